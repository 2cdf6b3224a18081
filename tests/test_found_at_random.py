"""What random decoders have found, each made as small as it gets."""

from __future__ import annotations

import pytest

from tests.random_decoders.checking import failure_of
from tests.random_decoders.specification import Decoder, Layer, sensible
from tests.support.spread import only

pytestmark = pytest.mark.compiled

ROW = {"layout": "unbatched", "length": 1, "heads": 1, "head_size": 2, "vocabulary": 11}
LAZY = {"outputs": "logits", "loss": "sum", "compiled": True, "lazy": True, "capped": True, "frozen": "head"}
SINKS, LINEAR, RELATIVE = Layer(core="einsum", sinks="front"), Layer(core="linear"), Layer(core="matmul", bias="relative")
FOUND = {
    # sinks run whole, and the loop after them only transposes values that an earlier loop has left
    "a view is not written over what it shows": Decoder((SINKS,), layout="time first", batch=1),
    # elu's backward kernel lays it out; the graph runs as it stood, but with views that copy
    "views of what lies otherwise": Decoder((LINEAR,), layout="unbatched", heads=2, embedding="given", compiled=True),
    # `bias.repeat(b, 1, 1)` where b is a number known only when the graph runs
    "any batch repeats a bias": Decoder((RELATIVE,), layout="folded", heads=2, batch=3, compiled=True, dynamic=True),
    # logits of one row have no rows to cut, and are made as a whole
    "uses of a single row's logits": Decoder((Layer(mlp="none"),), **ROW, **LAZY),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", only(["any batch repeats a bias", "uses of a single row's logits"], FOUND))
def test_what_was_found_stays_exact(name: str) -> None:
    failure = failure_of(sensible(FOUND[name]))
    assert failure is None, str(failure)
