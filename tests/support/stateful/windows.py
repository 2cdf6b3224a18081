"""A causal convolution with the last rows as its state: rows along the last dimension, laid out as its kernel reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import streamfx


@torch.library.custom_op("streamfx_tests::windows", mutates_args=())
def windows(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [b d t], weight [d w], the state [b d (w - 1)]."""
    assert x.transpose(1, 2).is_contiguous(), "the kernel reads channels side by side"
    padded = _padded(x, weight, first)
    return F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]), padded[..., x.shape[2] :].clone()


@torch.library.custom_op("streamfx_tests::windows_backward", mutates_args=())
def windows_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert x.transpose(1, 2).is_contiguous(), "the kernel reads channels side by side"
    padded, width = _padded(x, weight, first), weight.shape[1]
    rows = F.conv_transpose1d(dy, weight[:, None], groups=x.shape[1])
    if dlast is not None:
        rows[..., x.shape[2] :] += dlast
    dweight = torch.stack([(dy * padded[..., i : i + x.shape[2]]).sum((0, 2)) for i in range(width)], 1)
    return rows[..., width - 1 :].clone(), dweight, dy.sum((0, 2)), rows[..., : width - 1].clone()


def _padded(x: Tensor, weight: Tensor, first: Tensor | None) -> Tensor:
    width = weight.shape[1] - 1
    return F.pad(x, [width, 0]) if first is None else torch.cat((first, x), 2)


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
