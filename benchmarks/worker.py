"""A process that measures: reads a line of JSON per question from its input, writes a line of JSON per answer."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.training import Training


def answer(training: Training, question: str) -> dict[str, Any]:
    if question == "compile":
        return compile_seconds(training)
    return getattr(training, question)()


def compile_seconds(training: Training) -> dict[str, Any]:
    """Cold compilation: what the first step takes over the second, with the compiler's modules loaded before."""
    import streamfx.backend  # noqa: F401

    torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")(torch.ones(2, requires_grad=True)).backward()
    first, second = (_timed(training) for _ in range(2))
    return {"wall": first["wall"] - second["wall"], "cpu": first["cpu"] - second["cpu"]}


def _timed(training: Training) -> dict[str, float]:
    training.prepare()
    wall, processor = time.perf_counter(), time.process_time()
    training.step()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - processor}


def main() -> None:
    training = Training(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(training, line.strip())), flush=True)


if __name__ == "__main__":
    main()
