"""Blocks of rows that loops cut out one by one and join again, stacks cut to the rows of a loop, and rows of paddings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.joint import joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.passes.scan.row_access import rows_of
from streamfx.passes.scan.strip_mine import cut_blocks, put_back
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.tools.report.listing import call_text
from tests.support.canonical import same, special
from tests.support.exactness import Report, compare
from tests.support.spread import only
from tests.support.used import Use, Used, attending, batch, labelled, used

aten = torch.ops.aten
BLOCK, LAYERS = 4, 2
Function = Callable[[Tensor], Tensor]
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def blocks_of(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    return [tuple(part[:, :, i : i + BLOCK] for part in parts) for i in range(0, parts[0].shape[2], BLOCK)]


def split(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(BLOCK, 2) for part in parts), strict=True))


def linear(cut: Callable[..., list[tuple[Tensor, ...]]]) -> Mix:
    """A state for what is before a block, rows that meet at once inside of it."""

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for a, b, c in cut(q, k, v):
            made.append(a @ state + (a @ b.mT).tril() @ c)
            state = 0.9 * state + b.mT @ c
        return torch.cat(made, 2)

    return mix


def behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows see what is before their block alone: nobody reads the last block's keys."""
    state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for a, b, c in split(q, k, v):
        made.append(a @ state)
        state = (0.9 * state + b.mT @ c).tanh()
    return torch.cat(made, 2)


def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """There is no state in front of the first block, whose queries nobody reads."""
    state, made = None, []
    for a, b, c in blocks_of(q, k, v):
        made.append(c if state is None else c + a @ state)
        state = b.mT @ c if state is None else (0.9 * state + b.mT @ c).tanh()
    return torch.cat(made, 2)


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nothing goes from one block to the next."""
    return torch.cat([(a @ b.mT).tril() @ c for a, b, c in blocks_of(q, k, v)], 2)


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks see the one before, too."""
    made = []
    for start in range(0, q.shape[2], BLOCK):
        seen = slice(max(start - BLOCK, 0), start + BLOCK)
        made.append((q[:, :, start : start + BLOCK] @ k[:, :, seen].mT).sigmoid() @ v[:, :, seen])
    return torch.cat(made, 2)


MIXES: dict[str, Mix] = {
    "sliced": linear(blocks_of),
    "split": linear(split),
    "behind": behind,
    "first": first,
    "local": local,
}


def compared(mix: Mix, length: int, also: tuple[int, ...] = (1, 3, 64)) -> Report:
    return compare(attending(mix, LAYERS), batch(length), chunk_size=8, also=also)


def loops_of(report: Report) -> int:
    return sum(isinstance(node.target, Recurrence) for node in report.facts[0].joint.nodes)


@pytest.mark.compiled
@pytest.mark.parametrize("length", only([26], [12, 13, 24, 26, 27]))
@pytest.mark.parametrize("name", only(["split", "behind", "first"], MIXES))
def test_loops_over_blocks_stream(name: str, length: int) -> None:
    """Each is one operator per half, whatever is left behind the last block."""
    assert loops_of(compared(MIXES[name], length)) == 2 * LAYERS


@pytest.mark.compiled
def test_blocks_that_overlap_stay_as_they_are() -> None:
    """A step that reads two blocks takes rows from elsewhere: in a loop of its own they would be given to it as a whole."""
    assert loops_of(compared(windows, 24)) == 0


