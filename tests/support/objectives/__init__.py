"""Training objectives as users write them, each a function from models `m` and a batch `b` to a number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.objectives.models import (
    IGNORED,
    TEMPERATURE,
    VOCABULARY,
    Batch,
    Models,
    Objective,
    Step,
    batch_of,
    entropies,
    masked_mean,
    next_token,
    policy_and_teacher,
    ratios_to_reference,
    selected_logps,
    sequence_logps,
    token_logps,
)

__all__ = ["OBJECTIVES", "Batch", "Models", "Objective", "Step", "batch_of"]
BETA = 0.1


# -- on the policy's own logits and labels


def smoothing_of_transformers(m: Models, b: Batch) -> Tensor:
    """`label_smoothing_factor` of transformers' trainer."""
    log_probs, labels = -m.logits(b)[:, :-1].log_softmax(-1), b["labels"][:, 1:].unsqueeze(-1)
    padding = labels.eq(IGNORED)
    nll = log_probs.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(padding, 0.0)
    smoothed = log_probs.sum(dim=-1, keepdim=True).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_probs.shape[-1])


def z_loss(m: Models, b: Batch) -> Tensor:
    logits = m.logits(b)
    return next_token(logits, b) + 1e-2 * masked_mean(logits[:, :-1].logsumexp(-1).square(), b["mask"])


def focal(m: Models, b: Batch) -> Tensor:
    nll = next_token(m.logits(b), b, reduction="none")
    return ((1 - (-nll).exp()) ** 2 * nll).sum() / b["mask"].sum()


def weights_from_own_probabilities(m: Models, b: Batch) -> Tensor:
    """Dynamic fine-tuning: tokens weighted by their own probability, which has no gradient."""
    logp = token_logps(m.logits(b), b["ids"])
    return -masked_mean(logp * logp.detach().exp(), b["mask"])


def entropy_regularized(m: Models, b: Batch) -> Tensor:
    logits = m.logits(b)
    return next_token(logits, b) - 0.05 * masked_mean(entropies(logits), b["mask"])


SUPERVISED: dict[str, Objective] = {
    "models_own_loss": lambda m, b: m.policy(input_ids=b["ids"], labels=b["labels"]).loss,
    "cross_entropy": lambda m, b: next_token(m.logits(b), b),
    "cross_entropy_shifted_labels": lambda m, b: F.cross_entropy(
        m.logits(b).transpose(1, 2), F.pad(b["labels"], (0, 1), value=IGNORED)[:, 1:]
    ),
    "summed_over_items_in_batch": lambda m, b: next_token(m.logits(b), b, reduction="sum") / b["mask"].sum(),
    "label_smoothing": lambda m, b: next_token(m.logits(b), b, label_smoothing=0.1),
    "smoothing_of_transformers": smoothing_of_transformers,
    "class_weights": lambda m, b: next_token(m.logits(b), b, weight=torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)),
    "z_loss": z_loss,
    "focal": focal,
    "per_token_weights": lambda m, b: masked_mean(
        next_token(m.logits(b), b, reduction="none").view_as(b["mask"]) * b["advantages_per_token"].exp(), b["mask"]
    ),
    "weights_from_own_probabilities": weights_from_own_probabilities,
    "mean_of_sequence_means": lambda m, b: (
        -((selected_logps(m.logits(b), b["ids"]) * b["mask"]).sum(-1) / b["mask"].sum(-1)).mean()
    ),
    "entropy_regularized": entropy_regularized,
    "unlikelihood": lambda m, b: -masked_mean(torch.log1p(-token_logps(m.logits(b), b["ids"]).exp().clamp(max=0.999)), b["mask"]),
}


# -- on pairs and on single sequences that were liked or not: functions of sums over each sequence


def margins(m: Models, b: Batch, lengths: Tensor | float = 1.0) -> Tensor:
    """Log-ratios of policy and reference: preferred minus rejected."""
    chosen, rejected = (ratios_to_reference(m, b) / lengths).chunk(2)
    return BETA * (chosen - rejected)


