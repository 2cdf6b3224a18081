"""Random draws that can be repeated.

A chunk that is computed again in the backward half has to draw what it drew before. So one seed is drawn per step, from the
user's own generator, and every draw inside a loop is made under a state that follows from the seed, the operator and the chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MIX = 0x9E3779B97F4A7C15  # the golden ratio's bits, as in splitmix64
MASK = (1 << 64) - 1


def draw_seed() -> Tensor:
    """The step's seed, int64 []; follows `torch.manual_seed`."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


def replay(name: str, seed: Tensor, key: int, start: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator (named as `aten.native_dropout.default`) as it runs for this seed, operator and chunk."""
    function: Any = operator.attrgetter(name)(torch.ops)
    device = next((argument.device for argument in args if isinstance(argument, Tensor)), kwargs.get("device"))
    if isinstance(seed, FakeTensor):  # nothing is drawn, only shapes are asked for
        return function(*args, **kwargs)
    with _seeded(mixed(int(seed), key, start), torch.device(device or "cpu")):
        return function(*args, **kwargs)


def mixed(*numbers: int) -> int:
    """A well-mixed 63-bit number (splitmix64's finaliser, chained)."""
    state = 0
    for number in numbers:
        state = (state + number * MIX + MIX) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The device's default generator with a seed of its own; its state is put back."""
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = operator.getitem(module.default_generators, index)
    return generator
