"""Remove the collectives on weights: a sharded model's graph is the plain model's graph with collectives around it.

    wait(all_gather(shard)) -> t -> mm        ->    weight -> t -> mm
    mm -> wait(reduce_scatter) -> gradient    ->    mm -> gradient

The removed operators are stored and reinserted around the loops (`lowering/reinsert_collectives.py`), so that all passes
in between see the unsharded model. A gather is the subgraph from one input to one value that depends on this input alone;
a reduction is the subgraph from one value to one gradient that has no other use. Both are proven from the users of each
node. A reduction stays after all operators that compute its operand: before a product with a tangent it would be wrong,
because each rank has its own tangent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from streamfx.ir.collective_ops import Collectives, Gather
from streamfx.ir.facts import Facts
from streamfx.ir.joint import (
    JointGraph,
    bound_arguments,
    erase_unused,
    is_assertion,
    is_tensor,
    joint_graph,
    node_argument,
    outputs_of,
)
from streamfx.ir.structural_hash import structure
from streamfx.ir.subgraph import Subgraph
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import MUTATED, PATTERN, RECOMPUTE, VALUE
from streamfx.passes.ops.collectives import (
    REASSEMBLES,
    has_collectives,
    is_deterministic,
    is_gather,
    is_linear_reduction,
    is_reduction,
    is_wait,
)
from streamfx.passes.rewrite.driver import merge_key

aten = torch.ops.aten
SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Unshard:
    name: ClassVar[str] = "unshard"

    def apply(self, facts: Facts) -> Facts:
        """Remove the gathers of weights and the reductions of gradients, and store them in `Facts.collectives`."""
        graph, joint = facts.joint.graph, facts.joint
        if not has_collectives(graph):
            return facts
        erase_unused(graph)
        gathers = remove_gathers(joint)
        reductions = remove_reductions(joint)
        erase_unused(graph)
        joint = joint_graph(graph, len(joint.primals), len(joint.outputs))
        return replace(facts, joint=joint, collectives=Collectives(gathers, reductions))


# -- gathers of weights


def remove_gathers(joint: JointGraph) -> dict[fx.Node, Gather]:
    """Make each gathered weight an input of the graph, in place, and return the removed gather of each input."""
    gathers: dict[fx.Node, Gather] = {}
    for primal, derived in nodes_by_only_input(joint).items():
        if any(map(is_gather, derived)) and not primal.meta.get(MUTATED, False):
            derived = _merge_equal(derived)
            end = _find_gathered_weight(primal, derived)
            if end is not None:
                ancestors = _ancestors_within(end, derived)
                gathers[primal] = Gather(
                    Subgraph.between(primal, end, ancestors), _recompute_policy([node for node in derived if node in ancestors])
                )
                end.replace_all_uses_with(primal)
                meta = {key: value for key, value in primal.meta.items() if key != PATTERN}  # the pattern describes the shard
                primal.meta = {**meta, VALUE: end.meta[VALUE]}
    return gathers


def nodes_by_only_input(joint: JointGraph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each input tensor, the deterministic nodes that depend on it alone, in graph order."""
    by_input: dict[fx.Node, list[fx.Node]] = {primal: [] for primal in joint.inputs if is_tensor(primal)}
    only_input = {primal: primal for primal in by_input}
    for node in joint.graph.nodes:
        if node.op == "call_function" and is_deterministic(node) and not is_assertion(node):
            roots = {only_input.get(source) for source in node.all_input_nodes}
            if len(roots) == 1 and (single_input := roots.pop()) is not None:
                only_input[node] = single_input
                by_input[single_input].append(node)
    return by_input


