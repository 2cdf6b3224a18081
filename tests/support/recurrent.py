"""Recurrences of families of models, each as a function that joins stretches of rows, and as a step from row to row.

A step takes the states that the row before left, its own row of all that has rows and the weights that all rows are given; it
makes the states that are left and a row of the result. A stretch of rows is told by what becomes of a state that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, WIDTH, HEADS, HEAD, STATES = 2, 8, 2, 4, 3

Values = tuple[Tensor, ...]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """`rows` and `weights` say shapes by name, for one row of one sequence; so do `states`.

    `stretch` makes of rows, all at once, a stretch of each; `join` of two stretches that follow one another one; `after` of a
    stretch and a state the state behind it; `read` of rows and the states behind them the rows of the result (`before`: those in
    front of them).
    """

    rows: Shapes
    weights: Shapes
    states: Shapes
    made: Callable[[Values, Values], tuple[Values, Values]]
    stretch: Callable[[Values, Values], Values]
    join: Callable[[Values, Values], Values]
    after: Callable[[Values, Values], Values]
    read: Callable[[Values, Values, Values], Tensor]
    before: bool = False

    def step(self, states: Values, rows: Values, weights: Values) -> tuple[Values, Tensor]:
        left = self.after(self.stretch(rows, weights), states)
        return left, self.read(rows, weights, states if self.before else left)


def outer(one: Tensor, other: Tensor) -> Tensor:
    return one.unsqueeze(-1) * other.unsqueeze(-2)


def spread_over(number: Tensor, value: Tensor) -> Tensor:
    """A number for each of a value's first dimensions, for all of the others."""
    return number.reshape(*number.shape, *[1] * (value.dim() - number.dim()))


# Mamba: a decay for each channel and number of the state


def made_selective(rows: Values, weights: Values) -> tuple[Values, Values]:
    x, dt, b, c = rows
    return (x, F.softplus(dt), b, c), (-weights[0].exp(),)


def stretch_selective(rows: Values, weights: Values) -> Values:
    x, dt, b, _ = rows
    return (dt.unsqueeze(-1) * weights[0]).exp(), outer(dt * x, b)


def read_selective(rows: Values, weights: Values, states: Values) -> Tensor:
    return (states[0] * rows[3].unsqueeze(-2)).sum(-1)


# Qwen3-Next: what a key finds is replaced in part


def made_delta(rows: Values, weights: Values) -> tuple[Values, Values]:
    q, k, v, g, beta = rows
    return (q, F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid()), ()


def stretch_delta(rows: Values, weights: Values) -> Values:
    _, k, v, g, beta = rows
    factor = spread_over(g.exp(), outer(k, k)) * (torch.eye(HEAD, dtype=k.dtype) - beta[..., None, None] * outer(k, k))
    return factor, outer(k, beta.unsqueeze(-1) * v)


def read_delta(rows: Values, weights: Values, states: Values) -> Tensor:
    return (rows[0].unsqueeze(-2) @ states[0]).squeeze(-2).flatten(-2)


# sums of exponents, as multiples of the largest so far: states (sums..., maximum), stretches (decay, sums..., maximum)


def join_scaled(left: Values, right: Values) -> Values:
    return (left[0] + right[0], *blended(left[1:], right[1:], right[0]))


def after_scaled(stretch: Values, states: Values) -> Values:
    return blended(states, stretch[1:], stretch[0])


def blended(before: Values, own: Values, decay: Tensor) -> Values:
    largest = torch.maximum(decay + before[-1], own[-1])
    old, new = (decay + before[-1] - largest).exp(), (own[-1] - largest).exp()
    pairs = zip(before[:-1], own[:-1], strict=True)
    return (*(spread_over(old, a) * a + spread_over(new, b) * b for a, b in pairs), largest)


# xLSTM: a matrix for each head, and a vector that it is normalized by


def made_gated(rows: Values, weights: Values) -> tuple[Values, Values]:
    return (*rows[:4], F.logsigmoid(rows[4])), ()


def stretch_gated(rows: Values, weights: Values) -> Values:
    _, k, v, i, f = rows
    return f, outer(k, v), k, i


def read_gated(rows: Values, weights: Values, states: Values) -> Tensor:
    q, (matrix, normalizer, largest) = rows[0], states
    below = torch.maximum((q * normalizer).sum(-1).abs(), (-largest).exp())
    return ((q.unsqueeze(-2) @ matrix).squeeze(-2) / below.unsqueeze(-1)).flatten(-2)


# RWKV: a row of the result is made of the states in front of it, and of its own row with a weight that all rows are given


def made_weighted(rows: Values, weights: Values) -> tuple[Values, Values]:
    return rows, (weights[0], -weights[1].exp())


def stretch_weighted(rows: Values, weights: Values) -> Values:
    k, v = rows
    return weights[1].expand(k.shape), v, torch.ones_like(v), k


def read_weighted(rows: Values, weights: Values, states: Values) -> Tensor:
    k, v = rows
    above, below, _ = blended(states, (v, torch.ones_like(v), k + weights[0]), torch.zeros_like(k))
    return above / below


VECTORS = (HEADS, HEAD)
FAMILIES: dict[str, Family] = {
    "mamba": Family(
        {"x": (WIDTH,), "dt": (WIDTH,), "b": (STATES,), "c": (STATES,)},
        {"a": (WIDTH, STATES)},
        {"first": (WIDTH, STATES)},
        made_selective,
        stretch_selective,
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]),
        lambda stretch, states: (stretch[0] * states[0] + stretch[1],),
        read_selective,
    ),
    "qwen3_next": Family(
        {"q": VECTORS, "k": VECTORS, "v": VECTORS, "g": (HEADS,), "beta": (HEADS,)},
        {},
        {"first": (HEADS, HEAD, HEAD)},
        made_delta,
        stretch_delta,
        lambda left, right: (right[0] @ left[0], right[0] @ left[1] + right[1]),
        lambda stretch, states: (stretch[0] @ states[0] + stretch[1],),
        read_delta,
    ),
    "xlstm": Family(
        {"q": VECTORS, "k": VECTORS, "v": VECTORS, "i": (HEADS,), "f": (HEADS,)},
        {},
        {"matrix": (HEADS, HEAD, HEAD), "normalizer": VECTORS, "largest": (HEADS,)},
        made_gated,
        stretch_gated,
        join_scaled,
        after_scaled,
        read_gated,
    ),
    "rwkv": Family(
        {"k": (WIDTH,), "v": (WIDTH,)},
        {"bonus": (WIDTH,), "decay": (WIDTH,)},
        {"above": (WIDTH,), "below": (WIDTH,), "largest": (WIDTH,)},
        made_weighted,
        stretch_weighted,
        join_scaled,
        after_scaled,
        read_weighted,
        before=True,
    ),
}
