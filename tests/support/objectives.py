"""Training objectives as users write them, each a function from models `m` and a batch `b` to a number.

A model is a policy with frozen models and small heads; a batch has prompts with completions.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import hf
from tests.support.tables import named_cases

Batch: TypeAlias = "dict[str, Tensor]"
Objective: TypeAlias = "Callable[[Models, Batch], Tensor]"

VOCABULARY, ROWS, SEQUENCES = 2053, 29, 4  # many classes: small results are not chunked
IGNORED = -100
BETA, TEMPERATURE = 0.1, 2.0
SHIFTS = {"old_logps": 7.9, "reference_logps": 7.8, "advantages_per_token": 0.0, "old_values": 0.0}


def decoder(seed: int, layers: int, **more: Any) -> nn.Module:
    return hf.made("llama", seed=seed, num_hidden_layers=layers, vocab_size=VOCABULARY, **more)


class Models(nn.Module):
    """A policy, a frozen reference, a frozen teacher, heads for values and scores."""

    policy: Any
    reference: Any
    teacher: Any

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.policy = decoder(0, layers)
        self.reference = decoder(1, layers).requires_grad_(False)
        self.teacher = decoder(2, layers, hidden_size=24).requires_grad_(False)
        self.value_head = nn.Linear(hf.WIDTH, 1).double()
        self.score_head = nn.Linear(hf.WIDTH, 3, bias=False).double()

    def logits(self, batch: Batch) -> Tensor:
        return self.policy(input_ids=batch["ids"]).logits

    def hidden(self, batch: Batch) -> Tensor:
        return self.policy.model(input_ids=batch["ids"]).last_hidden_state

    @torch.no_grad()
    def reference_logits(self, batch: Batch) -> Tensor:
        return self.reference(input_ids=batch["ids"]).logits

    @torch.no_grad()
    def teacher_logits(self, batch: Batch) -> Tensor:
        return self.teacher(input_ids=batch["ids"]).logits


class Step(nn.Module):
    """A step as one module: models and loss."""

    def __init__(self, objective: Objective, layers: int = 1) -> None:
        super().__init__()
        self.models, self.objective = Models(layers), objective

    def forward(self, **batch: Tensor) -> Tensor:
        return self.objective(self.models, batch)


def batch_of(sequences: int = SEQUENCES, rows: int = ROWS) -> Batch:
    """Prompts of different lengths and their completions; the first half of the sequences is preferred to the second."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (sequences, rows), generator=draw)
    position, start = torch.arange(rows), torch.tensor([5, 9, 4, 12])[:sequences, None]
    end = torch.tensor([rows, rows - 4, rows - 2, rows - 9])[:sequences, None]
    completion = (position >= start) & (position < end)
    per_token = {
        name: 0.3 * torch.randn(sequences, rows - 1, generator=draw, dtype=torch.float64) - shift
        for name, shift in SHIFTS.items()
    }
    return {
        "ids": ids,
        "labels": ids.masked_fill(~completion, IGNORED),
        "mask": completion[:, 1:].double(),
        "last": end[:, 0] - 1,
        "advantages": torch.randn(sequences, generator=draw, dtype=torch.float64),
        "desirable": torch.arange(sequences) % 2 == 0,
        "scores": torch.randn(sequences, 3, generator=draw, dtype=torch.float64),
        "old_sequence_logps": (per_token["old_logps"] * completion[:, 1:]).sum(-1),
        **per_token,
    }


# -- common parts


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of each next token [B, T - 1], by log_softmax and gather."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def entropies(logits: Tensor) -> Tensor:
    """Of each next token [B, T - 1]."""
    logp = logits[:, :-1].log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def sequence_logps(logits: Tensor, batch: Batch) -> Tensor:
    return (token_logps(logits, batch["ids"]) * batch["mask"]).sum(-1)


