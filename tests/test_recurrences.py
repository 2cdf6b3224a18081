"""Loops over rows, or over blocks of rows, that Dynamo traces step by step: they stream with a carried state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.ir.facts import known
from streamfx.passes.analysis.derived_axes import keeps_row_positions
from streamfx.runtime.chunked_recurrences import Recurrence
from tests.support.exactness import Report, compare
from tests.support.mixers import LENGTH, Mixed, Mixer, all_in_rows, compared, operators, zeros
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.used import Use, Used, attending, batch, labelled, used

pytestmark = pytest.mark.compiled

BLOCK, LAYERS = 4, 2
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def loops_of(report: Report) -> int:
    return len(operators(report, Recurrence))


# -- loops over rows


def looped(step: Callable[..., tuple[Tensor, ...]], states: tuple[Tensor, ...], *rows: Tensor) -> Tensor:
    """Rows of results, stacked: the last result of a step; the others are its next states."""
    made = []
    for t in range(rows[0].shape[1]):
        *states, y = step(*states, *(item[:, t] for item in rows))  # type: ignore[assignment]
        made.append(y)
    return torch.stack(made, 1)


def kept(state: Tensor) -> tuple[Tensor, Tensor]:
    """The next state is the row of the result, too."""
    return state, state


def written(m: Mixed, x: Tensor) -> Tensor:
    y, state, decay = torch.zeros_like(x), zeros(x), m.gate(x).sigmoid()
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        y[:, t] = state.tanh()
    return m.out(y)


def of_the_first_stack(m: Mixed, x: Tensor) -> Tensor:
    """Each row of the first loop's stack is read separately, so its gradient is a stack of rows, too."""
    rows = looped(lambda s, row: kept((m.gate(s) + row).tanh()), (zeros(x),), x)
    return m.out(looped(lambda s, row: kept(s * 0.5 + m.gate(row)), (zeros(x),), rows))


def the_last_state(m: Mixed, x: Tensor) -> Tensor:
    """It leaves the loop after the last chunk."""
    rows, state = [], zeros(x)
    for t in range(x.shape[1]):
        state = (state * m.mu + x[:, t]).tanh()
        rows.append(state * x[:, t])
    return m.out(torch.stack(rows, 1)) + m.gate(state)[:, None]


def residual_streams(m: Mixed, x: Tensor) -> Tensor:
    """A loop over residual streams, each of which needs the first one: no loop over the sequence."""
    streams = torch.stack([x, m.gate(x), x * m.mu, x.sin()])
    return m.out(torch.stack([streams[0], *(other / streams[0].norm(dim=-1, keepdim=True) for other in streams[1:])]).mean(0))


# name: function, loops that are found, whether everything streams (None: either)
def after_a_first_row(m: Mixed, x: Tensor) -> Tensor:
    """Each step reads its row and the row before it, of a value that has one row more than there are steps."""
    rows, state, made = torch.cat([m.out.weight[:1].expand(len(x), 1, -1), x], 1), zeros(x), []
    for t in range(x.shape[1]):
        state = (m.gate(rows[:, t]) + state * 0.5 + rows[:, t + 1]).tanh()
        made.append(state)
    return m.out(torch.stack(made, 1))


def after_padding(m: Mixed, x: Tensor) -> Tensor:
    rows, state, made = torch.nn.functional.pad(x, (0, 0, 1, 0)), zeros(x), []
    for t in range(x.shape[1]):
        state = (m.gate(rows[:, t]) + state * 0.5 + rows[:, t + 1]).tanh()
        made.append(state)
    return m.out(torch.stack(made, 1))


def padded_with_a_row(m: Mixed, x: Tensor) -> Tensor:
    """The first row is the first state; in the result, it is a row of zeros."""
    state, made = x[:, 0], []
    for t in range(1, x.shape[1]):
        state = (m.gate(state) + x[:, t]).tanh()
        made.append(state)
    return m.out(torch.nn.functional.pad(torch.stack(made, 1), (0, 0, 1, 0)))


