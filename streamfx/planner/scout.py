"""Where a search begins: guessed from traces of the first few layers, which take a fraction of the time that all of them take.

Layers are alike, and what grows with the sequence grows by its rows. So a peak is about that of a few layers, and for each more
as much as between two such traces; and so is what the peak grows by from one size to the next. It remains a guess: the search
confirms it by a trace of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

FEWEST = 2  # layers: the first and the last differ from those between them


class Guess(NamedTuple):
    """Where a search begins, and the bytes that the peak grows by with each unit of size, where that is known."""

    size: int
    growth: float | None = None


def guessed(peak: Callable[[int, int], int], layers: int, step: int, first: int, budget: int) -> Guess | None:
    """By `peak(layers, size)` of two numbers of layers, multiples of `step`, at two sizes; None where so many are not few."""
    few = max(step, FEWEST)
    if 4 * few > layers:
        return None
    peaks = [_of_all(peak(few, size), peak(2 * few, size), layers / few) for size in (first, 2 * first)]
    growth = (peaks[1] - peaks[0]) / first
    return Guess(int(first + (budget - peaks[0]) / growth), growth) if growth > 0 else None


def _of_all(few: int, twice: int, times: float) -> float:
    return few + (times - 1) * (twice - few)


@contextmanager
def first_layers(model: nn.Module, count: int) -> Iterator[None]:
    """The model with the first layers of each of its outermost lists, in place, and with all of them afterwards."""
    lists = [module for module in _outermost(model) if len(module) > count]
    kept = [module._modules for module in lists]
    for module in lists:
        module._modules = dict(list(module._modules.items())[:count])
    try:
        yield
    finally:
        for module, layers in zip(lists, kept, strict=True):
            module._modules = layers


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost(child)
