"""Weighted averages of all rows so far: two states, the number of rows as an argument, and results that the backward is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import streamfx


@torch.library.custom_op("streamfx_tests::averages", mutates_args=())
def averages(
    count: int, k: Tensor, v: Tensor, decay: Tensor, top: Tensor | None, bottom: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_t = top_t / bottom_t, sums of exp(k) v and of exp(k) with a decay; k [b t d], states [b d]. And all bottoms.

    The kernel is told of a state how far sequences are apart, and reads each without gaps.
    """
    assert count == k.shape[1] == v.shape[1] and (top is None or top.stride(-1) == 1)
    over = torch.zeros_like(k[:, 0]) if top is None else top.as_strided(top.shape, (top.stride(0), 1))
    under = torch.ones_like(over) * 0 if bottom is None else bottom
    rows = []
    for t in range(count):
        weight = k[:, t].exp()
        over, under = decay * over + weight * v[:, t], decay * under + weight
        rows.append((over / under, under))
    y, unders = (torch.stack(items, 1) for items in zip(*rows, strict=True))
    return y, over.clone(), under.clone(), unders


@torch.library.custom_op("streamfx_tests::averages_backward", mutates_args=())
def averages_backward(
    count: int,
    dy: Tensor,
    dover: Tensor,
    dunder: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    top: Tensor | None,
    bottom: Tensor | None,
    y: Tensor,
    unders: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert count == k.shape[1] == dy.shape[1]
    first = tuple(torch.zeros_like(k[:, 0]) if state is None else state for state in (top, bottom))
    over, under, ddecay, rows = dover, dunder, torch.zeros_like(decay), []
    for t in reversed(range(count)):
        over, under = over + dy[:, t] / unders[:, t], under - dy[:, t] * y[:, t] / unders[:, t]
        weight = k[:, t].exp()
        rows.append((weight * (over * v[:, t] + under), weight * over))
        before = (y[:, t - 1] * unders[:, t - 1], unders[:, t - 1]) if t else first
        ddecay = ddecay + (over * before[0] + under * before[1]).sum(0)
        over, under = decay * over, decay * under
    dk, dv = (torch.stack(items[::-1], 1) for items in zip(*rows, strict=True))
    return dk, dv, ddecay, over.clone(), under.clone()


@averages.register_fake
def _(count: int, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(v), torch.empty_like(v[:, 0]), torch.empty_like(v[:, 0]), torch.empty_like(v)


@averages_backward.register_fake
def _(count: int, dy: Tensor, dover: Any, dunder: Any, k: Tensor, v: Tensor, decay: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(decay), torch.empty_like(v[:, 0]), torch.empty_like(v[:, 0])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.count, *given = inputs
    ctx.save_for_backward(*given, output[0], output[3])
    ctx.mark_non_differentiable(output[3])


def _backward(ctx: Any, dy: Tensor, dover: Tensor, dunder: Tensor, _: Any) -> Any:
    saved = ctx.saved_tensors
    dk, dv, ddecay, dtop, dbottom = averages_backward(ctx.count, dy, dover, dunder, *saved)
    top, bottom = saved[3:5]
    return None, dk, dv, ddecay, None if top is None else dtop, None if bottom is None else dbottom


averages.register_autograd(_backward, setup_context=_setup)

streamfx.register_recurrence(
    averages,
    averages_backward,
    rows={"k": 1, "v": 1},
    results=(1, None, None, 1),
    states={"top": 1, "bottom": 2},
    cotangents={"dy": 0, "dover": 1, "dunder": 2},
    gradients=("k", "v", "decay", "top", "bottom"),
    saved={"y": 0, "unders": 3},
    counts={"count"},
)
