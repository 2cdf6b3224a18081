"""What a first step spends, phase by phase, in the process that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from benchmarks.training import Training

BEFORE_PASSES = DYNAMO, TRACE, COPY = ("Dynamo", "AOTAutograd's joint trace", "copy of the graph")
AFTER_PASSES = PROGRAMS, GUARDS, RUN, TOTAL, SECOND = ("host programs", "guards", "first run", "first step", "second step")


class Phases:
    """Processor seconds by phase: each begins when the last one ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.process_time()

    def end(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.began
        self.began = now


def first_step_seconds(training: Training) -> dict[str, float]:
    """Processor seconds of the first step by phase, each pass under its name; in all; and of the second step."""
    training.prepare()
    phases = Phases()
    with ExitStack() as patches:
        for patch in _patches(phases):
            patches.enter_context(patch)
        training.step()
    phases.end(RUN)
    total, second = sum(phases.seconds.values()), Phases()
    training.step()
    second.end(SECOND)
    return {**phases.seconds, TOTAL: total, **second.seconds}


def _patches(phases: Phases) -> list[Any]:
    """Return patches of the backend that end a phase wherever the next one begins."""
    from streamfx.frontend.backend import Compilation
    from streamfx.passes import run_pipeline

    compiled, partitioned = Compilation.compile, Compilation.partition

    def compile_(self: Any, inputs: Any) -> Callable[..., Any]:
        phases.end(DYNAMO)
        run = compiled(self, inputs)
        phases.end(PROGRAMS)

        def first(*arguments: Any) -> Any:
            phases.end(GUARDS)
            return run(*arguments)

        return first

    def partition(self: Any, *arguments: Any, **keywords: Any) -> Any:
        phases.end(TRACE)
        return partitioned(self, *arguments, **keywords)

    def passes(capture: Callable[[], Any], options: Any, after: Any = None) -> Any:
        def copied() -> Any:
            facts = capture()
            phases.end(COPY)
            return facts

        def ended(a_pass: Any, facts: Any) -> None:
            phases.end(a_pass.name)
            if after is not None:
                after(a_pass, facts)

        return run_pipeline(copied, options, ended)

    return [
        mock.patch.object(Compilation, "compile", compile_),
        mock.patch.object(Compilation, "partition", partition),
        mock.patch("streamfx.frontend.backend.run_pipeline", passes),
    ]
