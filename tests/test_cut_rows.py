"""Stacks that are cut to the rows of a loop, and rows of paddings: written with the rows that the loop has, if it is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.passes.scan.row_access import rows_of
from streamfx.tools.report.listing import call_text
from tests.support.canonical import same, special

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


def rewritten(function: Function, x: Tensor) -> fx.GraphModule:
    """The graph behind `rows_of`, which gives the same to the bit."""
    before = make_fx(function, tracing_mode="fake")(x)
    after = fx.GraphModule(before, rows_of_copy(before))
    same(after(x.clone()), before(x.clone()), bits=True)
    return after


def rows_of_copy(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node, copy in zip(module.graph.nodes, graph.nodes, strict=True):
        copy.meta = dict(node.meta)
    rows_of(graph)
    return graph


def lines(module: fx.GraphModule) -> list[str]:
    return [call_text(node) for node in module.graph.nodes if node.op == "call_function"]


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
    graph = rewritten(function, special(5, rows, 3)).graph
    assert [len(node.args[0]) for node in graph.find_nodes(op="call_function", target=aten.stack.default)] == [count]  # type: ignore[arg-type]


def test_a_row_too_many(golden: Callable[[str], None]) -> None:
    """The last state is left over, and so is the row that it was made of."""
    golden("\n".join(lines(rewritten(stacked, special(2, 4, 3)))))


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
    text = "\n".join(lines(rewritten(function, special(5, 4, 3))))
    assert ("slice_backward" not in text) is is_read, text
