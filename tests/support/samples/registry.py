"""Where sample calls are registered: functions from sizes to the arguments of an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.support.laws import Call


@dataclass(frozen=True)
class Sizes:
    """Batch, sequence, width, another width, vocabulary; and the seed of the values. Each call draws anew."""

    b: int
    t: int
    d: int
    k: int
    v: int
    seed: int = 0

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64) + 0.1

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape)

    def booleans(self, *shape: int) -> Tensor:
        return torch.rand(shape) < 0.5


Sample: TypeAlias = "Callable[[Sizes], tuple[Any, ...]]"
SAMPLES: dict[Any, list[Sample]] = {}
RANDOM: set[Any] = set()


def sample(*operators: Any, random: bool = False) -> Callable[[Sample], Sample]:
    """Register a function from sizes to arguments; a last dictionary holds keyword arguments."""

    def register(function: Sample) -> Sample:
        for target in operators:
            SAMPLES.setdefault(target, []).append(function)
            if random:
                RANDOM.add(target)
        return function

    return register


def calls(target: Any, sizes: Sizes) -> Iterator[Call]:
    for function in SAMPLES[target]:
        torch.manual_seed(sizes.seed)
        args = function(sizes)
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        yield Call(target, args[:-1] if kwargs else args, kwargs, target in RANDOM)
