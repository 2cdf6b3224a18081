"""Loop bodies whose subgraphs between the runtime's own operators are compiled by Inductor.

A loop runs its body, a graph, once per chunk of the sequence. Inductor does not compile the runtime's own operators, such as
attention of a chunk, because they change buffers in place. A segment is a compiled subgraph between two of them. A compiled
body runs calls of segments and of operators in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from streamfx.progress import ProgressOption, Tally
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.expanded_code import CodeCall, generate_function


def segment_call(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> CodeCall:
    """Return a call of a subgraph of a loop body: of `module`, compiled when it runs first, with the body's nodes `inputs`.

    The items of its result are the body's nodes `outputs`.
    """
    return CodeCall(Segment(module), tuple(inputs), {}, tuple(outputs), tuple(module.graph.nodes))


def single_call(node: fx.Node, body: fx.GraphModule) -> CodeCall:
    """Return a call of one operator or submodule of a loop body."""
    run = body.get_submodule(node.target).forward if isinstance(node.target, str) else node.target
    return CodeCall(run, node.args, dict(node.kwargs), node, (node,))


def _for_several_lengths(call: CodeCall) -> CodeCall:
    """Return the call of a segment with `has_several_lengths` set (see `Segment`); other calls unchanged."""
    return replace(call, run=partial(call.run, has_several_lengths=True)) if isinstance(call.run, Segment) else call


def attach_compile_tally(bodies: Sequence[CompiledBody], progress: ProgressOption) -> None:
    """Let the segments of a program's loop bodies count, in one tally, how many distinct ones are compiled.

    The tally shows the count on a terminal, if the option `progress` allows it.
    """
    segments = [segment for body in bodies for segment in body.segments]
    tally = Tally("compiling", len({segment.structure for segment in segments}), progress)
    for segment in segments:
        segment.tally = tally


class CompiledBody:
    """A loop body as a function that runs calls in order, and drops each value after its last use."""

    def __init__(self, calls: Sequence[CodeCall], body: fx.GraphModule) -> None:
        self._calls, self._body = tuple(calls), body

    def __str__(self) -> str:
        return f"{len(self.segments)} compiled segments, {len(self._calls) - len(self.segments)} operators of the runtime"

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledBody:
        """Return itself, because it holds no state of a run. (AOTAutograd copies the backward graph.)"""
        return self

    @property
    def segments(self) -> list[Segment]:
        return [call.run for call in self._calls if isinstance(call.run, Segment)]

    def for_chunks(self, num_lengths: int) -> Callable[..., Sequence[Any]]:
        """Return the body as a function for a loop whose chunks have one length, or (if `num_lengths` is 2) several.

        The function is generated on first use.
        """
        return self._code_for_one_length if num_lengths == 1 else self._code_for_several_lengths

    @cached_property
    def _code_for_one_length(self) -> Callable[..., Sequence[Any]]:
        return self._generate(self._calls)

    @cached_property
    def _code_for_several_lengths(self) -> Callable[..., Sequence[Any]]:
        return self._generate([_for_several_lengths(call) for call in self._calls])

    def _generate(self, calls: Sequence[CodeCall]) -> Callable[..., Sequence[Any]]:
        """Return the function that runs these calls, with the body's inputs and results."""
        graph = self._body.graph
        return generate_function("body", graph.find_nodes(op="placeholder"), calls, graph.output_node().args[0])
