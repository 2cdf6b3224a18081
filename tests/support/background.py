"""Loop bodies that another process would compile, without one: an interpreter is the compiler, and answers arrive when chosen."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from streamfx.cost import inductor_choice
from streamfx.runtime import background_bodies, body_jobs, compile_process
from streamfx.runtime.body_jobs import BodyJob, decode_job
from streamfx.runtime.compile_process import Answer, JobQueue
from streamfx.runtime.outer import HostProgramRunner
from streamfx.runtime.step_bodies import StepBodies
from tests.support.stretches import for_one_size, for_sizes, interpreted


@dataclass
class Imitation:
    """Replaces the process: it answers all jobs at the n-th poll, for n = `polls`, each with an outcome, or ends then."""

    polls: int = 1
    per_poll: int = 1000  # answers
    outcome: Callable[[BodyJob], Answer] = lambda job: Answer(job.key, "cached")
    ends: bool = False
    jobs: list[BodyJob] = field(default_factory=list)
    started: int = 0
    is_alive: bool = True
    returncode: int | None = None
    snapshots: list[tuple[str, int, int]] = field(default_factory=list)  # (half, step, number of the snapshot) of each run
    compiled: list[BodyJob] = field(default_factory=list)  # in this process

    def start(self) -> "Imitation":
        self.started += 1
        return self

    def submit(self, job: BodyJob) -> None:
        decoded = decode_job(job.encoded)
        assert decoded == job and decoded.key == job.key
        self.jobs.append(job)

    def receive(self) -> Iterator[Answer]:
        self.polls -= 1
        if self.polls <= 0 and self.ends:
            self.close()
        if self.polls <= 0 and self.is_alive:
            jobs, self.jobs = self.jobs[: self.per_poll], self.jobs[self.per_poll :]
            yield from map(self.outcome, jobs)

    def close(self) -> None:
        self.is_alive, self.returncode = not self.ends, -11

    forget = close


def for_fixed_sizes(graph: Any, tensors: Sequence[Any]) -> Callable[..., Any]:
    """Replace `compile_for_fixed_sizes`."""
    return for_one_size(graph, [example.new_empty_strided(size, stride) for size, stride, example in tensors])


@contextmanager
def imitated(folder: Path, imitation: Imitation | None = None) -> Iterator[Imitation]:
    """Run bodies of any size eagerly until the process answers; `folder` has the cache's markers."""
    process = imitation or Imitation()
    compile_here, step_for = BodyJob.compile, HostProgramRunner.step_for

    def compiled(job: BodyJob) -> Any:
        process.compiled.append(job)
        return compile_here(job)

    def noted(self: HostProgramRunner, arguments: Sequence[Any]) -> StepBodies | None:
        step = step_for(self, arguments)
        half = "backward" if self._is_backward else "forward"
        process.snapshots += [(half, step.number, step.snapshot.number)] if step is not None else []
        return step

    with (
        interpreted(),
        mock.patch.object(inductor_choice, "MIN_COMPILED_FLOPS", 0),
        mock.patch.object(inductor_choice, "has_compiler", return_value=True),
        mock.patch.object(body_jobs, "compile_for_fixed_sizes", for_fixed_sizes),
        mock.patch.object(body_jobs, "compile_for_sizes", for_sizes),
        mock.patch.object(body_jobs, "cache_folder", return_value=str(folder)),
        mock.patch.object(background_bodies, "LOAD_SECONDS", 60.0),
        mock.patch.object(background_bodies, "WORTH_SECONDS", 0.0),
        mock.patch.object(compile_process, "job_queue", JobQueue()),
        mock.patch.object(JobQueue, "start_process", process.start),
        mock.patch.object(BodyJob, "compile", compiled),
        mock.patch.object(HostProgramRunner, "step_for", noted),
    ):
        yield process
