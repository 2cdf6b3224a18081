"""Compile loop bodies with Inductor.

Without Inductor, bodies run eagerly. With Inductor, a body is split at every operator of the runtime (attention
kernels, buffer writes, accumulation, random draws), and at operators with as many keys as the chunk sees, since this
length changes from chunk to chunk. The segments in between have only the chunk's shape, and are compiled once for all
layers and chunks that share it. Equal layers share all segments: an operator with which only the first or last body
starts, a lookup or a scaling (an *opening* operator), stays outside the segments and runs first.

A compiled body is a list of *calls*: of a compiled segment, or of a single operator that runs eagerly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from streamfx.cost.inductor_choice import compiles_in_background, uses_inductor
from streamfx.ir.facts import Facts, known
from streamfx.ir.lazy_module import LazyGraphModule
from streamfx.ir.program import CHUNK, START, STOP, Broadcast, BufferPart, Feed, LoopSpec, Number, Program
from streamfx.ir.sizes import Size
from streamfx.ir.structural_hash import structure
from streamfx.node_meta import HAS_KEYS, STACK_TRACE
from streamfx.options import Options
from streamfx.runtime.background_bodies import BackgroundBodies
from streamfx.runtime.collective_calls import begin
from streamfx.runtime.compiled import CompiledBody, attach_compile_tally, segment_call, single_call
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.expanded_code import CodeCall
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
OPENING = -1  # index of the segment that runs first
CALLS = ("call_function", "call_module")  # operators and mask programs


@dataclass(frozen=True)
class CompileBodies:
    """The pass: compiles loop bodies with Inductor, if the options request it or if it pays."""

    name: ClassVar[str] = "compile_bodies"
    options: Options

    def apply(self, facts: Facts) -> Facts:
        """Split each body into calls, and compile it with Inductor; equal bodies share their segments."""
        if not uses_inductor(self.options, facts.joint.graph):
            return facts
        program: Program = known(facts.program)
        background = (
            BackgroundBodies(program.backward is not None) if compiles_in_background(self.options, facts.joint.graph) else None
        )
        calls_by_key: dict[Any, tuple[LoopSpec, list[CodeCall]]] = {}
        for loop in program.loops:
            first, calls = calls_by_key.setdefault(_structural_key(loop.spec), (loop.spec, []))
            calls += split(first) if not calls else []
            loop.compiled = CompiledBody(_calls_for(loop.spec, first, calls), loop.spec.body, background)
        attach_compile_tally([loop.compiled for loop in program.loops], self.options.progress)
        return replace(facts, program=program)


def _structural_key(spec: LoopSpec) -> Any:
    """Return a hashable key of a loop body, equal for equal layers: its operators, feeds, and the traces that errors name."""
    nodes = spec.body.graph.nodes
    provenance = tuple((node.meta.get(HAS_KEYS, False), node.meta.get(STACK_TRACE)) for node in nodes)
    return structure(spec.body.graph), spec.feeds, provenance


def _calls_for(spec: LoopSpec, first: LoopSpec, calls: Sequence[CodeCall]) -> list[CodeCall]:
    """Return the calls of the body of `spec`, given the calls of an equal body (`first`).

    Segments are shared, with this body's nodes as arguments and results; single operators are calls of this body's own nodes.
    """
    node_of = dict(zip(first.body.graph.nodes, spec.body.graph.nodes, strict=True))
    return [
        replace(call, args=tuple(node_of[node] for node in call.args), outputs=tuple(node_of[node] for node in call.defs))
        if isinstance(call.run, Segment)
        else single_call(node_of[call.executed[0]], spec.body)
        for call in calls
    ]


def split(spec: LoopSpec) -> list[CodeCall]:
    """Split the body into calls in order: compiled segments, and single operators of the runtime."""
    segments = _SegmentAssignment(spec)
    calls: list[CodeCall] = []
    for index in range(OPENING, 1 + max(segments.segment_of.values(), default=0)):
        nodes = [node for node, segment in segments.segment_of.items() if segment == index and node.op in CALLS]
        compiled = [node for node in nodes if segments.is_compiled(node)]
        if compiled:
            calls.append(_extract_segment(compiled))
        calls.extend(single_call(node, spec.body) for node in nodes if not segments.is_compiled(node))
    return calls


class _SegmentAssignment:
    """Assigns each operator of a body to a segment.

    An operator is assigned to the first segment in which all its operands are ready, so that segments are long. A
    segment is merged into the next one if all its operators can wait.
    """

    def __init__(self, spec: LoopSpec) -> None:
        """Assign each operator of a body to a segment (`segment_of`), then merge segments."""
        self.graph = spec.body.graph
        self.feeds = dict(zip(self.graph.find_nodes(op="placeholder"), spec.feeds, strict=True))
        self.positions = self._select_placeholders(lambda feed: isinstance(feed, Number) and depends_on_position(feed.value))
        self.segment_of: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.segment_of[node] = 0
            elif node.op in CALLS:
                ready = max((self._ready_at(source) for source in node.all_input_nodes), default=0)
                self.segment_of[node] = OPENING if self._is_opening(node) else max(ready, self._segment_of_last_reduction(node))
        self._merge_segments()

    def is_compiled(self, node: fx.Node) -> bool:
        """Return whether Inductor may compile an operator; an element of a tuple follows its operator.

        Not compiled: operators with as many keys as the chunk sees, operators that depend on the chunk's position,
        and opening operators, with which only some of otherwise equal bodies start.
        """
        producer = node.args[0] if node.target is operator.getitem else node
        assert isinstance(producer, fx.Node)
        return (
            isinstance(producer.target, OpOverload)
            and not producer.meta.get(HAS_KEYS, False)
            and not self.positions.intersection(producer.all_input_nodes)
            and not self._is_opening(producer)
        )

    def _select_placeholders(self, condition: Callable[[Feed], bool]) -> set[fx.Node]:
        """Return the placeholders whose feeds meet a condition."""
        return {node for node, feed in self.feeds.items() if condition(feed)}

    def _is_opening(self, node: fx.Node) -> bool:
        """Return whether an operator reads only inputs of the body, and is a lookup or a scaling by a broadcast value."""
        if not all(source in self.feeds for source in node.all_input_nodes):
            return False
        has_broadcast = any(isinstance(self.feeds[source], Broadcast) for source in node.all_input_nodes)
        return node.target is aten.embedding.default or (node.target is aten.mul.Tensor and has_broadcast)

    def _ready_at(self, source: fx.Node) -> int:
        """Return the first segment that can use a value: operators that are not compiled run after their segment."""
        return self.segment_of[source] + (source.op in CALLS and not self.is_compiled(source))

    def _segment_of_last_reduction(self, node: fx.Node) -> int:
        """Return, for a reduction over ranks, the segment of the last reduction before it, otherwise 0.

        So reductions keep the body's order, which is the order on a rank without a compiler.
        """
        return (
            max((self.segment_of[other] for other in self.segment_of if other.target is begin), default=0)
            if node.target is begin
            else 0
        )

    def _merge_segments(self) -> None:
        """Merge each segment into the next one if the readers of its values before that segment can wait as well.

        A reader can wait if no operator uses its result. A segment that reads a buffer stays.
        """
        compiled = [node for node in self.segment_of if node.op == "call_function" and self.is_compiled(node)]
        buffer_readers = self._buffer_readers()
        for index, following in pairwise(sorted({self.segment_of[node] for node in compiled})):
            segment = {node for node in compiled if self.segment_of[node] == index}
            readers = {user for node in segment for user in node.users if user not in segment and user.op != "output"}
            readers_before_next = {user for user in readers if self.segment_of[user] < following}
            if segment.isdisjoint(buffer_readers) and all(has_no_users(user) for user in readers_before_next):
                self.segment_of.update(dict.fromkeys(segment | readers_before_next, following))

    def _buffer_readers(self) -> set[fx.Node]:
        """Return the placeholders of buffers and the compiled operators that read them: later operators may write to them."""
        readers = self._select_placeholders(lambda feed: isinstance(feed, BufferPart))
        for node in self.segment_of:
            if node.op == "call_function" and self.is_compiled(node) and readers.intersection(node.all_input_nodes):
                readers.add(node)
        return readers


def depends_on_position(size: Size) -> bool:
    """Return whether a size changes from chunk to chunk even if all chunks have equal length."""
    if isinstance(size, int):
        return False
    rows = sympy.Symbol("rows", integer=True)
    at_fixed_length = sympy.expand(size.subs(STOP, START + rows))
    return not at_fixed_length.free_symbols.isdisjoint({START, STOP, CHUNK})


def has_no_users(node: fx.Node) -> bool:
    """Return whether no operator uses a node's result, as for an addition to an accumulator."""
    return all(user.op == "output" for user in node.users)


def _extract_segment(nodes: list[fx.Node]) -> CodeCall:
    """Return a call of a segment: a graph with copies of `nodes` (in the body's order), and its inputs and outputs in the body.

    A tuple is no output: its elements (`getitem`) are in its segment, and are outputs themselves.
    """
    inside = set(nodes)
    inputs = [source for node in nodes for source in node.all_input_nodes if source not in inside]
    inputs = list(dict.fromkeys(inputs))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    outputs = [node for node in outputs if not _is_tuple(node)]
    graph = fx.Graph()
    copies = {source: graph.placeholder(source.name) for source in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in outputs))
    return segment_call(LazyGraphModule(torch.nn.Module(), graph), inputs, outputs)


def _is_tuple(node: fx.Node) -> bool:
    """Return whether a node returns several values."""
    return any(user.target is operator.getitem for user in node.users)
