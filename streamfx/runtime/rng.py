"""Reproducible random draws.

A chunk that is recomputed in the backward graph must draw the same numbers as in the forward graph. So each step draws one seed
from the user's generator, and each draw inside a loop uses a separate generator, seeded from the step's seed, the
operator and the chunk. The process's generators are never reseeded, because other threads may draw from them at any
time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
MIX = 0x9E3779B97F4A7C15  # the golden ratio's bits, as in splitmix64
MASK = (1 << 64) - 1


def draw_seed() -> Tensor:
    """Draw the step's seed, int64 [], from the generator that `torch.manual_seed` seeds.

    It is on the CPU, because the host reads it.
    """
    return torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")


def replay(name: str, seed: Tensor, key: int, start: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator, given by name (`aten.native_dropout.default`), with a new generator; return its result.

    The generator is seeded from the step's `seed`, the operator's `key` (a number per draw in the graph) and the chunk's first
    row `start`, so each run of the chunk draws the same numbers.
    """
    function: Any = operator.attrgetter(name)(torch.ops)
    if isinstance(seed, FakeTensor):  # fake tensors need shapes only
        return function(*args, **kwargs)
    device = next((argument.device for argument in args if isinstance(argument, Tensor)), kwargs.get("device"))
    generator = torch.Generator(device or "cpu")
    generator.manual_seed(mix_bits(int(seed), key, start))
    draw_with_generator = find_seeded_variant(function)
    assert draw_with_generator is not None, f"{name} was streamed although it takes no generator"
    # Numbers are drawn in memory order, and recomputed rows may have other strides than the original ones.
    dense = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in args]
    return draw_with_generator(*dense, **{**kwargs, "generator": generator})


@cache
def find_seeded_variant(function: Any) -> Callable[..., Any] | None:
    """Return a function that draws as a random operator does, but from the generator in its keyword argument `generator`.

    It is an implementation of this module, the operator itself, or an overload of it; None if none of these exists.
    """
    if function in _WITH_GENERATOR:
        return _WITH_GENERATOR[function]
    if _takes_generator(function._schema):
        return function  # type: ignore[no-any-return]
    packet = function.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((overload for overload in overloads if _adds_generator(overload._schema, function._schema)), None)


def _takes_generator(schema: Any) -> bool:
    """Return whether an operator's schema has a `generator` argument."""
    return any(argument.name == "generator" for argument in schema.arguments)


def _adds_generator(schema: Any, other: Any) -> bool:
    """Return whether the schema of an overload has the arguments of another overload's schema plus a generator."""
    own, others = (
        [(argument.name, str(argument.type), argument.kwarg_only) for argument in each_schema.arguments]
        for each_schema in (schema, other)
    )
    return _takes_generator(schema) and [argument for argument in own if argument[0] != "generator"] == others


def _dropout(rows: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Implement `native_dropout`; return the rows, scaled to preserve their mean, and the mask of kept elements."""
    if train is False or not rows.numel():
        return rows.clone(), torch.ones_like(rows, dtype=torch.bool)
    is_kept = torch.empty_like(rows, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (rows * is_kept).mul_(1 / (1 - p) if p < 1 else 0.0), is_kept


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the implementation of a `..._like` operator with a generator, given the in-place operator that draws.

    The in-place operator, for example `Tensor.uniform_`, fills a new tensor.
    """

    def draw_like(rows: Tensor, *numbers: int, generator: torch.Generator, **kwargs: Any) -> Tensor:
        return draw(torch.empty_like(rows, **kwargs), *numbers, generator=generator)

    return draw_like


_WITH_GENERATOR: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.rand_like.default: _like(Tensor.uniform_),
    aten.randn_like.default: _like(Tensor.normal_),
    aten.randint_like.default: _like(lambda rows, high, **kwargs: rows.random_(0, high, **kwargs)),
    aten.randint_like.low_dtype: _like(Tensor.random_),
}


def mix_bits(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on all numbers, so that similar ones give unrelated seeds (splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state + number * MIX + MIX) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1
