"""The longest sequence or the largest batch that fits: guessed from the terms of a few traces, and confirmed by one of its own.

It runs with the choices that take the least memory: nothing kept but stage inputs, and boundaries as far apart as is best. Chunks
have as many tokens as still keep a device busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamfx.cost.terms import CHUNK, INPUTS, KEY_GRADIENTS, KEYS, LOSS, STAGE_INPUTS, STATES, STREAM_GRADIENT
from streamfx.passes.partition.fit import KEEP_EVERY
from streamfx.planner.predict import Prediction

FIRST_LENGTH = 16384
MOST_TRACES = 6
CLOSE = 0.01  # of the size: with so little to gain the search ends
AIM = 0.998  # how much of the memory a guess is to take
BUSY = 1024  # tokens of a chunk: fewer save little memory and much time
LEAST_ROWS = 8
GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, CHUNK, LOSS, STATES, INPUTS)

Predict = Callable[[int, Mapping[str, Any]], Prediction]


@dataclass(frozen=True)
class Sought:
    """What is made as large as fits: its size in a prediction, and what its sizes are multiples of."""

    size: Callable[[Prediction], int]
    multiple: int


LENGTH = Sought(lambda found: found.length, 256)


def largest(predict: Predict, budget: int, options: Mapping[str, Any], first: int, sought: Sought) -> Prediction | None:
    """The prediction for about the largest size whose peak is within the budget; None where not even small ones are."""
    given = {"save": "inputs", "keep_every": 1, **options}
    found = predict(first, given)
    best, failed = (found, None) if found.peak_bytes <= budget else (None, found)
    terms = dict(found.peak_by_term)
    if "keep_every" not in options:
        given["keep_every"] = fewest_bytes(len(found.stages))
        terms[STAGE_INPUTS] = int(terms.get(STAGE_INPUTS, 0) * kept_share(given["keep_every"], len(found.stages)))
        failed = None  # with more kept
    if "chunk_size" not in options:
        rows = max(LEAST_ROWS, BUSY // found.batch)
        given.update(chunk_size=rows, loss_chunk_size=rows)
        terms.update({CHUNK: 0, LOSS: 0})
        failed = None
    size = _guess(sought.size(found), sum(terms.values()), terms, budget)
    for _ in range(MOST_TRACES - 1):
        size = _between(size, best, failed, sought)
        gain = size if best is None else size - sought.size(best)
        if size < sought.multiple or (gain <= CLOSE * size and gain <= first):
            break
        found = predict(size, given)
        best, failed = (found, failed) if found.peak_bytes <= budget else (best, found)
        size = _guess(sought.size(found), found.peak_bytes, found.peak_by_term, budget)
    return best


def fewest_bytes(stages: int) -> int:
    """How many stages should share one kept input, for the least memory."""
    return min(KEEP_EVERY, key=lambda every: kept_share(every, stages))


def kept_share(every: int, stages: int) -> float:
    """Stage inputs alive at most, of all: each k-th, and those of one group."""
    return 1 / every + (every - 1) / max(stages, every)


def _guess(size: int, peak: int, terms: Mapping[str, int], budget: int) -> int:
    """Where the peak would reach the budget, by the terms that grow with the size."""
    growing = sum(terms.get(name, 0) for name in GROWING) / size
    return int(size + (budget * AIM - peak) / max(growing, 1))


def _between(size: int, best: Prediction | None, failed: Prediction | None, sought: Sought) -> int:
    """The guess, or the middle where it is not between what is known to fit and what is known not to."""
    low, high = sought.size(best) if best else 0, sought.size(failed) if failed else None
    if high is not None and not low < size < high:
        size = (low + high) // 2
    return size // sought.multiple * sought.multiple
