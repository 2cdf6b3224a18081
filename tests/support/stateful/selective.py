"""A selective scan: a decay for each row, weights that all rows are given, a state that may be left out."""

from typing import Any

import torch
from torch import Tensor

import streamfx


def scanned(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    state, rows = first, []
    for t in range(x.shape[1]):
        state = (dt[:, t, :, None] * a).exp() * state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        rows.append((state * c[:, t, None]).sum(-1))
    return torch.stack(rows, 1) + d * x, state.clone()


def filled(x: Tensor, a: Tensor, d: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Omitted tensors are zeros."""
    state = x.new_zeros(x.shape[0], *a.shape) if first is None else first
    return x.new_zeros(x.shape[2]) if d is None else d, state


@torch.library.custom_op("streamfx_tests::selective", mutates_args=())
def selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t;  y_t = h_t c_t + d x_t. x [b t w], b [b t n], a [w n], first [b w n]."""
    return scanned(x, dt, a, b, c, *filled(x, a, d, first))


@torch.library.custom_op("streamfx_tests::selective_backward", mutates_args=())
def selective_backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (_, last), pull = torch.func.vjp(scanned, x, dt, a, b, c, *filled(x, a, d, first))
    return pull((dy, torch.zeros_like(last) if dlast is None else dlast))  # type: ignore[no-any-return]


@selective.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], *a.shape)


@selective_backward.register_fake
def _(dy: Tensor, dlast: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (*map(torch.empty_like, (x, dt, a, b, c)), x.new_empty(x.shape[2]), x.new_empty(x.shape[0], *a.shape))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor, dlast: Tensor) -> Any:
    saved = ctx.saved_tensors  # may be read once
    *made, dd, dfirst = selective_backward(dy, dlast, *saved)
    d, first = saved[5:]
    return (*made, None if d is None else dd, None if first is None else dfirst)


selective.register_autograd(_backward, setup_context=_setup)

streamfx.register_recurrence(
    selective,
    selective_backward,
    rows={"x": 1, "dt": 1, "b": 1, "c": 1},
    results=(1, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("x", "dt", "a", "b", "c", "d", "first"),
)
