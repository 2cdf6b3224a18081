"""The bytes alive along a step: where they are most is the peak that is predicted, and chunks show as teeth."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.cost.categories import BETWEEN_GRAPHS, CHUNK, LOSS, OPTIMIZER, PARAMETERS
from streamfx.cost.curve import Point, shortened
from streamfx.cost.sampled_chunks import MOST_TEETH, groups_of
from streamfx.cost.sampling import SampledLoop
from streamfx.cost.work import Work
from streamfx.tools.report.timeline import LoopTime, StepCourse
from tests.support.small import EXAMPLES, WIDTH, Causal, tokens
from tests.test_explain import Broken, Layer, rows


@pytest.mark.parametrize("rows_of_chunk", [1, 3])
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_highest_point_is_the_peak(example: str, rows_of_chunk: int) -> None:
    explanation = streamfx.explain(
        EXAMPLES[example].model(), *EXAMPLES[example].arguments(), options={"chunk_size": rows_of_chunk}
    )
    summary, timeline = explanation.summary(), explanation.timeline
    peaks = {course.way: course.peak_bytes for course in timeline.courses}
    assert timeline.peak_bytes == peaks["streamfx"] == summary["peak_bytes"]
    assert peaks["eager"] == summary["baseline_peak_bytes"]
    for course in timeline.courses:
        assert list(course.seconds) == sorted(course.seconds)
        assert 0 < course.turn <= course.end


def test_checkpointing_and_graph_breaks() -> None:
    """What one graph leaves for its backward half waits while the others run."""
    explanation = streamfx.explain(Broken(), rows(9), options={"chunk_size": 2})
    summary, timeline = explanation.summary(), explanation.timeline
    assert timeline.peak_bytes == summary["peak_bytes"]
    peaks = {course.way: course.peak_bytes for course in timeline.others}
    expected = {"gradient checkpointing": summary["checkpointing_peak_bytes"], "eager": summary["baseline_peak_bytes"]}
    assert peaks == expected
    assert max(timeline.ours.terms[BETWEEN_GRAPHS]) > 0


class InHalf(nn.Module):
    """One layer in a graph of its own, and one that runs in eager, whose gradients are there in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.late = Layer(), nn.Linear(WIDTH, 4000)

    def forward(self, x: Tensor) -> Tensor:
        return self._rest(self.layer(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rest(self, x: Tensor) -> Tensor:
        return self.late(x).square().mean()


def test_gradients_of_what_runs_in_eager_are_there_in_the_end() -> None:
    explanation = streamfx.explain(InHalf(), rows(3).requires_grad_())
    assert explanation.timeline.peak_bytes == explanation.summary()["peak_bytes"] >= 4000 * WIDTH * 4


def teeth(course: StepCourse, term: str, begins: float, ends: float) -> int:
    """How often the bytes of a term rise from nothing between two moments."""
    column = course.terms.get(term, (0,) * len(course.seconds))
    sizes = [size for at, size in zip(course.seconds, column, strict=True) if begins <= at <= ends]
    return sum(before == 0 < after for before, after in zip([0, *sizes], sizes, strict=False))


@pytest.mark.parametrize("chunks", [5, 12, 200])
def test_chunks_show_as_teeth(chunks: int) -> None:
    ids = tokens(2, 6 * chunks)
    explanation = streamfx.explain(Causal(), ids, ids, options={"chunk_size": 6, "loss_chunk_size": 6})
    ours = explanation.timeline.ours
    assert ours.loops
    for loop in ours.loops:
        assert (loop.chunks, loop.drawn) == (chunks, min(chunks, MOST_TEETH))
        assert 0 <= loop.begins < loop.ends <= ours.end
    first = ours.loops[0]
    assert teeth(ours, CHUNK, first.begins, first.ends) >= first.drawn
    assert len(ours.seconds) <= 4000
    busy = [at for at, size in zip(ours.seconds, ours.terms[CHUNK], strict=True) if size and at < first.ends]
    assert busy[-1] - first.begins > (1 - 1.5 / chunks) * (first.ends - first.begins)  # what stands for others takes their time
    assert ours.peak_bytes == explanation.summary()["peak_bytes"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_chunks_that_ran_stand_for_all(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loop takes the time, and rises as high, as if every chunk had run."""

    def found() -> list[tuple[Any, ...]]:
        model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
        ours = streamfx.explain(model, *arguments, options={"chunk_size": 1}).timeline.ours
        return [(loop.name, loop.chunks, _highest(ours, loop), pytest.approx(loop.ends)) for loop in ours.loops]

    sampled = found()
    monkeypatch.setattr("streamfx.cost.sampling.sample_of", list)
    monkeypatch.setattr("streamfx.cost.sampling.total_of", lambda part, stretch, costs: sum(costs[i] for i in part))
    every = found()
    assert sampled == every


def _highest(course: StepCourse, loop: LoopTime) -> int:
    sizes = zip(course.seconds, course.totals, strict=True)
    return max((size for at, size in sizes if loop.begins <= at < loop.ends), default=0)


def test_equal_layers_are_drawn_though_one_of_them_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of one is drawn for the others, at their own times."""
    drawn: list[int] = []
    of_all = SampledLoop._curve_of_all

    def noted(loop: SampledLoop, *more: Any) -> Any:
        drawn.append(1)
        return of_all(loop, *more)

    monkeypatch.setattr(SampledLoop, "_curve_of_all", noted)
    ids = tokens(2, 40)
    ours = streamfx.explain(Small(6), ids, ids, options={"chunk_size": 4, "loss_chunk_size": 4}).timeline.ours
    assert len(drawn) < len(ours.loops)
    for loop in ours.loops:
        counted = teeth(ours, CHUNK, loop.begins, loop.ends) + teeth(ours, LOSS, loop.begins, loop.ends)
        assert counted >= loop.drawn == loop.chunks == 10


def test_groups_of_chunks() -> None:
    assert groups_of(3) == [range(1), range(1, 2), range(2, 3)]
    groups = groups_of(1000)
    assert [position for group in groups for position in group] == list(range(1000))
    assert (len(groups), len(groups[0]), len(groups[-1])) == (MOST_TEETH, 1, 1)


def test_shortened_curves_keep_what_stands_out() -> None:
    points = [Point(Work(flops=i), {"a": 1000 * (i == 5003) + i % 7}) for i in range(10_001)]
    short = shortened(points, 100)
    assert len(short) <= 100
    assert (short[0], short[-1]) == (points[0], points[-1])
    assert points[5003] in short
    assert [point.work.flops for point in short] == sorted(point.work.flops for point in short)
    assert min(point.total for point in short) == 0


class Small(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("more", [{}, {"optimizer": "adamw"}, {"memory": "4MiB"}, {"baselines": False}], ids=str)
def test_plans(more: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Small()

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}

    report = streamfx.plan(model, seq=512, inputs=inputs, device="A100", **more)
    summary, timeline = report.summary(), report.timeline
    assert timeline.peak_bytes == summary["peak_bytes"]
    assert timeline.ours.end == pytest.approx(summary["seconds"])
    assert set(timeline.ours.terms[PARAMETERS]) == {summary["peak_by_term"][PARAMETERS]}
    assert (OPTIMIZER in timeline.ours.terms) == ("optimizer" in more)
    assert {course.way: course.peak_bytes for course in timeline.others} == {
        name: way["peak_bytes"] for name, way in summary["ways"].items()
    }
    for course in timeline.others:
        assert course.end == pytest.approx(summary["ways"][course.way]["seconds"])
    assert json.loads(json.dumps(timeline.as_dict()))["courses"][0]["seconds"] == list(timeline.ours.seconds)
