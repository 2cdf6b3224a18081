"""Recurrences of six families of models, each as a step from row to row, and as a function that joins stretches of rows.

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


@dataclass(frozen=True)
class Family:
    """`rows` and `weights` say shapes by name, for one row of one sequence; so do `states`.

    `stretch` makes of rows, all at once, a stretch of each; `join` of two stretches that follow one another one; `after` of a
    stretch and a state the state behind it; `read` of rows and the states behind them the rows of the result (`before`: those in
    front of them).
    """

    rows: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    states: dict[str, tuple[int, ...]]
    made: Callable[[Values, Values], tuple[Values, Values]]
    step: Callable[[Values, Values, Values], tuple[Values, Tensor]]
    stretch: Callable[[Values, Values], Values]
    join: Callable[[Values, Values], Values]
    after: Callable[[Values, Values], Values]
    read: Callable[[Values, Values, Values], Tensor]
    before: bool = False

    @property
    def features(self) -> int:
        """Numbers that a layer makes of each row."""
        return sum(torch.Size(shape).numel() for shape in self.rows.values())


def outer(one: Tensor, other: Tensor) -> Tensor:
    return one.unsqueeze(-1) * other.unsqueeze(-2)


def spread_over(number: Tensor, value: Tensor) -> Tensor:
    """A number for each of a value's first dimensions, for all of the others."""
    return number.reshape(*number.shape, *[1] * (value.dim() - number.dim()))


# -- states that are multiplied, and added to


def join_affine(left: Values, right: Values) -> Values:
    factor, other = right[0], spread_over(right[0], right[1])
    return left[0] * factor, other * left[1] + right[1]


def after_affine(stretch: Values, states: Values) -> Values:
    return (spread_over(stretch[0], stretch[1]) * states[0] + stretch[1],)


# Mamba: a decay for each channel and number of the state


def made_selective(rows: Values, weights: Values) -> tuple[Values, Values]:
    x, dt, b, c = rows
    return (x, F.softplus(dt), b, c), (-weights[0].exp(),)


def stretch_selective(rows: Values, weights: Values) -> Values:
    x, dt, b, _ = rows
    return (dt.unsqueeze(-1) * weights[0]).exp(), outer(dt * x, b)


def read_selective(rows: Values, weights: Values, states: Values) -> Tensor:
    return (states[0] * rows[3].unsqueeze(-2)).sum(-1)


# Mamba 2: one decay for each head, whose state is a matrix


def made_heads(rows: Values, weights: Values) -> tuple[Values, Values]:
    x, g, b, c = rows
    return (x, -F.softplus(g), b, c), ()


def stretch_heads(rows: Values, weights: Values) -> Values:
    x, g, b, _ = rows
    return g.exp(), outer(x, b.unsqueeze(-2).expand(*x.shape[:-1], b.shape[-1]))


def read_heads(rows: Values, weights: Values, states: Values) -> Tensor:
    return (states[0] * rows[3].unsqueeze(-2).unsqueeze(-2)).sum(-1).flatten(-2)


# RG-LRU: a decay for each channel, and as much of a row as is not left of the state


def made_linear(rows: Values, weights: Values) -> tuple[Values, Values]:
    x, gate = rows
    return (x, gate.sigmoid()), (-F.softplus(weights[0]),)


def stretch_linear(rows: Values, weights: Values) -> Values:
    x, gate = rows
    decay = weights[0] * gate
    return decay.exp(), (1 - (2 * decay).exp()).sqrt() * x


def read_linear(rows: Values, weights: Values, states: Values) -> Tensor:
    return states[0].tanh()


def step_affine(
    stretch: Callable[[Values, Values], Values], read: Callable[[Values, Values, Values], Tensor]
) -> Callable[[Values, Values, Values], tuple[Values, Tensor]]:
    def step(states: Values, rows: Values, weights: Values) -> tuple[Values, Tensor]:
        states = after_affine(stretch(rows, weights), states)
        return states, read(rows, weights, states)

    return step


# -- Qwen3-Next: what a key finds is replaced in part


def made_delta(rows: Values, weights: Values) -> tuple[Values, Values]:
    q, k, v, g, beta = rows
    return (q, F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid()), ()


def step_delta(states: Values, rows: Values, weights: Values) -> tuple[Values, Tensor]:
    q, k, v, g, beta = rows
    left = spread_over(g.exp(), states[0]) * states[0]
    found = (k.unsqueeze(-2) @ left).squeeze(-2)
    left = left + outer(k, beta.unsqueeze(-1) * (v - found))
    return (left,), (q.unsqueeze(-2) @ left).squeeze(-2).flatten(-2)


def stretch_delta(rows: Values, weights: Values) -> Values:
    _, k, v, g, beta = rows
    factor = spread_over(g.exp(), outer(k, k)) * (torch.eye(HEAD, dtype=k.dtype) - beta[..., None, None] * outer(k, k))
    return factor, outer(k, beta.unsqueeze(-1) * v)


