"""Where a search for another way's longest length begins: guessed from the first few layers, which take a fraction of the time.

Layers are alike, and what grows with the sequence grows by its rows. So a peak is about that of a few layers, and for each more
as much as between two such numbers of them; and so is what the peak grows by from one length to the next. It remains a guess: the
search confirms it by following the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FEWEST = 4  # layers: fewer have no stage whose neighbours are those of all others


class InitialGuess(NamedTuple):
    """Where a search begins, and bytes that do not grow with the length."""

    size: int
    base: float


def guessed(peaks: Callable[[int], tuple[int, int] | None], layers: int, first: int, budget: int) -> InitialGuess | None:
    """By the `peaks` of few layers and of one more, at two lengths; None where they are not known, or to follow all layers once
    takes no longer.
    """
    if layers < 2 * (FEWEST + FEWEST + 1) or (low := peaks(first)) is None or (high := peaks(2 * first)) is None:
        return None
    before, after = (of_all(*pair, layers - FEWEST) for pair in (low, high))
    growth = (after - before) / first
    base = before - growth * first
    return InitialGuess(int((budget - base) / growth), base) if growth > 0 else None


def of_all(few: int, more: int, steps: float) -> float:
    """What all layers take, if each step of layers takes as much as the one between two traces."""
    return few + steps * (more - few)
