"""Loop bodies that run eagerly at first, and compiled once another process has compiled all of them.

A `BackgroundBodies` belongs to one program, a forward and a backward graph. It notes which layouts the inputs of its segments
have, submits jobs for those that occur in two steps, and takes over the compiled code when a forward graph begins: for all
segments of both graphs at once. Layouts that occur later run eagerly until they are compiled in the same way.

# NOTE [Both halves of a step run the same code]
A step takes the snapshot of the compiled code that is current when its forward graph begins; its saved values bring it to the
backward graph (`step_bodies.py`). So a change never affects a step that has begun, and a forward graph without a backward
graph delays no change. If no saved value can bring it (saved-tensor hooks of the user or of a checkpoint replace them, or all
are inputs and views), the code never changes again: backward graphs that are still to come take the current snapshot.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from threading import Lock
from typing import Any

import torch

from streamfx.log import log
from streamfx.runtime import compile_process, compiled_segments
from streamfx.runtime.body_jobs import BodyJob, encode_graph, is_portable
from streamfx.runtime.compile_process import Answer
from streamfx.runtime.compiled_segments import MAX_VERSIONS, NOT_COMPILED, Segment, warn_once
from streamfx.runtime.inductor_errors import blame
from streamfx.runtime.shape_families import (
    Family,
    FamilyCode,
    Numbers,
    family_of,
    find_code,
    layout_of,
    widened_family,
    with_contiguous_rows,
)
from streamfx.runtime.step_bodies import Snapshot, StepBodies, step_of
from streamfx.torch_private.autograd import saves_tensors_themselves
from streamfx.torch_private.dynamo import compiling
from streamfx.torch_private.inductor_cache import portable_settings

LOAD_SECONDS = 0.05  # the time of a step that may go to loading compiled code; at least one segment is loaded
# of steps before anything is compiled: compilation takes 20 s of a core, and saves a tenth of a step or less
WORTH_SECONDS = 120.0
MANY_LAYOUTS = 6  # of a family: a segment whose inputs have another length in each step is compiled, too
MAX_NOTED_LAYOUTS = 64  # of a segment: sizes that depend on data differ in each chunk
PROCESS_ENDED = (
    "the process that compiles loop bodies has ended (%s): they run eagerly. The result is exact, but steps are slower."
)
TAKEN_OVER = "loop bodies run compiled from step %d on (%d segments)"
num_changes = 0  # of any program in this process to newly compiled code

_waits: ContextVar[bool] = ContextVar("streamfx_wait_for_compiled_bodies", default=False)


@contextmanager
def wait_for_compiled_bodies() -> Iterator[None]:
    """Context manager: programs that run here for the first time compile their bodies at once, in this process."""
    token = _waits.set(True)
    try:
        yield
    finally:
        _waits.reset(token)


@dataclass
class _Group:
    """A segment, and the layouts of its inputs that have occurred, for inputs of the same kinds."""

    segment: Segment
    kinds: tuple[Any, ...]
    # the number of steps in which these numbers occurred, and the last of these steps
    steps: dict[Numbers, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[Any, ...] | None:
        return encode_graph(self.segment.module.graph)

    def note(self, numbers: Numbers, step: int) -> bool:
        """Count a step in which these numbers occurred; return whether they now occurred for the first or second time."""
        count, last_step = self.steps.get(numbers, (0, 0))
        if last_step == step or (not count and len(self.steps) >= MAX_NOTED_LAYOUTS):
            return False
        self.steps[numbers] = count + 1, step
        return count < 2

    def families(self, codes: Sequence[FamilyCode], min_steps: int) -> Iterator[tuple[Family, Numbers]]:
        """Yield families to compile, with the numbers to optimize for, so that all numbers without code get code.

        A family is omitted if none of its numbers has occurred in `min_steps` steps, unless it has many numbers.
        """
        missing = [numbers for numbers in self.steps if find_code(codes, numbers) is None]
        num_codes = len(codes)
        while missing and num_codes < MAX_VERSIONS:
            family, typical = _family_for(codes, missing)
            members = [numbers for numbers in missing if family.member(numbers) is not None]
            missing = [numbers for numbers in missing if numbers not in members]
            counts = [self.steps[numbers][0] for numbers in members]
            if max(counts) >= min_steps or sum(counts) >= MANY_LAYOUTS:
                num_codes += 1
                yield family, typical


def _family_for(codes: Sequence[FamilyCode], missing: Sequence[Numbers]) -> tuple[Family, Numbers]:
    """Return a family that contains the first of these numbers, and others if possible; and the numbers with its largest n."""
    first, *others = missing
    for other in others:
        family = family_of(first, other)
        if family is not None and family.at is not None:
            return family, max(first, other, key=itemgetter(family.at))
    return widened_family(codes, first), first


class BackgroundBodies:
    """The state of a program whose bodies another process compiles (see the module)."""

    def __init__(self, has_backward: bool) -> None:
        """Begin with eager bodies; `has_backward`: the program has a backward graph."""
        self.has_backward = has_backward
        self.is_waiting = False  # segments compile on their first call, in this process
        self.is_abandoned = False  # the process ended: nothing more is compiled
        self.snapshot = Snapshot()
        self.num_steps = 0
        self._begin = 0.0  # of the first step
        self._is_cached = True  # as far as is known, all jobs are in Inductor's cache
        self._num_backwards = 0
        self._last_step: StepBodies | None = None
        self._groups: dict[Hashable, _Group] = {}  # keyed by the structure of the segment, and the kinds of its inputs
        self._is_changed = False  # a layout occurred for the first or second time since the last plan
        self._pending: dict[str, tuple[Hashable, BodyJob]] = {}  # jobs whose code is not loaded, by key
        self._loaded: dict[Hashable, list[FamilyCode]] = {}  # code for the next snapshot, keyed as `_groups`
        self._is_complete = False  # with the pending jobs, all layouts have code for which code pays
        self._lock = Lock()

    # -- steps

    def begin_forward(self) -> StepBodies | None:
        """Begin a step, with all code that is ready; None if segments compile on their first call, as without this class."""
        if self._must_wait():
            return None
        if self._lock.acquire(blocking=False):  # otherwise, another thread begins a step
            try:
                self._advance()
            except Exception as error:  # for example, the cache's folder cannot be written
                warn_once(NOT_COMPILED, blame(error))
                self._abandon()
            finally:
                self._lock.release()
        if self.is_waiting:
            return None
        self.num_steps += 1
        self._last_step = StepBodies(self, self.snapshot, self.num_steps)
        return self._last_step

    def end_forward(self, step: StepBodies | None, is_saved: bool) -> None:
        """End the forward graph; `is_saved`: a saved value will bring the step to the backward graph."""
        is_lost = self.has_backward and not (is_saved and saves_tensors_themselves())
        if step is not None and is_lost and not self.is_abandoned:
            self.snapshot = step.snapshot
            self._abandon()

    def begin_backward(self, arguments: Sequence[Any]) -> StepBodies | None:
        """Return the step of a backward graph with these inputs."""
        self._num_backwards += 1
        return step_of(arguments) or (None if self.is_waiting else self._last_step)

    def _must_wait(self) -> bool:
        """Return whether segments compile on their first call; once true for a program, it stays true.

        With several ranks, all would have to change in the same step. With deterministic algorithms, the step of the change
        would decide about rounding. If the code never changes again (`_abandon`), it does not change in this way either.
        """
        self.is_waiting = self.is_waiting or (
            not self.is_abandoned
            and (_waits.get() or not _can_start_process() or torch.are_deterministic_algorithms_enabled() or _has_other_ranks())
        )
        return self.is_waiting

    # -- layouts

    def note_inputs(self, segment: Segment, inputs: Sequence[Any], step: int) -> None:
        """Note inputs of a segment: numbers, and (shape, strides, dtype, device) of tensors."""
        kinds, numbers = layout_of([with_contiguous_rows(_without_memory(value)) for value in inputs])
        devices = (value[3] if isinstance(value, tuple) else None for value in inputs)
        own_kinds = (kind if device is None else (kind[0], device, kind[2]) for kind, device in zip(kinds, devices, strict=True))
        self.note_layout(segment, tuple(own_kinds), numbers, step)

    def note_layout(self, segment: Segment, kinds: Hashable, numbers: Numbers, step: int) -> None:
        """Note that a segment ran eagerly in a step, on inputs of these kinds, with these sizes and strides."""
        assert isinstance(kinds, tuple)
        key = segment.structure, kinds
        group = self._groups.get(key) or self._groups.setdefault(key, _Group(segment, kinds))
        self._is_changed |= group.note(numbers, step)

    def may_get_code(self, segment: Segment, kinds: Hashable) -> bool:
        """Return whether a later snapshot may have more code for a segment and inputs of these kinds."""
        return not self.is_abandoned and len(self.snapshot.codes.get((segment.structure, kinds), ())) < MAX_VERSIONS

    # -- jobs

    @property
    def _has_run_long(self) -> bool:
        return time.monotonic() - self._begin >= WORTH_SECONDS

    def _advance(self) -> None:
        """Load code that is ready, change over if nothing is pending, and plan jobs for new layouts."""
        if self._pending:
            self._load_answered()
            self._change_over_if_complete()
        self._begin = self._begin or time.monotonic()
        may_plan = self._is_cached or self._has_run_long
        if not self._pending and self._is_changed and not self.is_abandoned and may_plan:
            self._plan()
            self._change_over_if_complete()

    def _plan(self) -> None:
        """Find the jobs for layouts without code. If all are in Inductor's cache, load them; otherwise submit those that pay.

        A job pays if its layout has occurred in two steps, and if the program has run for `WORTH_SECONDS`: one that ends soon
        would gain less than the compilation costs.
        """
        if self.has_backward and not self._num_backwards:
            return
        self._is_changed = False
        settings = portable_settings()
        if settings is None or not all(group.nodes is not None and is_portable(group.kinds) for group in self._groups.values()):
            self.is_waiting = True
            return
        self._take_existing_code()
        jobs = self._jobs(settings, min_steps=1)
        if all(job.is_in_cache() for _, job in jobs.values()):
            for key, job in jobs.values():
                self._load(key, job, Answer(job.key, "cached"))
            self._is_complete = True
        elif not self._has_run_long:
            self._is_cached, self._is_changed = False, True
        elif (self._num_backwards if self.has_backward else self.num_steps) >= 2:
            self._pending = self._jobs(settings, min_steps=2)
            self._is_complete = True
            for _, job in self._pending.values():
                compile_process.job_queue.submit(job)

    def _jobs(self, settings: bytes, min_steps: int) -> dict[str, tuple[Hashable, BodyJob]]:
        """Return jobs, with the keys of their groups, for layouts without code that have occurred in `min_steps` steps."""
        jobs = {}
        for key, group in self._groups.items():
            for family, numbers in group.families(self._codes(key), min_steps):
                assert group.nodes is not None
                job = BodyJob(group.nodes, group.kinds, family, numbers, settings)
                jobs[job.key] = key, job
        return jobs

    def _codes(self, key: Hashable) -> list[FamilyCode]:
        """Return the code for a group: of the current snapshot, and loaded for the next one."""
        return [*self.snapshot.codes.get(key, ()), *self._loaded.get(key, ())]

    def _take_existing_code(self) -> None:
        """Load code that other programs of this process have compiled, for layouts without code."""
        for key, group in self._groups.items():
            for numbers in group.steps:
                code = find_code(compiled_segments._versions.get(key, ()), numbers)
                if code is not None and find_code(self._codes(key), numbers) is None:
                    self._loaded.setdefault(key, []).append(code)

    def _load_answered(self) -> None:
        """Load the code of jobs that the process has answered, as many as a step may take. If it has ended, give up."""
        jobs, start = compile_process.job_queue, time.perf_counter()
        jobs.poll()
        for name, (key, job) in list(self._pending.items()):
            answer = jobs.answers.get(name)
            if answer is not None and (time.perf_counter() - start < LOAD_SECONDS):
                del self._pending[name]
                self._load(key, job, answer)
            elif answer is None:
                jobs.submit(job)  # nothing happens if it is queued; a forked process has lost its jobs
        if jobs.is_broken and any(name not in jobs.answers for name in self._pending):
            warn_once(PROCESS_ENDED, jobs.reason)
            self._abandon()

    def _abandon(self) -> None:
        """Compile nothing more: later steps run as the last one."""
        self.is_abandoned = True
        self._pending.clear()
        self._loaded.clear()

    def _load(self, key: Hashable, job: BodyJob, answer: Answer) -> None:
        """Load the code of a job from Inductor's cache; code that runs eagerly if it could not be compiled.

        An operator that the process does not know is one of this process: then, it compiles here.
        """
        code = find_code(compiled_segments._versions.get(key, ()), job.numbers)
        if code is None:
            code = job.eager_code(self._groups[key].segment.module)
            if answer.outcome == "failed":
                warn_once(NOT_COMPILED, answer.error)
            else:
                try:
                    with compiling():
                        code = job.compile()
                except Exception as error:
                    warn_once(NOT_COMPILED, blame(error))
            compiled_segments._versions.setdefault(key, []).append(code)
        self._loaded.setdefault(key, []).append(code)

    def _change_over_if_complete(self) -> None:
        """Make a snapshot of the current and the loaded code, which steps take from now on, unless more code is to come."""
        if self._pending or not self._loaded or not self._is_complete:
            return
        global num_changes
        num_changes += 1
        codes = {key: tuple(self._codes(key)) for key in (*self.snapshot.codes, *self._loaded)}
        self._loaded, self._is_changed = {}, True  # guards may restrict code to some of the lengths for which it was compiled
        self.snapshot = Snapshot(self.snapshot.number + 1, codes)
        log.info(TAKEN_OVER, self.num_steps + 1, len(codes))


def _without_memory(value: Any) -> Any:
    """Return a tensor on the meta device for (shape, strides, dtype, device); a number unchanged."""
    if not isinstance(value, tuple):
        return value
    shape, strides, dtype, _ = value
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _can_start_process() -> bool:
    """Return whether this process can start another Python process; in a frozen program, the executable is not Python."""
    return os.name == "posix" and bool(sys.executable) and not getattr(sys, "frozen", False)


def _has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
