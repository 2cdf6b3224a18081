"""Hoist masks that depend only on data out of the loops, and compute them once per step instead of in every layer.

Padding and packed documents arrive as a mask that is the same in all layers. As part of every body it would be
recomputed and applied once per layer, chunk and direction. As a separate program (`MaskProgram`, a module that bodies call; its
result is cached) it runs once per chunk, and is converted to the few kernel calls that it requires
(`streamfx/kernels/mask_tiles.py`). A body's placeholder has a *feed* (which slice it gets) and a *source*, the node of the
host program that it slices.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import saved_values, walk
from streamfx.ir.lazy_module import LazyGraphModule
from streamfx.ir.program import Broadcast, ChunkSlice, LoopSpec, Number, Program
from streamfx.ir.structural_hash import structure
from streamfx.kernels.chunk_attention import backward as attention_backward
from streamfx.kernels.chunk_attention import forward as attention_forward
from streamfx.kernels.mask_programs import MaskProgram
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_random
from streamfx.runtime.loop import Loop
from streamfx.torch_private import OpOverload

MASK_ARGUMENT = {attention_forward: 3, attention_backward: 6}  # by kernel, the index of its mask argument


@dataclass(frozen=True)
class HoistMasks:
    """The pass: replaces masks in loop bodies by calls of mask programs."""

    name: ClassVar[str] = "hoist_masks"

    def apply(self, facts: Facts) -> Facts:
        """Replace, in place, each attention mask of a loop body that depends only on data from outside loops."""
        program: Program | None = facts.program
        if program is None:
            return facts
        programs: dict[Any, MaskProgram] = {}
        saved = _saved_forward_values(program, len(facts.joint.outputs))
        for outer in (program.forward, program.backward):
            for call in outer.graph.find_nodes(op="call_module") if outer is not None else ():
                loop = outer.get_submodule(call.target)  # type: ignore[union-attr]
                if isinstance(loop, Loop):
                    sources = call.args[len(loop.spec.symbols) :]
                    _hoist_masks(loop.spec, [saved.get(source, source) for source in sources], programs)
        return replace(facts, program=program)


def _saved_forward_values(program: Program, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """Return, for each input of the backward program, the identical forward value that was saved for it."""
    if program.backward is None:
        return {}
    saved = saved_values(program.forward.graph, program.backward.graph, num_outputs)
    return {placeholder: value for placeholder, value in saved.items() if placeholder.meta.get(VALUE) is value.meta.get(VALUE)}


def _hoist_masks(spec: LoopSpec, sources: Sequence[Any], programs: dict[Any, MaskProgram]) -> None:
    """Replace each mask of a body that depends only on data from outside loops by a call of its program, in place.

    `sources`: the host program's nodes that the body slices; for backward, the forward values that were saved. `programs`: all
    mask programs so far, by key.
    """
    body = spec.body
    loop_invariant: dict[fx.Node, fx.Node | None] = {}  # placeholders whose values no loop computes, and their host nodes
    for node, feed, source_index in zip(body.graph.find_nodes(op="placeholder"), spec.feeds, spec.sources, strict=True):
        source = None if source_index is None else sources[source_index]
        if isinstance(feed, Number) or (source is not None and _is_outside_loops(source) and _is_view(feed)):
            loop_invariant[node] = source
    masks = {node.args[index] for node in body.graph.nodes if (index := MASK_ARGUMENT.get(node.target)) is not None}
    for mask in [node for node in body.graph.nodes if node in masks]:
        operators = _operators_from(loop_invariant, mask)
        if operators:
            _replace_by_program_call(body, mask, operators, loop_invariant, programs)
    if masks:
        body.graph.lint()
        body.recompile()


def _is_outside_loops(source: fx.Node) -> bool:
    """Return whether no loop computes a value. (Other loops may overwrite a loop's results.)"""
    producer = source.args[0] if source.target is operator.getitem else source
    return isinstance(producer, fx.Node) and producer.op != "call_module"


def _is_view(feed: Any) -> bool:
    """Return whether a placeholder is a view of its source's memory, not a copy, so that its memory identifies the data.

    A slice of rows is a view if no other factor precedes the rows in their dimension.
    """
    return isinstance(feed, Broadcast) or (
        isinstance(feed, ChunkSlice) and all(placement.outer == 1 for placement, _ in feed.selections)
    )


def _operators_from(inputs: Collection[fx.Node], mask: fx.Node) -> list[fx.Node]:
    """Return the pure operators that compute a mask from `inputs` alone, in order; none if it depends on anything else."""
    operators = set(walk({mask}.difference(inputs), lambda node: set(node.all_input_nodes).difference(inputs)))
    is_pure = all(node.op == "call_function" and _is_pure(node) for node in operators)
    return [node for node in mask.graph.nodes if node in operators] if is_pure else []


def _is_pure(node: fx.Node) -> bool:
    """Return whether an operator of torch has no side effects and draws no random numbers."""
    is_operator = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable and not is_random(node)
    return is_operator or node.target is operator.getitem


def _replace_by_program_call(
    body: fx.GraphModule,
    mask: fx.Node,
    operators: list[fx.Node],
    loop_invariant: Mapping[fx.Node, fx.Node | None],
    programs: dict[Any, MaskProgram],
) -> None:
    """Replace a mask that attention reads by a call of its program, and erase operators without users, in place.

    `operators` compute the mask from placeholders; `loop_invariant` maps these placeholders to their sources, None for a number
    such as the chunk's start. Scalar constants among the sources are copied into the program.
    """
    inside = set(operators)
    inputs = list(dict.fromkeys(source for node in operators for source in node.all_input_nodes if source not in inside))
    constants = {node: source for node in inputs if (source := loop_invariant[node]) is not None and _is_scalar(source)}
    inputs = [node for node in inputs if node not in constants]
    program = _mask_program(mask, operators, inputs, constants, loop_invariant, programs)
    name = f"mask_{list(programs.values()).index(program)}"
    body.add_submodule(name, program)
    with body.graph.inserting_after(mask):
        call = body.graph.call_module(name, tuple(inputs))
    for user in list(mask.users):
        index = MASK_ARGUMENT.get(user.target)  # type: ignore[arg-type]
        if index is not None and user.args[index] is mask:
            user.update_arg(index, call)
    for node in reversed(operators):
        if not node.users:
            body.graph.erase_node(node)


def _is_scalar(source: fx.Node) -> bool:
    """Return whether a value is a scalar constant of the graph, such as the number added to masked scores."""
    is_constant = source.op == "call_function" and not source.all_input_nodes and _is_pure(source)
    return is_constant and isinstance(value := source.meta.get(VALUE), torch.Tensor) and value.dim() == 0


def _mask_program(
    mask: fx.Node,
    operators: list[fx.Node],
    inputs: list[fx.Node],
    constants: Mapping[fx.Node, fx.Node],
    loop_invariant: Mapping[fx.Node, fx.Node | None],
    programs: dict[Any, MaskProgram],
) -> MaskProgram:
    """Return the program that computes the mask from `inputs` and from copies of the constants: a new one, or an equal one.

    Programs are equal if their operators are, and those inputs that are computed from literals alone, such as an `arange`.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node, source in constants.items():
        copies[node] = graph.node_copy(source)
    for node in operators:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[mask],))
    literals = tuple(_literal_key(loop_invariant[node]) for node in inputs)
    key = structure(graph), literals
    if key not in programs:
        programs[key] = MaskProgram(LazyGraphModule(torch.nn.Module(), graph), literals)
    return programs[key]


def _literal_key(source: fx.Node | None) -> Any:
    """Return a hashable key, equal for equal values, of a value computed from literals alone, such as `arange`; else None."""
    operators = _operators_from((), source) if source is not None else []
    if not operators:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in operators:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return structure(graph)
