"""The collectives of a sharded model's step, from the profiler, and the error of its gradients against one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.profiled import operators_of

GATHER, SCATTER, REDUCE = (
    f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_")


@dataclass(frozen=True)
class Wire:
    """Calls and bytes of one half, by collective; `early` is the share of reductions before the last matmul.

    `begun` are the calls that engines make without a graph.
    """

    calls: dict[str, int]
    bytes: dict[str, int]
    early: float
    begun: dict[str, int]

    @staticmethod
    def of(half: Callable[[], Any]) -> Wire:
        operators = operators_of(half)
        last = max((i for i, (name, _) in enumerate(operators) if name in PRODUCTS), default=-1)
        calls, sizes = dict.fromkeys((GATHER, SCATTER, REDUCE), 0), dict.fromkeys((GATHER, SCATTER, REDUCE), 0)
        reductions = []
        for i, (name, shapes) in enumerate(operators):
            kind = name.removesuffix("_coalesced")
            if kind in calls:
                calls[kind] += 1
                sizes[kind] += 8 * sum(map(prod, shapes if kind != name else [shapes]))
            if kind in (SCATTER, REDUCE):
                reductions.append(i < last)
        begun = Counter(name for name, _ in operators if name.startswith("c10d::"))
        return Wire(calls, sizes, sum(reductions) / max(len(reductions), 1), dict(begun))


@dataclass(frozen=True)
class Step:
    """One step: the error of its loss, the largest error of a gradient, and both halves."""

    loss_error: float
    error: float
    forward: Wire
    backward: Wire


def data_of(rank: int, length: int, vocabulary: int = 17) -> tuple[Tensor, Tensor]:
    """Ids and labels, others on each rank."""
    numbers = torch.arange(length + 1) * (3 + 2 * rank) + rank
    ids = (numbers * numbers // 7 % vocabulary)[None]
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def one_process(truth: nn.Module, length: int, world: int = 2, micro: int = 1, shorter: int = 0) -> list[Tensor]:
    """Gradients of the mean over the ranks' losses, each of which has another tangent; the losses of the last batch.

    Each rank has `shorter` fewer rows than the one before it.
    """
    truth.zero_grad()
    for part in range(micro):
        losses = [truth(*data_of(world * part + other, length - shorter * other)) for other in range(world)]
        torch.stack([(other + 1) * loss / world for other, loss in enumerate(losses)]).sum().backward()
    return losses


def step(run: Callable[..., Tensor], model: nn.Module, truth: nn.Module, length: int, groups: int | None = None) -> Step:
    """One step of a model, against a copy that has the data of all ranks, or of groups of ranks with data and tangents."""
    world = dist.get_world_size() if groups is None else groups
    rank = dist.get_rank() * world // dist.get_world_size()
    losses = one_process(truth, length, world)
    model.zero_grad()
    made: list[Tensor] = []
    forward = Wire.of(lambda: made.append(run(*data_of(rank, length))))
    backward = Wire.of(lambda: (made[0] * (rank + 1)).backward())
    return Step((made[0] - losses[rank]).abs().item(), worst(model, truth), forward, backward)


def worst(model: nn.Module, truth: nn.Module) -> float:
    """The largest difference between a gradient and the true one, relative to the largest number of all true ones."""
    true = dict(truth.named_parameters())
    assert all(own.grad is None for name, own in model.named_parameters() if true[name].grad is None)
    asked = [(own, true[name]) for name, own in model.named_parameters() if true[name].grad is not None]
    pairs = [(whole_gradient(own), whole_gradient(other)) for own, other in asked]
    scale = max(other.abs().max().item() for _, other in pairs)
    return max((own - other).abs().max().item() for own, other in pairs) / scale


def whole_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
