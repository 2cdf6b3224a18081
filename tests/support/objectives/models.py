"""What an objective works on: a policy, models beside it, and a batch of prompts with completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import hf

Batch: TypeAlias = "dict[str, Tensor]"
Objective: TypeAlias = "Callable[[Any, Batch], Tensor]"

VOCABULARY, ROWS, SEQUENCES = 2053, 29, 4  # many classes: what is small is made at once for all rows
IGNORED = -100
TEMPERATURE = 2.0
SHIFTS = {"old_logps": 7.9, "reference_logps": 7.8, "advantages_per_token": 0.0, "old_values": 0.0}


def decoder(seed: int, layers: int, **more: Any) -> nn.Module:
    return hf.made("llama", seed=seed, num_hidden_layers=layers, vocab_size=VOCABULARY, **more)


class Models(nn.Module):
    """A policy, and all that stands beside one: a frozen reference, a frozen teacher, heads for values and scores."""

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
    """The whole step as one function: models and loss."""

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


# -- what most objectives begin with


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


def next_token(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    """Cross entropy of each next token with the labels."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), **options)
