"""Loop bodies whose subgraphs between the runtime's own operators are compiled by Inductor.

A loop runs its body, a graph, once per chunk of the sequence. Inductor does not compile the runtime's own operators, such as
attention of a chunk, because they change buffers in place. A segment is a compiled subgraph between two of them. A compiled
body runs calls of segments and of operators in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from streamfx.progress import ProgressOption, Tally
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.expanded_code import CodeCall, generate_function
from streamfx.runtime.step_bodies import current_step

if TYPE_CHECKING:
    from streamfx.runtime.background_bodies import BackgroundBodies


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


def calls_with_notes(calls: Sequence[CodeCall], body: fx.GraphModule) -> list[CodeCall]:
    """Return calls of all operators of a body in order, and calls that note the layouts of the inputs of its segments.

    The layouts are read early and noted at the end, so that each value is dropped after its last use in the body.
    """
    segments = [(call.run, call.args) for call in calls if isinstance(call.run, Segment)]
    noted = {node for _, inputs in segments for node in inputs}
    names = fx.Graph()
    layout_of_node: dict[fx.Node, fx.Node] = {}
    eager_calls: list[CodeCall] = []
    for node in body.graph.nodes:
        if node.op in ("call_function", "call_module"):
            eager_calls.append(single_call(node, body))
        if node in noted:
            layout_of_node[node] = names.placeholder(f"layout_of_{node.name}")
            eager_calls.append(CodeCall(describe_input, (node,), {}, layout_of_node[node]))
    for index, (segment, inputs) in enumerate(segments):
        layouts = tuple(layout_of_node[node] for node in inputs)
        eager_calls.append(CodeCall(partial(note_inputs, segment), layouts, {}, names.placeholder(f"noted_{index}")))
    return eager_calls


def describe_input(value: Any) -> Any:
    """Return (shape, strides, dtype, device) of a tensor; other values unchanged."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


def note_inputs(segment: Segment, *inputs: Any) -> None:
    """Note the inputs of a segment (`describe_input`) in the step that runs."""
    step = current_step()
    if step is not None:
        step.note_inputs(segment, inputs)


class CompiledBody:
    """A loop body as a function that runs calls in order, and drops each value after its last use.

    `background`: its segments are compiled in another process (`background_bodies.py`), and it runs eagerly until then.
    """

    def __init__(self, calls: Sequence[CodeCall], body: fx.GraphModule, background: BackgroundBodies | None = None) -> None:
        self._calls, self._body, self.background = tuple(calls), body, background

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
        step = current_step()
        if step is not None and step.is_eager:
            return self._body.forward if step.program.is_abandoned else self._eager_code  # type: ignore[no-any-return]
        return self._code_for_one_length if num_lengths == 1 else self._code_for_several_lengths

    @cached_property
    def _code_for_one_length(self) -> Callable[..., Sequence[Any]]:
        return self._generate(self._calls)

    @cached_property
    def _code_for_several_lengths(self) -> Callable[..., Sequence[Any]]:
        return self._generate([_for_several_lengths(call) for call in self._calls])

    @cached_property
    def _eager_code(self) -> Callable[..., Sequence[Any]]:
        return self._generate(calls_with_notes(self._calls, self._body))

    def _generate(self, calls: Sequence[CodeCall]) -> Callable[..., Sequence[Any]]:
        """Return the function that runs these calls, with the body's inputs and results."""
        graph = self._body.graph
        return generate_function("body", graph.find_nodes(op="placeholder"), calls, graph.output_node().args[0])
