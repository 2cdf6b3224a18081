"""Rewrites of traced loops: blocks become rows of a block dimension and are restored; stacks and paddings lose extra rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.joint import joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.passes.scan.row_access import find_row_accesses
from streamfx.passes.scan.strip_mine import restore_unused_blocks, stack_sliced_blocks
from streamfx.tools.report.listing import call_text
from tests.support.canonical import same, special
from tests.support.tables import named_cases

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


def rewritten(function: Function, x: Tensor, rewrite: Callable[[fx.Graph], object]) -> fx.Graph:
    """The graph of a function after a rewrite, which changes no bit of its result."""
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
    restore_unused_blocks(stack_sliced_blocks(joint_graph(graph, 1, 1), writer), graph, writer)
    graph.eliminate_dead_code()


def in_blocks(x: Tensor) -> Tensor:
    return torch.cat([part.sin() for part in (x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 6:])], 1)


def gradient(x: Tensor) -> Tensor:
    shape = list(x.shape)
    parts = [aten.slice_backward(x[:, 2 * i : 2 * i + 2].sin(), shape, 1, 2 * i, 2 * i + 2, 1) for i in range(3)]
    rest = aten.slice_backward(x[:, 6:].cos(), shape, 1, 6, 7, 1)
    return torch.cat([part[:, :2] for part in (x, x, x)], 1)[:, :1] + (parts[0] + (parts[1] + parts[2])) + rest


@pytest.mark.parametrize("function", [in_blocks, gradient])
def test_blocks_without_a_loop_are_restored(function: Function) -> None:
    found = lines(rewritten(function, special(2, 7), in_blocks_and_back))
    assert not any(line.startswith(("view", "stack", "select")) for line in found), found


def summed_rows(x: Tensor) -> Tensor:
    made: list[Tensor] = [aten.select_backward(x[:, i].sin(), list(x.shape), 1, i) for i in range(x.shape[1])]
    return torch.copysign(torch.ones_like(x), sum(made[1:], made[0]))


def summed_blocks(x: Tensor) -> Tensor:
    made: list[Tensor] = [aten.slice_backward(x[:, i : i + 2].sin(), list(x.shape), 1, i, i + 2, 1) for i in (0, 2, 4)]
    signs = torch.copysign(torch.ones_like(x), sum(made[1:], made[0]))
    return torch.cat([signs, torch.cat([x[:, :2].sin(), x[:, 2:4].sin(), x[:, 4:].sin()], 1)])


def in_blocks_only(graph: fx.Graph) -> None:
    stack_sliced_blocks(joint_graph(graph, 1, 1), GraphWriter(graph))


@pytest.mark.parametrize(("function", "rewrite"), [(summed_rows, find_row_accesses), (summed_blocks, in_blocks_only)])
def test_a_sum_that_becomes_a_stack_has_no_negative_zeros(function: Function, rewrite: Callable[[fx.Graph], object]) -> None:
    """Padding adds 0.0 to each row of the sum, and `copysign` shows it."""
    assert any(line.startswith("stack") for line in lines(rewritten(function, special(2, 6), rewrite)))


# -- stacks and paddings get as many rows as a loop has


def states(x: Tensor, steps: int, length: int | None = None) -> list[Tensor]:
    """A first state, and one after each step."""
    made = [x[:, 0] * 0]
    for step in range(steps):
        made.append(made[-1] * 0.5 + x[:, step].sin())
    return made[:length]


def stacked(x: Tensor) -> Tensor:
    return torch.stack(states(x, 4), 1)[:, :-1] * 1


STACKS: dict[str, tuple[Function, int, int]] = named_cases("stacks", globals())


def buffered(x: Tensor) -> Tensor:
    made = x.new_zeros(len(x), 5, x.shape[-1])
    for i, row in enumerate(states(x, 4)):
        made = made.select_scatter(row, 1, i)
    return made


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_trimmed_to_the_rows_that_are_read(name: str) -> None:
    function, rows, count = STACKS[name]
    graph = rewritten(function, special(5, rows, 3), find_row_accesses)
    assert [len(node.args[0]) for node in graph.find_nodes(op="call_function", target=aten.stack.default)] == [count]  # type: ignore[arg-type]


def test_a_row_too_many(golden: Callable[[str], None]) -> None:
    """The last state is unused, and so is the row that it depends on."""
    golden("\n".join(lines(rewritten(stacked, special(2, 4, 3), find_row_accesses))))


def padded(x: Tensor, start: int, end: int, length: int = 5) -> Tensor:
    made: Tensor = aten.slice_backward(x[:, : end - start].ceil(), [len(x), length, x.shape[-1]], 1, start, end, 1)
    return made


def summed(g: Tensor, steps: int) -> Tensor:
    """The loop of a backward, from the last row to the first, over gradients of its states."""
    made, carried = [], 0 * g[:, 0]
    for step in reversed(range(steps)):
        carried = carried + g[:, step + g.shape[1] - steps]
        made.append(carried * 0.5)
    return torch.stack(made[::-1], 1)


def rows(g: Tensor, count: int) -> list[Tensor]:
    return [g[:, i] for i in range(count)]


PADDINGS: dict[str, tuple[Function, bool]] = named_cases("paddings", globals())


@pytest.mark.parametrize("name", PADDINGS)
def test_rows_of_a_padding(name: str) -> None:
    function, is_read = PADDINGS[name]
    text = "\n".join(lines(rewritten(function, special(5, 4, 3), find_row_accesses)))
    assert ("slice_backward" not in text) is is_read, text
