"""Experts whose rows are sorted: they stream where the order is proven to be undone, and run whole where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.kernels.grouped_mm import GROUPED_MM
from tests.support.decoders.parts import VOCABULARY, made
from tests.support.exactness import Report, check_streamed, compare
from tests.support.sorted_experts import SPELLINGS, SortedExperts, SparseDecoder, Spelling
from tests.support.twins import batch, compiled, same_step, twins

LENGTH = 19


def checked(make: Callable[[], SortedExperts], streams: bool, layers: int = 1, **options: Any) -> Report:
    model = made(lambda: SparseDecoder(make, layers))
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    return compare(model, {"ids": ids, "labels": labels}, chunk_size=5, also=(1, 7, LENGTH), streams=streams, **options)


@pytest.mark.parametrize("name", SPELLINGS)
def test_sorted_experts_stream(name: str) -> None:
    report = checked(lambda: SortedExperts(SPELLINGS[name], bias="written" in name), streams=True)
    (facts,) = report.facts
    assert not any("sort" in str(node.target) for node in facts.joint.nodes), "something is still sorted"


def test_sorted_experts_stream_at_every_length() -> None:
    own, eager = twins(lambda: SparseDecoder(lambda: SortedExperts(Spelling())))
    function, backend = compiled(own)
    for rows, length in ((2, 13), (3, 9), (5, 21), (4, 4)):
        same_step(function, own, eager, batch(rows, length))
    check_streamed(backend.facts, True, {"causal"})


class Noisy(SortedExperts):
    """Groups that may be negative: such rows would be sorted to the front, but not counted."""

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = super().groups(x)
        return shares, chosen - 1


class Hashed(SortedExperts):
    """Groups are looked up in a table, as DeepSeek V4's first layers look them up by token."""

    table: Tensor

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.register_buffer("table", torch.arange(2 * 11).view(11, 2) % 4)

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.table[(x.detach().sum(-1).abs() * 9).long() % len(self.table)]
        return self.router(x).softmax(-1).gather(1, chosen.clamp(min=0)), chosen


def test_groups_from_a_table() -> None:
    checked(lambda: Hashed(Spelling()), streams=True)


def test_groups_from_a_table_that_changes() -> None:
    """Once a number is negative, nothing is known of them, and rows run whole."""
    own, eager = twins(lambda: SparseDecoder(lambda: Hashed(Spelling()), 1))
    function, _ = compiled(own)
    same_step(function, own, eager, batch(2, 13))
    for number in (3, -1):
        for table in (*own.buffers(), *eager.buffers()):
            table[3:, 0] = number
        same_step(function, own, eager, batch(2, 13))


class Running(SortedExperts):
    """Each row takes in those sorted before it."""

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        return super().between(rows, order, ends, ids).cumsum(0)


class Weighted(SortedExperts):
    """Rows count by where they stand in the order."""

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        return super().between(rows * torch.arange(len(rows), dtype=rows.dtype).unsqueeze(1), order, ends, ids)


class Shifted(SortedExperts):
    """The ends of the groups are those of other numbers than the ones that were sorted."""

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        others = torch.histc((ids // 2).float(), len(self.up), 0, len(self.up) - 1).cumsum(0).to(torch.int32)
        return super().between(rows, order, others, ids)


class Twice(SortedExperts):
    """Rows in the order of their experts, and the same rows in the order of their numbers."""

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        return super().between(rows, order, ends, ids) + rows[torch.sort(order)[1]]


@pytest.mark.parametrize(("dtype", "groups"), [(torch.int8, 128), (torch.uint8, 256), (torch.bfloat16, 257), (torch.int64, 3)])
def test_the_last_number_of_a_type(dtype: torch.dtype, groups: int) -> None:
    """The number after it, which ends its rows, is another one in that type."""
    group = torch.tensor([groups - 1, 0, groups - 2, groups - 1])
    x, weight = torch.randn(4, 3), torch.randn(groups, 3, 2)
    torch.testing.assert_close(GROUPED_MM(x, weight, group.to(dtype)), (x[:, None] @ weight[group])[:, 0])


DESCENDING = Spelling(order=lambda ids: torch.argsort(ids, descending=True))
FEWER_BINS = Spelling(count=lambda ids: torch.histc(ids.float(), 4, 0, 2))


REASONS = {
    Noisy: "may be negative",
    Running: "an order that matters to",
    Weighted: "sorted by group",
    Shifted: "end where the numbers end",
    Twice: "an order that matters to",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_depends_on_the_order_runs_whole(kind: type[SortedExperts]) -> None:
    (facts,) = checked(lambda: kind(Spelling()), streams=False).facts
    assert any(REASONS[kind] in reason for reason in facts.reasons()), facts.reasons()


@pytest.mark.parametrize("spelling", [DESCENDING, FEWER_BINS], ids=["descending", "fewer bins"])
def test_other_orders_and_counts_run_whole(spelling: Spelling) -> None:
    checked(lambda: SortedExperts(spelling), streams=False)


class Padded(SortedExperts):
    """Some rows belong to no expert of this rank: they are sorted behind all others and multiplied by nothing."""

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = super().groups(x)
        return shares, torch.where(shares < 0.35, len(self.up), chosen)

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        y = super().between(rows, order, ends, ids.clamp(max=len(self.up) - 1))
        return y.masked_fill((ids[order] >= len(self.up)).unsqueeze(1), 0.0)


class Beyond(Padded):
    """They are counted, and multiplied, as rows of the last expert."""

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        return SortedExperts.between(self, rows, order, ends, ids.clamp(max=len(self.up) - 1))


class Chosen(SortedExperts):
    """Groups put together from several positions, some of them put to the first expert."""

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        best, first = shares.max(-1)
        other = shares.masked_fill(shares >= best.unsqueeze(-1), 0.0).argmax(-1, keepdim=True)
        chosen = torch.cat((first.unsqueeze(-1), other), -1)
        return shares.gather(-1, chosen), chosen.masked_fill(chosen == 3, 0)


class Alone(SortedExperts):
    """A single expert: the histogram has no bounds, and counts every row whatever its number is."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.up, self.down = (torch.nn.Parameter(weight[:1].detach().clone()) for weight in (self.up, self.down))

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)[:, :2]
        return shares, (shares > 0.4).long() - (shares < 0.1).long()


def test_a_single_expert() -> None:
    checked(lambda: Alone(Spelling(count=lambda ids: torch.histc(ids.float(), 1, 0, 0))), streams=True)


def test_groups_from_several_places() -> None:
    checked(lambda: Chosen(Spelling()), streams=True, layers=2)


def test_rows_of_no_expert() -> None:
    checked(lambda: Padded(Spelling()), streams=True, layers=2)


def test_rows_of_no_expert_that_the_last_bin_counts() -> None:
    checked(lambda: Beyond(SPELLINGS["bins up to the count"]), streams=False)
