"""Bodies whose stretches between the runtime's own operators are compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from streamfx.progress import Asked, Tally
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.expanded_code import CodeCall, function_of


def segment_call(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> CodeCall:
    """A stretch of a body, from what it takes to what others use of it."""
    return CodeCall(Segment(module), tuple(inputs), {}, tuple(outputs), tuple(module.graph.nodes))


def single_call(node: fx.Node, body: fx.GraphModule) -> CodeCall:
    """One operator of a body, or one of its modules."""
    run = body.get_submodule(node.target).forward if isinstance(node.target, str) else node.target
    return CodeCall(run, node.args, dict(node.kwargs), node, (node,))


def _of_several(call: CodeCall) -> CodeCall:
    return replace(call, run=partial(call.run, several=True)) if isinstance(call.run, Segment) else call


def tallied(bodies: Sequence[CompiledBody], progress: Asked) -> None:
    """Let it be told how many of the stretches of a program's bodies are compiled; those that are equal are compiled once."""
    segments = [segment for body in bodies for segment in body.segments]
    tally = Tally("compiling", len({segment.structure for segment in segments}), progress)
    for segment in segments:
        segment.tally = tally


class CompiledBody:
    """A body as a function that runs calls in order, and drops each value after its last use."""

    def __init__(self, calls: Sequence[CodeCall], body: fx.GraphModule) -> None:
        self._calls, self._body = tuple(calls), body

    def __str__(self) -> str:
        return f"{len(self.segments)} compiled segments, {len(self._calls) - len(self.segments)} operators of the runtime"

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledBody:
        """Copies of a loop share it: it holds nothing of a run. (AOTAutograd copies the backward half.)"""
        return self

    @property
    def segments(self) -> list[Segment]:
        return [call.run for call in self._calls if isinstance(call.run, Segment)]

    def for_chunks(self, lengths: int) -> Callable[..., Sequence[Any]]:
        """The body for a loop whose chunks have so many different lengths; it is written for the first such loop."""
        return self._for_one if lengths == 1 else self._for_several

    @cached_property
    def _for_one(self) -> Callable[..., Sequence[Any]]:
        return self._written(self._calls)

    @cached_property
    def _for_several(self) -> Callable[..., Sequence[Any]]:
        return self._written([_of_several(call) for call in self._calls])

    def _written(self, calls: Sequence[CodeCall]) -> Callable[..., Sequence[Any]]:
        graph = self._body.graph
        return function_of("body", graph.find_nodes(op="placeholder"), calls, graph.output_node().args[0])
