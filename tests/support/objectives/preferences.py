"""Objectives on pairs and on single sequences that were liked or not: functions of sums over each sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.objectives.models import Batch, Models, next_token, sequence_logps

BETA = 0.1


def margins(models: Models, batch: Batch) -> Tensor:
    """Log-ratios of policy and reference: preferred minus rejected."""
    ratio = sequence_logps(models.logits(batch), batch) - sequence_logps(models.reference_logits(batch), batch)
    chosen, rejected = ratio.chunk(2)
    return chosen - rejected


def dpo(models: Models, batch: Batch) -> Tensor:
    return -F.logsigmoid(BETA * margins(models, batch)).mean()


def dpo_two_calls(models: Models, batch: Batch) -> Tensor:
    """Preferred and rejected sequences in calls of their own."""
    half = len(batch["ids"]) // 2
    parts = [{name: batch[name][rows] for name in ("ids", "mask")} for rows in (slice(half), slice(half, None))]
    chosen, rejected = (
        sequence_logps(models.logits(part), part) - sequence_logps(models.reference_logits(part), part) for part in parts
    )
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_reference_given(models: Models, batch: Batch) -> Tensor:
    chosen, rejected = (sequence_logps(models.logits(batch), batch) - batch["old_sequence_logps"]).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_label_smoothing(models: Models, batch: Batch) -> Tensor:
    margin = BETA * margins(models, batch)
    return (-F.logsigmoid(margin) * 0.9 - F.logsigmoid(-margin) * 0.1).mean()


def dpo_with_sft(models: Models, batch: Batch) -> Tensor:
    """RPO: the preferred sequences are also learned."""
    logits = models.logits(batch)
    ratio = sequence_logps(logits, batch) - sequence_logps(models.reference_logits(batch), batch)
    chosen, rejected = ratio.chunk(2)
    half = len(batch["ids"]) // 2
    nll = next_token(logits[:half], {"labels": batch["labels"][:half]})
    return -F.logsigmoid(BETA * (chosen - rejected)).mean() + 0.2 * nll


def ipo(models: Models, batch: Batch) -> Tensor:
    lengths = batch["mask"].sum(-1)
    ratio = (sequence_logps(models.logits(batch), batch) - sequence_logps(models.reference_logits(batch), batch)) / lengths
    chosen, rejected = ratio.chunk(2)
    return ((chosen - rejected) - 1 / (2 * BETA)).square().mean()


def hinge(models: Models, batch: Batch) -> Tensor:
    return torch.relu(1 - BETA * margins(models, batch)).mean()


def dpo_length_normalized(models: Models, batch: Batch) -> Tensor:
    lengths = batch["mask"].sum(-1)
    ratio = (sequence_logps(models.logits(batch), batch) - sequence_logps(models.reference_logits(batch), batch)) / lengths
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def simpo(models: Models, batch: Batch) -> Tensor:
    """No reference: mean log-probability with a margin."""
    chosen, rejected = (sequence_logps(models.logits(batch), batch) / batch["mask"].sum(-1)).chunk(2)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()


def orpo(models: Models, batch: Batch) -> Tensor:
    """Odds ratio beside the likelihood of what is preferred."""
    logits = models.logits(batch)
    chosen, rejected = (sequence_logps(logits, batch) / batch["mask"].sum(-1)).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def kto(models: Models, batch: Batch) -> Tensor:
    ratio = sequence_logps(models.logits(batch), batch) - sequence_logps(models.reference_logits(batch), batch)
    baseline = ratio.mean().clamp(min=0).detach()
    liked = 1 - torch.sigmoid(BETA * (ratio - baseline))
    disliked = 1 - torch.sigmoid(BETA * (baseline - ratio))
    return torch.where(batch["desirable"], liked, 1.2 * disliked).mean()


PREFERENCES = (
    dpo,
    dpo_two_calls,
    dpo_reference_given,
    dpo_label_smoothing,
    dpo_with_sft,
    ipo,
    hinge,
    dpo_length_normalized,
    simpo,
    orpo,
    kto,
)
