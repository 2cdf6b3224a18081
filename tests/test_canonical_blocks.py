"""Blocks that are cut out of rows, and what autograd makes of them: the same numbers, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.canonical import Case, Function, check, special

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


X, G = (special(2, 12, 2),), (special(2, 12, 2), special(2, 12, 2))
CASES = {
    "a block of a view": Case(beside_a_view(lambda x: x[:, 6:9]), X),
    "the last block of a view": Case(beside_a_view(lambda x: x[:, -3:]), X),
    "a block between those of a view": Case(beside_a_view(lambda x: x[:, 5:8]), X, changes=False),
    "a block of another size": Case(beside_a_view(lambda x: x[:, 4:8]), X, changes=False),
    "every other row of a block": Case(beside_a_view(lambda x: x[:, 6:9:2]), X, changes=False),
    "a block without a view": Case(
        lambda x: [x[:, 6:9], x.unflatten(1, (4, 3)).sin() if x.dim() < 3 else x.sin()], X, changes=False
    ),
    "a gradient of a block": Case(added_to_blocks(lambda g, d: d + put(g, 3, 6)), G),
    "gradients of blocks": Case(added_to_blocks(lambda g, d: d + put(g, 3, 6) + put(g, 9, 12)), G),
    "a gradient between blocks": Case(added_to_blocks(lambda g, d: d + put(g, 4, 7)), G, changes=False),
    "a gradient of another size": Case(added_to_blocks(lambda g, d: d + put(g, 4, 8)), G, changes=False),
    "a gradient of some rows of a block": Case(added_to_blocks(lambda g, d: d + put(g, 3, 6, 2)), G, changes=False),
    "a gradient beside blocks": Case(added_to_blocks(lambda g, d: [d.sin(), put(g, 3, 6)]), G, changes=False),
    "blocks that are added": Case(lambda g, d: d.view(2, 4, 3, 2).sin().view(2, 12, 2) + joined(g), G),
    "blocks that are repeated and added": Case(
        lambda g, d: d.sin().view(2, 12, 1, 2) + aten.select_backward(g[:, 0], [2, 12, 2], 1, 2).view(2, 1, 12, 2),
        G,
        changes=False,
    ),
    "blocks of another type that are added": Case(
        lambda g, d: d.float().sin().view(2, 12, 2) + aten.select_backward(g[:, :3], [2, 4, 3, 2], 1, 2).view(2, 12, 2),
        G,
        changes=False,
    ),
    "a block of joined ones": Case(lambda x: x.view(2, 4, 3, 2).sin().view(2, 12, 2)[:, 3:6], X),
    "rows across joined blocks": Case(lambda x: x.view(2, 4, 3, 2).sin().view(2, 12, 2)[:, 2:5], X, changes=False),
    "blocks that are joined otherwise": Case(lambda x: x.view(2, 3, 4, 2).sin().view(2, 12, 2)[:, 3:6], X, changes=False),
    "rows beside those written": Case(lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 3:6], X),
    "rows in front of the last": Case(lambda x: x.slice_scatter(x[:, :3].sin(), 1, -3)[:, 3:9], X),
    "rows among those written": Case(lambda x: x.slice_scatter(x[:, :3].sin(), 1, 6, 9)[:, 5:8], X, changes=False),
    "columns beside rows written": Case(lambda x: x.slice_scatter(x[:, :1].sin(), 1, 6, 7)[:, :, 1:], X, changes=False),
    "rows of a sum of paddings": Case(lambda a, b: padded(a, b)[:, 1:5], G),
    "rows of the second of two paddings": Case(lambda a, b: padded(a, b)[:, 8:], G),
    "rows of both paddings": Case(lambda a, b: padded(a, b)[:, 4:8], G, changes=False),
    "rows of paddings that overlap": Case(lambda a, b: padded(a, b, 8)[:, 5:7], G, changes=False),
    "rows that both are added to": Case(lambda a, b: padded(a, b, 8)[:, 6:8], G, changes=False),
    "columns of a sum of paddings": Case(lambda a, b: padded(a, b)[:, :, 1:], G, changes=False),
    "rows of a difference of paddings": Case(
        lambda a, b: torch.add(put(a, 0, 6), put(b, 6, 12), alpha=-1)[:, 7:9], G, changes=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    check(CASES[name])
