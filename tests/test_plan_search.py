"""The longest length or largest batch, and the first line of a plan: its gain, from which length on, and other ways' lengths."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.cost.curve import Curve, Point
from streamfx.cost.work import NO_WORK
from streamfx.errors import OverBudgetError
from streamfx.options import OFFLOADS
from streamfx.tools.inspect.explain import OURS
from streamfx.tools.planner import frontier
from streamfx.tools.planner.baselines import ON_HOST, find_longest
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.search import Limits, SearchedSize, find_largest, gains_from, growth_of, size_within
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, IN_CHUNKS, MIN_GAIN, times
from tests.test_plan import TINY

pytest.importorskip("transformers")


LENGTH = SearchedSize(256, lambda _: 2)


def prediction(length: int, peak: int) -> Prediction:
    terms = {"parameters": 1000, "stage inputs": peak - 1000}  # all else grows
    return Prediction(length, 1, peak, terms, NO_WORK)


class Predicting:
    """Predicts steps with given peaks, and records the traced lengths."""

    def __init__(self, peak: Callable[[int], int]) -> None:
        self.peak = peak
        self.traced: list[tuple[int, Any]] = []

    def __call__(self, length: int, options: Any) -> Prediction:
        self.traced.append((length, options))
        return self.at(length, 4)

    def at(self, length: int, rows: int) -> Prediction:
        return prediction(length, self.peak(length))


@pytest.mark.parametrize("first", [10_000, 65_536, 150_000])
def test_the_longest_length_was_traced_and_fits(first: int) -> None:
    predict = Predicting(lambda length: 1000 + 3 * length + (length > 60_000) * length)  # steeper beyond 60,000
    best = find_largest(predict, Limits(400_000), {"keep_every": 1}, first, LENGTH, 9)
    assert best is not None and best[0] == best[1].length
    assert (1, 512) in [(own["keep_every"], own["chunk_size"]) for length, own in predict.traced if length == best[0]]
    assert 97_000 < best[0] < 100_000 and len(predict.traced) < 6
    find_largest(predict, Limits(400_000), {"chunk_size": 7}, first, LENGTH, 9)
    assert (predict.traced[-1][1]["keep_every"], predict.traced[-1][1]["chunk_size"]) == (3, 7)


def test_a_search_ends_if_no_longer_length_fits() -> None:
    """Without bisection; at once if no length fits."""
    predict = Predicting(lambda length: 1000 + 3 * length + (length > 180_000) * 50_000)
    best = find_largest(predict, Limits(400_000), {}, 190_000, LENGTH, 9)
    assert best is not None and best[1].peak_bytes > 0.99 * 400_000 and len(predict.traced) <= 3
    assert find_largest(Predicting(lambda length: 10**9), Limits(1000), {}, 65_536, LENGTH, 9) is None


@pytest.mark.parametrize("first", [1000, 65_536, 10**6])
def test_the_longest_length_of_a_baseline_fits(first: int) -> None:
    """Each trace is at a multiple; 0 if no length fits, None if none can be traced."""
    traced: list[int] = []

    def peak_at(length: int) -> int:
        traced.append(length)
        return 5_000 + 3 * length + max(0, length - 50_000)

    found = find_longest(peak_at, 4_000, 400_000, first, 256)
    assert found is not None and 0.98 * 111_250 < found <= 111_250 and found in traced
    assert all(length % 256 == 0 for length in traced)
    assert find_longest(lambda length: 10**9, 0, 1000, first, 256) == 0
    assert find_longest(lambda length: None, 0, 1000, first, 256) is None


class Stepped(Predicting):
    """All gradients are alive at the end of a step, all stage inputs in its middle; a chunk's work grows by 2 per row."""

    def __init__(self) -> None:
        super().__init__(lambda length: length)

    def at(self, length: int, rows: int) -> Prediction:
        middle = {"parameters": 1000, "stage inputs": rows * length, "chunk work": 50_000 + 2 * length}
        end = {"parameters": 1000, "gradients": 300_000, "gradient of the stream": length}
        curve = Curve((Point(NO_WORK, middle), Point(NO_WORK, end)))
        terms = max(middle, end, key=lambda one: sum(one.values()))
        return replace(prediction(length, sum(terms.values())), peak_by_term=terms, curves={OURS: (curve, 0)})


