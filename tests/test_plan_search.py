"""The longest length or the largest batch: where a search begins, what it expects of other sizes, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamfx.cost.curve import Curve, Point
from streamfx.cost.work import NO_WORK
from streamfx.options import OFFLOADS
from streamfx.tools.inspect.explain import OURS
from streamfx.tools.planner.initial_guess import guessed
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.scaling import Growth, growth_of
from streamfx.tools.planner.search import Limits, SearchedSize, largest


def prediction(length: int, peak: int) -> Prediction:
    terms = {"parameters": 1000, "stage inputs": peak - 1000}  # all else grows
    return Prediction(length, 1, peak, terms, NO_WORK, [{}] * 9, [], None, {}, None, None)


LENGTH = SearchedSize(256, lambda _: 2)


@pytest.mark.parametrize("first", [10_000, 65_536, 150_000])
def test_the_longest_length_was_traced_and_fits(first: int) -> None:
    traced = []

    def predict(length: int, options: Any) -> Prediction:
        traced.append((length, options["keep_every"], options["chunk_size"]))
        peak = 1000 + 3 * length + (length > 60_000) * length  # steeper from some length on
        return prediction(length, peak)

    best = largest(predict, Limits(400_000), {"keep_every": 1}, first, LENGTH, 9)
    assert best is not None and best[0] == best[1].length
    assert (best[0], 1, 512) in traced
    assert 97_000 < best[0] < 100_000
    assert len(traced) < 6
    largest(predict, Limits(400_000), {"chunk_size": 7}, first, LENGTH, 9)
    assert traced[-1][1:] == (3, 7)


def test_models_of_few_layers_say_where_to_begin() -> None:
    """What grows with layers, with the size, with both, and with neither."""
    traced = []

    def peaks(size: int) -> tuple[int, int]:
        traced.append(size)
        few, more = (5_000 + 100 * layers + (7 + 2 * layers) * size for layers in (4, 5))
        return few, more

    guess = guessed(peaks, 36, 1000, 10**6)
    assert guess is not None
    assert guess.size == (10**6 - 8_600) // 79 and guess.base == pytest.approx(8_600)
    assert traced == [1000, 2000]
    assert guessed(peaks, 12, 1000, 10**6) is None  # as fast in full


class Stepped:
    """A step whose gradients are all there at its end, and in whose middle inputs of stages are; a chunk's work grows by 2."""

    def __init__(self) -> None:
        self.traced: list[int] = []

    def __call__(self, length: int, options: Any) -> Prediction:
        self.traced.append(length)
        return self.at(length, 4)

    @staticmethod
    def at(length: int, rows: int) -> Prediction:
        middle = {"parameters": 1000, "stage inputs": rows * length, "chunk work": 50_000 + 2 * length}
        end = {"parameters": 1000, "gradients": 300_000, "gradient of the stream": length}
        curve = Curve((Point(NO_WORK, middle), Point(NO_WORK, end)))
        terms = max(middle, end, key=lambda one: sum(one.values()))
        return replace(prediction(length, sum(terms.values())), peak_by_term=terms, curves={OURS: (curve, 0)})


def test_each_moment_is_asked_where_it_would_reach_the_limit() -> None:
    """The peak of a short sequence is at the end of a step, that of the longest one in its middle."""
    step = Stepped()
    assert step.at(1000, 4).peak_by_term.get("gradients")
    best = largest(step, Limits(500_000), {}, 1000, LENGTH, 9)
    assert best is not None and 0.99 * 449_000 / 6 < best[0] <= 449_000 / 6
    assert len(step.traced) == 3


def test_few_layers_show_how_the_work_on_a_chunk_grows() -> None:
    step, asked = Stepped(), list[tuple[int, int]]()

    def work(size: int, found: Prediction, other: int) -> Growth:
        asked.append((size, other))
        return growth_of(size, found, other, step.at(other, 1))

    best = largest(step, Limits(500_000), {}, 1000, LENGTH, 9, work)
    assert best is not None and 0.99 * 449_000 / 6 < best[0] <= 449_000 / 6
    assert len(step.traced) == 2 and [size for size, _ in asked] == [768]


def test_a_search_ends_where_no_more_is_to_be_had() -> None:
    """Not in the middle between what fits, just so, and what did not."""
    traced = []

    def predict(length: int, options: Any) -> Prediction:
        traced.append(length)
        return prediction(length, 1000 + 3 * length + (length > 180_000) * 50_000)

    best = largest(predict, Limits(400_000), {}, 190_000, LENGTH, 9)
    assert best is not None and best[1].peak_bytes > 0.99 * 400_000 and len(traced) <= 3


@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_waits_on_the_host_is_limited(offload: str) -> None:
    def predict(length: int, options: Any) -> Prediction:
        assert (options["keep_every"], options["save"], options["offload"]) == (1, offload, offload)
        return replace(prediction(length, 1000 + length), host_bytes=10 * length)

    for host, most in ((None, 400_000), (10**6, 100_000)):
        best = largest(predict, Limits(400_000, host), {"offload": offload}, 65_536, LENGTH, 9)
        assert best is not None and 0.98 * most < best[0] <= most


def test_no_length_may_fit() -> None:
    assert largest(lambda length, options: prediction(length, 10**9), Limits(1000), {}, 65_536, LENGTH, 9) is None


@pytest.mark.parametrize("first", [1, 40])
def test_the_largest_batch(first: int) -> None:
    """In chunks of as many tokens, whatever the batch is."""
    rows = {}

    def predict(batch: int, options: Any) -> Prediction:
        rows[batch] = options["chunk_size"]
        return prediction(100, 1000 + 130 * batch)

    best = largest(predict, Limits(4000), {}, first, SearchedSize(1, lambda size: 3 * size), 9)
    assert best is not None and best[0] == 23
    assert rows[23] == 1024 // 69
