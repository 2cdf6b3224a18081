"""Numbers that casts change: what is found to be row numbers has to be them, and counts in a type that holds them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.views.iota_index import counts_up, looked_up_by_number, repeats
from tests.support.masks import qkv
from tests.support.sorted_experts import EXPERTS, SortedExperts, Spelling
from tests.support.spread import spread
from tests.support.tracing import compare_function
from tests.test_experts import checked

# -- row numbers

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda i: i,
    "bool": lambda i: i.bool(),
    "int8": lambda i: i.to(torch.int8),
    "uint8": lambda i: i.to(torch.uint8),
    "int16": lambda i: i.to(torch.int16),
    "int32": lambda i: i.to(torch.int32),
    "half": lambda i: i.to(torch.float16),
    "bfloat16": lambda i: i.to(torch.bfloat16),
    "float": lambda i: i.float(),
    "halves": lambda i: i // 2,
    "thirds": lambda i: i // 3,
}


@pytest.mark.parametrize(("first", "second", "rows"), spread(product(STEPS, STEPS, (9, 300)), 3))
def test_row_numbers_are_what_they_are_taken_for(first: str, second: str, rows: int) -> None:
    numbers, claimed = _claimed(lambda x: STEPS[second](STEPS[first](torch.arange(rows))).long() + x, rows)
    for count, times in claimed.items():
        assert torch.equal(numbers, torch.arange(count).repeat_interleave(times)), (
            f"{first}, {second}: {count} rows {times} times"
        )


def test_row_numbers_are_found() -> None:
    assert _claimed(lambda x: torch.arange(9).to(torch.int32).long() + x, 9)[1] == {9: 1}
    assert _claimed(lambda x: (torch.arange(300) // 3).to(torch.int8).long() + x, 300)[1] == {100: 3}
    assert _claimed(lambda x: torch.arange(300).to(torch.int8).long() + x, 300)[1] == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.int32])
def test_what_counts_up_is_held_by_its_type(dtype: torch.dtype) -> None:
    """An `arange` of a narrow type begins again, or stands still."""
    for rows in (100, 200, 3000):
        made = fx.Graph().call_function(torch.ops.aten.arange.default, (rows,), {"dtype": dtype})
        made.meta["val"] = torch.empty(rows, dtype=dtype)
        assert counts_up(made) is torch.equal(torch.arange(rows).to(dtype).long(), torch.arange(rows))


def test_sums_into_rows_have_the_type_of_the_rows() -> None:
    """Sums of small integers wrap; those of PyTorch's own choice do not."""
    made = _summed(lambda x: torch.zeros(2, 3, dtype=x.dtype).index_add(0, torch.arange(4) // 2, x))
    assert made is not None and made.meta["val"].dtype == torch.int8


def test_sums_into_rows_begin_with_nothing_and_add_once() -> None:
    assert _summed(lambda x: torch.ones(2, 3, dtype=x.dtype).index_add(0, torch.arange(4) // 2, x)) is None
    assert _summed(lambda x: torch.zeros(2, 3, dtype=x.dtype).index_add(0, torch.arange(4) // 2, x, alpha=2)) is None


def _summed(function: Callable[[Tensor], Tensor]) -> fx.Node | None:
    """What a sum into rows equals, of bytes [4 3]."""
    graph = make_fx(function, tracing_mode="fake")(torch.full((4, 3), 100, dtype=torch.int8)).graph
    (added,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_add.default)
    return looked_up_by_number(added, GraphWriter(graph).before(added))


def _claimed(function: Callable[[Tensor], Tensor], rows: int) -> tuple[Tensor, dict[int, int]]:
    """The numbers that a function adds to zero, and as which repetitions of how many rows they are known."""
    zero = torch.zeros((), dtype=torch.int64)
    graph = make_fx(function, tracing_mode="fake")(zero).graph
    (added,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    (index,) = [item for item in added.args[:1] if isinstance(item, fx.Node)]
    found = {count: repeats(index, count) for count in {rows, rows // 2, rows // 3}}
    return function(zero), {count: times for count, times in found.items() if times is not None}


# -- sorted experts: rows are sorted by one number, counted by another


def histogram(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1)


ASTRAY = {
    "sorted by truth": Spelling(order=lambda ids: ids.bool().long().argsort(stable=True)),
    "sorted by a product that wraps": Spelling(order=lambda ids: (ids.to(torch.int8) * 127).argsort(stable=True)),
    "counted as truth": Spelling(count=lambda ids: histogram(ids).bool()),
    "counted after a cast": Spelling(count=lambda ids: histogram(ids.bool())),
    "added as truth": Spelling(count=lambda ids: torch.zeros(EXPERTS).scatter_add(0, ids, torch.ones(len(ids))).bool()),
    "counted in a type that wraps": Spelling(count=lambda ids: (histogram(ids) * 7).to(torch.int8)),
}


def test_a_count_that_a_type_rounds_is_made_in_one_piece() -> None:
    """In bfloat16 it ends at 256, in whichever order; sums over chunks would count further."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        numbers = (q[0, 0, :, :1] < 100).long().expand(-1, 80).flatten()
        counts = torch.zeros(2, dtype=torch.bfloat16).index_add(0, numbers, torch.ones_like(numbers, dtype=torch.bfloat16))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out * (1 + (counts[1] > 256).double())).pow(2).sum()

    compare_function(function, qkv(length=12), (5, 1))


@pytest.mark.parametrize("name", ASTRAY)
def test_experts_whose_counts_are_cast(name: str) -> None:
    checked(lambda: SortedExperts(ASTRAY[name]), streams=False)
