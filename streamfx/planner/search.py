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

FIRST_LENGTH = 65536
MOST_TRACES = 6
CLOSE = 0.01  # of the size: with so little to gain the search ends
AIM = 0.998  # how much of the memory a guess is to take
BUSY = 1024  # tokens of a chunk: fewer save little memory and much time
LEAST_ROWS = 8
GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, CHUNK, LOSS, STATES, INPUTS)

Predict = Callable[[int, Mapping[str, Any]], Prediction]


@dataclass(frozen=True)
class Sought:
    """What is made as large as fits: what its sizes are multiples of, and how many sequences a step of a size has."""

    multiple: int
    sequences: Callable[[int], int]


def largest(
    predict: Predict, budget: int, options: Mapping[str, Any], first: int, sought: Sought, stages: int
) -> tuple[int, Prediction] | None:
    """About the largest size whose peak is within the budget, and its prediction; None where not even small ones are.

    `stages` is about how many stages there are.
    """
    best: tuple[int, Prediction] | None = None
    failed, size = None, max(first, sought.multiple)
    for _ in range(MOST_TRACES):
        found = predict(size, {**_least_memory(sought.sequences(size), stages), **options})
        if found.peak_bytes <= budget:
            best = size, found
        else:
            failed = size
        size = _between(_guess(size, found, budget), best[0] if best else 0, failed, sought.multiple)
        gain = size - best[0] if best else size
        if size < sought.multiple or gain <= CLOSE * size:
            break
    return best


def _least_memory(sequences: int, stages: int) -> dict[str, Any]:
    rows = max(LEAST_ROWS, BUSY // sequences)
    return {"save": "inputs", "keep_every": fewest_bytes(stages), "chunk_size": rows, "loss_chunk_size": rows}


def fewest_bytes(stages: int) -> int:
    """How many stages should share one kept input, for the least memory."""
    return min(KEEP_EVERY, key=lambda every: 1 / every + (every - 1) / max(stages, every))


def _guess(size: int, found: Prediction, budget: int) -> int:
    """Where the peak would reach the budget, by the terms that grow with the size."""
    growing = sum(found.peak_by_term.get(name, 0) for name in GROWING) / size
    return int(size + (budget * AIM - found.peak_bytes) / max(growing, 1))


def _between(size: int, low: int, high: int | None, multiple: int) -> int:
    """The guess, or the middle where it is not between what is known to fit and what is known not to."""
    if high is not None and not low < size < high:
        size = (low + high) // 2
    return size // multiple * multiple