def of_two_halves(m: Mixed, x: Tensor) -> Tensor:
    """Rows are split and joined again before the loop, and stacked in two parts after it."""
    half, state, made = x.shape[1] // 2, zeros(x), []
    rows = torch.cat([x[:, :half], x[:, half:]], 1)
    for t in range(x.shape[1]):
        state = (m.gate(rows[:, t]) + state * 0.5).tanh()
        made.append(state)
    return m.out(torch.cat([torch.stack(made[:half], 1), torch.stack(made[half:], 1)], 1))


ROWS: dict[str, tuple[Mixer, int, bool | None]] = named_cases("rows", globals())


@pytest.mark.parametrize("name", only(["written row by row", "the last state", "after a first row", "of two halves"], ROWS))
def test_loops_over_rows(name: str) -> None:
    mixer, count, streams = ROWS[name]
    report = compared(mixer, chunk_size=4, also=(1, LENGTH), streams=streams)
    assert loops_of(report) == count
    assert not streams or not count or all_in_rows(report, operators(report, Recurrence))


def test_gradients_of_some_rows_become_one_stack() -> None:
    """Else all of them, each padded with zeros to the full length, would be alive at once: the loop that adds them reads them."""

    def every_third_row(m: Mixed, x: Tensor) -> Tensor:
        return m.out(x) + sum((m.mu * x[:, t].tanh() for t in range(4, x.shape[1], 3)), x[:, 1])[:, None]

    report = compared(every_third_row, length=20, chunk_size=4, streams=False)
    targets = {node.target for facts in report.facts for node in facts.joint.nodes}
    assert torch.ops.aten.select.int in targets and torch.ops.aten.select_backward.default not in targets


def test_a_flag_and_a_counter_in_each_step_stream() -> None:
    """Each step reads the counter twice: a recursive cost estimate without a cache would take exponential time.

    In the carry, the few bytes of the flag come before larger numbers.
    """

    def counted(m: Mixed, x: Tensor) -> Tensor:
        def step(flag: Tensor, s: Tensor, c: Tensor, row: Tensor, begins: Tensor) -> tuple[Tensor, ...]:
            flag = flag ^ begins
            c = torch.where(begins, 0, c + 1)
            s = s * 0.5 + row
            return flag, s, c, torch.where(flag[:, None], s, -s) * (c % 3)[:, None]

        first = torch.zeros(len(x), dtype=torch.bool), zeros(x), torch.zeros(len(x), dtype=torch.int64)
        return m.out(looped(step, first, x, (x[..., 0] > 0.5).detach()))

    report = compared(counted, length=24, chunk_size=5, also=(1, 24), streams=None)
    assert loops_of(report) == 2 and all_in_rows(report, operators(report, Recurrence))


# -- loops over blocks of rows


def sliced(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    return [tuple(part[:, :, i : i + BLOCK] for part in parts) for i in range(0, parts[0].shape[2], BLOCK)]


def split(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(BLOCK, 2) for part in parts), strict=True))


def linear(cut: Callable[..., list[tuple[Tensor, ...]]]) -> Mix:
    """A state for all earlier blocks; attention without a softmax inside a block."""

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for a, b, c in cut(q, k, v):
            made.append(a @ state + (a @ b.mT).tril() @ c)
            state = 0.9 * state + b.mT @ c
        return torch.cat(made, 2)

    return mix


def last_unused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows see earlier blocks only: no row reads the last block's keys."""
    state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for a, b, c in split(q, k, v):
        made.append(a @ state)
        state = (0.9 * state + b.mT @ c).tanh()
    return torch.cat(made, 2)


