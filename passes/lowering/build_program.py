"""Build the program that replaces the joint graph: two host programs, forward and backward, whose nodes are loops.

The forward program runs the stages in order and saves the values at the cuts. The backward program runs the stages in
reverse order, each from the last chunk to the first, and recomputes inside each chunk the values between the cuts that
it needs. If the plan drops values at a cut, the forward loops since the last saved cut are rerun first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from streamfx.ir.access import Layout
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import JointGraph, is_size, is_tensor, shape_of_node
from streamfx.ir.lazy_module import HostProgramModule
from streamfx.ir.program import Program
from streamfx.ir.sizes import Real, Truth, size_of
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import ChunkSize
from streamfx.node_meta import ALIASES, RESULT_VIEWS, TRACED_STRIDES, VALUE
from streamfx.passes.lowering.backward_program import BackwardBuilder
from streamfx.passes.lowering.donated_bodies import write_in_place
from streamfx.passes.lowering.donation import reuse_buffers
from streamfx.passes.lowering.host_program import HostProgramBuilder
from streamfx.passes.lowering.output_aliasing import clone_shared_gradients, clone_shared_results
from streamfx.passes.ops.aliasing import MemoryPlace, OtherMemory
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import is_random
from streamfx.passes.partition.hoisted_reductions import hoisted_reductions
from streamfx.passes.partition.loop_distribution import Region, distribute_over_loops
from streamfx.runtime.restride import has_lazy_bit, resolve_conj_and_neg
from streamfx.runtime.rng import draw_seed

aten = torch.ops.aten
DRAWN_IN_OTHER_STAGE = "{target} draws random numbers that {stage} recomputes, in chunks of another stage"


@dataclass(frozen=True)
class BuildProgram:
    """The pass: builds the program."""

    name: ClassVar[str] = "build_program"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with `program`: the forward and backward host programs, and their loops."""
        return replace(facts, program=_ProgramBuilder(facts).program())


