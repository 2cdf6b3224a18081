"""Types: row indices and counts are recognized only if their type holds them; low precision is as near to the truth as eager."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.program import Buffer
from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.views.iota_index import find_repeats, is_arange, simplify_arange_index
from streamfx.runtime.chunked_scans import RunningTotal
from streamfx.runtime.loop import Loop
from tests.support import decoders, twins
from tests.support.decoders.parts import made
from tests.support.exactness import check_streamed, compare, outcome
from tests.support.masks import qkv
from tests.support.sorted_experts import EXPERTS, SortedExperts, SparseDecoder, Spelling  # noqa: F401  (in tests/tables)
from tests.support.tables import named_cases
from tests.support.tracing import compare_function
from tests.support.used import batch

aten = torch.ops.aten

# -- row numbers

TYPES = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32)
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda i: i,
    **{str(dtype): partial(torch.Tensor.to, dtype=dtype) for dtype in TYPES},
    "halves": lambda i: i // 2,
    "thirds": lambda i: i // 3,
}


def claimed(first: str, second: str, rows: int) -> dict[int, int]:
    """The recognized numbers of rows, with repetitions of each; the indices equal them."""

    def function(x: Tensor) -> Tensor:
        return STEPS[second](STEPS[first](torch.arange(rows))).long() + x

    zero = torch.zeros((), dtype=torch.int64)
    (added,) = make_fx(function, tracing_mode="fake")(zero).graph.find_nodes(op="call_function", target=aten.add.Tensor)
    found = {count: find_repeats(added.args[0], count) for count in {rows, rows // 2, rows // 3}}
    for count, times in found.items():
        assert times is None or torch.equal(function(zero), torch.arange(count).repeat_interleave(times)), (first, second, rows)
    return {count: times for count, times in found.items() if times is not None}


def test_recognized_row_indices_are_row_indices() -> None:
    for case in product(STEPS, STEPS, (9, 300)):
        claimed(*case)
    assert claimed("torch.int32", "none", 9) == {9: 1} and claimed("thirds", "torch.int8", 300) == {100: 3}
    assert claimed("torch.int8", "none", 300) == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.int32])
def test_indices_count_up_if_their_type_holds_them(dtype: torch.dtype) -> None:
    """An `arange` of a narrow type wraps, or repeats a number."""
    for rows in (100, 200, 3000):
        node = fx.Graph().call_function(aten.arange.default, (rows,), {"dtype": dtype})
        node.meta["val"] = torch.empty(rows, dtype=dtype)
        assert is_arange(node) is torch.equal(torch.arange(rows).to(dtype).long(), torch.arange(rows))


def summed(base: float, alpha: int) -> fx.Node | None:
    """The replacement of a sum of bytes [4 3] into rows."""

    def function(x: Tensor) -> Tensor:
        return torch.full((2, 3), base, dtype=x.dtype).index_add(0, torch.arange(4) // 2, x, alpha=alpha)

    graph = make_fx(function, tracing_mode="fake")(torch.full((4, 3), 100, dtype=torch.int8)).graph
    (added,) = graph.find_nodes(op="call_function", target=aten.index_add.default)
    return simplify_arange_index(added, GraphWriter(graph).move_before(added))


def test_sums_into_rows_are_replaced_if_they_start_at_zero() -> None:
    """Sums of small integers wrap; those of PyTorch's own choice do not."""
    node = summed(0, 1)
    assert node is not None and node.meta["val"].dtype == torch.int8
    assert summed(1, 1) is None and summed(0, 2) is None


def test_a_count_that_its_type_rounds_is_not_chunked() -> None:
    """In bfloat16 it ends at 256, in whichever order; sums over chunks would count further."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        numbers = (q[0, 0, :, :1] < 100).long().expand(-1, 80).flatten()
        counts = torch.zeros(2, dtype=torch.bfloat16).index_add(0, numbers, torch.ones_like(numbers, dtype=torch.bfloat16))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out * (1 + (counts[1] > 256).double())).pow(2).sum()

    compare_function(function, qkv(length=12), (5, 1))


# -- sorted experts: rows are sorted by one number, counted by another


def histogram(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1)


ASTRAY = named_cases("astray", globals())


@pytest.mark.compiled
@pytest.mark.parametrize("name", ASTRAY)
def test_experts_whose_counts_are_cast(name: str) -> None:
    model = made(lambda: SparseDecoder(lambda: SortedExperts(ASTRAY[name]), layers=1))
    compare(model, batch(), chunk_size=5, also=(1, 7), streams=False)


# -- in low precision and under autocast, gradients are as near to the truth as eager's


def distance(actual: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> float:
    """Norm of all differences over norm of all gradients."""
    pairs = [(actual[name], wanted) for name, wanted in truth.items() if wanted is not None]
    difference = sum(float((one.double() - other).square().sum()) for one, other in pairs if one is not None)
    return float((difference / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5)


def assert_as_near_as_eager(dtype: torch.dtype, chunk_size: int) -> None:
    """Chunks are no smaller than a vector register: torch's CPU kernels round `rsqrt` and others twice in the remainder."""
    low = decoders.made(decoders.Plain, dtype=dtype)
    high, eager = copy.deepcopy(low).double(), copy.deepcopy(low)
    truth = outcome(high, high, twins.batch(2, 64)).gradients
    function, backend = twins.compiled(low, chunk_size=chunk_size, loss_chunk_size=chunk_size)
    wanted, found = (outcome(*run, twins.batch(2, 64)).gradients for run in ((eager, eager), (function, low)))
    check_streamed(backend.facts, True, {"causal"})
    assert distance(found, truth) <= 1.1 * distance(wanted, truth)
    assert all(g is not None and g.dtype == wanted[name].dtype for name, g in found.items())  # type: ignore[union-attr]


@pytest.mark.compiled
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


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_partial_sums_may_exceed_the_total(dtype: torch.dtype) -> None:
    """A partial sum would be infinite in float16, or its rounding error would exceed a small total."""
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums, terms = SUMS[dtype]
    model = Summed(sums).to(dtype)
    function, backend = twins.compiled(model, chunk_size=32, loss_chunk_size=32, outputs="dense")
    own, eager, truth = (call.detach().double() for call in (function(x), model(x), model.double()(x.double())))
    check_streamed(backend.facts, True, None)
    near = [float((found - truth).abs().max() / terms(x.double()).max()) for found in (own, eager)]
    assert own.isfinite().all() and near[0] <= 1.5 * near[1] + 1e-3


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_sums_carry_float32(dtype: torch.dtype) -> None:
    """A total in bfloat16 would stand still at 256."""
    rows, found = torch.ones(1, 4000, dtype=dtype), list[Tensor]()
    total = RunningTotal("cumsum", False, 1, dtype, row_size=1)
    carry = torch.zeros(4, dtype=torch.uint8)
    for number, chunk in enumerate(rows.split(8, 1)):
        found += total.advance(8 * number, 0, carry, None, 0, chunk)
    assert torch.equal(torch.cat(found, 1), rows.cumsum(1))