def first_unused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """There is no state before the first block, so its queries are unused."""
    state, made = None, []
    for a, b, c in sliced(q, k, v):
        made.append(c if state is None else c + a @ state)
        state = b.mT @ c if state is None else (0.9 * state + b.mT @ c).tanh()
    return torch.cat(made, 2)


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No value goes from one block to the next."""
    return torch.cat([(a @ b.mT).tril() @ c for a, b, c in sliced(q, k, v)], 2)


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks see the block before them, too."""
    made = []
    for start in range(0, q.shape[2], BLOCK):
        seen = slice(max(start - BLOCK, 0), start + BLOCK)
        made.append((q[:, :, start : start + BLOCK] @ k[:, :, seen].mT).sigmoid() @ v[:, :, seen])
    return torch.cat(made, 2)


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of a view. The backward needs rows of the sequence, and no result of the forward's steps."""
    a, b, c = (part.reshape(-1, part.shape[2] // BLOCK, BLOCK, part.shape[-1]) for part in (q, k, v))
    state, states = a.new_zeros(len(a), a.shape[-1], a.shape[-1]), []
    for i in range(a.shape[1]):
        states.append(state)
        state = 0.9 * state + b[:, i].mT @ c[:, i]
    return (a @ torch.stack(states, 1) + (a @ b.mT).tril() @ c).view(q.shape)


BLOCKS: dict[str, tuple[Mix, int, int]] = named_cases("blocks", globals())
IN_DEFAULT_RUNS = ("split", "last unused", "first unused", "overlapping windows", "of a view")


@pytest.mark.parametrize("name", only(IN_DEFAULT_RUNS, BLOCKS))
def test_loops_over_blocks(name: str) -> None:
    """Each is one operator in the forward and one in the backward, for any number of rows after the last full block."""
    mix, length, loops = BLOCKS[name]
    report = compare(attending(mix, LAYERS), batch(length), chunk_size=8, also=(1, 3, 64))
    assert loops_of(report) == 2 * LAYERS * loops


def memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As xLSTM: a state goes from block to block, then from row to row through the rows after the last full block."""
    count, width = q.shape[2] // BLOCK, q.shape[-1]
    rows = count * BLOCK
    a, b, c = (part[:, :, :rows].contiguous() for part in (q, k, v))
    state = q.new_zeros(*q.shape[:2], width, v.shape[-1])
    states = q.new_zeros(*q.shape[:2], (count + 1) * width, v.shape[-1])
    for i, start in enumerate(range(0, rows, BLOCK)):
        states[:, :, i * width : (i + 1) * width] = state
        state = state * 0.5 + b[:, :, start : start + BLOCK].mT @ c[:, :, start : start + BLOCK]
    states[:, :, -width:] = state
    before = states[:, :, :-width].view(*q.shape[:2], count, width, -1)
    a, b, c = (part.view(*part.shape[:2], count, BLOCK, -1) for part in (a, b, c))
    made, rest, state = ((a @ b.mT).tril() @ c + a @ before).flatten(2, 3), [], states[:, :, -width:]
    q, k, v = (part[:, :, rows:] for part in (q, k, v))
    for row in range(q.shape[2]):
        state = state * 0.9 + k[:, :, row, :, None] * v[:, :, row, None]
        rest.append((q[:, :, row, None] @ state)[:, :, 0])
    return torch.cat([made, torch.stack(rest, 2)], 2) if rest else made


@pytest.mark.parametrize("length", only([15, 23], [8, 12, 14, 15, 23, 31]))
def test_loops_over_blocks_and_the_rows_after_them(length: int) -> None:
    """Three blocks and three rows are two loops, though both have three steps. Two steps are no loop."""
    blocks, rest = divmod(length, BLOCK)
    streams = rest not in (1, 2)  # one or two rows are no rows of the sequence
    report = compare(attending(memory), batch(length), also=(1, 7, 64), streams=streams)
    if streams:
        sequence = known(known(report.facts[0].found_axes).sequence)
        assert loops_of(report) == 2 * LAYERS * ((blocks > 2) + (rest > 2))
        assert (sequence.length, sequence.chunk_alignment) == (length, BLOCK)


class Tables(nn.Module):
    """Linear attention in blocks, with decays in tables that all blocks read, as in MiniMax; a table may be trained."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        decays = torch.exp(-torch.arange(1.0, 5.0) / 3)[:, None]
        self.decays = nn.Parameter(decays) if trained else nn.Buffer(decays)
        self.pairs = nn.Buffer((decays / decays.T).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for a, b, c in sliced(q, k, v):
            rows = a.shape[2]
            made.append((a @ b.mT * self.pairs[:rows, :rows]) @ c + (a * self.decays[:rows]) @ state)
            state = state * 0.3 + (b * self.decays[-rows:]).mT @ c
        return torch.cat(made, 2)


class TrainedTables(Tables):
    def __init__(self) -> None:
        super().__init__(trained=True)


@pytest.mark.parametrize("length", only([11], [11, 19]))
def test_blocks_that_read_one_table(length: int) -> None:
    """Each block has its own axis, though all blocks are multiplied by the same numbers."""
    report = compare(attending(Tables), batch(length), also=(1, 7, 64))
    axes = known(report.facts[0].found_axes)
    joins = [node for node in axes.signatures if node.target is torch.ops.aten.cat.default and keeps_row_positions(node, axes)]
    assert len(joins) == LAYERS or length > 11


def test_blocks_that_train_one_table() -> None:
    """Its gradient is a sum over blocks, so all blocks have the same rows: exact, and no reader gets its own view."""
    report = compare(attending(TrainedTables), batch(15), also=(1, 64), streams=False)
    assert not [node for node in report.facts[0].joint.nodes if node.target is torch.ops.aten.alias.default]


def without_rows(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """Blocks of no rows are no blocks."""
    empty = x.split([0, 0, 0, x.shape[1]], 1)[:3]
    return labelled(model, x * (1 + torch.cat(empty, 1).sum()), labels)


def with_losses(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """A loss of each block is in no row of the concatenation."""
    parts = x.split(3, 1)
    losses = torch.stack([model.head(part).square().mean() for part in parts]).sum()
    return labelled(model, x + torch.cat([part.sin() for part in parts], 1), labels) + losses


@pytest.mark.parametrize(("use", "streams"), [(without_rows, False), (with_losses, True)])
def test_odd_blocks(use: Use, streams: bool) -> None:
    """With equal graphs each time: ids and labels are both cut into blocks, and one of the two is the sequence."""
    ids, counts = batch(15)["ids"], set[int]()
    for _ in range(2):
        report = compare(used(use, layers=0), {"ids": ids, "labels": ids}, chunk_size=4, streams=streams)
        counts.add(len(report.facts[0].joint.nodes))
    assert len(counts) == 1


# -- concatenations that are no blocks


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.function(*inputs)
        return result


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves that change places are features: no weight of such a graph shows which axis is the sequence."""
    left, right = x[..., :3], x[..., 3:]
    return x * cos[:, :, None] + torch.cat((-right, left), -1) * sin[:, :, None]


def side_by_side(x: Tensor) -> Tensor:
    """Halves that stay in place may be rows."""
    left, right = x[:, :11], x[:, 11:]
    return torch.cat((left.sin(), right.cos()), -1).mul(x).cumsum(-1)


@pytest.mark.parametrize(
    ("function", "shapes", "length"),
    [(rotary, ((2, 19, 4, 6), (2, 19, 6), (2, 19, 6)), 19), (side_by_side, ((2, 22),), 22)],
    ids=["rotary", "side_by_side"],
)
def test_which_axis_is_the_sequence(function: Callable[..., Tensor], shapes: Any, length: int) -> None:
    inputs = [torch.randn(*shape, dtype=torch.float64).requires_grad_(i == 0) for i, shape in enumerate(shapes)]
    report = compare(Of(function), inputs, also=(1, 7, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == length
