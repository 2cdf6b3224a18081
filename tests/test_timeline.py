"""The live bytes along a step: their maximum is the peak, and each chunk shows. Printed loop bodies run."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import streamfx
from streamfx.cost.categories import BETWEEN_GRAPHS, CHUNK, LOSS
from streamfx.cost.curve import Point, shortened
from streamfx.cost.sampling import MAX_GROUPS, SampledLoop, chunk_groups
from streamfx.cost.work import Work
from streamfx.runtime.loop import Loop
from streamfx.tools.report.loop_bodies import python_of
from streamfx.tools.report.timeline import LoopTime, MemoryTimeline
from tests.support.layered import Layered
from tests.support.small import EXAMPLES, Causal, tokens

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_highest_point_is_the_peak(example: str) -> None:
    model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    explanation = streamfx.explain(model, *arguments, options={"chunk_size": 3})
    summary, timeline = explanation.summary(), explanation.timeline
    peaks = {course.way: course.peak_bytes for course in timeline.courses}
    assert timeline.peak_bytes == peaks["streamfx"] == summary["peak_bytes"]
    assert peaks["eager"] == summary["baseline_peak_bytes"]
    for course in timeline.courses:
        assert list(course.seconds) == sorted(course.seconds) and 0 < course.backward_start <= course.end


def test_saved_values_of_a_graph_stay_alive_while_other_graphs_run() -> None:
    explanation = streamfx.explain(Layered(3, kind="breaks"), tokens(2, 9), options={"chunk_size": 2})
    summary, timeline = explanation.summary(), explanation.timeline
    assert timeline.peak_bytes == summary["peak_bytes"]
    peaks = {course.way: course.peak_bytes for course in timeline.others}
    assert peaks == {"gradient checkpointing": summary["checkpointing_peak_bytes"], "eager": summary["baseline_peak_bytes"]}
    assert max(timeline.ours.terms[BETWEEN_GRAPHS]) > 0


def rises(course: MemoryTimeline, term: str, loop: LoopTime) -> int:
    """How often the bytes of a term rise from zero while a loop runs."""
    column = course.terms.get(term, (0,) * len(course.seconds))
    sizes = [size for at, size in zip(course.seconds, column, strict=True) if loop.start <= at <= loop.end]
    return sum(before == 0 < after for before, after in zip([0, *sizes], sizes, strict=False))


@pytest.mark.parametrize("chunks", [5, 200])
def test_each_sampled_chunk_shows(chunks: int) -> None:
    ids = tokens(2, 6 * chunks)
    explanation = streamfx.explain(Causal(), ids, ids, options={"chunk_size": 6, "loss_chunk_size": 6})
    ours = explanation.timeline.ours
    for loop in ours.loops:
        assert (loop.chunks, loop.sampled_chunks) == (chunks, min(chunks, MAX_GROUPS))
        assert 0 <= loop.start < loop.end <= ours.end
    first = ours.loops[0]
    assert rises(ours, CHUNK, first) >= first.sampled_chunks
    assert len(ours.seconds) <= 4000
    busy = [at for at, size in zip(ours.seconds, ours.terms[CHUNK], strict=True) if size and at < first.end]
    assert busy[-1] - first.start > (1 - 1.5 / chunks) * (first.end - first.start)  # a sampled chunk takes its group's time
    assert ours.peak_bytes == explanation.summary()["peak_bytes"]


def test_equal_layers_are_drawn_from_one_layers_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled_chunks: list[int] = []
    of_all = SampledLoop._curve_of_all

    def noted(*given: Any) -> Any:
        sampled_chunks.append(1)
        return of_all(*given)

    monkeypatch.setattr(SampledLoop, "_curve_of_all", noted)
    ours = streamfx.explain(Layered(6), tokens(2, 40), options={"chunk_size": 4, "loss_chunk_size": 4}).timeline.ours
    assert len(sampled_chunks) < len(ours.loops)
    for loop in ours.loops:
        assert rises(ours, CHUNK, loop) + rises(ours, LOSS, loop) >= loop.sampled_chunks == loop.chunks == 10


def test_shortened_curves_keep_extremes_and_chunks_are_grouped() -> None:
    assert chunk_groups(3) == [range(1), range(1, 2), range(2, 3)]
    groups = chunk_groups(1000)
    assert [position for group in groups for position in group] == list(range(1000))
    assert (len(groups), len(groups[0]), len(groups[-1])) == (MAX_GROUPS, 1, 1)
    points = [Point(Work(flops=i), {"a": 1000 * (i == 5003) + i % 7}) for i in range(10_001)]
    short = shortened(points, 100)
    assert len(short) <= 100 and points[5003] in short and min(point.total for point in short) == 0
    assert (short[0], short[-1]) == (points[0], points[-1])
    assert [point.work.flops for point in short] == sorted(point.work.flops for point in short)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("example", EXAMPLES)
def test_printed_bodies_compute_the_results_of_loops(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a training step, the printed body computes each chunk a second time."""
    seen: list[str] = []

    def runner(loop: Loop, bounds: Any) -> Callable[..., Any]:
        name, body, namespace = loop.spec.name, loop.spec.body, dict[str, Any]()
        exec(python_of({name: body}), namespace)
        own = vars(namespace[name]).get("__init__")
        constants = {each: getattr(body, each) for each in [*inspect.signature(own).parameters][1:]} if own else {}
        printed = namespace[name](**constants)
        seen.append(name)

        def run(*feeds: Any) -> Any:
            # copies share memory as the values do: a chunk's rows of a buffer are among the visible rows
            copies = copy.deepcopy([value.detach() if isinstance(value, Tensor) else value for value in feeds])
            expected, found = body.forward(*feeds), printed(*copies)
            assert same(found, expected)
            assert same(copies, list(feeds))  # sums and buffers, too
            return expected

        return run

    monkeypatch.setattr(Loop, "runner", runner)
    model, given = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    arguments = [value.requires_grad_() if value.is_floating_point() else value for value in given]
    options: dict[str, Any] = {"bodies": "eager", "chunk_size": 3, "loss_chunk_size": 2}
    results = torch.compile(model, backend="streambp", options=options)(*arguments)
    torch.stack([value.sum() for value in (results if isinstance(results, tuple) else (results,))]).sum().backward()
    assert any("forward" in name for name in seen) and any("backward" in name for name in seen)


def test_bodies_of_a_module_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal of an unknown module suggests similar names."""
    explanation = streamfx.explain(Layered(3), tokens(2, 12), options={"chunk_size": 4})
    text = explanation.print_readable("layers.1")
    assert capsys.readouterr().out == text + "\n"
    assert text.count("class layers_1_") == 3 and "class head_" not in text
    assert "layered.py" in text  # the source of each line
    compile(text, "printed", "exec")
    linear = explanation.print_readable("layers.1.up", print_output=False)
    assert linear.count("class ") == linear.count("class layers_1_") == 3
    everything = explanation.print_readable(print_output=False)
    assert everything.count("class ") == len(explanation.graphs) == 10
    assert all(f"class {name}(" in everything for name in explanation.graphs)
    for name, said in (
        ("layer.1", r"(?s)'layer\.1'.*none of its operators streams.*'layers\.1'"),
        ("zzz", "for example"),
        ("", ""),
    ):
        with pytest.raises(streamfx.ReportError, match=said):
            explanation.print_readable(name)
    with pytest.raises(streamfx.ReportError, match="no modules in loops"):
        streamfx.explain(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True)).print_readable("up")
