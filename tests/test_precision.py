"""In low precision and under autocast, gradients are as near to the truth as eager's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.ir.program import Buffer
from streamfx.runtime import chunked_scans
from streamfx.runtime.loop import Loop
from tests.support import decoders
from tests.support.exactness import check_streamed, outcome
from tests.support.twins import batch, compiled

pytestmark = pytest.mark.compiled


def distance(actual: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> float:
    """Norm of all differences over norm of all gradients."""
    pairs = [(actual[name], wanted) for name, wanted in truth.items() if wanted is not None]
    difference = sum(float((one.double() - other).square().sum()) for one, other in pairs if one is not None)
    return float((difference / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5)


def assert_as_near_as_eager(dtype: torch.dtype, chunk_size: int) -> None:
    """Chunks are no smaller than a vector register: torch's CPU kernels round `rsqrt` and others twice in the remainder."""
    low = decoders.made(decoders.Plain, dtype=dtype)
    high, eager = copy.deepcopy(low).double(), copy.deepcopy(low)
    truth = outcome(high, high, batch(2, 64)).gradients
    function, backend = compiled(low, chunk_size=chunk_size, loss_chunk_size=chunk_size)
    wanted, found = (outcome(*run, batch(2, 64)).gradients for run in ((eager, eager), (function, low)))
    check_streamed(backend.facts, True, {"causal"})
    assert distance(found, truth) <= 1.1 * distance(wanted, truth)
    assert all(g is not None and g.dtype == wanted[name].dtype for name, g in found.items())  # type: ignore[union-attr]


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 32), (torch.bfloat16, 64), (torch.float16, 32)])
def test_sums_of_one_chunk_are_not_widened(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as near to the truth as eager's.

    A product is rounded once if it is the only one; rows that are looked up are added one by one, also by a single chunk.
    """
    found, make = set[tuple[str, torch.dtype]](), Loop._new_buffer

    def new_buffer(self: Loop, item: Any, env: Any, zeroed: bool) -> Tensor:
        buffer = make(self, item, env, zeroed)
        if isinstance(item, Buffer):
            found.add((item.name.split("_")[0], buffer.dtype))
        return buffer

    monkeypatch.setattr(Loop, "_new_buffer", new_buffer)
    assert_as_near_as_eager(dtype, rows)
    assert {kind for name, kind in found if name == "mm"} == {dtype if rows == 64 else torch.float32}
    assert {kind for name, kind in found if name == "embedding"} == {torch.float32}


class Summed(nn.Module):
    """A layer, and sums of its rows: [B, T, 8]."""

    def __init__(self, sums: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sums, self.up, self.down = sums, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x + self.down(self.up(x).relu()))


SIGNS = torch.ones(64).index_fill(0, torch.arange(32, 64), -1.0)[:, None]
SUMS: dict[torch.dtype, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # sums, and how large terms are
    torch.float16: (lambda x: x.abs().mul(3000).mean(1), lambda x: x.abs().mul(3000).mean(1)),
    torch.bfloat16: (lambda x: (x.abs() * 3000 * SIGNS.to(x.dtype)).sum(1), lambda x: x.abs().mul(3000).sum(1)),
}


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_partial_sums_may_exceed_the_total(dtype: torch.dtype) -> None:
    """A partial sum would be infinite in float16, or its rounding error would exceed a small total."""
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums, terms = SUMS[dtype]
    model = Summed(sums).to(dtype)
    function, backend = compiled(model, chunk_size=32, loss_chunk_size=32, outputs="dense")
    own, eager, truth = (call.detach().double() for call in (function(x), model(x), model.double()(x.double())))
    check_streamed(backend.facts, True, None)
    near = [float((found - truth).abs().max() / terms(x.double()).max()) for found in (own, eager)]
    assert own.isfinite().all() and near[0] <= 1.5 * near[1] + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_sums_carry_float32(dtype: torch.dtype) -> None:
    """A total in bfloat16 would stand still at 256."""
    rows, found = torch.ones(1, 4000, dtype=dtype), list[Tensor]()
    carry = torch.zeros(1, 1, dtype=chunked_scans.carry_type(dtype))
    for number, chunk in enumerate(rows.split(8, 1)):
        found.append(chunked_scans.advance("cumsum", False, chunk, 1, dtype, carry, 8 * number, None, 0))
    assert torch.equal(torch.cat(found, 1), rows.cumsum(1))
