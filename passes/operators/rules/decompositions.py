"""Operators that AOTAutograd takes apart before any rule sees them.

A mean of pointwise terms as a single operator (`mse_loss`) hides how many terms there are: rows of a chunk would be divided by
the chunk's own number. Others hide which axis they mix. Their parts have rules. What an operator asserts of its operands is
asserted beside its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamfx.torch_private import get_decompositions

aten = torch.ops.aten

WHOLE_OPERATORS = (
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
)


def _binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Torch's own, behind the assertions that its kernels make."""
    for name, probability in (("input", input), ("target", target)):
        inside = ((probability >= 0) & (probability <= 1)).all()
        aten._assert_async.msg(inside, f"all elements of {name} should be between 0 and 1")
    made: Tensor = _OF_TORCH[aten.binary_cross_entropy.default](input, target, weight, reduction)
    return made


_OF_TORCH: dict[Any, Callable[..., Any]] = get_decompositions([*WHOLE_OPERATORS, aten.binary_cross_entropy])
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {**_OF_TORCH, aten.binary_cross_entropy.default: _binary_cross_entropy}
