"""Scores by distance that are shifted row by row: what counts as a shift, and that it streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support.canonical import Case, check, graphs, plain, same, special
from tests.support.decoders import HEAD, HEADS, Decoder, Heads
from tests.support.exactness import compare
from tests.support.twins import batch

aten = torch.ops.aten
small = st.integers(1, 5)
Shift = Callable[[Tensor, int], Tensor]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(small, small, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_operators_are_their_definition(rows: int, columns: int, before: int, behind: int, turned: bool) -> None:
    """Element by element, of memory in any order; and the second is the adjoint of the first."""
    first, width = rows - 1 + before, rows - 1 + before + columns + behind
    x, gradient = plain(2, rows, width, 3), plain(2, rows, columns, 3)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
    wanted = torch.stack([torch.stack([x[:, i, first - i + j] for j in range(columns)], 1) for i in range(rows)], 1)
    made = RELATIVE_SHIFT(x, 1, first, columns)
    assert torch.equal(made, wanted)
    back = RELATIVE_SHIFT_BACKWARD(gradient, 1, first, width)
    assert torch.equal(RELATIVE_SHIFT(back, 1, first, columns), gradient)
    torch.testing.assert_close((made * gradient).sum(), (x * back).sum())


# -- what counts as a shift


def by_views(x: Tensor, columns: int, start: int = 1, less: int = 1) -> Tensor:
    """As XLNet writes it: [b t w]."""
    b, t, w = x.shape
    return x.reshape(b, w, t)[:, start:].reshape(b, -1, w - less)[..., :columns]


def by_index(x: Tensor, columns: int) -> Tensor:
    b, t, w = x.shape
    return x.reshape(b, w, t)[:, 1:].reshape(b, t, w - 1).index_select(2, torch.arange(columns))


def behind_zeros(x: Tensor, columns: int) -> Tensor:
    """As the Conformer and Transformer-XL write it; where there are as many columns as rows, later keys get the next row's."""
    return by_views(F.pad(x, (1, 0)), columns)


def rows_first(x: Tensor, columns: int) -> Tensor:
    t, w, b = x.shape
    return x.reshape(w, t, b)[1:].reshape(t, w - 1, b)[:, :columns]