class _ProgramBuilder:
    """Builds the forward and the backward host program from the stages (segments of the graph) and the plan."""

    def __init__(self, facts: Facts) -> None:
        """`layout` has the rows that each operator reads; `order` the position of each node in the joint graph."""
        self.facts, self.joint = facts, facts.joint
        self.layout = Layout(facts.axes, facts.access, facts.key_spans, facts.truncations)
        self.order = {node: i for i, node in enumerate(facts.joint.graph.nodes)}
        self.stages = facts.stages

    def program(self) -> Program:
        """Return both host programs, and the values that the forward program saves for the backward program.

        The forward program has the loops of each stage. The backward program has the stages from the last to the
        first; stages whose inputs were dropped are rerun first.
        """
        forward = HostProgramBuilder(self.layout, self.order, self.facts.plan)
        self._add_inputs(forward)
        for stage in self.stages:
            region = distribute_over_loops(self._values_used_outside(stage), forward.has, self.layout, self.order, reverse=False)
            check_draws(region, stage)
            forward.emit_region(f"{_identifier(stage.name)}_forward", region, self.chunk_size(stage))
        self._emit_assertions(forward, early=True)
        results = self._results(forward)
        if not any(isinstance(gradient, fx.Node) for gradient in self.joint.gradients):
            forward.graph.output(tuple(self._clone_shared_results(forward, results, ())))
            return Program(_finished_module(forward), None, (), tuple(forward.loops))
        backward = BackwardBuilder(self.facts, self.layout, self.order, forward)
        for stage in reversed(self.stages):
            gradients_of_stage = [node for node in stage.gradients if is_tensor(node)]
            if stage.gradient_in_forward:
                continue
            if gradients_of_stage:
                self._rerun_dropped_stages(stage, backward)
            region = distribute_over_loops(gradients_of_stage, backward.has, self.layout, self.order, reverse=True)
            check_draws(region, stage)
            chunk_size = forward.chunks_of(region) or self.chunk_size(stage)
            backward.emit_region(f"{_identifier(stage.name)}_backward", region, chunk_size)
        self._emit_assertions(backward, early=False)
        gradients = clone_shared_gradients([self._output_value(backward, gradient) for gradient in self.joint.gradients])
        saved, objects_and_sizes = backward.finish(tuple(gradients))
        forward.graph.output((*self._clone_shared_results(forward, results, saved), *saved, *objects_and_sizes))
        loops = (*forward.loops, *backward.loops)
        return Program(_finished_module(forward), _finished_module(backward), tuple(saved), loops)

    def _rerun_dropped_stages(self, stage: Stage, backward: HostProgramBuilder) -> None:
        """Emit, into the backward program, the forward loops of earlier stages whose outputs were dropped (not saved).

        They start from the last saved cut before this stage, so that the inputs of `stage` exist again.
        """
        dropped = self.facts.plan.dropped[: self.stages.index(stage)]
        first = len(dropped)
        while first and dropped[first - 1] and not any(backward.has(node) for node in dropped[first - 1]):
            first -= 1
        for earlier, outputs in zip(self.stages[first:], dropped[first:], strict=False):
            region = distribute_over_loops(outputs, backward.has, self.layout, self.order, reverse=False)
            check_draws(region, earlier)
            backward.emit_region(f"{_identifier(earlier.name)}_again", region, self.chunk_size(earlier))

    def _emit_assertions(self, outer: HostProgramBuilder, early: bool) -> None:
        """Emit the assertions of the user's code at the end of a host program, where all their operands exist.

        If `early`, emit the assertions whose operands are all in the forward graph; otherwise the others.
        """
        for node in self.joint.assertions:
            if self.joint.forward.issuperset(node.all_input_nodes) is early:
                outer.emit(node)

    def chunk_size(self, stage: Stage) -> ChunkSize:
        """Return the planned chunk size of a stage."""
        return self.facts.plan.chunk_sizes[self.stages.index(stage)]

    def _add_inputs(self, outer: HostProgramBuilder) -> None:
        """Add a placeholder for each input (resolved, if lazily conjugated), and register the symbols that its sizes define."""
        for node in self.joint.primals:
            input_ = outer.graph.placeholder(node.name)
            input_.meta = dict(node.meta)
            outer.env[node] = self._resolve_lazy(outer, input_) if is_tensor(node) and has_lazy_bit(node.meta[VALUE]) else input_
        outer.symbols.update(symbols_of(self.joint, outer))

    def _resolve_lazy(self, outer: HostProgramBuilder, placeholder: fx.Node) -> fx.Node:
        """Return a call that resolves the lazy conjugate or negative of an input."""
        call = outer.graph.call_function(resolve_conj_and_neg, (placeholder,))
        call.meta = {**placeholder.meta, VALUE: resolve_conj_and_neg(placeholder.meta[VALUE])}
        return call

    def _values_used_outside(self, stage: Stage) -> list[fx.Node]:
        """Return the values of a stage that are used outside it: by later stages, the caller, or hoisted reductions."""
        inside = set(stage.forward)
        values = list(stage.outputs)
        outputs = {output for output in self.joint.outputs if isinstance(output, fx.Node)}
        for node in stage.forward:
            if not is_tensor(node) or (node in self.facts.axes.static and node not in outputs):
                continue
            storage_class = self.layout.access.storage_class(node)
            is_used_outside = node in outputs or not inside.issuperset(node.users)
            if (
                is_used_outside
                and storage_class is not StorageClass.ROWS
                and storage_class not in (StorageClass.PAIR, StorageClass.KEYSUM)
            ):
                values.append(node)
        if stage.gradient_in_forward:
            values += [node for node in stage.gradients if is_tensor(node)]
        stage_index = self.stages.index(stage)
        return list(dict.fromkeys([*values, *self.facts.plan.kept[stage_index], *hoisted_reductions(stage_index, self.facts)]))

    def _results(self, forward: HostProgramBuilder) -> list[Any]:
        """Return the forward results, as nodes of the forward program, with the strides and the aliasing of the trace.

        AOTAutograd recreates views from a result's strides, and the caller may call `.view` on it. Three cases: a view
        of an input or of another result becomes a view of it, views of the same other memory are placed into one
        storage, and other results get their traced strides. `rewrite/views/strided_access.py: record_layouts` has
        recorded the strides (`TRACED_STRIDES`) and the views (`RESULT_VIEWS`).
        """
        outputs, meta = self.joint.outputs, self.joint.graph.output_node().meta
        layouts, places = (meta.get(key, (None,) * len(outputs)) for key in (TRACED_STRIDES, RESULT_VIEWS))
        inputs = {node.name: node for node in forward.graph.find_nodes(op="placeholder")}
        nodes_by_layout: dict[Any, Any] = {}

        def result_at(index: int) -> Any:
            """Return the node (or literal) of the result at an index; `places` says what memory it was a view of in the trace.

            A view of an input (named by a string) or of another result (by its index) becomes a view of it. Views of the same
            other memory are placed together. Any other result is restrided if it has traced strides. Equal results share a node.
            """
            output, strides = outputs[index], layouts[index]
            place: MemoryPlace | None = places[index]
            if place is not None and not isinstance(place.base, OtherMemory):
                base_node = inputs[place.base] if isinstance(place.base, str) else result_at(place.base)
                return forward.view_of_storage(base_node, output, place)
            if (output, strides, place) in nodes_by_layout:
                return nodes_by_layout[output, strides, place]
            if place is None:
                value = self._output_value(forward, output)
                nodes_by_layout[output, strides, place] = value if strides is None else forward.restride(value, output, strides)
                return nodes_by_layout[output, strides, place]
            same_storage = [
                (outputs[i], layouts[i], other_place)
                for i, other_place in enumerate(places)
                if other_place and other_place.base == place.base
            ]
            nodes_by_layout.update(zip(same_storage, self._place_in_one_storage(forward, same_storage), strict=True))
            return nodes_by_layout[output, strides, place]

        return [result_at(index) for index in range(len(outputs))]

    def _place_in_one_storage(
        self, forward: HostProgramBuilder, outputs: Sequence[tuple[fx.Node, Any, MemoryPlace]]
    ) -> list[fx.Node]:
        """Return results that were views of one value, which is not a result itself, as views of one new storage.

        `outputs`: for each, its joint-graph node, strides, and place in that memory. A single result, and results of
        several dtypes, get separate storages.
        """
        values = [self._output_value(forward, output) for output, *_ in outputs]
        places = [place for *_, place in outputs]
        have_same_type = len({output.meta[VALUE].dtype for output, *_ in outputs}) == 1
        if len(outputs) > 1 and have_same_type:
            return forward.place_in_one_storage(values, places)
        return [forward.place_at_offset(value, place) for value, place in zip(values, places, strict=True)]

    def _clone_shared_results(self, forward: HostProgramBuilder, results: Sequence[Any], saved: Sequence[fx.Node]) -> list[Any]:
        """Return the results, with clones of those that share memory with other results or saved values, but did not in the
        trace, so that the caller may write to them.
        """
        traced = self.joint.graph.output_node().meta.get(ALIASES, (frozenset[str](),) * len(results))
        names = {value: node.name for node, value in forward.env.items()}
        return clone_shared_results(results, traced[: len(results)], saved, names)

    def _output_value(self, outer: HostProgramBuilder, output: Any) -> Any:
        """Return the host-program node, or the literal, for an output of the joint graph."""
        if not isinstance(output, fx.Node):
            return output
        return outer.size_argument(size_of(output.meta[VALUE])) if is_size(output) else outer.operand(output)