def dpo_two_calls(m: Models, b: Batch) -> Tensor:
    """Preferred and rejected sequences in calls of their own."""
    half = len(b["ids"]) // 2
    parts = [{name: b[name][rows] for name in ("ids", "mask")} for rows in (slice(half), slice(half, None))]
    chosen, rejected = (ratios_to_reference(m, part) for part in parts)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_reference_given(m: Models, b: Batch) -> Tensor:
    chosen, rejected = (sequence_logps(m.logits(b), b) - b["old_sequence_logps"]).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_with_sft(m: Models, b: Batch) -> Tensor:
    """RPO: the preferred sequences are also learned."""
    logits, half = m.logits(b), len(b["ids"]) // 2
    chosen, rejected = (sequence_logps(logits, b) - sequence_logps(m.reference_logits(b), b)).chunk(2)
    nll = next_token(logits[:half], {"labels": b["labels"][:half]})
    return -F.logsigmoid(BETA * (chosen - rejected)).mean() + 0.2 * nll


def simpo(m: Models, b: Batch) -> Tensor:
    """No reference: mean log-probability with a margin."""
    chosen, rejected = (sequence_logps(m.logits(b), b) / b["mask"].sum(-1)).chunk(2)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()


def orpo(m: Models, b: Batch) -> Tensor:
    """Odds ratio beside the likelihood of what is preferred."""
    chosen, rejected = (sequence_logps(m.logits(b), b) / b["mask"].sum(-1)).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def kto(m: Models, b: Batch) -> Tensor:
    ratio = ratios_to_reference(m, b)
    better = BETA * (ratio - ratio.mean().clamp(min=0).detach())
    return torch.where(b["desirable"], 1 - torch.sigmoid(better), 1.2 * (1 - torch.sigmoid(-better))).mean()


PREFERENCES: dict[str, Objective] = {
    "dpo": lambda m, b: -F.logsigmoid(margins(m, b)).mean(),
    "dpo_two_calls": dpo_two_calls,
    "dpo_reference_given": dpo_reference_given,
    "dpo_label_smoothing": lambda m, b: (lambda x: -F.logsigmoid(x) * 0.9 - F.logsigmoid(-x) * 0.1)(margins(m, b)).mean(),
    "dpo_with_sft": dpo_with_sft,
    "ipo": lambda m, b: ((margins(m, b, b["mask"].sum(-1)) - 0.5) / BETA).square().mean(),
    "dpo_length_normalized": lambda m, b: -F.logsigmoid(margins(m, b, b["mask"].sum(-1))).mean(),
    "hinge": lambda m, b: torch.relu(1 - margins(m, b)).mean(),
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}


