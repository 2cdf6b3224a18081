"""An operator for each family of `tests/support/recurrent.py`: rows one by one, and a backward that goes back by steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import streamfx
from tests.support.recurrent import FAMILIES, Family, Values


class Operators:
    """A family's operator, `name(rows..., weights..., states...) -> (y, last states...)`, and the operator of its gradients."""

    def __init__(self, name: str, family: Family) -> None:
        self.family = family
        self.counts = len(family.rows), len(family.weights), len(family.states)
        self.names = (*family.rows, *family.weights, *family.states)
        lasts = [f"d{state}" for state in family.states]
        given, made = _tensors(self.names), _tensors(["y", *family.states])
        self.own = torch.library.custom_op(
            f"streamfx_tests::{name}_rows", self.forward, mutates_args=(), schema=f"({given}) -> ({made})"
        )
        backward = f"({_tensors(['dy', *lasts])}, {given}) -> ({_tensors(self.names)})"
        self.back = torch.library.custom_op(
            f"streamfx_tests::{name}_rows_backward", self.backward, mutates_args=(), schema=backward
        )
        self.own.register_fake(self.forward)
        self.back.register_fake(lambda *given: tuple(map(torch.empty_like, given[1 + len(lasts) :])))
        self.own.register_autograd(self.gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
        streamfx.register_recurrence(
            self.own,
            self.back,
            rows=dict.fromkeys(family.rows, 1),
            results=(1, *(None for _ in lasts)),
            states={state: 1 + i for i, state in enumerate(family.states)},
            cotangents={"dy": 0, **{last: 1 + i for i, last in enumerate(lasts)}},
            gradients=self.names,
        )

    def parts(self, given: tuple[Tensor, ...]) -> tuple[Values, Values, Values]:
        rows, weights, _ = self.counts
        return given[:rows], given[rows : rows + weights], given[rows + weights :]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        rows, weights, states = self.parts(given)
        made = []
        for t in range(rows[0].shape[1]):
            states, y = self.family.step(states, tuple(item[:, t] for item in rows), weights)
            made.append(y)
        return torch.stack(made, 1), *(state.clone() for state in states)

    def backward(self, dy: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        carried, (rows, weights, first) = given[: self.counts[2]], self.parts(given[self.counts[2] :])
        states = [first]
        for t in range(dy.shape[1]):
            states.append(self.family.step(states[-1], tuple(item[:, t] for item in rows), weights)[0])
        of_weights, of_rows = tuple(map(torch.zeros_like, weights)), []
        for t in reversed(range(dy.shape[1])):
            _, pull = torch.func.vjp(self.family.step, states[t], tuple(item[:, t] for item in rows), weights)
            carried, own, more = pull((carried, dy[:, t]))
            of_rows.append(own)
            of_weights = tuple(one + other for one, other in zip(of_weights, more, strict=True))
        back = (torch.stack(items[::-1], 1) for items in zip(*of_rows, strict=True))
        return *back, *of_weights, *(item.clone() for item in carried)

    def gradients(self, ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self.back(*cotangents, *ctx.saved_tensors)
        return made


def _tensors(names: Any) -> str:
    return ", ".join(f"Tensor {name}" for name in names)


OPERATORS: dict[str, Callable[..., tuple[Tensor, ...]]] = {name: Operators(name, each).own for name, each in FAMILIES.items()}
