"""The live bytes along a step: their maximum is the peak, and each chunk shows. Printed loop bodies run. Profiles of steps."""

import copy
import inspect
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
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
from streamfx.runtime.probes import measurement
from streamfx.tools.report.loop_bodies import python_of
from streamfx.tools.report.profile_text import measured
from streamfx.tools.report.timeline import LoopTime, MemoryTimeline
from tests.support.layered import Layered
from tests.support.small import EXAMPLES, Causal, tokens
from tests.support.spread import spread

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


# -- `streamfx.profile`: the real times and bytes of a step, and the predicted peak

ROWS = tokens(2, 1024)
OPTIONS: dict[str, Any] = {"chunk_size": 128, "loss_chunk_size": 128}
CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture(scope="module")
def step() -> Callable[[], None]:
    """A compiled step."""
    torch._dynamo.reset()
    model = Layered(3, 32)
    compiled = torch.compile(model, backend="streambp", options={**OPTIONS, "bodies": "eager"})

    def run() -> None:
        compiled(ROWS).backward()

    run()
    model.zero_grad()
    return run


@pytest.fixture(scope="module")
def profiled(step: Callable[[], None]) -> streamfx.Profile:
    with streamfx.profile() as profile:
        step()
    return profile


def test_a_profile_has_the_loops_of_explain(profiled: streamfx.Profile) -> None:
    explained = streamfx.explain(Layered(3, 32), ROWS, options=OPTIONS).summary()
    expected = [
        (run["name"], stage["name"], run["half"], run["chunks"]) for stage in explained["stages"] for run in stage["runs"]
    ]
    found = [(loop["name"], loop["stage"], loop["half"], loop["chunks"]) for loop in profiled.summary()["loops"]]
    assert sorted(found) == sorted(expected)
    halves = [half for _, _, half, _ in found]
    assert halves == sorted(halves, reverse=True) and set(halves) == {"forward", "backward"}
    assert profiled.predicted_peak_bytes == explained["peak_bytes"]
    assert profiled.peak_bytes == pytest.approx(explained["peak_bytes"], rel=0.05)
    assert profiled.peak_bytes == max(loop.peak_bytes or 0 for loop in profiled.measured.loops)
    edges = [edge for loop in profiled.measured.loops for edge in (loop.start, loop.end)]
    assert edges == sorted(edges) and edges[0] > 0 and edges[-1] < profiled.measured.seconds
    assert sum(loop.seconds for loop in profiled.measured.loops) > 0.3 * profiled.measured.seconds


