"""The rows of which a value consists are the value, bit for bit, in random programs that move rows."""

import math
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.joint import is_tensor, shape_of_node
from streamfx.passes.ops.row_maps import Piece, RowMove, RowSlice, find_pieces, find_sources, nested_addends, row_read, row_write
from streamfx.passes.scan.row_access import find_row_accesses
from tests.support.canonical import same, special

aten = torch.ops.aten
FILLS = (0.0, -0.0, 7.0, math.nan)
MAX_NUMBERS = 3000  # of a value


def sizes(x: Tensor) -> list[int]:
    return list(x.shape)


def paddings(r: random.Random, x: Tensor) -> list[int]:
    return [r.choice([0, 0, 0, 1, 2, -1 if min(x.shape) > 2 else 0]) for _ in range(2 * x.dim())]


def move(r: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    """One operator on a value; `others` are values of its shape, itself among them."""
    dim = r.randrange(x.dim())
    length = x.shape[dim]
    low = r.randint(0, length)
    high = r.randint(low, length)
    rows, other, fill = aten.slice(r.choice(others), dim, low, high), r.choice(others), r.choice(FILLS)
    index = r.randrange(-length, length) if length else 0
    moves: list[Callable[[], Tensor]] = [
        lambda: aten.slice(x, dim, low - length if r.random() < 0.2 else low, high + r.randint(0, 1)),
        lambda: aten.slice(x, dim, low, high, 2),
        lambda: aten.constant_pad_nd(x, paddings(r, x), fill),
        lambda: aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [low, r.choice([1, 1, -1])], fill),
        lambda: aten.slice(x, dim, length + 2, length + 3),
        lambda: aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [length, 0], -0.0) + torch.cat([x, x], dim),
        lambda: (
            aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [length, 0], -0.0)
            + aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, length], 0.0)
        ),
        lambda: torch.cat([r.choice(others) for _ in range(r.randint(1, 3))], dim),
        lambda: torch.cat([x.new_full(sizes(rows), fill), x], dim),
        lambda: torch.stack([r.choice(others) for _ in range(r.randint(1, 3))], r.randint(0, x.dim())),
        lambda: aten.slice_scatter(x, rows.neg(), dim, low, high),
        lambda: aten.slice_scatter(torch.full_like(x, fill), rows, dim, low, high),
        lambda: aten.slice_backward(rows, sizes(x), dim, low, high, 1),
        lambda: aten.slice_backward(rows, sizes(x), dim, low, high, 1) + aten.slice_backward(rows, sizes(x), dim, low, high, 1),
        lambda: aten.slice_backward(rows, sizes(x), dim, low, high, 1) + other,
        lambda: (
            aten.slice_backward(rows, sizes(x), dim, low, high, 1)
            + aten.slice_backward(aten.slice(other, dim, high, length), sizes(x), dim, high, length, 1)
        ),
        lambda: aten.add(x, other, alpha=2),
        lambda: x.flip(dim),
        lambda: x.permute(r.sample(range(x.dim()), x.dim())),
        lambda: x.unsqueeze(dim),
        lambda: x.neg(),
    ]
    if length:
        moves += [
            lambda: aten.select(x, dim, index) if x.dim() > 1 else x.clone(),
            lambda: aten.select_scatter(x, aten.select(other, dim, 0).neg(), dim, index),
            lambda: aten.select_backward(aten.select(other, dim, 0), sizes(x), dim, index),
            lambda: (
                aten.select_backward(aten.select(other, dim, 0), sizes(x), dim, 0)
                + aten.select_backward(aten.select(x, dim, 0), sizes(x), dim, length - 1)
            ),
            lambda: x.split(r.randint(1, length), dim)[-1],
            lambda: r.choice(x.unbind(dim)) if x.dim() > 1 else x.clone(),
        ]
    return r.choice(moves)()


def program(seed: int, *inputs: Tensor) -> list[Tensor]:
    r, values = random.Random(seed), list(inputs)
    for _ in range(r.randint(2, 16)):
        x = r.choice(values[-3:])
        if x.dim() and x.numel() < MAX_NUMBERS:
            values.append(move(r, x, [y for y in values if y.shape == x.shape]))
    return values


class Numbers(fx.Interpreter):
    """Keeps the numbers of each node."""

    def run_node(self, n: fx.Node) -> Any:
        self.numbers[n] = super().run_node(n)
        return self.numbers[n]

    def of(self, *inputs: Tensor) -> dict[fx.Node, Any]:
        self.numbers: dict[fx.Node, Any] = {}
        self.run(*inputs)
        return self.numbers