@pytest.mark.parametrize("few_layers", [False, True])
def test_each_moment_is_extrapolated_to_the_limit(few_layers: bool) -> None:
    """The peak of a short sequence is at the end of a step, that of the longest in its middle.

    A step of few layers shows how the work on a chunk grows, which saves a trace.
    """
    step = Stepped()
    assert step.at(1000, 4).peak_by_term.get("gradients")
    growth = (lambda size, found, far: growth_of(size, found, far, step.at(far, 1)),) if few_layers else ()
    best = find_largest(step, Limits(500_000), {}, 1000, LENGTH, 9, *growth)
    assert best is not None and 0.99 * 449_000 / 6 < best[0] <= 449_000 / 6
    assert len(step.traced) == (2 if few_layers else 3)


def test_a_category_grows_as_measured_or_in_proportion() -> None:
    found = replace(prediction(100, 7000), peak_by_term={"parameters": 1000, "stage inputs": 1000, "other": 5000})
    assert size_within(10_000, 100, found, {}) == 100 + 3000 // 60
    assert size_within(10_000, 100, found, {"other": 5, "chunk work": 7}) == 100 + 3000 // 15


@pytest.mark.parametrize("offload", OFFLOADS)
def test_host_memory_is_a_limit(offload: str) -> None:
    def predict(length: int, options: Any) -> Prediction:
        assert (options["keep_every"], options["save"], options["offload"]) == (1, offload, offload)
        return replace(prediction(length, 1000 + length), host_bytes=10 * length)

    for host, most in ((None, 400_000), (10**6, 100_000)):
        best = find_largest(predict, Limits(400_000, host), {"offload": offload}, 65_536, LENGTH, 9)
        assert best is not None and 0.98 * most < best[0] <= most


@pytest.mark.parametrize("first", [1, 40])
def test_the_largest_batch_fits(first: int) -> None:
    """A chunk has the same number of tokens for each batch."""
    predict = Predicting(lambda batch: 1000 + 130 * batch)
    best = find_largest(predict, Limits(4000), {}, first, SearchedSize(1, lambda size: 3 * size), 9)
    assert best is not None and best[0] == 23
    assert dict(predict.traced)[23]["chunk_size"] == 1024 // 69