def test_trace_and_table_show_each_loop(profiled: streamfx.Profile, tmp_path: Path) -> None:
    trace = json.loads(profiled.to_perfetto(tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert max(sum(event["args"].values()) for event in events if event["ph"] == "C") == profiled.peak_bytes
    stages, names = ([event["name"] for event in events if event["ph"] == "X" and event["tid"] == of] for of in (1, 2))
    assert names == [loop.name for loop in profiled.measured.loops]
    assert stages == ["layers.0", "layers.1", "layers.2", "head", "layers.2", "layers.1", "layers.0"]
    assert "predicted" not in json.dumps(trace)
    with pytest.raises(streamfx.ReportError, match="no folder"):
        profiled.to_perfetto(tmp_path / "nowhere" / "trace.json")
    lines = str(profiled).splitlines()
    assert "were predicted for activations and gradients" in lines[1]
    body = [line.split() for line in lines[4:]]
    assert [row[:4] for row in body[:2]] == [["layers.0-2", "forward", "3", "24"], ["head", "forward", "1", "8"]]
    assert ["layers.0-2", "backward"] in [row[:2] for row in body]
    assert sum(float(line.split(" %")[0].split()[-1]) for line in lines[4:]) == pytest.approx(100, abs=1)


def test_live_bytes_are_those_of_the_busiest_device() -> None:
    moves = [(10, 5, "cpu"), (20, 100, "cuda"), (30, 50, "cuda"), (40, -100, "cuda"), (60, 20, "cuda"), (90, 1000, "cuda")]
    found = measured(0, 80, moves, [(0, 15, "a", "s", "forward", 1), (35, 70, "b", "s", "backward", 2)])
    assert (found.device, found.alive, found.peak_bytes) == ("cuda", (100, 150, 50, 70), 150)
    assert [loop.peak_bytes for loop in found.loops] == [0, 150]


def in_a_thread(step: Callable[[], object]) -> None:
    (thread := threading.Thread(target=step)).start()
    thread.join()


def within_a_profiler(step: Callable[[], None]) -> None:
    with suppress(RuntimeError), torch.profiler.profile(activities=CPU):
        step()


UNSEEN = [(within_a_profiler, "another torch profiler was opened"), (in_a_thread, "in another thread")]


@pytest.mark.parametrize(("run", "why"), spread(UNSEEN, 2))
def test_unseen_bytes_are_not_reported_as_zero(
    step: Callable[[], None], run: Callable[..., None], why: str, tmp_path: Path
) -> None:
    with streamfx.profile() as profile:
        kept = torch.zeros(1000)
        run(step)
    found = profile.summary()
    assert kept.nbytes and found["peak_bytes"] is None and why in found["unseen"]
    assert {loop["peak_bytes"] for loop in found["loops"]} == {None} and len(found["loops"]) > 4
    assert all(loop["seconds"] > 0 for loop in found["loops"])
    assert "memory   not measured: " in str(profile) and why in str(profile) and "at the peak" not in str(profile)
    for ask in (lambda: profile.peak_bytes, lambda: profile.timeline):
        with pytest.raises(streamfx.ProfileError, match=why):
            ask()
    events = json.loads(profile.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    assert not any(event["args"] for event in events if event["ph"] == "C") and any(event["ph"] == "X" for event in events)


def sorted_step() -> None:
    torch.compile(lambda x: x.sort(0).values.sum(), backend="streambp")(torch.randn(4, requires_grad=True)).backward()


def test_several_calls_or_graphs_have_no_predicted_peak(step: Callable[[], None]) -> None:
    """Two steps that are alive at once take more than one; a graph that does not stream counts as a step."""
    for other in (step, sorted_step):
        with streamfx.profile() as profile:
            step()
            other()
        assert profile.predicted_peak_bytes is None and "predicted" not in str(profile)


def test_a_block_without_a_compiled_step_has_no_loops() -> None:
    with streamfx.profile() as profile:
        kept = torch.zeros(1000)
    assert "no loop of streamfx ran" in str(profile)
    assert profile.summary()["loops"] == [] and profile.predicted_peak_bytes is None
    assert profile.peak_bytes == kept.nbytes
    with streamfx.profile() as profile:
        in_a_thread(lambda: torch.zeros(1000).sum())
    assert profile.summary()["peak_bytes"] is None
    assert "not measured: no allocation in the thread that entered the block" in str(profile)


def test_compile_time_is_reported_and_profiling_changes_no_gradient() -> None:
    model, ids = Causal().double(), tokens(2, 64)
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 16, "bodies": "eager"})
    with streamfx.profile() as first:
        compiled(ids, ids).backward()
        str(streamfx.explain(model, ids, ids, chunk_size=16))  # loops of a cost prediction do not count
        torch._dynamo.reset()  # compile time counts although Dynamo forgets it
    seconds = first.summary()["compiled_seconds"]
    assert len(first.measured.loops) == 4
    assert sum(loop.seconds for loop in first.measured.loops) < seconds < first.measured.seconds
    assert "compiling took " in str(first).splitlines()[1] and "measure the next step" in str(first)
    (row,) = (line for line in str(first).splitlines() if line.startswith("  compiling  "))
    assert row.split()[-1] == "%"
    compiled(ids, ids)
    gradients = []
    for around in (nullcontext(), streamfx.profile()):
        model.zero_grad()
        with around as second:
            compiled(ids, ids).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert second is not None and second.summary()["compiled_seconds"] == 0 and "compil" not in str(second)


def test_one_profile_at_a_time_measures_one_block() -> None:
    refused: list[str] = []

    def other() -> None:
        with pytest.raises(streamfx.ProfileError, match=r"another streamfx.profile\(\) is active") as caught, streamfx.profile():
            pass
        refused.append(str(caught.value))

    with streamfx.profile() as profile:
        assert measurement.probe is not None
        with pytest.raises(streamfx.ProfileError, match="still running"):
            str(profile)
        in_a_thread(other)
        other()
    assert len(refused) == 2 and str(profile)
    with pytest.raises(streamfx.ProfileError, match="already used"), profile:
        pass
    with torch.profiler.profile(activities=CPU), pytest.raises(streamfx.ProfileError, match="torch's profiler is active"):
        streamfx.profile().__enter__()
    with pytest.raises(ZeroDivisionError), streamfx.profile() as failed:
        _ = 1 / 0
    assert measurement.probe is None
    with pytest.raises(streamfx.ProfileError, match="ended with an error"):
        failed.summary()
