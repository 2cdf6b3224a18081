"""Determine after which loop of the backward graph each gradient is complete.

Autograd's accumulators and their hooks (a reducer, an optimizer in the backward pass) may run between two segments of
the backward graph. They may modify a gradient, and write to its parameter. So a segment releases a gradient only if
no later operator reads the memory of the gradient or of its parameter.

    head.weight                        scale_saved_in_place(saved, tangent)
    ---------------------------------  a loop follows
    layer 1's weights                  layer_1_backward_0, layer_1_backward_1
    ---------------------------------
    layer 0's, embed.weight if tied    layer_0_backward_0, layer_0_backward_1, add_in_place(...)

The graph is not changed. Operators that only lead to gradients (transposes, scaling, casts) and are placed after all
loops run as soon as their operands are ready.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from streamfx.fallbacks import GRADIENTS_AT_END, try_step
from streamfx.ir.joint import ancestors, is_tensor, outputs_of
from streamfx.ir.release_plan import ReleaseSegment, Saved, Sources, released_indices, sources_of
from streamfx.node_meta import EXCLUSIVE
from streamfx.passes.ops.aliasing import memories
from streamfx.passes.ops.traits import is_expensive, is_random
from streamfx.runtime.in_place import OVERWRITES_FIRST
from streamfx.runtime.loop import Loop
from streamfx.runtime.outer import HostProgramRunner
from streamfx.runtime.stagewise import GradientReleaseChain, StagewiseRunner
from streamfx.torch_private import OpOverload, mutated_inputs


class ReleaseSpec(NamedTuple):
    """The arguments of a chain: inputs with gradients, memory of saved values, gradients that each segment completes."""

    sources: Sources
    saved: Saved
    gradient_indices: tuple[tuple[int, ...], ...]  # by segment


def plan_chain(
    chain: GradientReleaseChain, joint: fx.Graph, forward: fx.Graph, backward: fx.GraphModule, num_outputs: int, num_inputs: int
) -> None:
    """Record in `chain`, in place, which gradients the backward graph can release before it ends, and after which segment.

    Gradients of inputs that the graph writes to are excluded. If the analysis fails, all are released at the end.
    """
    plan = partial(_release_spec, joint, forward, backward, num_outputs, num_inputs)
    no_release = ReleaseSpec({}, (), ())
    chain.sources, chain.saved, chain.released = try_step(plan, no_release, GRADIENTS_AT_END, strict=False)
    chain.exclude_inputs(mutated_inputs(joint))


def _release_spec(joint: fx.Graph, forward: fx.Graph, backward: fx.GraphModule, num_outputs: int, num_inputs: int) -> ReleaseSpec:
    """Return the release spec of the graph. If there is only one segment, it has no gradient indices."""
    sources = sources_of(joint, num_outputs, num_inputs)
    index_of_primal = {source.primal_index: index for index, source in sources.items()}
    saved = tuple(
        frozenset(index_of_primal[primal] for primal in inputs if primal in index_of_primal)
        for inputs in inputs_aliased_by_saved(forward, num_outputs)
    )
    gradient_indices = released_indices(release_segments(backward, saved)) if sources else ()
    return ReleaseSpec(sources, saved, gradient_indices if len(gradient_indices) > 1 else ())


def run_in_segments(runner: HostProgramRunner, chain: GradientReleaseChain) -> Callable[[list[Any]], Any]:
    """Return a runner that releases gradients after each segment; the plain runner if the graph has changed since planning."""
    segments = no_segments = tuple[ReleaseSegment, ...]()
    if chain.released:
        split = partial(release_segments, runner.module, chain.saved)
        segments = try_step(split, no_segments, GRADIENTS_AT_END, strict=False)
    return StagewiseRunner(runner, segments, chain) if segments and released_indices(segments) == chain.released else runner


def inputs_aliased_by_saved(forward: fx.Graph, num_outputs: int) -> Saved:
    """Return, for each tensor that the forward graph saves, the indices of inputs whose memory it may share."""
    inputs = {node: i for i, node in enumerate(forward.find_nodes(op="placeholder"))}
    saved = [node for node in outputs_of(forward)[num_outputs:] if is_tensor(node)]
    return tuple(frozenset(inputs[memory] for memory in memories(node) if memory in inputs) for node in saved)


def release_segments(backward: fx.GraphModule, saved: Saved) -> tuple[ReleaseSegment, ...]:
    """Split the backward graph into segments that end before a loop; return none if the graph writes to memory.

    `saved` has, for each saved tensor, the indices of gradients whose inputs' memory it may share.
    """
    gradients = [node for node in outputs_of(backward.graph) if isinstance(node, fx.Node) and node.op != "placeholder"]
    if not all(map(is_tensor, gradients)) or any(
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in backward.graph.nodes
    ):
        return ()
    order = _execution_order(backward)
    complete = _complete_gradients(backward.graph, order, saved)
    segments: list[ReleaseSegment] = []
    start, ready = 0, dict[int, fx.Node]()
    for index, node in enumerate(order):
        if ready and _is_slow(node, backward):
            segments.append(_release_segment(order[start:index], ready))
            start, ready = index, {}
        ready |= complete.get(index, {})
    return (*segments, _release_segment(order[start:], ready)) if order else ()


def _release_segment(operators: Sequence[fx.Node], gradients: dict[int, fx.Node]) -> ReleaseSegment:
    """Return a segment with its operators, the saved inputs whose memory it reads, and its complete gradients."""
    memory_read = (memory for node in operators for operand in node.all_input_nodes for memory in memories(operand))
    reads = [node for node in memory_read if node.op == "placeholder" and is_tensor(node) and not node.meta.get(EXCLUSIVE, False)]
    return ReleaseSegment(tuple(operators), tuple(dict.fromkeys(reads)), gradients)


def _is_slow(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a node is a loop or an expensive operator."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), Loop)
    return is_expensive(node) and node.target is not operator.getitem


def _execution_order(module: fx.GraphModule) -> list[fx.Node]:
    """Return the operators in a valid order: graph order, but movable operators run as soon as their operands are ready."""
    inputs = module.graph.find_nodes(op="placeholder")
    movable, placed, order = _movable_operators(module), set(inputs), list[fx.Node]()

    def may_follow(node: fx.Node) -> bool:
        """Return whether a movable operator is not placed yet and all its operands are."""
        return node in movable and node not in placed and placed.issuperset(node.all_input_nodes)

    def place(node: fx.Node) -> None:
        """Append a node to the order."""
        order.append(node)
        placed.add(node)

    def place_ready_users(node: fx.Node) -> None:
        """Place the movable users of a node that are ready, then their users, depth first."""
        todo = [iter(node.users)]
        while todo:
            user = next(filter(may_follow, todo[-1]), None)
            if user is None:
                todo.pop()
            else:
                place(user)
                todo.append(iter(user.users))

    for node in inputs:
        place_ready_users(node)
    for node in module.graph.nodes:
        if node not in placed and node.op != "output":
            place(node)
            place_ready_users(node)
    return order


def _movable_operators(module: fx.GraphModule) -> set[fx.Node]:
    """Return the fast, deterministic operators whose results only other such operators, or the output, use."""
    graph, output = module.graph, module.graph.output_node()
    needed = ancestors(tuple(output.all_input_nodes))
    movable: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads_only_to_gradients = all(user is output or user in movable for user in node.users)
        if node in needed and leads_only_to_gradients and _may_run_any_time(node) and not _is_slow(node, module):
            movable.add(node)
    return movable


def _may_run_any_time(node: fx.Node) -> bool:
    """Return whether an operator may run at any time, unlike a collective or an operator that waits for one."""
    if node.target is operator.getitem or node.target in OVERWRITES_FIRST:
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten" and not is_random(node)


def _complete_gradients(graph: fx.Graph, order: Sequence[fx.Node], saved: Saved) -> dict[int, dict[int, fx.Node]]:
    """Return, by operator index, the gradients that are complete after that operator, by gradient index.

    No later operator reads the memory of such a gradient, or of its parameter.
    """
    operator_index = {node: index for index, node in enumerate(order)}
    last_read = _last_reads(graph, operator_index)
    tensors = [node for node in graph.find_nodes(op="placeholder") if is_tensor(node)]
    last_read_of_parameter: dict[int, int] = {}  # by gradient index
    for node, gradient_indices in zip(tensors, saved, strict=False):
        for i in gradient_indices:
            last_read_of_parameter[i] = max(last_read_of_parameter.get(i, 0), last_read.get(node, 0))
    complete: dict[int, dict[int, fx.Node]] = {}
    for i, gradient in enumerate(outputs_of(graph)):
        if is_tensor(gradient):
            reads = [last_read.get(memory, 0) for memory in memories(gradient)]
            index = max([operator_index.get(gradient, 0), last_read_of_parameter.get(i, 0), *reads])
            complete.setdefault(index, {})[i] = gradient
    return complete


def _last_reads(graph: fx.Graph, operator_index: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return, for each value that owns memory, the index of the last operator that reads it or a view of it."""
    last_read: dict[fx.Node, int] = {}
    for node in graph.nodes:
        reads = [operator_index[user] for user in node.users if user in operator_index]
        if reads and node.op != "output":
            for memory in memories(node):
                last_read[memory] = max(last_read.get(memory, 0), *reads)
    return last_read
