"""Operators that AOTAutograd takes apart before any rule sees them.

A mean of pointwise terms as a single operator (`mse_loss`) hides how many terms there are: rows of a chunk would be divided by
the chunk's own number. Others hide which axis they mix. Their parts have rules.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

TAKEN_APART = (
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.glu,
    aten.glu_backward,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
)
