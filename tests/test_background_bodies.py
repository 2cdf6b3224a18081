"""Loop bodies run eagerly at first; once another process has compiled all of them, a step changes over in both halves."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.cost import inductor_choice
from streamfx.runtime import background_bodies, body_jobs
from streamfx.runtime.background_bodies import wait_for_compiled_bodies
from streamfx.runtime.body_jobs import BodyJob, UnknownOperatorError, decode_graph, encode_graph, find_operator
from streamfx.runtime.compile_process import Answer
from streamfx.runtime.step_bodies import StepBodies
from tests.random_decoders.change_over import changes_of
from tests.random_decoders.kinds import numbered
from tests.support.background import Imitation, imitated
from tests.support.small import Causal, tokens
from tests.support.spread import only
from tests.support.stretches import for_sizes

LENGTH = 11


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="streambp", options={"chunk_size": 4, **options})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("streamfx")]


def cached(job: BodyJob) -> Answer:
    job.mark_as_cached()
    return Answer(job.key, "cached")


class Steps:
    """Steps of a small decoder, each compared with eager; `run` returns its gradients."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Causal().double()
        self.call = compiled(self.model, **options)

    def forward(self, length: int = LENGTH) -> Tensor:
        given = (tokens(2, length), tokens(2, length))
        loss: Tensor = self.call(*given)
        assert torch.allclose(loss, self.model(*given), rtol=1e-12)
        return loss

    def train(self, length: int) -> None:
        """Run a step without a comparison."""
        self.call(tokens(2, length), tokens(2, length)).backward()

    def run(self, length: int = LENGTH) -> list[Tensor]:
        weights = [*self.model.parameters()]
        found = torch.autograd.grad(self.forward(length), weights)
        wanted = torch.autograd.grad(self.model(tokens(2, length), tokens(2, length)), weights)
        assert all(torch.allclose(one, other, rtol=1e-11, atol=1e-13) for one, other in zip(found, wanted, strict=True))
        return [*found]


@pytest.mark.compiled
@pytest.mark.parametrize("polls", only([1, 3], [1, 2, 3, 4]))
def test_both_halves_change_over_in_one_step(polls: int, tmp_path: Path) -> None:
    """Jobs are submitted as the third step begins: a graph that runs once is not compiled. Bits change only once."""
    with imitated(tmp_path, Imitation(polls=polls)) as process:
        steps = Steps()
        found = [steps.run() for _ in range(polls + 5)]
    change = 3 + polls
    wanted = [(half, step, int(step >= change)) for step in range(1, polls + 6) for half in ("forward", "backward")]
    assert process.snapshots == wanted and process.started == 1
    for first, second in ((0, change - 2), (change - 1, -1)):
        assert all(map(torch.equal, found[first], found[second]))


@pytest.mark.compiled
def test_all_segments_change_over_at_once(tmp_path: Path) -> None:
    """Code of some is loaded earlier, and waits for that of the others."""
    with imitated(tmp_path, Imitation(per_poll=1)) as process:
        steps = Steps()
        for _ in range(12):
            steps.run()
    numbers = [number for half, _, number in process.snapshots if half == "forward"]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1} and sum(numbers) == 12 - 3 - len(process.compiled) + 1


