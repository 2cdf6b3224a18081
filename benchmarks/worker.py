"""A process that measures: reads a line of JSON per question from its input, writes a line of JSON per answer."""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from unittest import mock

import torch

from benchmarks.phases import first_step_seconds
from benchmarks.training import Training


def answer(training: Training, question: str) -> dict[str, Any]:
    if question in QUESTIONS:
        return QUESTIONS[question](training)
    return getattr(training, question)()


def warm(training: Training) -> dict[str, Any]:
    """Load the compiler's modules, so that what comes next is this training's own."""
    import streamfx.frontend.backend  # noqa: F401

    torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")(torch.ones(2, requires_grad=True)).backward()
    return {}


def compile_seconds(training: Training) -> dict[str, Any]:
    """Cold compilation: what the first step takes over the second, with the compiler's modules loaded before."""
    warm(training)
    first, second = (_timed(training) for _ in range(2))
    return {"wall": first["wall"] - second["wall"], "cpu": first["cpu"] - second["cpu"]}


def analysis_seconds(training: Training) -> dict[str, Any]:
    """Processor seconds of the passes, and of AOTAutograd until it hands over its joint graph; the operators of that."""
    from streamfx.frontend.backend import Compilation
    from streamfx.passes import run_pipeline as passes

    found: dict[str, Any] = {}
    compiled = Compilation.compile

    def compile_(self: Any, inputs: Any) -> Any:
        found["began"] = time.process_time()
        return compiled(self, inputs)

    def run_pipeline(capture: Any, options: Any, after: Any = None) -> Any:
        start = time.process_time()
        found["tracing"], found["nodes"] = start - found["began"], len(capture().joint.nodes)
        start = time.process_time()
        try:
            return passes(capture, options, after)
        finally:
            found["passes"] = time.process_time() - start

    with mock.patch.object(Compilation, "compile", compile_), mock.patch("streamfx.frontend.backend.run_pipeline", run_pipeline):
        training.prepare()
        training.step()
    return {name: found[name] for name in ("tracing", "passes", "nodes")}


def first_step(training: Training) -> dict[str, Any]:
    """Processor seconds of the first step by phase, on one thread: others count while they wait. Modules are loaded."""
    torch.set_num_threads(1)
    warm(training)
    return first_step_seconds(training)


def _timed(training: Training) -> dict[str, float]:
    training.prepare()
    wall, processor = time.perf_counter(), time.process_time()
    training.step()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - processor}


QUESTIONS = {"warm": warm, "compile": compile_seconds, "analysis": analysis_seconds, "first step": first_step}


def main() -> None:
    training = Training(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(training, line.strip())), flush=True)


if __name__ == "__main__":
    main()
