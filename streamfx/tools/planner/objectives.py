"""Training objectives: supervised fine-tuning, preference pairs (DPO), and groups of rewarded answers (GRPO).

They have the memory and time of real trainers' losses, but are not meant for training. Plan a custom loss as a model
that returns it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.tools.planner.models import LoraLinear, language_inputs

BETA, CLIP = 0.1, 0.2


@dataclass(frozen=True)
class Objective:
    """`step` turns a model into one that returns the loss of `inputs(sequences, length)`; one example has `sequences`
    sequences.
    """

    step: Callable[[nn.Module], nn.Module]
    inputs: Callable[[int, int], Mapping[str, Tensor]]
    sequences: int


def objective_by_name(name: str, group: int) -> Objective:
    """Return an objective by name; `group` is the number of answers per prompt that are compared."""
    return {
        "sft": Objective(lambda model: model, language_inputs, 1),
        "dpo": Objective(PairsStep, _pair_inputs, 2),
        "grpo": Objective(GroupStep, _group_inputs, group),
    }[name]


class PairsStep(nn.Module):
    """DPO (Rafailov et al., 2023, equation 7): ids [2 n, t], the preferred sequences first."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference_of(policy)

    def forward(self, ids: Tensor, answer: Tensor) -> Tensor:
        """Return the DPO loss; `answer` masks the tokens of the answers."""
        with torch.no_grad():
            reference = (token_logps(self.reference, ids) * answer).sum(-1)
        ratio = (token_logps(self.policy, ids) * answer).sum(-1) - reference
        preferred, rejected = ratio.chunk(2)
        return -F.logsigmoid(BETA * (preferred - rejected)).mean()


class GroupStep(nn.Module):
    """GRPO (Shao et al., 2024, equation 3) with a penalty on the distance from a reference: ids [n, t], advantages [n]."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference_of(policy)

    def forward(self, ids: Tensor, answer: Tensor, advantages: Tensor, sampled: Tensor) -> Tensor:
        """Return the clipped GRPO loss; `sampled` are the log-probabilities at sampling time."""
        with torch.no_grad():
            reference = token_logps(self.reference, ids)
        logps = token_logps(self.policy, ids)
        ratio, gain = (logps - sampled).exp(), advantages[:, None]
        clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        distance = (reference - logps).exp() - (reference - logps) - 1
        return (((BETA * distance - clipped) * answer).sum(-1) / answer.sum(-1)).mean()


def token_logps(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probabilities [n, t - 1] of each next token."""
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def reference_of(policy: nn.Module) -> nn.Module:
    """Return the policy before training: without its adapters if it has any, otherwise a frozen copy."""
    if any(isinstance(module, LoraLinear) for module in policy.modules()):
        return _without_adapters(policy)
    return copy.deepcopy(policy).requires_grad_(False)


def _without_adapters(module: nn.Module) -> nn.Module:
    """Copy the module tree without adapters; parameters stay shared, including tied ones."""
    if isinstance(module, LoraLinear):
        return module.base
    bare = copy.copy(module)
    bare._modules = {name: None if child is None else _without_adapters(child) for name, child in module._modules.items()}
    return bare


def _pair_inputs(sequences: int, length: int) -> dict[str, Tensor]:
    """Return ids and a mask of answer tokens, without data."""
    ids = torch.empty(sequences, length, dtype=torch.int64, device="meta")
    return {"ids": ids, "answer": torch.empty(sequences, length - 1, device="meta")}


def _group_inputs(sequences: int, length: int) -> dict[str, Tensor]:
    """Return ids, answer mask, advantages and sampled log-probabilities, without data."""
    sampled = torch.empty(sequences, length - 1, device="meta")
    return {**_pair_inputs(sequences, length), "advantages": torch.empty(sequences, device="meta"), "sampled": sampled}
