"""Distillation: a teacher's distribution beside the policy's, both T x V if anybody made them whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.objectives.models import VOCABULARY, Batch, Models, masked_mean, next_token

TEMPERATURE = 2.0


def both(models: Models, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher for each next token."""
    student = (models.logits(batch)[:, :-1] / TEMPERATURE).log_softmax(-1)
    teacher = (models.teacher_logits(batch)[:, :-1] / TEMPERATURE).log_softmax(-1)
    return student, teacher


def kl(models: Models, batch: Batch) -> Tensor:
    student, teacher = both(models, batch)
    return masked_mean(F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1), batch["mask"])


def kl_batchmean(models: Models, batch: Batch) -> Tensor:
    student, teacher = both(models, batch)
    shape = (-1, VOCABULARY)
    return F.kl_div(student.reshape(shape), teacher.reshape(shape).exp(), reduction="batchmean") * TEMPERATURE**2


def reverse_kl(models: Models, batch: Batch) -> Tensor:
    student, teacher = both(models, batch)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), batch["mask"])


def jensen_shannon(models: Models, batch: Batch) -> Tensor:
    """The generalized divergence of GKD, by log-sum-exp of both."""
    student, teacher = both(models, batch)
    beta = torch.tensor(0.3, dtype=student.dtype)
    mixed = torch.logsumexp(torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0)
    loss = beta * F.kl_div(mixed, teacher, log_target=True, reduction="none")
    loss = loss + (1 - beta) * F.kl_div(mixed, student, log_target=True, reduction="none")
    return masked_mean(loss.sum(-1), batch["mask"])


def jensen_shannon_of_means(models: Models, batch: Batch) -> Tensor:
    student, teacher = both(models, batch)
    mean = (0.5 * (student.exp() + teacher.exp())).log()
    loss = 0.5 * (student.exp() * (student - mean) + teacher.exp() * (teacher - mean))
    return masked_mean(loss.sum(-1), batch["mask"])


def teacher_and_labels(models: Models, batch: Batch) -> Tensor:
    logits = models.logits(batch)
    teacher = (models.teacher_logits(batch) / TEMPERATURE).softmax(-1)
    soft = -(teacher * (logits / TEMPERATURE).log_softmax(-1)).sum(-1)[:, :-1]
    return 0.5 * next_token(logits, batch) + 0.5 * masked_mean(soft, batch["mask"])


def soft_labels(models: Models, batch: Batch) -> Tensor:
    """Cross entropy with probabilities as targets."""
    teacher = models.teacher_logits(batch).softmax(-1)
    return F.cross_entropy(models.logits(batch).flatten(0, 1), teacher.flatten(0, 1))


def logits_squared_error(models: Models, batch: Batch) -> Tensor:
    return F.mse_loss(models.logits(batch), models.teacher_logits(batch))


def top_k_given(models: Models, batch: Batch) -> Tensor:
    """Stored teacher: its few largest log-probabilities for each token."""
    student = models.logits(batch).log_softmax(-1).gather(-1, batch["top_ids"])
    return (batch["top_logps"].exp() * (batch["top_logps"] - student)).sum(-1).mean()


def top_k_of_teacher(models: Models, batch: Batch) -> Tensor:
    """The largest logits of a teacher in the same step."""
    values, indices = models.teacher_logits(batch).topk(5, dim=-1)
    teacher = values.log_softmax(-1)
    student = models.logits(batch).log_softmax(-1).gather(-1, indices)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def hidden_states_too(models: Models, batch: Batch) -> Tensor:
    """Hidden states are matched beside the distributions."""
    hidden = models.hidden(batch)
    with torch.no_grad():
        target = models.reference.model(input_ids=batch["ids"]).last_hidden_state
    return next_token(models.policy.lm_head(hidden), batch) + F.mse_loss(hidden, target)


TEACHERS = (
    kl,
    kl_batchmean,
    reverse_kl,
    jensen_shannon,
    jensen_shannon_of_means,
    teacher_and_labels,
    soft_labels,
    logits_squared_error,
    top_k_given,
    top_k_of_teacher,
    hidden_states_too,
)
