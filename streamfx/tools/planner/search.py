"""Find the longest sequence or the largest batch that fits, or the length from which memory is saved.

Each size is extrapolated from the growth of a trace, and confirmed by another trace.

The search uses the plan with the least memory: only stage inputs and offloaded values are saved, and stage boundaries
have the best spacing. Chunks have as few tokens as still saturate a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from streamfx.cost.categories import (
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
from streamfx.options import min_save_level
from streamfx.passes.partition.budget_search import KEEP_EVERY
from streamfx.tools.inspect.explain import OURS
from streamfx.tools.planner.predict import Prediction

FIRST_LENGTH = 65536  # per device; if stage inputs are offloaded, `OFFLOAD_LENGTH_FACTOR` times as many fit
OFFLOAD_LENGTH_FACTOR = 4
LENGTH_MULTIPLE = 256  # the longest length per rank is rounded to a multiple of this
MAX_TRACES = 6
MIN_GUESS_RATIO = 1.5  # ratio of sizes from which the growth of the chunk work matters
MIN_RELATIVE_GAIN = 0.01  # relative gain below which the search ends
TARGET_SHARE = 0.998  # fraction of the memory that a guess targets
EFFICIENT_TOKENS = 1024  # tokens of a chunk; smaller chunks save little memory but cost much time
MIN_ROWS = 8

STEPS = 4  # candidate lengths per power of two
STRIDE = 2 * STEPS  # candidates between two probes: a factor of four in length
MAX_INDEX = 16 * STEPS  # index of the greatest candidate, 262,144 tokens
GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, STATES, INPUTS, EXCHANGED, ATTENTION, OTHER)
CHUNK_TERMS = (CHUNK, LOSS)

Growth: TypeAlias = "Mapping[str, float]"  # additional bytes of a category per additional token or sequence
Predict = Callable[[int, Mapping[str, Any]], Prediction]
Work = Callable[[int, Prediction, int], Growth]


@dataclass(frozen=True)
class SearchedSize:
    """The size to maximize: it is a multiple of `multiple`, and a step has `sequences(size)` sequences."""

    multiple: int
    sequences: Callable[[int], int]


@dataclass(frozen=True)
class Limits:
    """Bytes of a device, and of the host per device; None if unlimited. `text` is the device's memory, also as it was given."""

    device: int | None = None
    host: int | None = None
    text: str = ""

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
        """Return the next size to trace: the guess, or the middle of the largest that fits and the smallest that does not."""
        guess, low = limits.size(size, prediction, growth), best[0] if best else 0
        if failed is not None and not low < guess < failed:
            guess = (low + failed) // 2
        return guess // sought.multiple * sought.multiple

    for _ in range(MAX_TRACES):
        prediction = predict(size, with_least_memory(sought.sequences(size), stages, options))
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


def with_least_memory(sequences: int, stages: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, completed by those with the least memory; `stages` is the approximate number of stages."""
    rows = max(MIN_ROWS, EFFICIENT_TOKENS // sequences)
    offload = options.get("offload", "none")
    every = min(KEEP_EVERY, key=lambda every: 1 / every + (every - 1) / max(stages, every))  # stages per saved input
    every = every if offload == "none" else 1  # offloaded inputs use no device memory: save all of them
    return {"save": min_save_level(offload), "keep_every": every, "chunk_size": rows, "loss_chunk_size": rows, **options}


# -- the length from which memory is saved
#
# Candidate lengths are fixed: powers of two, with three values between neighbors. The result therefore depends only on the
# model and its options, not on the requested length, provided that there is a gain at all greater lengths.


def gains_from(saves_memory: Callable[[int], bool], length: int, multiple: int) -> int | None:
    """Return the first candidate length above `length` at which `saves_memory` is true, or None if no candidate saves memory.

    `length` itself saves none. Probes are a factor of four apart, and candidates between the last two are found by bisection.
    """

    def saves(index: int) -> bool:
        """Return whether the candidate of an index is long enough, and saves memory."""
        candidate = candidate_length(index, multiple)
        return candidate > length and saves_memory(candidate)

    high = next((index for index in range(STRIDE, MAX_INDEX + 1, STRIDE) if saves(index)), None)
    if high is None:
        return None
    low = high - STRIDE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saves(middle) else (middle, high)
    return candidate_length(high, multiple)


def candidate_length(number: int, multiple: int) -> int:
    """Return the candidate length of an index, rounded up to a multiple.

    >>> [candidate_length(index, 1) for index in range(9)], candidate_length(41, 1), candidate_length(41, 1000)
    ([4, 5, 6, 7, 8, 10, 12, 14, 16], 5120, 6000)
    """
    length = (STEPS + number % STEPS) << (number // STEPS)
    return -(-length // multiple) * multiple


# -- growth with the size
#
# At each point of a step, the sequence's values grow linearly with the size, but weights and their gradients do not. So short
# sequences peak at one point (all gradients are alive), long ones at another (stage inputs are alive). Each point is
# extrapolated separately. The work of a chunk depends on its query positions and grows with the key positions they see. Its
# growth is taken from a trace of a few layers at another size, because it does not depend on the number of layers.


def size_within(limit: float, size: int, prediction: Prediction, growth: Growth) -> int:
    """Return the largest size at which no point of a step exceeds the limit, given a prediction at one size.

    Categories in `growth` grow by so many bytes if they are alive at a point; of the others, those in `GROWING` are proportional.
    """
    sizes = []
    for terms in bytes_at_points(prediction):
        measured = sum(bytes_per_unit for name, bytes_per_unit in growth.items() if terms.get(name))
        proportional = sum(terms.get(name, 0) for name in GROWING if name not in growth)
        slope = proportional / size + measured  # bytes per additional token or sequence
        sizes.append((limit - sum(terms.values())) / max(slope, 1))
    return int(size + min(sizes))


def growth_of(
    size: int, prediction: Prediction, other_size: int, other_prediction: Prediction, names: Sequence[str] = CHUNK_TERMS
) -> Growth:
    """Return the growth of some categories between two sizes, by default of the chunk work, for which layers may differ."""
    return {
        name: (_peak_of_term(name, other_prediction) - _peak_of_term(name, prediction)) / (other_size - size) for name in names
    }


def _peak_of_term(name: str, prediction: Prediction) -> int:
    """Return the largest size of a category over the step."""
    return max(terms.get(name, 0) for terms in bytes_at_points(prediction))


def bytes_at_points(prediction: Prediction) -> list[Mapping[str, int]]:
    """Return the bytes alive by category at all points of the step, or only those of the peak if there is no curve."""
    curve = prediction.curves.get(OURS)
    return [prediction.peak_by_term] if curve is None else [point.terms for point in curve[0].points]
