"""Operators that AOTAutograd decomposes before any rule applies.

A mean of pointwise terms as a single operator (`mse_loss`) hides the number of terms: a chunk's sum would be divided by the
number of terms in the chunk. Other operators hide which axis they mix. Axis rules (which say how an operator maps the axes of
its operands to its results) exist for the decompositions, which keep the operators' assertions on their operands. A
decomposition that returns `NotImplemented` leaves the call as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.torch_private import get_decompositions

aten = torch.ops.aten
Sizes: TypeAlias = "Sequence[int]"
WIDEST = 16  # widest window for which one operator per tap pays off


def _binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Decompose the loss as torch does, after the assertions of torch's kernels: input and target are between 0 and 1."""
    for name, probability in (("input", input), ("target", target)):
        inside = ((probability >= 0) & (probability <= 1)).all()
        aten._assert_async.msg(inside, f"all elements of {name} should be between 0 and 1")
    loss: Tensor = _OF_TORCH[aten.binary_cross_entropy.default](input, target, weight, reduction)
    return loss


def _avg_pool2d(x: Tensor, size: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil: bool = False, *options: Any) -> Tensor:
    """Decompose `avg_pool2d` (x: [..., rows, columns]) into views and a mean, whose axes the rules know.

    Covers adjacent blocks, and short windows along the last dimension with stride 1; `NotImplemented` for others.
    """
    if _are_windows(x, size, stride, padding, ceil, *options):
        return x.unfold(-1, size[-1], 1).mean(-1)
    if not _are_blocks(size, stride, padding, ceil, *options):
        return NotImplemented
    rows, columns = (length // block for length, block in zip(x.shape[-2:], (size[0], size[-1]), strict=True))
    blocks = x[..., : rows * size[0], : columns * size[-1]].unflatten(-1, (columns, size[-1])).unflatten(-3, (rows, size[0]))
    return blocks.mean((-3, -1))


def _avg_pool2d_backward(gradient: Tensor, x: Tensor, size: Sizes, *options: Any) -> Tensor:
    """Decompose the backward of `avg_pool2d`: spread the gradient of each block, or window, evenly over its elements.

    Return the gradient of x; elements that no block covers get zero. `NotImplemented` for the windows that
    `_avg_pool2d` does not cover.
    """
    if _are_windows(x, size, *options):
        per_element = (gradient / size[-1]).unsqueeze(-1).expand(*gradient.shape, size[-1])
        windows: Tensor = aten.unfold_backward(per_element, x.shape, x.dim() - 1, size[-1], 1)
        return windows
    if not _are_blocks(size, *options):
        return NotImplemented
    share = (gradient / (size[0] * size[-1])).unsqueeze(-1).unsqueeze(-3)
    *front, rows, _, columns, _ = share.shape
    blocks = share.expand(*front, rows, size[0], columns, size[-1]).flatten(-2).flatten(-3, -2)
    uncovered = [length - covered for length, covered in zip(x.shape[-2:], blocks.shape[-2:], strict=True)]
    padded: Tensor = aten.constant_pad_nd(blocks, [0, uncovered[1], 0, uncovered[0]])
    return padded


def _are_blocks(size: Sizes, stride: Sizes, padding: Sizes, ceil: bool, _: bool = True, divisor: int | None = None) -> bool:
    """Return whether pooling windows are adjacent blocks without padding: the stride is their size, or missing.

    The arguments are `avg_pool2d`'s; one number in `size` or `stride` holds for both dimensions.
    """
    strides = (stride[0], stride[-1]) if stride else (size[0], size[-1])
    return strides == (size[0], size[-1]) and not any(padding) and not ceil and divisor is None


def _are_windows(
    x: Tensor, size: Sizes, stride: Sizes, padding: Sizes, ceil: bool, _: bool = True, divisor: int | None = None
) -> bool:
    """Return whether pooling windows are 1 x 2 to 1 x `WIDEST` elements, with stride 1 and without padding.

    The arguments are `avg_pool2d`'s.
    """
    is_narrow = len(size) == 2 and size[0] == 1 < size[1] <= WIDEST
    return is_narrow and tuple(stride) == (1, 1) and not any(padding) and not ceil and divisor is None and x.shape[-1] >= size[1]


_OF_TORCH: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward,
        aten.huber_loss,
        aten.huber_loss_backward,
        aten.soft_margin_loss,
        aten.soft_margin_loss_backward,
        aten.binary_cross_entropy_backward,
        aten.binary_cross_entropy_with_logits,
        aten.glu,
        aten.glu_backward,
        aten._prelu_kernel,
        aten._prelu_kernel_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten.diag_embed,
        aten.binary_cross_entropy,
    ]
)
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **_OF_TORCH,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
}
