"""Train a small decoder with bodies that another process compiles, and print what happened; or end in some way meanwhile.

python -m tests.support.background_program train|killed|interrupted|exit|fork
"""

import json
import os
import sys
import time

import torch
from torch._dynamo.utils import counters

from streamfx.cost import inductor_choice
from streamfx.frontend import backend  # noqa: F401
from streamfx.runtime import compile_process
from streamfx.runtime.background_bodies import BackgroundBodies
from tests.support.small import Causal, tokens


def main(way: str) -> None:
    """Run steps until bodies are compiled; `way`: how to end."""
    inductor_choice.MIN_COMPILED_FLOPS = 0
    programs: list[BackgroundBodies] = []
    begin, start = BackgroundBodies.begin_forward, compile_process.JobQueue.start_process
    started: list[compile_process.CompileProcess] = []

    def begin_forward(self: BackgroundBodies):  # type: ignore[no-untyped-def]
        programs.append(self)
        return begin(self)

    def start_process() -> compile_process.CompileProcess:
        started.append(start())
        return started[-1]

    BackgroundBodies.begin_forward = begin_forward  # type: ignore[method-assign]
    compile_process.JobQueue.start_process = staticmethod(start_process)  # type: ignore[method-assign]
    call = torch.compile(Causal().double(), backend="streambp", options={"chunk_size": 4})
    steps, deadline = 0, time.monotonic() + 400
    while time.monotonic() < deadline and not (programs and programs[-1].snapshot.number):
        steps += not (programs and programs[-1].snapshot.number)
        call(tokens(2, 19), tokens(2, 19)).backward()
        time.sleep(0.05)
        if way != "train" and started:
            end(way, started[0]._process.pid)
    before = steps - 1
    found = {"cache misses": counters["inductor"]["fxgraph_cache_miss"], "processes": len(started), "steps before": before}
    print(json.dumps(found))


def end(way: str, pid: int) -> None:
    """End this process, or wait for its end."""
    print(pid, flush=True)
    if way == "fork" and not os.fork():
        time.sleep(60)
        os._exit(0)
    if way in ("exit", "fork"):
        sys.exit()
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
