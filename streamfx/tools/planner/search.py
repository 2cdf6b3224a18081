"""The longest sequence or the largest batch that fits: guessed from how the bytes of a trace grow, confirmed by one of its own.

It runs with the choices that take the least memory: nothing kept but stage inputs and what waits on the host, and boundaries as
far apart as is best. Chunks have as many tokens as still keep a device busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamfx.options import least_save
from streamfx.passes.partition.budget_search import KEEP_EVERY
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.scaling import Growth, growth_of, size_within

FIRST_LENGTH = 65536  # on a device; if inputs of stages wait on the host, several times as many fit
OFFLOADED = 4
MOST_TRACES = 6
FAR = 1.5  # times a size: so far away its work on a chunk is another
CLOSE = 0.01  # of the size: with so little to gain the search ends
AIM = 0.998  # how much of the memory a guess is to take
BUSY = 1024  # tokens of a chunk: fewer save little memory and much time
LEAST_ROWS = 8

Predict = Callable[[int, Mapping[str, Any]], Prediction]
Work = Callable[[int, Prediction, int], Growth]


@dataclass(frozen=True)
class SearchedSize:
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

    def size(self, size: int, found: Prediction, growth: Growth) -> int:
        """Where a step would reach a limit, given what it takes at a size, and how the work on its chunks grows."""
        assert self.device is not None
        most = size_within(self.device * AIM, size, found, growth)
        if self.host is None or not found.host_bytes:
            return most
        return min(most, int(size * self.host / found.host_bytes))


def _within(size: int, limit: int | None) -> bool:
    return limit is None or size <= limit


def largest(
    predict: Predict,
    limits: Limits,
    options: Mapping[str, Any],
    first: int,
    sought: SearchedSize,
    stages: int,
    work: Work | None = None,
) -> tuple[int, Prediction] | None:
    """About the largest size that is within limits, and its prediction; None where not even small ones are.

    `stages` is about how many stages there are. `work(size, found, other)` says how the work on chunks grows to another size,
    given what was found at one: it is asked where the search has far to go.
    """
    best: tuple[int, Prediction] | None = None
    before: tuple[int, Prediction] | None = None
    failed, size = None, max(first // sought.multiple * sought.multiple, sought.multiple)

    def following(growth: Growth) -> int:
        return _between(limits.size(size, found, growth), best[0] if best else 0, failed, sought.multiple)

    for _ in range(MOST_TRACES):
        found = predict(size, {**least_memory(sought.sequences(size), stages, options), **options})
        if limits.hold(found):
            best = size, found
        else:
            failed = size
        growth = {} if before is None else growth_of(*before, size, found)
        if before is None and work is not None and (far := following(growth)) >= FAR * size:
            growth = work(size, found, far)
        if limits.hold(found) and limits.size(size, found, growth) - size <= CLOSE * size:
            break
        before, size = (size, found), following(growth)
        gain = size - best[0] if best else size
        if size < sought.multiple or gain <= CLOSE * size:
            break
    return best


def least_memory(sequences: int, stages: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The choices that leave most room, where `options` make no others."""
    rows = max(LEAST_ROWS, BUSY // sequences)
    offload = options.get("offload", "none")
    every = fewest_bytes(stages) if offload == "none" else 1  # inputs on the host take no memory of the device: all are kept
    return {"save": least_save(offload), "keep_every": every, "chunk_size": rows, "loss_chunk_size": rows}


def fewest_bytes(stages: int) -> int:
    """How many stages should share one kept input, for the least memory."""
    return min(KEEP_EVERY, key=lambda every: 1 / every + (every - 1) / max(stages, every))


def _between(size: int, low: int, high: int | None, multiple: int) -> int:
    """The guess, or the middle where it is not between what is known to fit and what is known not to."""
    if high is not None and not low < size < high:
        size = (low + high) // 2
    return size // multiple * multiple
