"""Promise two, model by model: live bytes fall with the chunk size, and no step makes a tensor of rows times rows, rows times
vocabulary or rows times the inner width of an MLP.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

pytest.importorskip("transformers")

from streamfx import explain
from streamfx.frontend.backend import streambp
from tests.support.spread import only
from tests.zoo.configs import INNER, VOCABULARY
from tests.zoo.models import BATCH, WITHOUT_LABELS, built, grouped_products_in_float64
from tests.zoo.runs import known

pytestmark = pytest.mark.compiled

ROWS = 61  # prime, so that a dimension of a multiple of it ranges over the rows


def streams_all(row: dict[str, Any]) -> bool:
    return row.get("share") == 1 and not row.get("reasons") and row.get("graphs") == 1 and row["model_type"] not in WITHOUT_LABELS


ALL = [name for name, row in known().items() if streams_all(row)]


def case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    grouped_products_in_float64()
    model = built(name)
    ids = torch.randint(3, VOCABULARY - 8, (BATCH, ROWS), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


class Shapes(TorchDispatchMode):
    """Records the shape of each new tensor, except views that only repeat elements."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made |= {tuple(item.shape) for item in tree_iter(out) if is_made(item)}
        return out


def is_made(item: Any) -> bool:
    """Whether a tensor has memory of its own for each element: no repeated view, no stand-in for an output not yet computed."""
    return isinstance(item, Tensor) and 0 not in item.stride() and item.device.type != "meta"


def too_large(shapes: set[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for shape in shapes:
        over_rows = [size for size in shape if size % ROWS == 0]
        if len(over_rows) > 1 or (over_rows and (VOCABULARY in shape or INNER in shape)):
            yield shape


def shapes_of(name: str, chunk: int) -> list[tuple[int, ...]]:
    """What a step makes that is too large."""
    model, given = case(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=streambp, options={"chunk_size": chunk, "loss_chunk_size": chunk})
    compiled(**given).loss.backward()
    with Shapes() as shapes:
        compiled(**given).loss.backward()
    assert shapes.made, "nothing was seen"
    return sorted(too_large(shapes.made))


def test_an_unchunked_step_has_large_tensors() -> None:
    """The check can fail: one chunk of all rows is everything that is not to be."""
    assert {VOCABULARY, INNER} <= {size for shape in shapes_of("opt", ROWS) for size in shape}


@pytest.mark.parametrize("name", only(["falcon"], ALL))
def test_a_chunked_step_has_no_large_tensor(name: str) -> None:
    assert not shapes_of(name, 5), "made in one piece"


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_live_bytes_fall_with_the_chunk_size(name: str) -> None:
    model, given = case(name)
    peaks = []
    for chunk in (ROWS, 16, 4):
        summary = explain(model, **given, options={"chunk_size": chunk, "loss_chunk_size": chunk}).summary()
        peaks.append(summary["peak_bytes"])
    assert all(small <= large for large, small in pairwise(peaks)) and peaks[-1] < 0.8 * peaks[0], peaks
