"""Find the longest sequence or the largest batch that fits: extrapolated from the growth of a trace, and confirmed by
another trace.

The search uses the plan with the least memory: only stage inputs and offloaded values are saved, and stage boundaries
have the best spacing. Chunks have as few tokens as still saturate a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamfx.options import min_save_level
from streamfx.passes.partition.budget_search import KEEP_EVERY
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.scaling import Growth, growth_of, size_within

FIRST_LENGTH = 65536  # per device; if stage inputs are offloaded, `OFFLOAD_LENGTH_FACTOR` times as many fit
OFFLOAD_LENGTH_FACTOR = 4
MAX_TRACES = 6
MIN_GUESS_RATIO = 1.5  # ratio of sizes from which the growth of the chunk work matters
MIN_RELATIVE_GAIN = 0.01  # relative gain below which the search ends
TARGET_SHARE = 0.998  # fraction of the memory that a guess targets
EFFICIENT_TOKENS = 1024  # tokens of a chunk; smaller chunks save little memory but cost much time
MIN_ROWS = 8

Predict = Callable[[int, Mapping[str, Any]], Prediction]
Work = Callable[[int, Prediction, int], Growth]


@dataclass(frozen=True)
class SearchedSize:
    """The size to maximize: it is a multiple of `multiple`, and a step has `sequences(size)` sequences."""

    multiple: int
    sequences: Callable[[int], int]


@dataclass(frozen=True)
class Limits:
    """Bytes of a device, and of the host per device; None if unlimited."""

    device: int | None = None
    host: int | None = None

    def hold(self, prediction: Prediction) -> bool:
        return _fits(prediction.peak_bytes, self.device) and _fits(prediction.host_bytes, self.host)

    def size(self, size: int, prediction: Prediction, growth: Growth) -> int:
        """Return the size at which a step reaches a limit, given its prediction at one size and the growth of its chunk work."""
        assert self.device is not None
        size_on_device = size_within(self.device * TARGET_SHARE, size, prediction, growth)
        if self.host is None or not prediction.host_bytes:
            return size_on_device
        return min(size_on_device, int(size * self.host / prediction.host_bytes))


def _fits(size: int, limit: int | None) -> bool:
    return limit is None or size <= limit


def find_largest(
    predict: Predict,
    limits: Limits,
    options: Mapping[str, Any],
    first_size: int,
    sought: SearchedSize,
    stages: int,
    work: Work | None = None,
) -> tuple[int, Prediction] | None:
    """Return approximately the largest size within the limits and its prediction, or None if not even small sizes fit.

    `stages` is the approximate number of stages. `work(size, found, other)` returns the growth of the chunk work from
    `size`, with prediction `found`, to another size; it is called if the first guess is far away.
    """
    best: tuple[int, Prediction] | None = None
    previous: tuple[int, Prediction] | None = None
    failed, size = None, max(first_size // sought.multiple * sought.multiple, sought.multiple)

    def next_size(growth: Growth) -> int:
        """Return the next size to trace, between the largest that fits and the smallest that does not."""
        return _next_candidate(limits.size(size, prediction, growth), best[0] if best else 0, failed, sought.multiple)

    for _ in range(MAX_TRACES):
        prediction = predict(size, {**options_with_least_memory(sought.sequences(size), stages, options), **options})
        if limits.hold(prediction):
            best = size, prediction
        else:
            failed = size
        growth = {} if previous is None else growth_of(*previous, size, prediction)
        if previous is None and work is not None and (guess := next_size(growth)) >= MIN_GUESS_RATIO * size:
            growth = work(size, prediction, guess)
        if limits.hold(prediction) and limits.size(size, prediction, growth) - size <= MIN_RELATIVE_GAIN * size:
            break
        previous, size = (size, prediction), next_size(growth)
        gain = size - best[0] if best else size
        if size < sought.multiple or gain <= MIN_RELATIVE_GAIN * size:
            break
    return best


def options_with_least_memory(sequences: int, stages: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the least memory, as defaults for `options`."""
    rows = max(MIN_ROWS, EFFICIENT_TOKENS // sequences)
    offload = options.get("offload", "none")
    every = stages_per_saved_input(stages) if offload == "none" else 1  # offloaded inputs use no device memory: save all of them
    return {"save": min_save_level(offload), "keep_every": every, "chunk_size": rows, "loss_chunk_size": rows}


def stages_per_saved_input(stages: int) -> int:
    """Return the number of stages per saved input with the least memory."""
    return min(KEEP_EVERY, key=lambda every: 1 / every + (every - 1) / max(stages, every))


def _next_candidate(size: int, low: int, high: int | None, multiple: int) -> int:
    """Return the guess, or the middle of the interval if the guess lies outside of it, rounded down to a multiple."""
    if high is not None and not low < size < high:
        size = (low + high) // 2
    return size // multiple * multiple