def without_rows(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """Blocks of no rows are no blocks."""
    empty = x.split([0, 0, 0, x.shape[1]], 1)[:3]
    return labelled(model, x * (1 + torch.cat(empty, 1).sum()), labels)


def with_losses(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """What each block adds to the loss reaches no row that is joined."""
    parts = x.split(3, 1)
    beside = torch.stack([model.head(part).square().mean() for part in parts]).sum()
    return labelled(model, x + torch.cat([part.sin() for part in parts], 1), labels) + beside


@pytest.mark.compiled
@pytest.mark.parametrize(("use", "streams"), [(without_rows, False), (with_losses, True)])
def test_blocks_that_are_odd(use: Use, streams: bool) -> None:
    """Each time alike: ids and labels are both cut into blocks, and one of the two is the sequence."""
    ids, counts = batch(15)["ids"], set[int]()
    for _ in range(2):
        report = compare(used(use, layers=0), {"ids": ids, "labels": ids}, chunk_size=4, streams=streams)
        counts.add(len(report.facts[0].joint.nodes))
    assert len(counts) == 1


# -- written in other words, and back: the same to the bit


def rewritten(function: Function, x: Tensor, rewrite: Callable[[fx.Graph], object]) -> fx.Graph:
    before = make_fx(function, tracing_mode="fake")(x)
    graph = fx.Graph()
    graph.output(graph.graph_copy(before.graph, {}))
    for node, copy in zip(before.graph.nodes, graph.nodes, strict=True):
        copy.meta = dict(node.meta)
    rewrite(graph)
    same(fx.GraphModule(before, graph)(x.clone()), before(x.clone()), bits=True)
    return graph


def lines(graph: fx.Graph) -> list[str]:
    return [call_text(node) for node in graph.nodes if node.op == "call_function"]


def in_blocks_and_back(graph: fx.Graph) -> None:
    writer = GraphWriter(graph)
    put_back(cut_blocks(joint_graph(graph, 1, 1), writer), graph, writer)
    graph.eliminate_dead_code()


def in_blocks(x: Tensor) -> Tensor:
    return torch.cat([part.sin() for part in (x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 6:])], 1)


def gradient(x: Tensor) -> Tensor:
    shape = list(x.shape)
    parts = [aten.slice_backward(x[:, 2 * i : 2 * i + 2].sin(), shape, 1, 2 * i, 2 * i + 2, 1) for i in range(3)]
    rest = aten.slice_backward(x[:, 6:].cos(), shape, 1, 6, 7, 1)
    return torch.cat([part[:, :2] for part in (x, x, x)], 1)[:, :1] + (parts[0] + (parts[1] + parts[2])) + rest


@pytest.mark.parametrize("function", [in_blocks, gradient])
def test_what_no_loop_takes_is_put_back(function: Function) -> None:
    found = lines(rewritten(function, special(2, 7), in_blocks_and_back))
    assert not any(line.startswith(("view", "stack", "select")) for line in found), found


# -- stacks and paddings with the rows that a loop has, if it is known


def states(x: Tensor, steps: int, length: int | None = None) -> list[Tensor]:
    """A first state, and one behind each step."""
    made = [x[:, 0] * 0]
    for step in range(steps):
        made.append(made[-1] * 0.5 + x[:, step].sin())
    return made[:length]


def stacked(x: Tensor) -> Tensor:
    return torch.stack(states(x, 4), 1)[:, :-1] * 1


STACKS: dict[str, tuple[Function, int, int]] = {  # rows of x; how many rows are stacked then
    "before each step": (stacked, 4, 4),
    "behind each step": (lambda x: torch.stack(states(x, 4), 1)[:, 1:] * 1, 4, 4),
    "from a buffer": (lambda x: buffered(x)[:, :-1] * 1, 4, 4),
    "of more rows": (lambda x: torch.stack(states(x, 5, 5), 1)[:, :-1] * 1, 5, 5),
    "of a last row": (lambda x: torch.stack([row * x[:, -1] for row in states(x, 4)], 1)[:, :-1] * 1, 4, 4),
    "along another dimension": (lambda x: torch.stack(states(x, 4), 1)[:, :, :-1] * 1, 4, 5),
    "every other": (lambda x: torch.stack(states(x, 4), 1)[:, :-1:2] * 1, 4, 5),
    "of two lengths": (lambda x: torch.stack([row * x[i].sum() for i, row in enumerate(states(x, 4))], 1)[:, :-1] * 1, 4, 5),
}


def buffered(x: Tensor) -> Tensor:
    made = x.new_zeros(len(x), 5, x.shape[-1])
    for i, row in enumerate(states(x, 4)):
        made = made.select_scatter(row, 1, i)
    return made


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_cut_to_the_rows_that_were_read(name: str) -> None:
    function, rows, count = STACKS[name]
    graph = rewritten(function, special(5, rows, 3), rows_of)
    assert [len(node.args[0]) for node in graph.find_nodes(op="call_function", target=aten.stack.default)] == [count]  # type: ignore[arg-type]


def test_a_row_too_many(golden: Callable[[str], None]) -> None:
    """The last state is left over, and so is the row that it was made of."""
    golden("\n".join(lines(rewritten(stacked, special(2, 4, 3), rows_of))))


def padded(x: Tensor, start: int, end: int, length: int = 5) -> Tensor:
    made: Tensor = aten.slice_backward(x[:, : end - start].ceil(), [len(x), length, x.shape[-1]], 1, start, end, 1)
    return made


def summed(g: Tensor, steps: int) -> Tensor:
    """What a loop from the last row to the first makes of gradients of its states."""
    made, carried = [], 0 * g[:, 0]
    for step in reversed(range(steps)):
        carried = carried + g[:, step + g.shape[1] - steps]
        made.append(carried * 0.5)
    return torch.stack(made[::-1], 1)


def rows(g: Tensor, count: int) -> list[Tensor]:
    return [g[:, i] for i in range(count)]


PADDINGS: dict[str, tuple[Function, bool]] = {  # whether rows of what was padded are read
    "in front": (lambda x: summed(padded(x, 1, 5), 4), True),
    "behind": (lambda x: summed(padded(x, 0, 4), 4), True),
    "of a sum": (lambda x: summed(padded(x, 0, 4) + padded(-x, 4, 5), 4), True),
    "of a sum of zeros": (lambda x: torch.stack([-row for row in rows(padded(x, 0, 4) + padded(-x, 4, 5), 4)], 1), True),
    "for loops over either": (lambda x: summed(y := padded(x, 0, 4), 4).sum(1) + summed(y, 5).sum(1), False),
    "of paddings that overlap": (lambda x: summed(padded(x, 0, 4) + padded(x.sin(), 3, 5), 4), False),
    "of one that is added to itself": (lambda x: summed((y := padded(x, 0, 4)) + y, 4), False),
    "of a product": (lambda x: summed(padded(x, 0, 4) * 2, 4), False),
    "of as many rows as are made": (lambda x: summed(padded(x, 0, 4), 5), False),
    "of other rows": (lambda x: summed(padded(x, 0, 3), 4), False),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_rows_of_a_padding(name: str) -> None:
    function, is_read = PADDINGS[name]
    text = "\n".join(lines(rewritten(function, special(5, 4, 3), rows_of)))
    assert ("slice_backward" not in text) is is_read, text
