"""Losses on a policy's own logits and labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.objectives.models import (
    IGNORED,
    VOCABULARY,
    Batch,
    Models,
    entropies,
    masked_mean,
    next_token,
    selected_logps,
    token_logps,
)


def models_own_loss(models: Models, batch: Batch) -> Tensor:
    return models.policy(input_ids=batch["ids"], labels=batch["labels"]).loss


def cross_entropy(models: Models, batch: Batch) -> Tensor:
    return next_token(models.logits(batch), batch)


def cross_entropy_in_float32(models: Models, batch: Batch) -> Tensor:
    return next_token(models.logits(batch).to(torch.float64), batch)


def cross_entropy_shifted_labels(models: Models, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(models.logits(batch).transpose(1, 2), labels)


def summed_over_items_in_batch(models: Models, batch: Batch) -> Tensor:
    return next_token(models.logits(batch), batch, reduction="sum") / batch["mask"].sum()


def label_smoothing(models: Models, batch: Batch) -> Tensor:
    return next_token(models.logits(batch), batch, label_smoothing=0.1)


def smoothing_of_transformers(models: Models, batch: Batch) -> Tensor:
    """`label_smoothing_factor` of transformers' trainer."""
    logits, labels = models.logits(batch)[:, :-1], batch["labels"][:, 1:]
    log_probs = -logits.log_softmax(-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(IGNORED)
    nll = log_probs.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(padding, 0.0)
    smoothed = log_probs.sum(dim=-1, keepdim=True).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_probs.shape[-1])


def class_weights(models: Models, batch: Batch) -> Tensor:
    return next_token(models.logits(batch), batch, weight=torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64))


def z_loss(models: Models, batch: Batch) -> Tensor:
    logits = models.logits(batch)
    return next_token(logits, batch) + 1e-2 * masked_mean(logits[:, :-1].logsumexp(-1).square(), batch["mask"])


def focal(models: Models, batch: Batch) -> Tensor:
    nll = next_token(models.logits(batch), batch, reduction="none")
    return ((1 - (-nll).exp()) ** 2 * nll).sum() / batch["mask"].sum()


def per_token_weights(models: Models, batch: Batch) -> Tensor:
    nll = next_token(models.logits(batch), batch, reduction="none").view_as(batch["mask"])
    return masked_mean(nll * batch["advantages_per_token"].exp(), batch["mask"])


def weights_from_own_probabilities(models: Models, batch: Batch) -> Tensor:
    """Dynamic fine-tuning: tokens weighted by their own probability, which has no gradient."""
    logp = token_logps(models.logits(batch), batch["ids"])
    return -masked_mean(logp * logp.detach().exp(), batch["mask"])


def mean_of_sequence_means(models: Models, batch: Batch) -> Tensor:
    logp, mask = selected_logps(models.logits(batch), batch["ids"]), batch["mask"]
    return -((logp * mask).sum(-1) / mask.sum(-1)).mean()


def entropy_regularized(models: Models, batch: Batch) -> Tensor:
    logits = models.logits(batch)
    return next_token(logits, batch) - 0.05 * masked_mean(entropies(logits), batch["mask"])


def unlikelihood(models: Models, batch: Batch) -> Tensor:
    p = token_logps(models.logits(batch), batch["ids"]).exp()
    return -masked_mean(torch.log1p(-p.clamp(max=0.999)), batch["mask"])


SUPERVISED = (
    models_own_loss,
    cross_entropy,
    cross_entropy_in_float32,
    cross_entropy_shifted_labels,
    summed_over_items_in_batch,
    label_smoothing,
    smoothing_of_transformers,
    class_weights,
    z_loss,
    focal,
    per_token_weights,
    weights_from_own_probabilities,
    mean_of_sequence_means,
    entropy_regularized,
    unlikelihood,
)