def check_draws(region: Region, stage: Stage) -> None:
    """Raise a FallbackError for a random draw that a region of another stage recomputes.

    Random draws are repeated chunk by chunk, so all loops that compute a draw must have the same chunks.
    """
    stage_nodes = {*stage.forward, *stage.backward}
    for node in region.nodes:
        if is_random(node) and node not in stage_nodes and node.target is not draw_seed:
            raise FallbackError(node, DRAWN_IN_OTHER_STAGE.format(target=node.target, stage=stage.name))


def _finished_module(builder: HostProgramBuilder) -> fx.GraphModule:
    """Return the module of a complete host program, with buffers reused and operators written in place."""
    module = HostProgramModule(builder.module, builder.graph)
    reuse_buffers(module)
    write_in_place(module)
    return module


def symbols_of(joint: JointGraph, outer: HostProgramBuilder) -> dict[sympy.Symbol, fx.Node]:
    """Return a host-program node for each dynamic-shape symbol: an input, or the size of an input's dimension."""
    symbols: dict[sympy.Symbol, fx.Node] = {}
    for node in joint.primals:
        size = size_of(node.meta[VALUE]) if is_size(node) else None
        symbol = size.args[0] if isinstance(size, (Real, Truth)) else size
        if isinstance(symbol, sympy.Symbol):
            symbols.setdefault(symbol, outer.env[node])
    for node in joint.primals:
        if is_tensor(node):
            for dim, size in enumerate(shape_of_node(node)):
                if isinstance(size, sympy.Symbol) and size not in symbols:
                    symbols[size] = outer.graph.call_function(aten.sym_size.int, (outer.env[node], dim))
                    symbols[size].meta[VALUE] = node.meta[VALUE].shape[dim]
    return symbols


def _identifier(name: str) -> str:
    """Return a stage's name as an identifier of letters, digits and underscores."""
    return re.sub(r"\W+", "_", name).strip("_") or "stage"
