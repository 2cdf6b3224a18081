"""Find the length from which the backend saves memory: compare two peaks at growing lengths, and confirm the result by a trace.

Candidate lengths are fixed: powers of two, with three values between neighbors. The result therefore depends only on
the model and its options, not on the requested length, provided that there is a gain at all greater lengths.
"""

from __future__ import annotations

from collections.abc import Callable

from streamfx.tools.report.verdict import MIN_GAIN

STEPS = 4  # candidate lengths per power of two
STRIDE = 2 * STEPS  # candidates between two probes: a factor of four in length
MAX_INDEX = 16 * STEPS  # index of the greatest candidate, 262,144 tokens
Peaks = Callable[[int], "tuple[int, int] | None"]  # peaks of the backend and the baseline at a length, None if unknown


def gains_from(guess: Peaks, traced: Peaks, length: int, multiple: int) -> int | None:
    """Return a length, close to the shortest, at which `traced` confirms a gain; None if no length does. `guess`
    guides the search.

    Only lengths above `length`, which has no gain, are candidates.
    """
    for high in range(STRIDE, MAX_INDEX + 1, STRIDE):
        candidate = candidate_length(high, multiple)
        if candidate > length and _saves_memory(guess, candidate):
            nearest = candidate_length(_first_gain(guess, high - STRIDE, high, length, multiple), multiple)
            return next((length for length in dict.fromkeys((nearest, candidate)) if _saves_memory(traced, length)), None)
    return None


def _first_gain(guess: Peaks, low: int, high: int, length: int, multiple: int) -> int:
    """Return the index of the first candidate after `low` with a gain, by bisection; `high` has one."""
    while high - low > 1:
        middle = (low + high) // 2
        candidate = candidate_length(middle, multiple)
        low, high = (low, middle) if candidate > length and _saves_memory(guess, candidate) else (middle, high)
    return high


def _saves_memory(peaks: Peaks, length: int) -> bool:
    """Return whether the baseline takes at least `MIN_GAIN` times the memory of the backend."""
    pair = peaks(length)
    return pair is not None and pair[1] >= MIN_GAIN * pair[0]


def candidate_length(number: int, multiple: int) -> int:
    """Return the candidate length of an index, rounded up to a multiple.

    >>> [candidate_length(index, 1) for index in range(9)], candidate_length(41, 1), candidate_length(41, 1000)
    ([4, 5, 6, 7, 8, 10, 12, 14, 16], 5120, 6000)
    """
    length = (STEPS + number % STEPS) << (number // STEPS)
    return -(-length // multiple) * multiple
