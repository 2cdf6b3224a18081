"""What random decoders have found, each made as small as it gets."""

from __future__ import annotations

import pytest

from tests.random_decoders.checking import failure_of
from tests.random_decoders.specification import Decoder, Layer, sensible


def assert_exact(layer: Layer, **others: object) -> None:
    failure = failure_of(sensible(Decoder(layers=(layer,), **others)))  # type: ignore[arg-type]
    assert failure is None, str(failure)


@pytest.mark.parametrize("layout", ["batch first", "time first", "unbatched", "folded"])
def test_a_view_is_not_written_over_what_it_shows(layout: str) -> None:
    """Sinks run whole, and the loop after them only transposes values that an earlier loop has left."""
    assert_exact(Layer(core="einsum", sinks="front"), layout=layout, batch=1)


@pytest.mark.parametrize("layout", ["time first", "unbatched"])
def test_views_of_what_a_kernel_laid_out_otherwise_than_promised(layout: str) -> None:
    """elu's backward kernel; the graph runs as it stood, but with views that copy."""
    assert_exact(Layer(core="linear"), layout=layout, heads=2, embedding="given", compiled=True)


def test_a_batch_of_any_size_repeats_a_bias() -> None:
    """`bias.repeat(b, 1, 1)` where b is a number known only when the graph runs."""
    assert_exact(Layer(core="matmul", bias="relative"), layout="folded", heads=2, batch=3, compiled=True, dynamic=True)


def test_uses_of_the_logits_of_a_single_row_wait_for_nothing() -> None:
    """Logits of one row have no rows to cut, and are made as a whole."""
    sizes = {"layout": "unbatched", "length": 1, "heads": 1, "head_size": 2, "vocabulary": 11}
    ways = {"outputs": "logits", "loss": "sum", "compiled": True, "lazy": True, "capped": True, "frozen": "head"}
    assert_exact(Layer(core="causal", mlp="none"), **sizes, **ways)
