"""Dropout on attention, of small models with compiled bodies.

Float64 draws other numbers, and each chunk draws its own, so no two ways of running a model drop the same elements: gradients are
not compared with another way's. What has to hold is that a seed repeats a step, and that a gradient is that of the sample drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.measures import Finding, distance
from benchmarks.gpu.models import OWN, compiled, fed, made, set_experts
from benchmarks.gpu.place import Place

PROBABILITY = 0.2
REPEATED = 0.02  # how far bfloat16 gradients of the same draws may be apart: kernels add in any order on a GPU
SLOPE = 0.01  # how far a difference quotient may be from the gradient's norm, in float32
CHANGE = 4e-3  # of the loss, by which parameters move along the gradient and back: far above rounding, and almost linear
ROWS = 256  # of a sequence, at most: experts in float32 gather a weight for each row and expert


def dropout(place: Place, model: str) -> Iterator[Finding]:
    """In bfloat16, finite gradients that a seed repeats; in float32, gradients that are the slope of the loss, too.

    The small form leaves bfloat16 out.
    """
    for dtype in (torch.float32,) if place.small else (torch.bfloat16, torch.float32):
        module = made(place, model, dtype, attention_dropout=PROBABILITY, **_every_expert(model))
        if dtype == torch.float32:
            set_experts(module, "batched_mm")  # grouped products are made for half types
        inputs = {name: item[:, :ROWS].contiguous() for name, item in fed(place, "plain", module.config.vocab_size).items()}
        run = compiled(module, place)
        first, second, other = (_step(run, module, inputs, seed) for seed in (1, 1, 2))
        finite, again, apart = bool(torch.isfinite(first).all()), distance(second, first), distance(other, first)
        figures = {"finite": finite, "same seed, apart": again, "other seed, apart": apart}
        yield Finding(str(dtype)[6:], figures, not finite or not again <= REPEATED or not again < apart)
        if dtype == torch.float32:
            yield _slope(run, module, inputs, first)
        del module, run


def _every_expert(model: str) -> dict[str, int]:
    """Let each token have all experts: if it moves from one to another, the loss jumps, and has no slope."""
    own = OWN[model][1]
    return {"num_experts_per_tok": own["num_local_experts"]} if "num_local_experts" in own else {}


def _slope(run: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Tensor], gradient: Tensor) -> Finding:
    """The loss's slope along the gradient of a sample is the norm of that gradient, if that is its gradient."""
    norm = float(gradient.norm())
    size, losses = CHANGE / norm, []
    for sign in (1, -1):
        _move(module, gradient, sign * size / norm)
        losses.append(_loss(run, inputs, 1))
        _move(module, gradient, -sign * size / norm)
    slope = (losses[0] - losses[1]) / (2 * size)
    error = abs(slope - norm) / norm
    return Finding("float32", {"slope": slope, "gradient's norm": norm, "error": error}, not error <= SLOPE)


def _loss(run: Callable[..., Any], inputs: Mapping[str, Tensor], seed: int) -> float:
    torch.manual_seed(seed)
    return float(run(**inputs).loss.detach())


def _step(run: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Tensor], seed: int) -> Tensor:
    """All gradients in one vector."""
    torch.manual_seed(seed)
    run(**inputs).loss.backward()
    found = [torch.zeros_like(item) if item.grad is None else item.grad for item in module.parameters()]
    vector = torch.cat([item.flatten() for item in found]).double()
    module.zero_grad(set_to_none=True)
    return vector


@torch.no_grad()
def _move(module: nn.Module, gradient: Tensor, factor: float) -> None:
    """Add the gradient times a factor to the parameters."""
    sizes = [item.numel() for item in module.parameters()]
    for item, part in zip(module.parameters(), gradient.split(sizes), strict=True):
        item.add_(part.view_as(item).to(item.dtype), alpha=factor)