class Layered(nn.Module):
    """A custom decoder, too wide to gain anything at few rows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def own_inputs(most: int = 1 << 30) -> Callable[[int, int], dict[str, Tensor]]:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        if length > most:
            raise ValueError(f"no more than {most}")
        return {"x": torch.empty(batch, length, 8, device="meta")}

    return inputs


def peaks_of(report: Any) -> tuple[int, int]:
    return report.prediction.peak_bytes, report.prediction.baselines[CHECKPOINTING].peak_bytes


@pytest.mark.compiled
def test_a_plan_begins_with_its_gain() -> None:
    report = streamfx.plan(TINY, seq=2048, chunk_size=64, loss_chunk_size=64, save="inputs")
    (ours, other), found = peaks_of(report), report.prediction
    share = found.flops / found.baselines[CHECKPOINTING].flops
    than = f"{CHECKPOINTING} ({times(found.baselines[CHUNKED].peak_bytes / ours)} {IN_CHUNKS})"
    assert other / ours > 2 and found.baselines[CHUNKED].peak_bytes < other
    assert str(report).splitlines()[0].endswith(f": {other / ours:.1f} times less memory than {than}, {share:.2f} of its FLOPs")
    assert CHUNKED in str(report) and CHUNKED in report.summary()["ways"]
    assert report.summary()["verdict"] == report.verdict and report.gains_from is None


@pytest.mark.compiled
def test_the_length_from_which_a_plan_gains_does_not_depend_on_the_planned_length() -> None:
    """No length is named if custom inputs refuse longer ones."""
    small = {"chunk_size": 16, "loss_chunk_size": 16, "save": "inputs"}
    short, other = (streamfx.plan(Layered(), seq=length, inputs=own_inputs(), options=small) for length in (2, 17))
    found = short.gains_from
    assert found is not None and found == other.gains_from
    assert f" {CHECKPOINTING} at this length" in short.verdict and short.verdict.endswith(f"; from about {found:,} tokens on")
    for length, gains in ((found, True), (found // 2, False)):
        ours, theirs = peaks_of(streamfx.plan(Layered(), seq=length, inputs=own_inputs(length), options=small))
        assert (theirs >= MIN_GAIN * ours) == gains
    report = streamfx.plan(Layered(), seq=16, inputs=own_inputs(40))
    assert report.gains_from is None and "at this length" in report.verdict


@pytest.mark.parametrize("multiple", [1, 3, 64])
def test_the_search_for_a_gain_finds_the_same_length_from_each_start(multiple: int) -> None:
    """The length was traced."""
    for bend in (20, 300, 5000, 17_000, 100_000):
        traced: list[int] = []

        def saves_memory(length: int, bend: int = bend, traced: list[int] = traced) -> bool:
            traced.append(length)
            return length >= bend

        starts = {3, 17, 64, 250, 1024, 4500, 15_000, 16_000, 65_536, bend - 1}
        (named,) = {gains_from(saves_memory, length, multiple) for length in starts if length < bend}
        assert named is not None and bend <= named < 1.26 * (bend + multiple) and named % multiple == 0 and named in traced


@pytest.mark.long
def test_within_a_budget_the_verdict_says_whether_it_fits() -> None:
    wide = streamfx.plan(TINY, seq=512, memory="1G")
    tight = streamfx.plan(TINY, seq=512, memory=peaks_of(wide)[1] - 1)
    assert tight.verdict.startswith("fits into ") and f"{CHECKPOINTING} takes" in tight.verdict
    assert wide.verdict.startswith("fits into 1.0 GiB: nothing streams, because the unchunked graph fits")
    decimal = streamfx.plan(TINY, seq=512, memory="1GB", baselines=False, optimizer="adamw8bit")
    assert decimal.verdict.startswith("fits into 1GB (953.7 MiB)")


def test_a_frontier_has_no_limit_of_memory() -> None:
    with pytest.raises(streamfx.PlanError, match="a frontier has plans for all budgets"):
        streamfx.plan(TINY, frontier=True, memory="1G")


@pytest.mark.long
def test_a_frontier_goes_from_the_smallest_peak_to_the_fastest_step() -> None:
    """Its first plan takes the peak of the smallest budget."""
    report = streamfx.plan(TINY, seq=512, frontier=True, baselines=False)
    found = report.summary()["frontier"]
    assert 3 <= len(found) <= frontier.NUM_BUDGETS and "plans for other budgets" in str(report)
    assert all(plan["peak_bytes"] < later["peak_bytes"] for plan, later in pairwise(found))
    assert found[-1]["seconds"] < found[0]["seconds"]
    with pytest.raises(OverBudgetError) as caught:
        streamfx.plan(TINY, seq=512, memory=found[0]["peak_bytes"] // 2, baselines=False)
    assert caught.value.smallest == pytest.approx(found[0]["peak_bytes"], rel=0.01)


@pytest.mark.long
def test_the_longest_lengths_of_other_ways_fit() -> None:
    budget = 24 << 20
    report = streamfx.plan(TINY, memory=budget, max_length=True, seq=256)
    assert list(report.lengths) == [CHECKPOINTING, IN_CHUNKS, f"{IN_CHUNKS}, {ON_HOST}"]
    lengths = list(report.lengths.values())
    assert 0 < lengths[0] < lengths[1] <= lengths[2] and report.max_length is not None
    share = f"{times(report.max_length / lengths[0])} the length of {CHECKPOINTING}"
    assert report.verdict == f"{share}: {report.max_length:,} tokens for {lengths[0]:,}"
    assert report.summary()["fits"] and report.summary()["max_length"] == report.max_length
    peak = peaks_of(streamfx.plan(TINY, seq=lengths[0], memory="1G"))[1]
    assert 0.9 * budget < peak <= budget
    for way, length in report.lengths.items():
        assert f"{length:,}  {way}: ours is " in str(report)
