"""Weighted averages of all rows so far: two states, the number of rows as an argument, and results that the backward is given."""

from typing import Any

import torch
from torch import Tensor

import streamfx


def averaged(k: Tensor, v: Tensor, decay: Tensor, over: Tensor, under: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = []
    for t in range(k.shape[1]):
        weight = k[:, t].exp()
        over, under = decay * over + weight * v[:, t], decay * under + weight
        rows.append((over / under, under))
    y, unders = (torch.stack(items, 1) for items in zip(*rows, strict=True))
    return y, over.clone(), under.clone(), unders


def started(k: Tensor, top: Tensor | None, bottom: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel gets only the batch stride of a state, and reads each sequence without gaps."""
    assert top is None or top.stride(-1) == 1
    over = torch.zeros_like(k[:, 0]) if top is None else top.as_strided(top.shape, (top.stride(0), 1))
    return over, torch.zeros_like(over) if bottom is None else bottom


@torch.library.custom_op("streamfx_tests::averages", mutates_args=())
def averages(
    count: int, k: Tensor, v: Tensor, decay: Tensor, top: Tensor | None, bottom: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_t = top_t / bottom_t, sums of exp(k) v and of exp(k) with a decay; k [b t d], states [b d]. And all bottoms."""
    assert count == k.shape[1] == v.shape[1]
    return averaged(k, v, decay, *started(k, top, bottom))


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
    """Saved values have to belong to the same rows."""
    assert count == k.shape[1] == dy.shape[1]
    made, pull = torch.func.vjp(averaged, k, v, decay, *started(k, top, bottom))
    torch.testing.assert_close((y, unders), (made[0], made[3]), rtol=1e-3, atol=1e-3)
    return pull((dy, dover, dunder, torch.zeros_like(unders)))  # type: ignore[no-any-return]


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
