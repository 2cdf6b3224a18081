"""Cross-entropy of hidden states [1 t d] through a head [v d] in ways that never hold all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PARTS = 8


def plain(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """All logits at once, in float32 as trainers do."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), labels.flatten())


def in_parts(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Rows in parts, each of them checkpointed: what plain PyTorch can do."""

    def part(rows: Tensor, own: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, head).float(), own, reduction="sum")

    rows, own = hidden.flatten(0, 1).chunk(PARTS), labels.flatten().chunk(PARTS)
    losses = [checkpoint(part, *pair, use_reentrant=False) for pair in zip(rows, own, strict=True)]
    return torch.stack(losses).sum() / labels.numel()


def liger(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss()(head, hidden.flatten(0, 1), labels.flatten())
    return loss


def cce(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    loss: Tensor = linear_cross_entropy(hidden, head, labels)
    return loss


def torchs(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own, which computes gradients chunk by chunk in its forward pass (since 2.13)."""
    from torch.nn import LinearCrossEntropyOptions

    return F.linear_cross_entropy(hidden.flatten(0, 1), head, labels.flatten(), options=LinearCrossEntropyOptions())


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in parts": in_parts,
    "liger": liger,
    "cce": cce,
    "torch": torchs,
}