def join_delta(left: Values, right: Values) -> Values:
    return right[0] @ left[0], right[0] @ left[1] + right[1]


def after_delta(stretch: Values, states: Values) -> Values:
    return (stretch[0] @ states[0] + stretch[1],)


def read_delta(rows: Values, weights: Values, states: Values) -> Tensor:
    return (rows[0].unsqueeze(-2) @ states[0]).squeeze(-2).flatten(-2)


# -- sums of exponents, as multiples of the largest so far: states (sums..., maximum), stretches (decay, sums..., maximum)


def join_scaled(left: Values, right: Values) -> Values:
    decay, *sums, largest = right
    return (left[0] + decay, *_blended(left[1:], (*sums, largest), decay))


def after_scaled(stretch: Values, states: Values) -> Values:
    return _blended(states, stretch[1:], stretch[0])


def _blended(before: Values, own: Values, decay: Tensor) -> Values:
    largest = torch.maximum(decay + before[-1], own[-1])
    old, new = (decay + before[-1] - largest).exp(), (own[-1] - largest).exp()
    pairs = zip(before[:-1], own[:-1], strict=True)
    return (*(spread_over(old, a) * a + spread_over(new, b) * b for a, b in pairs), largest)


# xLSTM: a matrix for each head, and a vector that it is normalized by


def made_gated(rows: Values, weights: Values) -> tuple[Values, Values]:
    q, k, v, i, f = rows
    return (q, k, v, i, F.logsigmoid(f)), ()


def stretch_gated(rows: Values, weights: Values) -> Values:
    _, k, v, i, f = rows
    return f, outer(k, v), k, i


def read_gated(rows: Values, weights: Values, states: Values) -> Tensor:
    q, (matrix, normalizer, largest) = rows[0], states
    below = torch.maximum((q * normalizer).sum(-1).abs(), (-largest).exp())
    return ((q.unsqueeze(-2) @ matrix).squeeze(-2) / below.unsqueeze(-1)).flatten(-2)


def step_gated(states: Values, rows: Values, weights: Values) -> tuple[Values, Tensor]:
    states = after_scaled(stretch_gated(rows, weights), states)
    return states, read_gated(rows, weights, states)


# RWKV: a row of the result is made of the states in front of it, and of its own row with a weight that all rows are given


def made_weighted(rows: Values, weights: Values) -> tuple[Values, Values]:
    bonus, decay = weights
    return rows, (bonus, -decay.exp())


def stretch_weighted(rows: Values, weights: Values) -> Values:
    k, v = rows
    return weights[1].expand(k.shape), v, torch.ones_like(v), k


def read_weighted(rows: Values, weights: Values, states: Values) -> Tensor:
    k, v = rows
    above, below, _ = _blended(states, (v, torch.ones_like(v), k + weights[0]), torch.zeros_like(k))
    return above / below


def step_weighted(states: Values, rows: Values, weights: Values) -> tuple[Values, Tensor]:
    made = read_weighted(rows, weights, states)
    return after_scaled(stretch_weighted(rows, weights), states), made


# -- all of them

VECTORS = (HEADS, HEAD)
FAMILIES: dict[str, Family] = {
    "mamba": Family(
        {"x": (WIDTH,), "dt": (WIDTH,), "b": (STATES,), "c": (STATES,)},
        {"a": (WIDTH, STATES)},
        {"first": (WIDTH, STATES)},
        made_selective,
        step_affine(stretch_selective, read_selective),
        stretch_selective,
        join_affine,
        after_affine,
        read_selective,
    ),
    "mamba2": Family(
        {"x": VECTORS, "g": (HEADS,), "b": (STATES,), "c": (STATES,)},
        {},
        {"first": (HEADS, HEAD, STATES)},
        made_heads,
        step_affine(stretch_heads, read_heads),
        stretch_heads,
        join_affine,
        after_affine,
        read_heads,
    ),
    "xlstm": Family(
        {"q": VECTORS, "k": VECTORS, "v": VECTORS, "i": (HEADS,), "f": (HEADS,)},
        {},
        {"matrix": (HEADS, HEAD, HEAD), "normalizer": VECTORS, "largest": (HEADS,)},
        made_gated,
        step_gated,
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
        step_weighted,
        stretch_weighted,
        join_scaled,
        after_scaled,
        read_weighted,
        before=True,
    ),
    "qwen3_next": Family(
        {"q": VECTORS, "k": VECTORS, "v": VECTORS, "g": (HEADS,), "beta": (HEADS,)},
        {},
        {"first": (HEADS, HEAD, HEAD)},
        made_delta,
        step_delta,
        stretch_delta,
        join_delta,
        after_delta,
        read_delta,
    ),
    "recurrent_gemma": Family(
        {"x": (WIDTH,), "gate": (WIDTH,)},
        {"a": (WIDTH,)},
        {"first": (WIDTH,)},
        made_linear,
        step_affine(stretch_linear, read_linear),
        stretch_linear,
        join_affine,
        after_affine,
        read_linear,
    ),
}