def _merge_equal(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Merge equal operators, in place, because a weight that is used twice is gathered twice; return the remaining nodes."""
    first_by_key: dict[Any, fx.Node] = {}
    for node in nodes:
        first = first_by_key.setdefault(merge_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            node.graph.erase_node(node)
    return list(first_by_key.values())


def _find_gathered_weight(primal: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the value that a gather passes to the model: the last one before any operator that does more than reassemble.

    `nodes` depend on the input alone. The value replaces the weight, so it must hold the weight's elements, at most rounded
    or padded with zeros. None if there is no such value.
    """
    result, ancestors_of_end = None, set[fx.Node]()
    for node in nodes:
        ancestors = _ancestors_within(node, nodes)
        is_gathered = any(map(is_gather, ancestors)) and any(map(is_wait, ancestors)) and is_tensor(node)
        if is_gathered and all(map(_keeps_elements, ancestors)) and _is_only_result(node, {primal, *ancestors}):
            if result is not None and not all(map(_is_reassembly, ancestors - ancestors_of_end)):
                break
            result, ancestors_of_end = node, ancestors
    return result


def _pads_with_nonzero(node: fx.Node) -> bool:
    """Return whether an operator pads its operand with a value other than zero."""
    return node.target is aten.constant_pad_nd.default and bound_arguments(node)["value"] != 0


def _is_reassembly(node: fx.Node) -> bool:
    """Return whether an operator is a gather, its wait, or reassembles a tensor from shards."""
    return node.target in REASSEMBLES or is_gather(node) or is_wait(node)


def _keeps_elements(node: fx.Node) -> bool:
    """Return whether an operator returns elements of its operand, at most rounded or padded with zeros."""
    if _pads_with_nonzero(node):
        return False
    if node.target is aten._to_copy.default:
        return all(value.meta[VALUE].is_floating_point() for value in (node, node_argument(node)))
    return _is_reassembly(node)


def _is_only_result(end: fx.Node, subgraph: set[fx.Node]) -> bool:
    """Return whether `end` is the only value of a subgraph with users outside it, and is not an output of the graph."""
    is_output = any(user.op == "output" for user in end.users)
    return not is_output and all(user in subgraph for node in subgraph - {end} for user in node.users)


def _ancestors_within(node: fx.Node, within: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the node, and those ancestors that are reachable from it through nodes of `within` alone."""
    allowed, ancestors, todo = set(within), {node}, [node]
    while todo:
        new = [source for source in todo.pop().all_input_nodes if source in allowed and source not in ancestors]
        ancestors.update(new)
        todo += new
    return ancestors


def _recompute_policy(nodes: Iterable[fx.Node]) -> bool | None:
    """Return whether the user's checkpoint policy saves (True) or recomputes (False) a gathered weight; None if it is not set."""
    hints = [node.meta[RECOMPUTE] for node in nodes if node.meta.get(RECOMPUTE) is not None]
    if any(policy in SAVES for policy in hints):
        return True
    return False if any(policy in RECOMPUTES for policy in hints) else None


# -- reductions of gradients


def remove_reductions(joint: JointGraph) -> dict[int, Subgraph]:
    """Let the graph return gradients before their reduction over ranks, in place; return the reductions by gradient index."""
    output, num_outputs = joint.graph.output_node(), len(joint.outputs)
    results = list(outputs_of(joint.graph))
    reductions: dict[int, Subgraph] = {}
    for gradient_index, primal, gradient in joint.trained:
        if is_tensor(primal) and results.count(gradient) == 1:
            gradient = results[num_outputs + gradient_index] = _merge_reductions(gradient, primal)
            removed = _match_reduction(gradient, primal)
            if removed is not None:
                results[num_outputs + gradient_index], reductions[gradient_index] = removed
    output.args = (tuple(results),)
    return reductions


def _match_reduction(gradient: fx.Node, primal: fx.Node) -> tuple[fx.Node, Subgraph] | None:
    """Return the value from which a gradient's reduction starts, and the reduction's subgraph; None if there is no reduction.

    The value is the last one with the weight's shape and dtype, else the last operand on which all reductions depend.
    """
    candidates = _exclusive_ancestors(gradient)
    reductions = {node for node in candidates if is_reduction(node)}
    operands = {source for node in candidates for source in node.all_input_nodes if is_tensor(source)} if reductions else ()
    nodes_by_source = {
        source: nodes
        for source in sorted(operands, reverse=True)
        if reductions <= (nodes := _nodes_between(source, gradient, candidates))
    }
    like_the_weight = [source for source in nodes_by_source if _has_shape_and_dtype_of(source, primal)]
    source = next(iter(like_the_weight or nodes_by_source), None)
    return None if source is None else (source, Subgraph.between(source, gradient, nodes_by_source[source]))


def _merge_reductions(gradient: fx.Node, primal: fx.Node) -> fx.Node:
    """Merge the reductions of two uses of a weight into one reduction of their sum, in place; return the gradient.

    add(wait(reduce_scatter(a)), wait(reduce_scatter(b))) -> wait(reduce_scatter(add(a, b)))
    """
    if gradient.target is not aten.add.Tensor or gradient.kwargs or not all(map(is_tensor, gradient.args)):
        return gradient
    addends = [
        _merge_reductions(addend, primal) if set(addend.users) == {gradient} else addend for addend in gradient.all_input_nodes
    ]
    reductions = [
        pair for addend in addends if set(addend.users) == {gradient} and (pair := _match_reduction(addend, primal)) is not None
    ]
    if len(reductions) != 2:
        return gradient
    (source, first), (second_source, second) = reductions
    if structure(first.graph) != structure(second.graph) or not all(map(_is_linear, first.nodes)):
        return gradient
    total = GraphWriter(gradient.graph).before(gradient).call(aten.add.Tensor, source, second_source)
    reduced_sum = first.insert_into(total, lambda node: gradient)[first.result]
    gradient.replace_all_uses_with(reduced_sum)
    gradient.graph.erase_node(gradient)
    return reduced_sum


def _is_linear(node: fx.Node) -> bool:
    """Return whether an operator of a reduction commutes with sums."""
    if _pads_with_nonzero(node):
        return False
    return is_linear_reduction(node) or is_wait(node) or node.target in REASSEMBLES


def _exclusive_ancestors(gradient: fx.Node) -> set[fx.Node]:
    """Return those ancestors of a gradient that have no other use, and that may be part of a reduction."""
    ancestors: set[fx.Node] = set()
    todo = [gradient]
    while todo:
        node = todo.pop()
        is_exclusive = all(user in ancestors for user in node.users) or node is gradient
        if node.op == "call_function" and is_exclusive and is_deterministic(node) and _may_be_in_reduction(node):
            ancestors.add(node)
            todo += [source for source in node.all_input_nodes if source not in ancestors]
    return ancestors


def _may_be_in_reduction(node: fx.Node) -> bool:
    """Return whether an operator has one operand or reassembles a tensor from shards."""
    return len(node.all_input_nodes) == 1 or node.target in REASSEMBLES


def _nodes_between(source: fx.Node, target: fx.Node, allowed: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes on paths from `source` to `target` through allowed nodes.

    Return the empty set if these nodes read another value as well.
    """
    descendants, todo = set[fx.Node](), [source]
    while todo:
        new = [user for user in todo.pop().users if user in allowed and user not in descendants]
        descendants.update(new)
        todo += new
    nodes = descendants & _ancestors_within(target, descendants)
    depends_on_source_only = target in nodes and all(
        operand in nodes or operand is source for node in nodes for operand in node.all_input_nodes
    )
    return nodes if depends_on_source_only else set()


def _has_shape_and_dtype_of(node: fx.Node, primal: fx.Node) -> bool:
    """Return whether a value has a weight's shape and dtype."""
    value, weight = node.meta[VALUE], primal.meta[VALUE]
    return value.shape == weight.shape and value.dtype == weight.dtype
