"""Where a search begins: guessed from traces of the first few layers, which take a fraction of the time that all of them take.

Layers are alike, and what grows with the sequence grows by its rows. So a peak is about that of a few layers, and for each more
as much as between two such traces; and so is what the peak grows by from one size to the next. It remains a guess: the search
confirms it by a trace of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FEWEST = 4  # layers: fewer have no stage whose neighbours are those of all others


class Guess(NamedTuple):
    """Where a search begins, and bytes that do not grow with the size, where they are known."""

    size: int
    base: float | None = None


def guessed(peak: Callable[[int, int], int], layers: int, step: int, first: int, budget: int) -> Guess | None:
    """By `peak(layers, size)` of two numbers of layers, multiples of `step`, at two sizes; None where that takes longer than one
    trace of all layers.
    """
    few = -(-FEWEST // step) * step
    more = few + step
    if 2 * (few + more) > layers:
        return None
    sizes = first, 2 * first
    peaks = [of_all(peak(few, size), peak(more, size), (layers - few) / step) for size in sizes]
    growth = (peaks[1] - peaks[0]) / first
    base = peaks[0] - growth * first
    return Guess(int((budget - base) / growth), base) if growth > 0 else None


def of_all(few: int, more: int, steps: float) -> float:
    """What all layers take, if each step of layers takes as much as the one between two traces."""
    return few + steps * (more - few)
