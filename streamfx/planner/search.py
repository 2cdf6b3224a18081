"""The longest sequence or the largest batch that fits: guessed from the terms of a few traces, and confirmed by one of its own.

It runs with the choices that take the least memory: nothing kept but stage inputs, and boundaries as far apart as is best. Chunks
have as many tokens as still keep a device busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamfx.cost.terms import (
    ATTENTION,
    CHUNK,
    EXCHANGED,
    INPUTS,
    KEY_GRADIENTS,
    KEYS,
    LOSS,
    OTHER,
    STAGE_INPUTS,
    STATES,
    STREAM_GRADIENT,
)
from streamfx.passes.partition.fit import KEEP_EVERY
from streamfx.planner.predict import Prediction
from streamfx.planner.scout import Guess

FIRST_LENGTH = 65536  # on a device; where inputs of stages wait on the host, several times as many fit
OFFLOADED = 4
MOST_TRACES = 6
CLOSE = 0.01  # of the size: with so little to gain the search ends
AIM = 0.998  # how much of the memory a guess is to take
BUSY = 1024  # tokens of a chunk: fewer save little memory and much time
LEAST_ROWS = 8
GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, CHUNK, LOSS, STATES, INPUTS, EXCHANGED, ATTENTION, OTHER)

Predict = Callable[[int, Mapping[str, Any]], Prediction]


@dataclass(frozen=True)
class Sought:
    """What is made as large as fits: what its sizes are multiples of, and how many sequences a step of a size has."""

    multiple: int
    sequences: Callable[[int], int]


@dataclass(frozen=True)
class Limits:
    """Bytes of a device, and of the host for each device, where these are limited."""

    device: int | None = None
    host: int | None = None

    def hold(self, found: Prediction) -> bool:
        return _within(found.peak_bytes, self.device) and _within(found.host_bytes, self.host)

    def size(self, size: int, found: Prediction, base: float | None) -> int:
        """Where a prediction for a size would reach a limit: what is no `base` grows, or what terms say."""
        assert self.device is not None
        growing = sum(found.peak_by_term.get(name, 0) for name in GROWING) if base is None else found.peak_bytes - base
        most = int(size + (self.device * AIM - found.peak_bytes) / max(growing / size, 1))
        if self.host is None or not found.host_bytes:
            return most
        return min(most, int(size * self.host / found.host_bytes))


def _within(size: int, limit: int | None) -> bool:
    return limit is None or size <= limit


def largest(
    predict: Predict, limits: Limits, options: Mapping[str, Any], first: Guess, sought: Sought, stages: int
) -> tuple[int, Prediction] | None:
    """About the largest size that is within limits, and its prediction; None where not even small ones are.

    `stages` is about how many stages there are.
    """
    best: tuple[int, Prediction] | None = None
    failed, size = None, max(first.size // sought.multiple * sought.multiple, sought.multiple)
    for _ in range(MOST_TRACES):
        found = predict(size, {**least_memory(sought.sequences(size), stages, options), **options})
        if limits.hold(found):
            best = size, found
        else:
            failed = size
        guess = limits.size(size, found, first.base)
        if limits.hold(found) and guess - size <= CLOSE * size:
            break
        size = _between(guess, best[0] if best else 0, failed, sought.multiple)
        gain = size - best[0] if best else size
        if size < sought.multiple or gain <= CLOSE * size:
            break
    return best


def least_memory(sequences: int, stages: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The choices that leave most room, where `options` make no others."""
    rows = max(LEAST_ROWS, BUSY // sequences)
    # inputs that wait on the host take no memory of the device: all are kept
    every = 1 if options.get("offload") == "inputs" else fewest_bytes(stages)
    return {"save": "inputs", "keep_every": every, "chunk_size": rows, "loss_chunk_size": rows}


def fewest_bytes(stages: int) -> int:
    """How many stages should share one kept input, for the least memory."""
    return min(KEEP_EVERY, key=lambda every: 1 / every + (every - 1) / max(stages, every))


def _between(size: int, low: int, high: int | None, multiple: int) -> int:
    """The guess, or the middle where it is not between what is known to fit and what is known not to."""
    if high is not None and not low < size < high:
        size = (low + high) // 2
    return size // multiple * multiple