def with_gradient(function: Callable[..., Tensor], *more: Any) -> Callable[..., list[Tensor]]:
    def both(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        made = function(x, *more)
        return [made, *torch.autograd.grad(made, x, made.detach())]

    return both


SHIFTS = {
    "by views": Case(with_gradient(by_views, 4), (special(2, 4, 8),)),
    "all columns": Case(with_gradient(by_views, 7), (special(2, 4, 8),)),
    "by an index": Case(with_gradient(by_index, 4), (special(2, 4, 8),)),
    "behind zeros": Case(with_gradient(behind_zeros, 4), (special(2, 4, 7),)),
    "as many keys as rows": Case(with_gradient(behind_zeros, 4), (special(2, 4, 4),)),
    "rows first": Case(with_gradient(rows_first, 4), (special(4, 8, 2),)),
    "one row": Case(with_gradient(by_views, 1), (special(2, 1, 8),)),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {  # of [2 4 8], what only looks like one
    "further on": lambda x: x.reshape(2, 8, 4)[:, 2:].reshape(2, 3, 8)[..., :3],
    "two less": lambda x: x.reshape(2, 8, 4)[:, 2:].reshape(2, 4, 6)[..., :3],
    "in steps": lambda x: x.reshape(2, 8, 4)[:, 1::2].reshape(2, 4, 4)[..., :3],
    "other rows": lambda x: x.reshape(2, 4, 8)[:, 1:].reshape(2, 4, 6)[..., :2],
    "from the left": lambda x: x.reshape(2, 8, 4)[:, :-1].reshape(2, 4, 7)[..., :3],
    "cut at both ends": lambda x: x.reshape(2, 8, 4)[:, 1:5].reshape(2, 4, 4)[..., :3],
    "of other sequences": lambda x: x.reshape(1, 2, 4, 8).reshape(2, 1, 8, 4)[:, :, 1:].reshape(2, 1, 4, 7)[..., :3],
    "of another batch": lambda x: x.reshape(1, 16, 4)[:, 1:, :].reshape(1, 4, 15)[..., :3],
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift(name: str) -> None:
    """Of numbers that are drawn to hurt, with the same bits; no view stays in the way."""
    check(SHIFTS[name])
    _, after = graphs(SHIFTS[name])
    found = {node.target for node in after.graph.nodes}
    assert found >= {RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD}
    assert found.isdisjoint({aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.slice_backward.default})


@pytest.mark.parametrize("name", OTHERS)
def test_no_shift(name: str) -> None:
    x = special(2, 4, 8)
    before, after = graphs(Case(with_gradient(OTHERS[name]), (x,)))
    assert {node.target for node in after.graph.nodes}.isdisjoint({RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD})
    for actual, wanted in zip(after(x), before(x), strict=True):
        same(actual, wanted, bits=True)


@pytest.mark.parametrize(("index", "source"), [([0, 1, 2], 3), ([0, 2, 1], 3), ([0, 1, 2, 3], 4)], ids=str)
def test_first_rows_by_number(index: list[int], source: int) -> None:
    """Numbers that count up take a part; a zero that is added to zeros has no sign. Others, and those in no order, stay."""
    x, y = special(2, 4, 3), special(2, source, 3)

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        numbers = torch.arange(source) if index == sorted(index) else torch.tensor(index)
        return [
            x.index_select(1, numbers),
            torch.zeros_like(x).index_add(1, numbers, y),
            torch.ones_like(x).index_add(1, numbers, y),
        ]

    before, after = graphs(Case(function, (x, y)))
    kept = sum(node.target in (aten.index_select.default, aten.index_add.default) for node in after.graph.nodes)
    assert kept == (1 if index == sorted(index) else 3)
    for actual, wanted in zip(after(x, y), before(x, y), strict=True):
        same(actual, wanted, bits=True)


# -- decoders that shift


class RelativeHeads(Heads):
    """Scores by key and by distance; `shift` brings distances [b h t w] to keys, of which some are seen."""

    def __init__(self, shift: Shift, distances: Callable[[int], Tensor], seen: int | None) -> None:
        super().__init__()
        self.shift, self.distances, self.seen = shift, distances, seen
        self.relative = nn.Linear(4, HEADS * HEAD)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        angles = self.distances(length).to(q.dtype)[:, None] * torch.arange(1, 5, dtype=q.dtype)
        keys = self.relative(angles.sin()).unflatten(-1, (HEADS, HEAD))
        scores = q @ k.transpose(-1, -2) + self.shift(torch.einsum("bhid,jhd->bhij", q, keys), length)
        if self.seen is not None:  # keys so far behind the row, and no more than three in front of that
            seen = torch.ones(length, length, dtype=torch.bool).tril(self.seen).triu(self.seen - 3)
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v


class Relative(Decoder):
    def __init__(self, *how: Any) -> None:
        self.attention = lambda: RelativeHeads(*how)  # type: ignore[assignment,method-assign]
        super().__init__()


def over_heads(shift: Shift) -> Shift:
    return lambda x, columns: shift(x.flatten(0, 1), columns).unflatten(0, x.shape[:2])


def four(x: Tensor, columns: int) -> Tensor:
    b, h, t, w = x.shape
    return x.reshape(b, h, w, t)[:, :, 1:].reshape(b, h, t, w - 1)[..., :columns]


def both_ways(length: int) -> Tensor:
    return torch.arange(length, -length, -1)


def to_the_left(length: int) -> Tensor:
    return torch.arange(length - 1, -1, -1)


def as_many(length: int) -> Tensor:
    return torch.arange(length - 1, -length, -1)


STREAMS: dict[str, tuple[Any, ...]] = {
    "XLNet, in a window": (four, both_ways, 0),
    "Conformer": (over_heads(behind_zeros), as_many, None),
    "Transformer-XL": (over_heads(behind_zeros), to_the_left, 0),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", STREAMS)
def test_it_streams(name: str) -> None:
    attention = {"masked" if STREAMS[name][-1] is None else "window(4)"}
    report = compare(Relative(*STREAMS[name]).double(), batch(2, 19), also=(1, 64), attention=attention)
    assert any(node.target is RELATIVE_SHIFT for node in report.facts[0].joint.nodes)


@pytest.mark.compiled
@pytest.mark.parametrize("seen", [None, 1])
def test_the_next_row_shows(seen: int | None) -> None:
    """As many distances as keys, and nothing hides what later keys get: a chunk would have to look into the next one."""
    model = Relative(over_heads(behind_zeros), to_the_left, seen).double()
    report = compare(model, batch(2, 19), also=(1, 64), streams=False)
    reasons = [reason for one in report.facts for reason in one.reasons()]
    assert any("numbers of the next row" in reason for reason in reasons), reasons
