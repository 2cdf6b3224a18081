"""The longest sequence that fits: guessed from the terms of a few traces, and confirmed by a trace of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamfx.errors import OverBudget
from streamfx.planner.predict import Prediction

FIRST_LENGTH = 16384
MOST_TRACES = 7
CLOSE = 0.02  # of the budget: with so little left over the search ends
ROUNDING = 256
PER_TOKEN = ("stage inputs", "gradient of the stream", "keys and values", "gradients of keys and values", "chunk work", "states")

Predict = Callable[[int], Prediction]


@dataclass
class Probe:
    """Bytes that a step of some length needs at least, as a trace has found."""

    length: int
    peak: int
    prediction: Prediction | None  # None where it does not fit


def longest(predict: Predict, budget: int, first: int = FIRST_LENGTH) -> Prediction | None:
    """The prediction for about the longest length whose peak is within the budget; None where not even short ones are."""
    best: Probe | None = None
    failed: Probe | None = None
    probes: list[Probe] = []
    length = first
    for _ in range(MOST_TRACES):
        probe, terms = _probe(predict, length, budget)
        probes.append(probe)
        if probe.prediction is not None:
            best = probe if best is None or probe.length > best.length else best
        else:
            failed = probe if failed is None or probe.length < failed.length else failed
        length = _next(probes, terms, budget, best, failed)
        if length <= (best.length if best else 0) or (best and _is_close(best, failed, length, budget)):
            break
    return best.prediction if best else None


def _probe(predict: Predict, length: int, budget: int) -> tuple[Probe, dict[str, int]]:
    try:
        found = predict(length)
    except OverBudget as error:
        return Probe(length, error.smallest, None), dict(error.terms)
    fits = found.peak_bytes <= budget
    return Probe(length, found.peak_bytes, found if fits else None), found.peak_by_term


def _next(probes: list[Probe], terms: dict[str, int], budget: int, best: Probe | None, failed: Probe | None) -> int:
    """Where the peak would reach the budget: by the terms that grow with the length, between what is known."""
    last = probes[-1]
    growing = sum(terms.get(name, 0) for name in PER_TOKEN) / last.length
    length = int(last.length + (budget * 0.997 - last.peak) / max(growing, 1))
    low, high = best.length if best else 0, failed.length if failed else None
    if high is not None and not low < length < high:
        length = (low + high) // 2
    return max(0, length) // ROUNDING * ROUNDING


def _is_close(best: Probe, failed: Probe | None, length: int, budget: int) -> bool:
    if failed is not None and failed.length - best.length <= max(ROUNDING, best.length * CLOSE):
        return True
    return length - best.length <= max(ROUNDING, best.length * CLOSE / 2)