# -- driven by rewards, and the reward models that rewards come from


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def of_policy(m: Models, b: Batch, advantages: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens, and GRPO's loss of each."""
    logps = token_logps(m.logits(b), b["ids"])
    return logps, clipped((logps - b["old_logps"]).exp(), b["advantages"][:, None] if advantages is None else advantages)


def divergence(logps: Tensor, reference: Tensor) -> Tensor:
    """The estimate of the KL divergence to the reference that is never negative."""
    return (reference - logps).exp() - (reference - logps) - 1


def grpo(m: Models, b: Batch) -> Tensor:
    """Clipped ratios per token, KL to the reference; the mean of sequences' means."""
    logps, loss = of_policy(m, b)
    loss = loss + 0.04 * divergence(logps, token_logps(m.reference_logits(b), b["ids"]))
    return ((loss * b["mask"]).sum(-1) / b["mask"].sum(-1)).mean()


def grpo_reference_given(m: Models, b: Batch) -> Tensor:
    logps, loss = of_policy(m, b)
    return masked_mean(loss + 0.04 * divergence(logps, b["reference_logps"]), b["mask"])


def grpo_first_step(m: Models, b: Batch) -> Tensor:
    """The policy is still the one that sampled: ratios are one, and carry the gradient."""
    logps = token_logps(m.logits(b) / 0.7, b["ids"])
    return masked_mean(clipped((logps - logps.detach()).exp(), b["advantages"][:, None]), b["mask"])


def grpo_without_norms(m: Models, b: Batch) -> Tensor:
    """Dr. GRPO: divided by a constant."""
    ratio = (selected_logps(m.logits(b), b["ids"]) - b["old_logps"]).exp()
    return (clipped(ratio, b["advantages"][:, None]) * b["mask"]).sum() / b["mask"].numel()


def grpo_entropy_bonus(m: Models, b: Batch) -> Tensor:
    logits = m.logits(b)
    ratio = (token_logps(logits, b["ids"]) - b["old_logps"]).exp()
    return masked_mean(clipped(ratio, b["advantages"][:, None]) - 0.01 * entropies(logits), b["mask"])


def gspo(m: Models, b: Batch) -> Tensor:
    """One ratio per sequence, the mean of its tokens'."""
    logps, mask = token_logps(m.logits(b), b["ids"]), b["mask"]
    return clipped((((logps - b["old_logps"]) * mask).sum(-1) / mask.sum(-1)).exp(), b["advantages"]).mean()


def gspo_per_token(m: Models, b: Batch) -> Tensor:
    """GSPO-token: the sequence's ratio in value, each token's own gradient."""
    logps, mask = token_logps(m.logits(b), b["ids"]), b["mask"]
    mean = ((logps - b["old_logps"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return masked_mean(clipped((logps - logps.detach() + mean.detach()).exp(), b["advantages_per_token"]), mask)


def cispo(m: Models, b: Batch) -> Tensor:
    """The ratio is clipped and only a weight."""
    logps = token_logps(m.logits(b), b["ids"])
    weight = (logps - b["old_logps"]).exp().clamp(max=1.5).detach()
    return -masked_mean(weight * b["advantages"][:, None] * logps, b["mask"])


def reinforce_leave_one_out(m: Models, b: Batch) -> Tensor:
    """RLOO: sequence log-probabilities; the KL to the reference is part of the reward."""
    logps = sequence_logps(m.logits(b), b)
    reward = b["advantages"] - 0.05 * (logps.detach() - sequence_logps(m.reference_logits(b), b))
    advantage = reward - (reward.sum() - reward) / (len(reward) - 1)
    return clipped((logps - b["old_sequence_logps"]).exp(), advantage).mean()


def ppo_with_values(m: Models, b: Batch) -> Tensor:
    """Policy and value head on one backbone; values are clipped, too."""
    hidden = m.hidden(b)
    logits, values = m.policy.lm_head(hidden), m.value_head(hidden)[:, :-1, 0]
    policy = clipped((token_logps(logits, b["ids"]) - b["old_logps"]).exp(), b["advantages_per_token"])
    target = b["advantages_per_token"] + b["old_values"]
    near = b["old_values"] + (values - b["old_values"]).clamp(-0.2, 0.2)
    value = torch.max((values - target).square(), (near - target).square())
    return masked_mean(policy + 0.25 * value - 0.01 * entropies(logits), b["mask"])


def reward_of_pairs(m: Models, b: Batch) -> Tensor:
    """A reward model: the score of each sequence's last token."""
    hidden = m.hidden(b)
    chosen, rejected = m.value_head(hidden[torch.arange(len(hidden)), b["last"]])[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()


def scores_then_last(m: Models, b: Batch) -> Tensor:
    """The same as transformers' sequence classification: scores of all tokens, of which one per sequence is taken."""
    scores = m.score_head(m.hidden(b))
    return F.mse_loss(scores[torch.arange(len(scores)), b["last"]], b["scores"])


def process_rewards(m: Models, b: Batch) -> Tensor:
    """A score for every token."""
    scores, target = m.value_head(m.hidden(b))[:, :-1, 0], (b["advantages_per_token"] > 0).double()
    return masked_mean(F.binary_cross_entropy_with_logits(scores, target, reduction="none"), b["mask"])


REWARDS: dict[str, Objective] = {
    "grpo": grpo,
    "grpo_reference_given": grpo_reference_given,
    "grpo_first_step": grpo_first_step,
    "grpo_without_norms": grpo_without_norms,
    "grpo_entropy_bonus": grpo_entropy_bonus,
    "grpo_importance_sampling": lambda m, b: masked_mean(  # completions were sampled by an engine with other numerics
        of_policy(m, b)[1] * (b["old_logps"] - b["reference_logps"]).exp().clamp(max=2.0), b["mask"]
    ),
    "grpo_advantages_per_token": lambda m, b: masked_mean(of_policy(m, b, b["advantages_per_token"])[1], b["mask"]),
    "gspo": gspo,
    "gspo_per_token": gspo_per_token,
    "cispo": cispo,
    "reinforce_leave_one_out": reinforce_leave_one_out,
    "ppo_with_values": ppo_with_values,
    "reward_of_pairs": reward_of_pairs,
    "scores_then_last": scores_then_last,
    "last_token_classes": lambda m, b: F.cross_entropy(m.score_head(m.hidden(b)[:, -1]), b["last"] % 3),
    "process_rewards": process_rewards,
}


# -- distillation: a teacher's distribution beside the policy's, both T x V if anybody made them whole


def jensen_shannon(m: Models, b: Batch) -> Tensor:
    """The generalized divergence of GKD, by log-sum-exp of both."""
    student, teacher = policy_and_teacher(m, b)
    beta = torch.tensor(0.3, dtype=student.dtype)
    mixed = torch.logsumexp(torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0)
    parts = [F.kl_div(mixed, one, log_target=True, reduction="none") for one in (teacher, student)]
    return masked_mean((beta * parts[0] + (1 - beta) * parts[1]).sum(-1), b["mask"])


def reverse_kl(m: Models, b: Batch) -> Tensor:
    student, teacher = policy_and_teacher(m, b)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), b["mask"])


def kl_batchmean(m: Models, b: Batch) -> Tensor:
    student, teacher = (one.reshape(-1, VOCABULARY) for one in policy_and_teacher(m, b))
    return F.kl_div(student, teacher.exp(), reduction="batchmean") * TEMPERATURE**2


def teacher_and_labels(m: Models, b: Batch) -> Tensor:
    logits, teacher = m.logits(b), (m.teacher_logits(b) / TEMPERATURE).softmax(-1)
    soft = -(teacher * (logits / TEMPERATURE).log_softmax(-1)).sum(-1)[:, :-1]
    return 0.5 * next_token(logits, b) + 0.5 * masked_mean(soft, b["mask"])


def top_k_given(m: Models, b: Batch) -> Tensor:
    """Stored teacher: its few largest log-probabilities for each token."""
    student = m.logits(b).log_softmax(-1).gather(-1, b["top_ids"])
    return (b["top_logps"].exp() * (b["top_logps"] - student)).sum(-1).mean()


def top_k_of_teacher(m: Models, b: Batch) -> Tensor:
    """The largest logits of a teacher in the same step."""
    values, indices = m.teacher_logits(b).topk(5, dim=-1)
    teacher, student = values.log_softmax(-1), m.logits(b).log_softmax(-1).gather(-1, indices)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def hidden_states_too(m: Models, b: Batch) -> Tensor:
    """Hidden states are matched beside the distributions."""
    hidden = m.hidden(b)
    with torch.no_grad():
        target = m.reference.model(input_ids=b["ids"]).last_hidden_state
    return next_token(m.policy.lm_head(hidden), b) + F.mse_loss(hidden, target)


TEACHERS: dict[str, Objective] = {
    "kl": lambda m, b: masked_mean(F.kl_div(*policy_and_teacher(m, b), log_target=True, reduction="none").sum(-1), b["mask"]),
    "kl_batchmean": kl_batchmean,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "teacher_and_labels": teacher_and_labels,
    "soft_labels": lambda m, b: F.cross_entropy(m.logits(b).flatten(0, 1), m.teacher_logits(b).softmax(-1).flatten(0, 1)),
    "logits_squared_error": lambda m, b: F.mse_loss(m.logits(b), m.teacher_logits(b)),
    "top_k_given": top_k_given,
    "top_k_of_teacher": top_k_of_teacher,
    "hidden_states_too": hidden_states_too,
}
OBJECTIVES = {**SUPERVISED, **PREFERENCES, **REWARDS, **TEACHERS}
