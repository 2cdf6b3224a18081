"""Traces a call of a model as `torch.compile` would, and leaves the model as it was.

The frame runs under fake tensors: Dynamo and AOTAutograd trace it, the passes analyse each graph, and what would then compute is
replaced by something that only returns tensors of the right shapes. Nothing is computed, and no gradient is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from streamfx.backend import Compilation
from streamfx.errors import NotTraced
from streamfx.ir.facts import Facts
from streamfx.options import Options, resolved
from streamfx.report.memory import made_like
from streamfx.report.untouched import Faker, device_of, modules_of, untouched
from streamfx.torch_private import (
    break_reasons,
    compiled_apart,
    default_partition,
    fake_mode_of,
    is_compiled,
    real_values,
)


@dataclass
class TracedGraph:
    """One graph: what the passes found in it, and the two halves that run without the backend."""

    facts: Facts
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int


@dataclass(frozen=True)
class GraphBreak:
    """A place at which Dynamo could not go on tracing."""

    reason: str
    where: str


@dataclass
class TracedCall:
    """All graphs of one call; `calls` has a graph as often as it is called, in order.

    `stopped` says why the call could not be followed to its end, if it could not.
    """

    options: Options
    graphs: list[TracedGraph] = field(default_factory=list)
    calls: list[TracedGraph] = field(default_factory=list)
    breaks: tuple[GraphBreak, ...] = ()
    stopped: str = ""


def traced(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Any = None
) -> TracedCall:
    """Trace one call of a model: real, fake or on the meta device, and so its arguments."""
    model = model._orig_mod if is_compiled(model) else model  # type: ignore[attr-defined]
    call = TracedCall(replace(resolved(options), strict=False))

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with real_values():
            return _Watched(module, call).compile(inputs)

    modules, number = modules_of(model), len(break_reasons())
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    tensors += [value for module in modules for value in (*module._parameters.values(), *module._buffers.values()) if value is not None]
    mode = fake_mode_of(tensors) or FakeTensorMode()
    faker = Faker(mode, device_of(tensors))
    with untouched(model), compiled_apart(backend) as keywords:
        faker.replace_meta(modules)
        for module in modules:
            module._compiled_call_impl = None  # `model.compile()` was called: see what is underneath
        fake_args, fake_kwargs = faker.inputs((tuple(args), dict(kwargs)))
        try:
            with _accepting_real(mode), mode:
                torch.compile(model, backend=backend, **keywords)(*fake_args, **fake_kwargs)
        except Exception as error:
            call.stopped = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if not call.graphs:
                raise _not_traced(call.stopped) from error
    call.breaks = _distinct(break_reasons()[number:])
    if not call.graphs:
        raise _not_traced("; ".join(item.reason for item in call.breaks) or "no operator on tensors")
    return call


def _not_traced(found: str) -> NotTraced:
    return NotTraced(
        "streamfx.explain asks for a call that torch.compile can trace",
        found=found,
        do="check that model(*args, **kwargs) runs with these arguments, and that torch.compile is not disabled",
    )


@contextmanager
def _accepting_real(mode: FakeTensorMode) -> Iterator[None]:
    """Real parameters may meet fake inputs."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _distinct(reasons: Sequence[Any]) -> tuple[GraphBreak, ...]:
    """Each place once: a break inside of an inlined function is met again by the function around it."""
    found: dict[str, GraphBreak] = {}
    for reason in reasons:
        if reason.graph_break and reason.user_stack:
            frame = reason.user_stack[-1]
            where = f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
            found.setdefault(where, GraphBreak(str(reason.reason).strip().splitlines()[0], where))
    return tuple(found.values())


class _Watched(Compilation):
    """A compilation that keeps what it finds, and runs nothing."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        super().__init__(module, call.options)
        self.call = call

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        number = len(self.facts)
        halves = super().partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if len(self.facts) > number:
            facts = self.facts[-1]
            plain = halves
            if facts.program is not None:
                plain = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
            self.call.graphs.append(TracedGraph(facts, *plain, num_fwd_outputs))
        return halves

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _StandIn(module, self.call)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        super().run_inference(module, inputs)
        outputs = module.graph.output_node().args[0]
        count = len(outputs) if isinstance(outputs, (list, tuple)) else 1
        self.call.graphs.append(TracedGraph(self.facts[-1], module, None, count))
        return _StandIn(module, self.call)


class _StandIn:
    """Returns what a graph would return, without running it."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        self._outputs = module.graph.output_node().args[0]
        self._call, self._graph = call, call.graphs[-1]
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> list[Any]:
        arguments.clear()
        self._call.calls.append(self._graph)
        values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in self._outputs]  # type: ignore[union-attr]
        return [made_like(value) for value in values]
