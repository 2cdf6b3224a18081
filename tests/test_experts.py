"""Experts whose rows are sorted: they stream where the order is proven to be undone, and run whole where it is not."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.dialect.products import GROUPED_MM
from tests.support.decoders.parts import made
from tests.support.exactness import Report, compare
from tests.support.sorted_experts import SPELLINGS, SortedExperts, SparseDecoder, Spelling
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.twins import batch, compiled, same_step, twins

pytestmark = pytest.mark.compiled

LENGTH = 19
Groups = Callable[[SortedExperts, Tensor], tuple[Tensor, Tensor]]  # of rows, to shares and experts
Between = Callable[[SortedExperts, Tensor, Tensor, Tensor, Tensor], Tensor]  # of rows, their order, ends and experts


class Own(SortedExperts):
    """Experts that choose, or work on the rows that were sorted, in a way of their own."""

    table: Tensor

    def __init__(self, spelling: Spelling | None = None, groups: Groups | None = None, between: Between | None = None) -> None:
        super().__init__(spelling or Spelling())
        self.how = groups or SortedExperts.groups, between or SortedExperts.between
        self.register_buffer("table", torch.arange(2 * 11).view(11, 2) % 4)

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.how[0](self, x)

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        return self.how[1](self, rows, order, ends, ids)


def checked(make: Callable[[], SortedExperts], streams: bool, layers: int = 1, **options: Any) -> Report:
    model = made(lambda: SparseDecoder(make, layers))
    return compare(model, batch(2, LENGTH), chunk_size=5, also=(1, 7, LENGTH), streams=streams, **options)


@pytest.mark.parametrize("name", only(["tokens looked up", "rows written back", "counted by comparison"], SPELLINGS))
def test_sorted_experts_stream(name: str) -> None:
    report = checked(lambda: SortedExperts(SPELLINGS[name], bias="written" in name), streams=True)
    (facts,) = report.facts
    assert not any("sort" in str(node.target) for node in facts.joint.nodes), "something is still sorted"


@pytest.mark.parametrize(("dtype", "groups"), [(torch.int8, 128), (torch.uint8, 256), (torch.bfloat16, 257), (torch.int64, 3)])
def test_group_numbers_may_reach_the_limit_of_their_type(dtype: torch.dtype, groups: int) -> None:
    """The number after it, which ends its rows, is another one in that type."""
    group = torch.tensor([groups - 1, 0, groups - 2, groups - 1])
    x, weight = torch.randn(4, 3), torch.randn(groups, 3, 2)
    torch.testing.assert_close(GROUPED_MM(x, weight, group.to(dtype)), (x[:, None] @ weight[group])[:, 0])


# -- other choices


def looked_up(m: SortedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """In a table, as DeepSeek V4's first layers look them up by token."""
    chosen = m.get_buffer("table")[(x.detach().sum(-1).abs() * 9).long() % 11]
    return m.router(x).softmax(-1).gather(1, chosen.clamp(min=0)), chosen


def some_of_none(m: SortedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows belong to no expert of this rank: they are sorted after all others."""
    shares, chosen = SortedExperts.groups(m, x)
    return shares, torch.where(shares < 0.35, len(m.up), chosen)


def of_some(m: SortedExperts, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
    """Rows of no expert are multiplied by nothing."""
    return as_the_last(m, rows, order, ends, ids).masked_fill((ids[order] >= len(m.up)).unsqueeze(1), 0.0)


def as_the_last(m: SortedExperts, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
    return SortedExperts.between(m, rows, order, ends, ids.clamp(max=len(m.up) - 1))


def from_several_places(m: SortedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Some of them put to the first expert."""
    shares = m.router(x).softmax(-1)
    best, first = shares.max(-1)
    other = shares.masked_fill(shares >= best.unsqueeze(-1), 0.0).argmax(-1, keepdim=True)
    chosen = torch.cat((first.unsqueeze(-1), other), -1)
    return shares.gather(-1, chosen), chosen.masked_fill(chosen == 3, 0)


@pytest.mark.parametrize(("groups", "between"), [(from_several_places, None), (some_of_none, of_some)])
def test_other_routings_stream(groups: Groups, between: Between | None) -> None:
    checked(lambda: Own(groups=groups, between=between), streams=True)


def test_a_routing_table_that_changes_stays_exact() -> None:
    """Once a number is negative, nothing is known of them, and rows run whole."""
    own, eager = twins(lambda: SparseDecoder(lambda: Own(groups=looked_up), 1))
    function, _ = compiled(own)
    for rows, length in ((2, 13), (3, 9)):
        same_step(function, own, eager, batch(rows, length))
    for number in (3, -1):
        for table in (*own.buffers(), *eager.buffers()):
            table[3:, 0] = number
        same_step(function, own, eager, batch(2, 13))


# -- values that depend on the order of rows


def negative(m: SortedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Such rows would be sorted to the front, but not counted."""
    shares, chosen = SortedExperts.groups(m, x)
    return shares, chosen - 1


def running(m: SortedExperts, rows: Tensor, *others: Tensor) -> Tensor:
    return SortedExperts.between(m, rows, *others).cumsum(0)


def weighted(m: SortedExperts, rows: Tensor, *others: Tensor) -> Tensor:
    return SortedExperts.between(m, rows * torch.arange(len(rows), dtype=rows.dtype).unsqueeze(1), *others)


def shifted(m: SortedExperts, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
    """The ends of the groups are those of other numbers than the ones that were sorted."""
    others = torch.histc((ids // 2).float(), len(m.up), 0, len(m.up) - 1).cumsum(0).to(torch.int32)
    return SortedExperts.between(m, rows, order, others, ids)


WHOLE: dict[str, tuple[Callable[[], SortedExperts], str]] = named_cases("whole", globals())


@pytest.mark.parametrize("name", only(["negative", "descending", "none in the last bin"], WHOLE))
def test_values_that_depend_on_the_order_of_rows_fall_back(name: str) -> None:
    make, why = WHOLE[name]
    (facts,) = checked(make, streams=False).facts
    assert any(why in reason for reason in facts.reasons()), facts.reasons()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with PyTorch's builds for CUDA")
@pytest.mark.parametrize("program", ["interpreted", "compiled"])
def test_triton_kernels_run_and_compile(program: str) -> None:
    """Products by group in Triton: run by its interpreter, and compiled for cards that are not there."""
    command = [sys.executable, "-m", "tests.support.triton_programs", program]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
