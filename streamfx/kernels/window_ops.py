"""Operators over a window of rows, on the rows of a chunk: what lies outside of the sequence is zero."""

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
    around: tuple[int, int],
    dilation: int,
    transposed: bool,
    groups: int,
) -> Tensor:
    """The chunk's rows of a convolution [b c t], from the rows of their windows and so many zeros before and after them."""
    reach = dilation * (weight.shape[-1] - 1)
    if rows.shape[-1] + sum(around) <= reach:  # a chunk without a row
        return rows.new_empty(rows.shape[0], _channels(weight, transposed, groups), 0)
    padding = reach if transposed else 0  # only what is complete
    padded = F.pad(rows, around) if any(around) else rows
    made: Tensor = aten.convolution(padded, weight, bias, [1], [padding], [dilation], transposed, [0], groups)
    return made


def weight_gradient(
    gradient: Tensor, rows: Tensor, weight: Tensor, around: tuple[int, int], dilation: int, transposed: bool, groups: int
) -> tuple[None, Tensor, None]:
    """The part that the chunk's rows of x have in the gradient of a convolution's weight.

    `gradient` has the rows of dy whose windows hold them, and is `around` short of zeros.
    """
    reach = dilation * (weight.shape[-1] - 1)
    if rows.shape[-1] == 0:
        return None, torch.zeros_like(weight), None
    padding = 0 if transposed else reach
    padded = F.pad(gradient, around) if any(around) else gradient
    arguments: Any = (None, [1], [padding], [dilation], transposed, [0], groups, [False, True, False])
    return None, aten.convolution_backward(padded, rows, weight, *arguments)[1], None


def mix_channels(rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution whose kernel has one tap, [b c ...], on a chunk that may be without a row."""
    if 0 in rows.shape[2:]:
        return rows.new_empty(rows.shape[0], _channels(weight, options[3], options[-1]), *rows.shape[2:])
    made: Tensor = aten.convolution(rows, weight, bias, *options)
    return made


def mixing_gradient(gradient: Tensor, rows: Tensor, weight: Tensor, *options: Any) -> tuple[Any, Any, Any]:
    """The part that a chunk's rows have in the gradient of its weight."""
    if 0 in rows.shape[2:]:
        return None, torch.zeros_like(weight), None
    made: tuple[Any, Any, Any] = aten.convolution_backward(gradient, rows, weight, *options)
    return made


def _channels(weight: Tensor, transposed: bool, groups: int) -> int:
    return weight.shape[1] * groups if transposed else weight.shape[0]
