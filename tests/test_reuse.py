"""Buffers of earlier loops that results are written over."""

from __future__ import annotations

import pytest

from tests.random_decoders.checking import failure_of
from tests.random_decoders.specification import Decoder, Layer, sensible


@pytest.mark.parametrize("layout", ["batch first", "time first", "unbatched", "folded"])
def test_a_view_is_not_written_over_what_it_shows(layout: str) -> None:
    """Sinks run whole, and the loop after them only transposes values that an earlier loop has left."""
    layer = Layer(core="einsum", sinks=True)
    assert failure_of(sensible(Decoder(layers=(layer,), layout=layout, batch=1))) is None