@pytest.mark.compiled
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Markers of all jobs exist: the second step runs compiled bodies, and no process starts."""
    with imitated(tmp_path, Imitation(outcome=cached)) as first:
        steps = Steps()
        for _ in range(5):
            steps.run()
    torch._dynamo.reset()
    with imitated(tmp_path) as second:
        steps = Steps()
        for _ in range(3):
            steps.run()
    assert (first.started, second.started) == (1, 0)
    assert {job.key for job in first.compiled} == {job.key for job in second.compiled}
    assert [number for _, _, number in second.snapshots] == [0, 0, 1, 1, 1, 1]


@pytest.mark.compiled
def test_a_backward_runs_the_code_of_its_forward(tmp_path: Path) -> None:
    """Other forward graphs begin before it; some have no backward graph, which delays nothing."""
    with imitated(tmp_path) as process:
        steps = Steps()
        for _ in range(2):
            steps.run()
        open_losses = [steps.forward() for _ in range(3)]
        steps.forward()
        for loss in reversed(open_losses):
            loss.backward()
    forward = {step: number for half, step, number in process.snapshots if half == "forward"}
    backward = [(step, number) for half, step, number in process.snapshots if half == "backward"]
    assert forward == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert backward == [(1, 0), (2, 0), (5, 1), (4, 1), (3, 0)]


@pytest.mark.compiled
def test_code_stays_if_hooks_replace_saved_tensors(tmp_path: Path) -> None:
    """Their copies do not know the step, and the backward graph of any earlier forward graph may still come."""
    with imitated(tmp_path) as process:
        steps = Steps()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            first, second = steps.forward(), steps.forward()
            second.backward()
            for _ in range(3):
                steps.run()
            with wait_for_compiled_bodies():
                steps.run()
            first.backward()
        for _ in range(3):
            steps.run()
    assert [number for _, _, number in process.snapshots] == [0] * 2 * (2 + 3 + 1 + 3)


@pytest.mark.compiled
def test_a_checkpoint_recomputes_with_the_code_of_its_forward(tmp_path: Path) -> None:
    with imitated(tmp_path) as process:
        steps, given = Steps(), (tokens(2, LENGTH), tokens(2, LENGTH))
        for _ in range(4):
            losses = [checkpoint(steps.call, *given, use_reentrant=False) for _ in range(2)]  # type: ignore[no-untyped-call]
            sum(losses).backward()
    assert {number for _, _, number in process.snapshots} == {0} and len(process.snapshots) == 4 * 2 * 3


@pytest.mark.compiled
def test_a_process_without_jobs_ends_and_another_one_takes_later_jobs(tmp_path: Path) -> None:
    process = Imitation(outcome=lambda job: cached(job) if process.started > 1 else Answer("", "idle"))
    with imitated(tmp_path, process):
        steps = Steps()
        for _ in range(8):
            steps.run()
    assert process.started == 2 and process.snapshots[-1][-1] == 1


@pytest.mark.compiled
def test_lengths_that_occur_once_are_not_compiled(tmp_path: Path) -> None:
    with imitated(tmp_path) as process, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        steps = Steps()
        for length in (9, 10, 11, 13):
            steps.run(length)
    assert process.started == 0


@pytest.mark.compiled
def test_a_run_that_may_end_soon_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with imitated(tmp_path) as process:
        steps = Steps()
        for seconds, started in ((60.0, 0), (0.0, 1)):
            monkeypatch.setattr(background_bodies, "WORTH_SECONDS", seconds)
            for _ in range(4):
                steps.run()
            assert process.started == started
    assert process.snapshots[-1][2] == 1


@pytest.mark.compiled
def test_changing_lengths_use_the_code_of_earlier_ones(tmp_path: Path) -> None:
    """One dynamic program: full chunks occur in each step, and code for two lengths of the last chunk holds for others."""
    with imitated(tmp_path) as process, torch._dynamo.config.patch(assume_static_by_default=False):
        steps = Steps()
        for length in (17, 18, 19, 21, 22, 23, 25, 26, 27, 29, 30):
            steps.run(length)
    assert process.started == 2 and process.snapshots[-1][2] == 2
    assert all(job.family.at is not None for job in process.compiled)


@pytest.mark.compiled
def test_lengths_that_guards_exclude_get_code_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for full and last chunks holds only for full ones: a second change brings code for the last ones."""
    noted: list[int] = []
    note = StepBodies.note_layout

    def note_layout(self: StepBodies, *given: Any) -> bool:
        noted.append(self.number)
        return note(self, *given)

    monkeypatch.setattr(StepBodies, "note_layout", note_layout)
    with imitated(tmp_path, Imitation(polls=1)) as process:
        monkeypatch.setattr(body_jobs, "compile_for_sizes", for_typical_size)
        steps = Steps()
        for _ in range(8):
            steps.run()
    assert [number for half, _, number in process.snapshots if half == "forward"] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert set(noted) == {4}


def for_typical_size(graph: Any, typical_size: int, shapes: Any) -> Any:
    """Replace `compile_for_sizes`: a guard allows only the size for which code is optimized."""
    run, _ = for_sizes(graph, typical_size, shapes)
    return run, lambda n: n == typical_size


