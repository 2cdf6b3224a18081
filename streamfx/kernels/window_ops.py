"""Operators over a window of rows, on the rows of a chunk. Rows outside the sequence are zero."""

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
    """Return the chunk's rows of a convolution [b c t], from the rows of their windows.

    `zeros_around` is the number of zeros (before, after) these rows, for windows that exceed the sequence.
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
    """Return the contribution of the chunk's rows of x to the gradient of a convolution's weight.

    `gradient` contains the rows of dy whose windows include them; `zeros_around` is the number of missing zeros before and
    after.
    """
    reach = dilation * (weight.shape[-1] - 1)
    if rows.shape[-1] == 0:
        return None, torch.zeros_like(weight), None
    padding = 0 if transposed else reach
    padded = F.pad(gradient, zeros_around) if any(zeros_around) else gradient
    arguments: Any = (None, [1], [padding], [dilation], transposed, [0], groups, [False, True, False])
    return None, aten.convolution_backward(padded, rows, weight, *arguments)[1], None


def mix_channels(rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Apply a convolution with kernel size 1, [b c ...], to a chunk that may have no rows."""
    if 0 in rows.shape[2:]:
        return rows.new_empty(rows.shape[0], _channels(weight, options[3], options[-1]), *rows.shape[2:])
    output: Tensor = aten.convolution(rows, weight, bias, *options)
    return output


def mixing_gradient(gradient: Tensor, rows: Tensor, weight: Tensor, *options: Any) -> tuple[Any, Any, Any]:
    """Return the gradients (of rows, weight, bias) that the mask at the end of `options` requests; others are None.

    The weight's gradient is the contribution of the chunk's rows, which may be zero rows.
    """
    if 0 in rows.shape[2:]:
        return None, torch.zeros_like(weight), None
    gradients: tuple[Any, Any, Any] = aten.convolution_backward(gradient, rows, weight, *options)
    return gradients


def _channels(weight: Tensor, transposed: bool, groups: int) -> int:
    """Return the number of output channels."""
    return weight.shape[1] * groups if transposed else weight.shape[0]
