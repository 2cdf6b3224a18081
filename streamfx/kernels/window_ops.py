"""Convolutions along the sequence, on the rows of a chunk: positions [s, e) of the sequence, which a loop computes at a time.

Tensors are [b c t]: batch, channels, rows. Each output row reads a window of input rows; rows outside the sequence are zero.
Strides along the sequence are 1. A chunk may have no rows, for which torch's operators raise an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def convolve(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    zeros_around: tuple[int, int],
    dilation: int,
    transposed: bool,
    groups: int,
) -> Tensor:
    """Return the chunk's rows of a convolution, from `rows`: those that the windows of the chunk's rows cover.

    `zeros_around`: the number of zeros to add (before, after) these rows, for windows that exceed the sequence.
    `transposed`: a transposed convolution.
    """
    reach = dilation * (weight.shape[-1] - 1)
    if rows.shape[-1] + sum(zeros_around) <= reach:  # the chunk has no rows
        return rows.new_empty(rows.shape[0], _channels(weight, transposed, groups), 0)
    padding = reach if transposed else 0  # keep only complete windows
    padded = F.pad(rows, zeros_around) if any(zeros_around) else rows
    output: Tensor = aten.convolution(padded, weight, bias, [1], [padding], [dilation], transposed, [0], groups)
    return output


def weight_gradient(
    gradient: Tensor, rows: Tensor, weight: Tensor, zeros_around: tuple[int, int], dilation: int, transposed: bool, groups: int
) -> tuple[None, Tensor, None]:
    """Return (None, dweight, None), as `convolution_backward` does: the contribution of the chunk's rows of x to dweight.

    `gradient` contains the rows of dy whose windows include these; `zeros_around` is the number of zeros to add (before, after)
    them, for rows outside the sequence.
    """
    reach = dilation * (weight.shape[-1] - 1)
    if rows.shape[-1] == 0:
        return None, torch.zeros_like(weight), None
    padding = 0 if transposed else reach
    padded = F.pad(gradient, zeros_around) if any(zeros_around) else gradient
    arguments: Any = (None, [1], [padding], [dilation], transposed, [0], groups, [False, True, False])
    return None, aten.convolution_backward(padded, rows, weight, *arguments)[1], None


def mix_channels(rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Apply a convolution with kernel size 1 to [b c ...], a chunk that may have no rows.

    `options`: the last arguments of `aten.convolution`: (stride, padding, dilation, transposed, output_padding, groups).
    """
    if 0 in rows.shape[2:]:
        return rows.new_empty(rows.shape[0], _channels(weight, options[3], options[-1]), *rows.shape[2:])
    output: Tensor = aten.convolution(rows, weight, bias, *options)
    return output


def mixing_gradient(gradient: Tensor, rows: Tensor, weight: Tensor, *options: Any) -> tuple[Any, Any, Any]:
    """Return the gradients (of rows, weight, bias) of `mix_channels` that the mask at the end of `options` requests; else None.

    `options`: the last arguments of `aten.convolution_backward`. The gradient of the weight is the contribution of the chunk's
    rows; zeros if there are no rows.
    """
    if 0 in rows.shape[2:]:
        return None, torch.zeros_like(weight), None
    gradients: tuple[Any, Any, Any] = aten.convolution_backward(gradient, rows, weight, *options)
    return gradients


def _channels(weight: Tensor, transposed: bool, groups: int) -> int:
    """Return the number of output channels: a transposed convolution's weight is [in, out / groups, ...], else [out, ...]."""
    return weight.shape[1] * groups if transposed else weight.shape[0]