def policy_and_teacher(models: Models, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both for each next token."""
    student, teacher = models.logits(batch)[:, :-1], models.teacher_logits(batch)[:, :-1]
    return (student / TEMPERATURE).log_softmax(-1), (teacher / TEMPERATURE).log_softmax(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def next_token(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of each next token with the labels."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


# -- of pairs, and of single sequences that were liked or not: functions of sums over each sequence


def of_sequences(loss: Callable[[Tensor, Batch], Tensor], by_length: bool = False, has_reference: bool = True) -> Objective:
    """A loss of the log-probability of each sequence, relative to the reference's; the first half is preferred."""

    def objective(m: Models, b: Batch) -> Tensor:
        sums = sequence_logps(m.logits(b), b)
        if has_reference:
            sums = sums - sequence_logps(m.reference_logits(b), b)
        return loss(sums / b["mask"].sum(-1) if by_length else sums, b).mean()

    return objective


def of_pairs(loss: Callable[[Tensor, Tensor], Tensor], by_length: bool = False, has_reference: bool = True) -> Objective:
    return of_sequences(lambda ratios, b: loss(*ratios.chunk(2)), by_length, has_reference)


def dpo_two_calls(m: Models, b: Batch) -> Tensor:
    """Preferred and rejected sequences in separate calls."""
    parts = [dict(zip(("ids", "mask"), rows, strict=True)) for rows in zip(b["ids"].chunk(2), b["mask"].chunk(2), strict=True)]
    chosen, rejected = (sequence_logps(m.logits(part), part) - sequence_logps(m.reference_logits(part), part) for part in parts)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_with_sft(m: Models, b: Batch) -> Tensor:
    """RPO: the preferred sequences are also learned."""
    logits, half = m.logits(b), len(b["ids"]) // 2
    chosen, rejected = (sequence_logps(logits, b) - sequence_logps(m.reference_logits(b), b)).chunk(2)
    nll = next_token(logits[:half], {"labels": b["labels"][:half]})
    return -F.logsigmoid(BETA * (chosen - rejected)).mean() + 0.2 * nll


def orpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds ratio, and the likelihood of the preferred sequence."""
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen - 0.1 * F.logsigmoid(odds)


def kto(ratio: Tensor, b: Batch) -> Tensor:
    better = BETA * (ratio - ratio.mean().clamp(min=0).detach())
    return torch.where(b["desirable"], 1 - torch.sigmoid(better), 1.2 * (1 - torch.sigmoid(-better)))


def gspo(m: Models, b: Batch) -> Tensor:
    """One ratio per sequence, the mean of its tokens'."""
    logps, mask = token_logps(m.logits(b), b["ids"]), b["mask"]
    return clipped((((logps - b["old_logps"]) * mask).sum(-1) / mask.sum(-1)).exp(), b["advantages"]).mean()


OF_SEQUENCES: dict[str, Objective] = named_cases("losses of sequences", globals())


# -- of tokens


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def divergence(logps: Tensor, reference: Tensor) -> Tensor:
    """The estimate of the KL divergence to the reference that is never negative."""
    return (reference - logps).exp() - (reference - logps) - 1


def of_tokens(loss: Callable[[Tensor, Tensor, Batch], Tensor]) -> Objective:
    """A loss of each token's log-probability and its ratio to the sampling policy's."""

    def objective(m: Models, b: Batch) -> Tensor:
        logps = token_logps(m.logits(b), b["ids"])
        return masked_mean(loss(logps, (logps - b["old_logps"]).exp(), b), b["mask"])

    return objective


def grpo(m: Models, b: Batch) -> Tensor:
    """Clipped ratios per token, KL to the reference; the mean of sequences' means."""
    logps = token_logps(m.logits(b), b["ids"])
    loss = clipped((logps - b["old_logps"]).exp(), b["advantages"][:, None])
    loss = loss + 0.04 * divergence(logps, token_logps(m.reference_logits(b), b["ids"]))
    return ((loss * b["mask"]).sum(-1) / b["mask"].sum(-1)).mean()


def gspo_per_token(logps: Tensor, ratio: Tensor, b: Batch) -> Tensor:
    """GSPO-token: the sequence's ratio in value, each token's own gradient."""
    mean = ((logps - b["old_logps"]) * b["mask"]).sum(-1, keepdim=True) / b["mask"].sum(-1, keepdim=True)
    return clipped((logps - logps.detach() + mean.detach()).exp(), b["advantages_per_token"])


def ppo_with_values(m: Models, b: Batch) -> Tensor:
    """Policy and value head on one backbone, with an entropy bonus; values are clipped, too."""
    hidden = m.hidden(b)
    logits, values = m.policy.lm_head(hidden), m.value_head(hidden)[:, :-1, 0]
    policy = clipped((token_logps(logits, b["ids"]) - b["old_logps"]).exp(), b["advantages_per_token"])
    target = b["advantages_per_token"] + b["old_values"]
    near = b["old_values"] + (values - b["old_values"]).clamp(-0.2, 0.2)
    value = torch.max((values - target).square(), (near - target).square())
    return masked_mean(policy + 0.25 * value - 0.01 * entropies(logits), b["mask"])


OF_TOKENS: dict[str, Objective] = named_cases("losses of tokens", globals())


# -- reward models


def reward_of_pairs(m: Models, b: Batch) -> Tensor:
    """The score of each sequence's last token."""
    hidden = m.hidden(b)
    chosen, rejected = m.value_head(hidden[torch.arange(len(hidden)), b["last"]])[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()


def scores_then_last(m: Models, b: Batch) -> Tensor:
    """As in transformers' sequence classification: scores of all tokens, of which one per sequence is used."""
    scores = m.score_head(m.hidden(b))
    return F.mse_loss(scores[torch.arange(len(scores)), b["last"]], b["scores"])


def process_rewards(m: Models, b: Batch) -> Tensor:
    """A score for every token."""
    scores, target = m.value_head(m.hidden(b))[:, :-1, 0], (b["advantages_per_token"] > 0).double()
    return masked_mean(F.binary_cross_entropy_with_logits(scores, target, reduction="none"), b["mask"])


OF_HIDDEN: dict[str, Objective] = named_cases("losses of hidden states", globals(), "m, b")


# -- distillation: distributions of teacher and policy, both T x V if computed in full


def of_teacher(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    return lambda m, b: masked_mean(loss(*policy_and_teacher(m, b)).sum(-1), b["mask"])


def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    """The generalized divergence of GKD, by log-sum-exp of both."""
    beta = torch.tensor(0.3, dtype=student.dtype)
    mixed = torch.logsumexp(torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0)
    parts = [F.kl_div(mixed, one, log_target=True, reduction="none") for one in (teacher, student)]
    return beta * parts[0] + (1 - beta) * parts[1]


def top_k_of_teacher(m: Models, b: Batch) -> Tensor:
    """The largest logits of a teacher in the same step."""
    values, indices = m.teacher_logits(b).topk(5, dim=-1)
    teacher, student = values.log_softmax(-1), m.logits(b).log_softmax(-1).gather(-1, indices)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def hidden_states_too(m: Models, b: Batch) -> Tensor:
    """Match hidden states and distributions."""
    hidden = m.hidden(b)
    with torch.no_grad():
        target = m.reference.model(input_ids=b["ids"]).last_hidden_state
    return next_token(m.policy.lm_head(hidden), b) + F.mse_loss(hidden, target)


TEACHERS: dict[str, Objective] = named_cases("teachers", globals())
OBJECTIVES = {**OF_SEQUENCES, **OF_TOKENS, **OF_HIDDEN, **TEACHERS}