@pytest.mark.compiled
def test_a_process_that_ends_leaves_bodies_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with imitated(tmp_path, Imitation(ends=True)) as process:
        steps = Steps()
        for _ in range(6):
            steps.run()
    assert {number for _, _, number in process.snapshots} == {0} and process.started == 1 and not process.compiled
    assert [text.startswith("the process that compiles loop bodies has ended (exit status -11)") for text in said(caplog)] == [
        True
    ]


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["failed", "unknown operator"])
def test_a_segment_that_the_process_cannot_compile(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays eager, with one warning; this process compiles operators that only it knows."""
    with imitated(tmp_path, Imitation(outcome=lambda job: Answer(job.key, kind, "no reason"))) as process:
        steps = Steps()
        for _ in range(5):
            steps.run()
    assert process.snapshots[-1][2] == 1 and bool(process.compiled) == (kind == "unknown operator")
    assert [("no reason" in text, "runs uncompiled" in text) for text in said(caplog)] == [(True, True)] * (kind == "failed")


@pytest.mark.compiled
@pytest.mark.parametrize("reason", ["block", "deterministic", "settings", "ranks", "frozen"])
def test_some_programs_wait(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then segments compile on their first call, in this process."""
    monkeypatch.setattr(background_bodies, "_has_other_ranks", lambda: reason == "ranks")
    monkeypatch.setattr(sys, "frozen", reason == "frozen", raising=False)
    if reason == "settings":
        monkeypatch.setattr(background_bodies, "portable_settings", lambda: None)
    with imitated(tmp_path) as process:
        steps = Steps()
        torch.use_deterministic_algorithms(reason == "deterministic")
        try:
            if reason == "block":
                with wait_for_compiled_bodies():
                    steps.run()
            for _ in range(4):
                steps.run()
        finally:
            torch.use_deterministic_algorithms(False)
    assert process.started == 0 and len(process.snapshots) == (2 if reason == "settings" else 0)


@pytest.mark.compiled
def test_verify_checks_compiled_bodies(tmp_path: Path) -> None:
    with imitated(tmp_path) as process:
        found = streamfx.verify(Causal().double(), tokens(2, 19), tokens(2, 19), chunk_size=4)
    assert found.ok and not process.snapshots


@pytest.mark.compiled
def test_equal_bodies_compile_once_in_a_process(tmp_path: Path) -> None:
    """A second model with equal layers takes the code as soon as its layouts are known."""
    with imitated(tmp_path) as process:
        steps = Steps()
        for _ in range(5):
            steps.run()
        before, process.snapshots[:] = len(process.compiled), []
        torch._dynamo.reset()
        steps = Steps()
        for _ in range(3):
            steps.run()
    assert len(process.compiled) == before and process.started == 1
    assert [number for _, _, number in process.snapshots] == [0, 0, 1, 1, 1, 1]


@pytest.mark.compiled
def test_eager_bodies_take_no_more_memory(tmp_path: Path) -> None:
    """Notes of layouts keep no tensor alive: the peak is that of `bodies="eager"`, for which memory is planned."""
    peaks = []
    with imitated(tmp_path, Imitation(polls=99)):
        for bodies in ("eager", "auto"):
            torch._dynamo.reset()
            steps = Steps(bodies=bodies)
            for _ in range(2):
                steps.train(40)
            peaks.append(peak_live_bytes(partial(steps.train, 40)))
    assert peaks[1] <= peaks[0]


@pytest.mark.compiled
@pytest.mark.parametrize("number", only(range(2), range(500)))
def test_random_decoders_are_exact_at_each_change(number: int) -> None:
    """Bodies change over in each of several steps; all steps have eager's gradients."""
    changes_of(numbered(number))


@pytest.mark.compiled
def test_an_error_leaves_bodies_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that cannot be written, for example."""
    monkeypatch.setattr(BodyJob, "is_in_cache", lambda job: (tmp_path / "file" / job.key).touch())
    with imitated(tmp_path) as process:
        steps = Steps()
        for _ in range(4):
            steps.run()
    assert {number for _, _, number in process.snapshots} == {0} and process.started == 0
    assert ["runs uncompiled" in text and "FileNotFoundError" in text for text in said(caplog)] == [True]


def test_a_graph_of_an_unknown_operator() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.split_with_sizes.default, (x, [1, 2])),))
    nodes = encode_graph(graph)
    assert nodes is not None and str(decode_graph(nodes).graph) == str(graph)
    graph.call_function(len, (x,))
    assert encode_graph(graph) is None
    with pytest.raises(UnknownOperatorError, match="nowhere"):
        find_operator("nowhere.mm.default")


def test_only_auto_on_a_cpu_compiles_in_another_process() -> None:
    x = torch.fx.Graph()
    with mock.patch.object(inductor_choice, "device_of", return_value=torch.device("cuda")):
        assert not inductor_choice.compiles_in_background(streamfx.Options(), x)
    with mock.patch.object(inductor_choice, "device_of", return_value=torch.device("cpu")):
        assert inductor_choice.compiles_in_background(streamfx.Options(), x)
        assert not inductor_choice.compiles_in_background(streamfx.Options(bodies="inductor"), x)
