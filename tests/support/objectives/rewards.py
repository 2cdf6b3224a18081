"""Objectives driven by rewards: GRPO and its relatives, PPO, and the reward models that rewards come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.objectives.models import Batch, Models, entropies, masked_mean, selected_logps, token_logps


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def divergence(logps: Tensor, reference: Tensor) -> Tensor:
    """The estimate of the KL divergence to the reference that is never negative."""
    return (reference - logps).exp() - (reference - logps) - 1


def grpo(models: Models, batch: Batch) -> Tensor:
    """Clipped ratios per token, KL to the reference; the mean of sequences' means."""
    logps = token_logps(models.logits(batch), batch["ids"])
    with torch.no_grad():
        reference = token_logps(models.reference_logits(batch), batch["ids"])
    loss = clipped((logps - batch["old_logps"]).exp(), batch["advantages"][:, None]) + 0.04 * divergence(logps, reference)
    return ((loss * batch["mask"]).sum(-1) / batch["mask"].sum(-1)).mean()


def grpo_reference_given(models: Models, batch: Batch) -> Tensor:
    logps = token_logps(models.logits(batch), batch["ids"])
    loss = clipped((logps - batch["old_logps"]).exp(), batch["advantages"][:, None])
    loss = loss + 0.04 * divergence(logps, batch["reference_logps"])
    return masked_mean(loss, batch["mask"])


def grpo_first_step(models: Models, batch: Batch) -> Tensor:
    """The policy is still the one that sampled: ratios are one, and carry the gradient."""
    logps = token_logps(models.logits(batch) / 0.7, batch["ids"])
    return masked_mean(clipped((logps - logps.detach()).exp(), batch["advantages"][:, None]), batch["mask"])


def grpo_without_norms(models: Models, batch: Batch) -> Tensor:
    """Dr. GRPO: divided by a constant."""
    logps = selected_logps(models.logits(batch), batch["ids"])
    loss = clipped((logps - batch["old_logps"]).exp(), batch["advantages"][:, None])
    return (loss * batch["mask"]).sum() / batch["mask"].numel()


def grpo_entropy_bonus(models: Models, batch: Batch) -> Tensor:
    logits = models.logits(batch)
    logps = token_logps(logits, batch["ids"])
    loss = clipped((logps - batch["old_logps"]).exp(), batch["advantages"][:, None]) - 0.01 * entropies(logits)
    return masked_mean(loss, batch["mask"])


def grpo_importance_sampling(models: Models, batch: Batch) -> Tensor:
    """Completions were sampled by an engine with other numerics: truncated weights beside the ratios."""
    logps = token_logps(models.logits(batch), batch["ids"])
    weights = (batch["old_logps"] - batch["reference_logps"]).exp().clamp(max=2.0)
    loss = clipped((logps - batch["old_logps"]).exp(), batch["advantages"][:, None]) * weights
    return masked_mean(loss, batch["mask"])


def grpo_advantages_per_token(models: Models, batch: Batch) -> Tensor:
    logps = token_logps(models.logits(batch), batch["ids"])
    return masked_mean(clipped((logps - batch["old_logps"]).exp(), batch["advantages_per_token"]), batch["mask"])


def gspo(models: Models, batch: Batch) -> Tensor:
    """One ratio per sequence, the mean of its tokens'."""
    logps, mask = token_logps(models.logits(batch), batch["ids"]), batch["mask"]
    ratio = (((logps - batch["old_logps"]) * mask).sum(-1) / mask.sum(-1)).exp()
    return clipped(ratio, batch["advantages"]).mean()


def gspo_per_token(models: Models, batch: Batch) -> Tensor:
    """GSPO-token: the sequence's ratio in value, each token's own gradient."""
    logps, mask = token_logps(models.logits(batch), batch["ids"]), batch["mask"]
    mean = ((logps - batch["old_logps"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio = (logps - logps.detach() + mean.detach()).exp()
    return masked_mean(clipped(ratio, batch["advantages_per_token"]), mask)


def cispo(models: Models, batch: Batch) -> Tensor:
    """The ratio is clipped and only a weight."""
    logps = token_logps(models.logits(batch), batch["ids"])
    weight = (logps - batch["old_logps"]).exp().clamp(max=1.5).detach()
    return -masked_mean(weight * batch["advantages"][:, None] * logps, batch["mask"])


def reinforce_leave_one_out(models: Models, batch: Batch) -> Tensor:
    """RLOO: sequence log-probabilities; the KL to the reference is part of the reward."""
    logps = (token_logps(models.logits(batch), batch["ids"]) * batch["mask"]).sum(-1)
    with torch.no_grad():
        reference = (token_logps(models.reference_logits(batch), batch["ids"]) * batch["mask"]).sum(-1)
    reward = batch["advantages"] - 0.05 * (logps.detach() - reference)
    advantage = reward - (reward.sum() - reward) / (len(reward) - 1)
    ratio = (logps - batch["old_sequence_logps"]).exp()
    return clipped(ratio, advantage).mean()


def ppo_with_values(models: Models, batch: Batch) -> Tensor:
    """Policy and value head on one backbone; values are clipped, too."""
    hidden = models.hidden(batch)
    logits, values = models.policy.lm_head(hidden), models.value_head(hidden)[:, :-1, 0]
    logps = token_logps(logits, batch["ids"])
    policy = clipped((logps - batch["old_logps"]).exp(), batch["advantages_per_token"])
    target = batch["advantages_per_token"] + batch["old_values"]
    near = batch["old_values"] + (values - batch["old_values"]).clamp(-0.2, 0.2)
    value = torch.max((values - target).square(), (near - target).square())
    return masked_mean(policy + 0.25 * value - 0.01 * entropies(logits), batch["mask"])


def reward_of_pairs(models: Models, batch: Batch) -> Tensor:
    """A reward model: the score of each sequence's last token."""
    hidden = models.hidden(batch)
    last = hidden[torch.arange(len(hidden)), batch["last"]]
    chosen, rejected = models.value_head(last)[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()


def scores_then_last(models: Models, batch: Batch) -> Tensor:
    """The same as transformers' sequence classification: scores of all tokens, of which one per sequence is taken."""
    scores = models.score_head(models.hidden(batch))
    return F.mse_loss(scores[torch.arange(len(scores)), batch["last"]], batch["scores"])


def last_token_classes(models: Models, batch: Batch) -> Tensor:
    return F.cross_entropy(models.score_head(models.hidden(batch)[:, -1]), batch["last"] % 3)


def process_rewards(models: Models, batch: Batch) -> Tensor:
    """A score for every token."""
    scores = models.value_head(models.hidden(batch))[:, :-1, 0]
    target = (batch["advantages_per_token"] > 0).double()
    return masked_mean(F.binary_cross_entropy_with_logits(scores, target, reduction="none"), batch["mask"])


REWARDS = (
    grpo,
    grpo_reference_given,
    grpo_first_step,
    grpo_without_norms,
    grpo_entropy_bonus,
    grpo_importance_sampling,
    grpo_advantages_per_token,
    gspo,
    gspo_per_token,
    cispo,
    reinforce_leave_one_out,
    ppo_with_values,
    reward_of_pairs,
    scores_then_last,
    last_token_classes,
    process_rewards,
)
