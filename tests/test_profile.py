"""`streamfx.profile` reports the real times and bytes of a step, and the predicted peak."""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import streamfx
from streamfx.runtime.probes import measurement
from streamfx.tools.report.profile_text import measured
from tests.support.layered import Layered
from tests.support.small import Causal, tokens
from tests.support.spread import spread

pytestmark = pytest.mark.compiled

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
