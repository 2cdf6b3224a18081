"""Loop bodies of a step, compiled for an H100 without one: `python -m tests.support.fake_cuda.bodies '{"model": "Qwen3-8B"}'`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from streamfx.ir.facts import known
from streamfx.runtime import compiled_segments
from streamfx.runtime.loop import Loop
from streamfx.runtime.shape_families import any_size
from streamfx.tools.inspect.explain import Explanation
from streamfx.tools.inspect.tracing import TracedCall, traced
from streamfx.tools.planner.models import loss_of
from streamfx.torch_private import FakeTensorMode, inductor
from tests.support.fake_cuda.absent import compiling_for_absent_device
from tests.support.fake_cuda.attention import Device
from tests.support.fake_cuda.report import inputs_of, model_of


def report(model: str, length: int = 8192, layers: int = 2) -> list[dict[str, Any]]:
    """Return the fields of `Compiled` for each segment of a body."""
    Device("h100").install()
    step = loss_of(model_of(model, layers, None))
    with FakeTensorMode():
        inputs = inputs_of("plain", 1, length)
    found = []
    for compile in requests_of(traced(step, (), inputs, {"bodies": "inductor"}, False)):
        with compiling_for_absent_device() as compiled:
            compile()
        found.append(vars(compiled))
    return found


def requests_of(call: TracedCall) -> list[Callable[[], Any]]:
    """Follow a step on fake tensors; return what its loops request from Inductor. Equal loops make one request."""
    found: list[Callable[[], Any]] = []

    def one(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        found.append(partial(compile_on_fake, graph, tensors))
        return graph.forward

    def several(graph: fx.GraphModule, like: int, shapes: Any) -> Any:
        found.append(partial(inductor.compile_for_sizes, graph, like, shapes))
        return graph.forward, any_size

    def run(loop: Loop, *feeds: Any) -> Sequence[Any]:
        return loop.runner(loop.chunks(loop.size(loop.spec.length, {}), {}))(*feeds)

    programs = (known(graph.facts.program) for graph in call.graphs if graph.facts.program is not None)
    for loop in (loop for program in programs for loop in program.loops):
        loop.spec.body.forward = partial(run, loop)  # type: ignore[assignment]
    with (
        patch.object(compiled_segments, "compile_for_one_size", one),
        patch.object(compiled_segments, "compile_for_sizes", several),
    ):
        assert Explanation(call).costs
    return found


def compile_on_fake(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    """`compile_for_one_size` of fake tensors: Inductor takes them if their mode is that of what is being traced."""
    mode = FakeTensorMode()
    with mode:
        own = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device) for like in tensors]
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        inductor._compile_body("from_tracing_context", graph, own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"parts": report(**json.loads(sys.argv[1]))}))