def traced(seed: int, mode: Literal["fake", "symbolic"]) -> tuple[list[fx.Node], dict[fx.Node, Any]]:
    """The nodes of a random program that are tensors, and the numbers of all nodes."""
    r = random.Random(seed)
    shape = [r.choice([0, 1, 2, 3, 4, 4, 5]) if r.random() < 0.9 else 1 for _ in range(r.randint(1, 3))]
    inputs = special(*shape), special(*shape).neg()
    module = make_fx(lambda *inputs: program(seed, *inputs), tracing_mode=mode)(*inputs)
    numbers = Numbers(module).of(*inputs)
    return [node for node in module.graph.nodes if is_tensor(node)], numbers


def rows_of(piece: Piece, dim: int, like: Tensor, numbers: dict[fx.Node, Any]) -> Tensor:
    if not isinstance(piece.value, fx.Node):
        return like.new_full((*like.shape[:dim], piece.num_rows, *like.shape[dim + 1 :]), piece.value)
    value = numbers[piece.value]
    rows = value.unsqueeze(dim) if piece.is_row else value.narrow(dim, piece.start, piece.num_rows)
    return rows + 0.0 if piece.is_added else rows


@pytest.mark.parametrize("seed", range(150))
def test_a_value_consists_of_its_pieces(seed: int) -> None:
    nodes, numbers = traced(seed, "fake")
    r = random.Random(seed)
    for node in nodes:
        for dim, length in enumerate(shape_of_node(node)):
            low = r.randint(0, length)  # type: ignore[arg-type]
            rows = RowSlice(dim, low, r.randint(low, length))  # type: ignore[arg-type]
            read = numbers[node].narrow(dim, rows.start, rows.stop - rows.start)
            for pieces in (find_pieces(node, rows), find_sources(node, rows)):
                assert [piece.row for piece in pieces] == [rows.start, *(piece.stop for piece in pieces)][: len(pieces)]
                parts = [read.narrow(dim, 0, 0), *(rows_of(piece, dim, read, numbers) for piece in pieces)]
                same(torch.cat(parts, dim), read, bits=True)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("seed", range(30))
def test_a_move_moves_its_rows(seed: int, mode: Literal["fake", "symbolic"]) -> None:
    nodes, numbers = traced(seed, mode)

    def number(size: Any) -> int:
        return int(size) if isinstance(size, int) else int(size.subs(values))

    values = {
        symbol: value
        for node in nodes
        for size, value in zip(shape_of_node(node), numbers[node].shape, strict=True)
        if getattr(size, "is_Symbol", False)
        for symbol in [size]
    }
    for node in nodes:
        for found in filter(None, (row_read(node), row_write(node))):
            check(found, numbers, *map(number, found.rows))


def check(found: RowMove, numbers: dict[fx.Node, Any], dim: int, start: int, stop: int) -> None:
    tensor, part = numbers[found.tensor], numbers[found.part]
    same(tensor.select(dim, start) if found.is_single else tensor.narrow(dim, start, stop - start), part, bits=True)
    if found.rest is not None:
        rest = numbers[found.rest] if isinstance(found.rest, fx.Node) else torch.full_like(tensor, found.rest)
        for low, high in ((0, start), (stop, tensor.shape[dim])):
            same(tensor.narrow(dim, low, high - low), rest.narrow(dim, low, high - low), bits=True)


def test_a_sum_of_equal_sums_is_decomposed_once() -> None:
    """Decomposed once per path, 60 doublings would have 2 ** 60 addends."""

    def doubled(x: Tensor) -> Tensor:
        for _ in range(60):
            x = x + x
        return x

    (result,) = make_fx(doubled)(torch.ones(4, 3)).graph.output_node().all_input_nodes
    assert len(nested_addends(result)) == 61


def test_sums_of_rows_that_contain_such_a_sum_become_stacks() -> None:
    """The gradients of two residual loops: the rows of the first sum are read, and it is an addend of the second one."""

    def residual(x: Tensor) -> Tensor:
        for _ in range(2):
            x = sum((aten.select_backward(x[:, t].sin(), sizes(x), 1, t) for t in range(x.shape[1])), x)
        return x

    x = special(2, 5, 3)
    module = make_fx(residual, tracing_mode="fake")(x)
    assert len(find_row_accesses(module.graph).concats) == 2
    assert not module.graph.find_nodes(op="call_function", target=aten.select_backward.default)
    module.recompile()
    same(module(x), residual(x), bits=False)
