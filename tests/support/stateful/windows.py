"""A causal convolution with the last rows as its state: rows along the last dimension, laid out as its kernel reads them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import streamfx


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
    padded = F.pad(x, [weight.shape[1] - 1, 0]) if first is None else torch.cat((first, x), 2)
    return F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]), padded[..., x.shape[2] :].clone()


@torch.library.custom_op("streamfx_tests::windows", mutates_args=())
def windows(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [b d t], weight [d w], the state [b d (w - 1)]."""
    assert x.transpose(1, 2).is_contiguous(), "the kernel reads channels side by side"
    return convolved(x, weight, bias, first)


@torch.library.custom_op("streamfx_tests::windows_backward", mutates_args=())
def windows_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert x.transpose(1, 2).is_contiguous(), "the kernel reads channels side by side"
    state = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if first is None else first
    (_, last), pull = torch.func.vjp(convolved, x, weight, x.new_zeros(x.shape[1]), state)
    made = pull((dy, torch.zeros_like(last) if dlast is None else dlast))
    return tuple(item.clone(memory_format=torch.contiguous_format) for item in made)  # type: ignore[return-value]


@windows.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, first: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:2], weight.shape[1] - 1)


@windows_backward.register_fake
def _(dy: Tensor, dlast: Any, x: Tensor, weight: Tensor, first: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight[:, 0].clone(), x.new_empty(*x.shape[:2], weight.shape[1] - 1)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, first = inputs
    ctx.has_bias, ctx.has_first = bias is not None, first is not None
    ctx.save_for_backward(x, weight, first)


def _backward(ctx: Any, dy: Tensor, dlast: Tensor) -> Any:
    dx, dweight, dbias, dfirst = windows_backward(dy, dlast, *ctx.saved_tensors)
    return dx, dweight, dbias if ctx.has_bias else None, dfirst if ctx.has_first else None


windows.register_autograd(_backward, setup_context=_setup)

streamfx.register_recurrence(
    windows,
    windows_backward,
    rows={"x": -1},
    results=(2, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("x", "weight", "bias", "first"),
)
