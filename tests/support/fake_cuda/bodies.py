"""Loop bodies of a step, compiled for an H100 without one: `python -m tests.support.fake_cuda.bodies '{"model": "Qwen3-8B"}'`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
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


class Part(NamedTuple):
    """A part of a body that Inductor is asked for, the loop that asks first, and the rows of its chunks."""

    loop: str
    rows: int
    compile: Callable[[], Any]


def report(model: str, length: int = 8192, layers: int = 2) -> list[dict[str, Any]]:
    """For each part of a body: figures of `Compiled`, and the rows of a chunk."""
    Device("h100").install()
    step = loss_of(model_of(model, layers, None))
    with FakeTensorMode():
        inputs = inputs_of("plain", 1, length)
    parts = parts_of(traced(step, (), inputs, {"bodies": "inductor"}, False))
    found = []
    for part in parts:
        with compiling_for_absent_device() as compiled:
            part.compile()
        found.append({"loop": part.loop, "rows": part.rows, **vars(compiled)})
    return found


def parts_of(call: TracedCall) -> list[Part]:
    """Follow a step on fake tensors, and note what its loops ask Inductor for; equal loops ask once."""
    found: list[Part] = []
    asking: list[Loop] = []

    def note(compile: Callable[[], Any]) -> None:
        (loop,) = asking
        found.append(Part(loop.spec.name, loop.rows_per_chunk(loop.size(loop.spec.length, {}), {}), compile))

    def one(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        note(partial(compile_on_fake, graph, tensors))
        return graph.forward

    def several(graph: fx.GraphModule, like: int, shapes: Any) -> Any:
        note(partial(inductor.compile_for_sizes, graph, like, shapes))
        return graph.forward, any_size

    @contextmanager
    def asks(loop: Loop) -> Iterator[None]:
        asking.append(loop)
        yield
        asking.pop()

    def run(loop: Loop, *feeds: Any) -> Sequence[Any]:
        with asks(loop):
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
