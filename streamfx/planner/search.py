"""The longest sequence that fits: guessed from the terms of a few traces, and confirmed by a trace of its own.

It runs with the choices that take the least memory: nothing kept but stage inputs, and boundaries as far apart as is best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamfx.cost.terms import CHUNK, INPUTS, KEY_GRADIENTS, KEYS, LOSS, STAGE_INPUTS, STATES, STREAM_GRADIENT
from streamfx.passes.partition.fit import KEEP_EVERY
from streamfx.planner.predict import Prediction

FIRST_LENGTH = 16384
MOST_TRACES = 6
CLOSE = 0.01  # of the length: with so little to gain the search ends
AIM = 0.998  # how much of the memory a guess is to take
ROUNDING = 256
LARGE_WORK, SMALL_CHUNK = 0.1, 128  # where a chunk's work takes such a share of the memory, chunks are so short
GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, CHUNK, LOSS, STATES, INPUTS)

Predict = Callable[[int, Mapping[str, Any]], Prediction]


def longest(predict: Predict, budget: int, options: Mapping[str, Any], first: int = FIRST_LENGTH) -> Prediction | None:
    """The prediction for about the longest length whose peak is within the budget; None where not even short ones are."""
    given = {"save": "inputs", "keep_every": 1, **options}
    found = predict(first, given)
    best, failed = (found, None) if found.peak_bytes <= budget else (None, found)
    terms = dict(found.peak_by_term)
    if "keep_every" not in options:
        given["keep_every"] = fewest_bytes(len(found.stages))
        terms[STAGE_INPUTS] = int(terms.get(STAGE_INPUTS, 0) * kept_share(given["keep_every"], len(found.stages)))
        failed = None  # with more kept
    if "chunk_size" not in options and terms.get(CHUNK, 0) + terms.get(LOSS, 0) > LARGE_WORK * budget:
        given.update(chunk_size=SMALL_CHUNK, loss_chunk_size=SMALL_CHUNK)
        terms.update({CHUNK: 0, LOSS: 0})
        failed = None
    length = _guess(found.length, sum(terms.values()), terms, budget)
    for _ in range(MOST_TRACES - 1):
        length = _between(length, best, failed)
        if length < ROUNDING or (best is not None and length <= best.length * (1 + CLOSE) and length - best.length <= first):
            break
        found = predict(length, given)
        best, failed = (found, failed) if found.peak_bytes <= budget else (best, found)
        length = _guess(found.length, found.peak_bytes, found.peak_by_term, budget)
    return best


def fewest_bytes(stages: int) -> int:
    """How many stages should share one kept input, for the least memory."""
    return min(KEEP_EVERY, key=lambda every: kept_share(every, stages))


def kept_share(every: int, stages: int) -> float:
    """Stage inputs alive at most, of all: each k-th, and those of one group."""
    return 1 / every + (every - 1) / max(stages, every)


def _guess(length: int, peak: int, terms: Mapping[str, int], budget: int) -> int:
    """Where the peak would reach the budget, by the terms that grow with the length."""
    growing = sum(terms.get(name, 0) for name in GROWING) / length
    return int(length + (budget * AIM - peak) / max(growing, 1))


def _between(length: int, best: Prediction | None, failed: Prediction | None) -> int:
    """The guess, or the middle where it is not between what is known to fit and what is known not to."""
    low, high = best.length if best else 0, failed.length if failed else None
    if high is not None and not low < length < high:
        length = (low + high) // 2
    return length // ROUNDING * ROUNDING
