"""Blocks that are cut out of rows, and what autograd makes of them: the same numbers, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.canonical import INF, NAN, Case, Function, Table, cases, check, special

aten = torch.ops.aten


def beside_a_view(how: Function, size: int = 3) -> Function:
    """Something of x [2 12 2], and a view of x in blocks."""
    return lambda x: [how(x), x.unflatten(1, (-1, size)).sin()]


def added_to_blocks(how: Function, size: int = 3) -> Function:
    """Gradients [2 12 2] of blocks, of a dimension of their own, and of slices, added up."""
    return lambda g, d: how(g, d.view(2, 12 // size, size, 2).sin().view(2, 12, 2))


def put(g: Tensor, start: int, end: int, step: int = 1) -> Tensor:
    made: Tensor = aten.slice_backward(g[:, start:end:step], [2, 12, 2], 1, start, end, step)
    return made


def joined(g: Tensor) -> Tensor:
    made: Tensor = aten._unsafe_view(aten.select_backward(g[:, :3], [2, 4, 3, 2], 1, 2), [2, 12, 2])
    return made


def padded(a: Tensor, b: Tensor, start: int = 6) -> Tensor:
    """Seven rows of a sum of gradients, those before `start` of `a`, those behind of `b`."""
    one, other = (
        aten.slice_backward(a[:, :start], [2, 12, 2], 1, 0, start, 1),
        aten.slice_backward(b[:, 6:], [2, 12, 2], 1, 6, 12, 1),
    )
    return one + other


def buffer(x: Tensor, rows: Sequence[tuple[int, int]], base: Tensor | None = None) -> Tensor:
    """Rows [start, end) of x written into a buffer, one after the other, each in another way."""
    made = x.tan() if base is None else base
    for number, (start, end) in enumerate(rows):
        made = made.slice_scatter(x[:, start:end].sin() * (1 + number), 1, start, end)
    return made


def in_blocks(x: Tensor, size: int = 3) -> Tensor:
    made: Tensor = aten.view(x, [2, 12 // size, size, 2])
    return made


X, G = (special(2, 12, 2),), (special(2, 12, 2), special(2, 12, 2))


def written(write: Callable[[Tensor], object], shape: tuple[int, ...] = (12, 12), changes: bool = True) -> Case:
    """Writes into a buffer, as AOTAutograd traces them."""

    def function(x: Tensor) -> Tensor:
        made = x.clone()
        write(made)
        return made

    return Case(torch.func.functionalize(function), (special(*shape),), changes)


def by_row(columns: Callable[[int], slice], number: float = -INF) -> Callable[[Tensor], object]:
    return lambda x: [x[..., i, columns(i)].fill_(number) for i in range(x.shape[-2])]


def at_places(places: Sequence[tuple[Any, float]]) -> Callable[[Tensor], object]:
    return lambda x: [x[place].fill_(number) for place, number in places]


RANDOM = Random(0)


def some(length: int) -> slice:
    return slice(*sorted(RANDOM.sample(range(length + 1), 2)))


WRITTEN = {
    "constants on both sides of a window": written(
        at_places([place for r in range(12) for place in (((r, slice(max(0, r - 3))), 0.0), ((r, slice(r + 1, None)), 0.0))])
    ),
    "constants in rows of a list": written(lambda x: [row[:i].fill_(-INF) for i, row in enumerate(x)], (5, 7)),
    "constants of every row": written(by_row(lambda r: slice(-r - 1, None), NAN), (2, 1, 5, 7)),
    "constants in blocks on the diagonal": written(at_places([((slice(i, i + 5),) * 2, 1.0) for i in range(0, 12, 5)])),
    "constants in blocks of many sizes": written(
        at_places([((slice(a, b),) * 2, -0.0) for a, b in ((0, 2), (2, 7), (7, 9), (9, 12))])
    ),
    "constants in every other row": written(at_places([(r, 0.0) for r in range(0, 12, 2)])),
    "constants over constants": written(at_places([item for r in range(12) for item in ((r, 7.0), ((r, slice(r)), 0.0))])),
    "a constant in rows, and one in columns": written(at_places([(slice(2, 5), 1.0), ((slice(None), slice(3, 4)), 0.0)])),
    "a constant everywhere": written(at_places([((slice(i, i + 6),), 2.0) for i in (0, 6)])),
    "constants in three dimensions": written(at_places([((0, 1, 2), 0.0), ((1, 1, 1), 0.0)]), (3, 3, 3)),
    "a constant in rows that are then read": written(lambda x: [x[i, :2].fill_(x[i - 1, 3]) for i in range(3)], changes=False),
    "a constant in every other row, by steps": written(at_places([(slice(None, None, 2), 0.0)])),
    **{
        f"constants at random {i}": written(at_places([((some(12), some(12)), RANDOM.choice((0.0, INF))) for _ in range(i)]))
        for i in range(1, 12)
    },
}
REWRITTEN: Table = {
    "a block of a view": (beside_a_view(lambda x: x[:, 6:9]), *X),
    "the last block of a view": (beside_a_view(lambda x: x[:, -3:]), *X),
    "a gradient of a block": (added_to_blocks(lambda g, d: d + put(g, 3, 6)), *G),
    "gradients of blocks": (added_to_blocks(lambda g, d: d + put(g, 3, 6) + put(g, 9, 12)), *G),
    "blocks that are added": (lambda g, d: d.view(2, 4, 3, 2).sin().view(2, 12, 2) + joined(g), *G),
    "a block of joined ones": (lambda x: x.view(2, 4, 3, 2).sin().view(2, 12, 2)[:, 3:6], *X),
    "rows beside those written": (lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 3:6], *X),
    "rows in front of the last": (lambda x: x.slice_scatter(x[:, :3].sin(), 1, -3)[:, 3:9], *X),
    "some of the rows written": (lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 7:9], *X),
    "rows written once more": (lambda x: buffer(x, [(0, 6), (2, 5)])[:, 2:5], *X),
    "rows that are written around": (lambda x: buffer(x, [(0, 6), (2, 5)])[:, 0:2], *X),
    "a row written": (lambda x: x.select_scatter(x[:, 0].sin(), 1, 6)[:, 6:7], *X),
    "blocks written in turn": (lambda x: in_blocks(buffer(x, [(i, i + 3) for i in range(0, 12, 3)])), *X),
    "blocks written from behind": (lambda x: in_blocks(buffer(x, [(i, i + 3) for i in (9, 3, 0, 6)])), *X),
    "blocks written into zeros": (lambda x: in_blocks(buffer(x, [(3, 6), (6, 9), (9, 12)], torch.zeros_like(x))), *X),
    "all that was written": (lambda x: buffer(x, [(0, 3), (3, 8), (8, 12)]).cumsum(1), *X),
    "one block written into zeros": (lambda x: buffer(x, [(3, 6)], torch.zeros_like(x)).cumsum(1), *X),
    "all rows but the last block's": (lambda x: buffer(x, [(i, i + 3) for i in range(0, 12, 3)])[:, :9] * 2, *X),
    "blocks that are joined": (lambda x: in_blocks(torch.cat([x[:, i : i + 3].sin() * i for i in (6, 0, 9, 3)], 1)), *X),
    "rows of a padded gradient": (lambda g, d: put(g, 3, 9)[:, 4:7], *G),
    "rows beside a padded gradient": (lambda g, d: put(g, 3, 9)[:, 9:12], *G),
    "rows of a sum of paddings": (lambda a, b: padded(a, b)[:, 1:5], *G),
    "rows of the second of two paddings": (lambda a, b: padded(a, b)[:, 8:], *G),
}
KEPT: Table = {
    "a block between those of a view": (beside_a_view(lambda x: x[:, 5:8]), *X),
    "a block of another size": (beside_a_view(lambda x: x[:, 4:8]), *X),
    "every other row of a block": (beside_a_view(lambda x: x[:, 6:9:2]), *X),
    "a block without a view": (lambda x: [x[:, 6:9], x.unflatten(1, (4, 3)).sin() if x.dim() < 3 else x.sin()], *X),
    "a gradient between blocks": (added_to_blocks(lambda g, d: d + put(g, 4, 7)), *G),
    "a gradient of another size": (added_to_blocks(lambda g, d: d + put(g, 4, 8)), *G),
    "a gradient of some rows of a block": (added_to_blocks(lambda g, d: d + put(g, 3, 6, 2)), *G),
    "a gradient beside blocks": (added_to_blocks(lambda g, d: [d.sin(), put(g, 3, 6)]), *G),
    "blocks that are repeated and added": (
        lambda g, d: d.sin().view(2, 12, 1, 2) + aten.select_backward(g[:, 0], [2, 12, 2], 1, 2).view(2, 1, 12, 2),
        *G,
    ),
    "blocks of another type that are added": (
        lambda g, d: d.float().sin().view(2, 12, 2) + aten.select_backward(g[:, :3], [2, 4, 3, 2], 1, 2).view(2, 12, 2),
        *G,
    ),
    "rows across joined blocks": (lambda x: x.view(2, 4, 3, 2).sin().view(2, 12, 2)[:, 2:5], *X),
    "blocks that are joined otherwise": (lambda x: x.view(2, 3, 4, 2).sin().view(2, 12, 2)[:, 3:6], *X),
    "rows among those written": (lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 5:8], *X),
    "rows written as another type": (lambda x: x.float().slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 7:9], *X),
    "every other row written": (lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 12, 2)[:, 7:9], *X),
    "all but a gap that was written": (lambda x: buffer(x, [(0, 3), (4, 8), (8, 12)]).cumsum(1), *X),
    "two blocks written": (lambda x: in_blocks(buffer(x, [(0, 6), (6, 12)]), 6), *X),
    "blocks written beside a gap": (lambda x: in_blocks(buffer(x, [(0, 3), (6, 9), (9, 12)])), *X),
    "blocks written over others": (lambda x: in_blocks(buffer(x, [(0, 6), (3, 9), (9, 12)])), *X),
    "blocks written over in part": (lambda x: in_blocks(buffer(x, [(0, 3), (3, 6), (6, 12), (0, 1)])), *X),
    "rows from within a block on": (lambda x: buffer(x, [(i, i + 3) for i in range(0, 12, 3)])[:, 1:10], *X),
    "columns of blocks written": (
        lambda x: buffer(x, [(i, i + 3) for i in range(0, 12, 3)]).select_scatter(x[:, :, 0], 2, 0)[:, :9],
        *X,
    ),
    "a row beside a column written": (lambda x: x.select_scatter(x[:, :, 1].sin(), 2, 0)[:, 0:1], *X),
    "blocks of two sizes that are joined": (
        lambda x: in_blocks(torch.cat([x[:, :2].sin(), x[:, 2:8].cos(), x[:, 8:].tan()], 1)),
        *X,
    ),
    "joined along another dimension": (lambda x: aten.view(torch.cat([x, x, x], 2), [2, 4, 3, 6]), *X),
    "joined blocks in blocks of their own": (
        lambda x: aten.view(torch.cat([x[:, i : i + 4] for i in (0, 4, 8)], 1).sin(), [2, 2, 6, 2]),
        *X,
    ),
    "rows across the end of a padded gradient": (lambda g, d: put(g, 3, 9)[:, 7:11], *G),
    "columns beside rows written": (lambda x: x.slice_scatter(x[:, :1].sin(), 1, 6, 7)[:, :, 1:], *X),
    "rows of both paddings": (lambda a, b: padded(a, b)[:, 4:8], *G),
    "rows of paddings that overlap": (lambda a, b: padded(a, b, 8)[:, 5:7], *G),
    "rows that both are added to": (lambda a, b: padded(a, b, 8)[:, 6:8], *G),
    "rows beside padded columns": (
        lambda a, b: (
            aten.slice_backward(a[:, :1], [2, 12, 2], 1, 0, 1, 1) + aten.slice_backward(b[:, :, 1:], [2, 12, 2], 2, 1, 2, 1)
        )[:, :1],
        *G,
    ),
    "columns of a sum of paddings": (lambda a, b: padded(a, b)[:, :, 1:], *G),
    "rows of a difference of paddings": (lambda a, b: torch.add(put(a, 0, 6), put(b, 6, 12), alpha=-1)[:, 7:9], *G),
}
CASES = cases(REWRITTEN) | cases(KEPT, changes=False) | WRITTEN


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    check(CASES[name])
