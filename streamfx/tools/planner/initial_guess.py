"""Guess the longest length of a baseline from its first few layers, which are fast to trace, to start the search there.

All layers are alike, and values that depend on the sequence grow linearly. So the peak is extrapolated linearly in the
number of layers, from the peaks of a few layers and of one more, and linearly in the length. The search confirms the
guess by tracing the full model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FEW_LAYERS = 4  # layers; with fewer, no stage has the same neighbors as the inner stages of the full model


class InitialGuess(NamedTuple):
    """The length at which a search starts, and the bytes that do not grow with the length."""

    size: int
    base: float


def guess_length(
    peaks: Callable[[int], tuple[int, int] | None], layers: int, first_length: int, budget: int
) -> InitialGuess | None:
    """Guess from the `peaks` of a few layers and of one more at two lengths. None if these are unknown, or if one trace
    of all layers is as fast.
    """
    if (
        layers < 2 * (FEW_LAYERS + FEW_LAYERS + 1)
        or (peaks_at_first := peaks(first_length)) is None
        or (peaks_at_double := peaks(2 * first_length)) is None
    ):
        return None
    bytes_at_first, bytes_at_double = (
        extrapolate_layers(*pair, layers - FEW_LAYERS) for pair in (peaks_at_first, peaks_at_double)
    )
    growth = (bytes_at_double - bytes_at_first) / first_length
    constant_bytes = bytes_at_first - growth * first_length
    return InitialGuess(int((budget - constant_bytes) / growth), constant_bytes) if growth > 0 else None


def extrapolate_layers(at_few: int, at_one_more: int, further_layers: float) -> float:
    """Extrapolate to all layers: each further step costs the difference of the two traces."""
    return at_few + further_layers * (at_one_more - at_few)
