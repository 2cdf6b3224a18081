"""Remove the collectives on weights: a sharded model's graph is the plain model's graph with collectives around it.

    wait(all_gather(shard)) -> t -> mm        ->    weight -> t -> mm
    mm -> wait(reduce_scatter) -> gradient    ->    mm -> gradient

A shard is the part of a weight that one rank holds. The removed operators are stored and reinserted around the loops
(`lowering/reinsert_collectives.py`), so that all passes in between see the unsharded model. A gather is the subgraph from
one input (a primal) to one value that depends on this input alone; a reduction is the subgraph from one value to one
gradient that has no other use. Both also contain the operators that cut and reassemble shards (views, `cat`, padding;
`REASSEMBLES`). Both are proven from the users of each node. A reduction stays after all operators that compute its
operand: before a product with a tangent it would be wrong, because each rank has its own tangent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

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
    walk,
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
    """Turn each input that is a shard into the full weight, in place, and return the removed gather of each such input.

    wait(all_gather(primal)) -> t -> mm   ->   primal -> t -> mm, and the primal's fake value becomes the full weight's.
    """
    gathers: dict[fx.Node, Gather] = {}
    for primal, derived in nodes_by_only_input(joint).items():
        if any(map(is_gather, derived)) and not primal.meta.get(MUTATED, False):
            derived = _merge_equal(derived)
            full_weight = _find_gathered_weight(primal, derived)
            if full_weight is not None:
                gather_nodes = _ancestors_within(full_weight, derived)
                keep_full = _recompute_policy([node for node in derived if node in gather_nodes])
                gathers[primal] = Gather(Subgraph.between(primal, full_weight, gather_nodes), keep_full)
                full_weight.replace_all_uses_with(primal)
                # `PATTERN` describes the elements of the shard
                meta = {key: value for key, value in primal.meta.items() if key != PATTERN}
                primal.meta = {**meta, VALUE: full_weight.meta[VALUE]}
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
    """Merge operators with equal arguments, in place, because a weight that is used twice is gathered twice.

    Return the remaining nodes, in order.
    """
    first_by_key: dict[Any, fx.Node] = {}
    for node in nodes:
        first = first_by_key.setdefault(merge_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            node.graph.erase_node(node)
    return list(first_by_key.values())


def _find_gathered_weight(primal: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the gathered weight that the model reads; None if no value is one.

    `nodes` are all nodes that depend on the input `primal` alone, in order. A candidate must hold the weight's elements, at
    most rounded or padded with zeros, because the weight will replace it, and no other operator may read a value before it.
    The first candidate may include casts; then it advances over operators that reassemble shards, and stops at any other.
    """
    result = None
    ancestors_of_result = set[fx.Node]()
    for node in nodes:
        ancestors = _ancestors_within(node, nodes)
        is_gathered = any(map(is_gather, ancestors)) and any(map(is_wait, ancestors)) and is_tensor(node)
        if is_gathered and all(map(_keeps_elements, ancestors)) and _is_only_result(node, {primal, *ancestors}):
            if result is not None and not all(map(_is_reassembly, ancestors - ancestors_of_result)):
                break
            result = node
            ancestors_of_result = ancestors
    return result


def _pads_with_nonzero(node: fx.Node) -> bool:
    """Return whether an operator pads its operand with a value other than zero."""
    return node.target is aten.constant_pad_nd.default and bound_arguments(node)["value"] != 0


def _is_reassembly(node: fx.Node) -> bool:
    """Return whether an operator is a gather, its wait, or a view, slice, `cat` or padding that reassembles shards."""
    return node.target in REASSEMBLES or is_gather(node) or is_wait(node)


def _keeps_elements(node: fx.Node) -> bool:
    """Return whether an operator of a gather returns elements of its operand, at most rounded or padded with zeros."""
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
    """Return the node, and its ancestors in `within` that are reachable from it through nodes of `within` alone."""
    allowed = set(within)
    return set(walk([node], lambda ancestor: allowed.intersection(ancestor.all_input_nodes)))


def _recompute_policy(nodes: Iterable[fx.Node]) -> bool | None:
    """Return whether the user's checkpoint policy saves (True) or recomputes (False) a gathered weight; None if it is not set.

    `nodes` are the operators of the gather. If their policies differ, saving wins.
    """
    policies = [node.meta[RECOMPUTE] for node in nodes if node.meta.get(RECOMPUTE) is not None]
    if any(policy in SAVES for policy in policies):
        return True
    return False if any(policy in RECOMPUTES for policy in policies) else None


# -- reductions of gradients


def remove_reductions(joint: JointGraph) -> dict[int, Subgraph]:
    """Make the graph return each gradient before its reduction over ranks, in place.

    Return the removed reductions by the index of the gradient among the graph's gradients. A value that is returned twice
    keeps its reduction.
    """
    num_outputs = len(joint.outputs)  # the forward results, which precede the gradients
    results = list(outputs_of(joint.graph))
    reductions: dict[int, Subgraph] = {}
    for gradient_index, primal, gradient in joint.trained:
        if is_tensor(primal) and results.count(gradient) == 1:
            gradient = results[num_outputs + gradient_index] = _merge_reductions(gradient, primal)
            match = _match_reduction(gradient, primal)
            if match is not None:
                results[num_outputs + gradient_index] = match.source
                reductions[gradient_index] = match.subgraph
    joint.graph.output_node().args = (tuple(results),)
    return reductions


class ReductionMatch(NamedTuple):
    """The reduction of a gradient: `subgraph` computes the gradient from `source`, the value before it is reduced."""

    source: fx.Node
    subgraph: Subgraph


def _match_reduction(gradient: fx.Node, primal: fx.Node) -> ReductionMatch | None:
    """Match the operators that reduce a weight's gradient over ranks; return None if there is no reduction.

    mm -> pad -> reduce_scatter -> wait = gradient: the source is `mm`. All reductions must depend on the source. If several
    values qualify, the last one with the full weight's shape and dtype is the source, else the last one.
    """
    candidates = _exclusive_ancestors(gradient)
    reductions = {node for node in candidates if is_reduction(node)}
    operands = {operand for node in candidates for operand in node.all_input_nodes if is_tensor(operand)} if reductions else ()
    nodes_by_source = {
        source: nodes
        for source in sorted(operands, reverse=True)  # the last in graph order comes first
        if reductions <= (nodes := _nodes_between(source, gradient, candidates))
    }
    sources_like_weight = [source for source in nodes_by_source if _has_shape_and_dtype_of(source, primal)]
    source = next(iter(sources_like_weight or nodes_by_source), None)
    return None if source is None else ReductionMatch(source, Subgraph.between(source, gradient, nodes_by_source[source]))


def _merge_reductions(gradient: fx.Node, primal: fx.Node) -> fx.Node:
    """Merge the reductions of two uses of a weight into one reduction of their sum, in place.

    add(wait(reduce_scatter(a)), wait(reduce_scatter(b))) -> wait(reduce_scatter(add(a, b)))

    Return the new gradient, or the given node if it is not such a sum. Addends that are sums themselves are merged first.
    """
    if gradient.target is not aten.add.Tensor or gradient.kwargs or not all(map(is_tensor, gradient.args)):
        return gradient
    addends = [
        _merge_reductions(addend, primal) if set(addend.users) == {gradient} else addend for addend in gradient.all_input_nodes
    ]
    matches = [
        match for addend in addends if set(addend.users) == {gradient} and (match := _match_reduction(addend, primal)) is not None
    ]
    if len(matches) != 2:
        return gradient
    left, right = matches
    reduction = left.subgraph
    if structure(reduction.graph) != structure(right.subgraph.graph) or not all(map(_is_linear, reduction.nodes)):
        return gradient
    sum_before_reduction = GraphWriter(gradient.graph).move_before(gradient).call(aten.add.Tensor, left.source, right.source)
    reduced_sum = reduction.insert_into(sum_before_reduction, lambda node: gradient)[reduction.result]
    gradient.replace_all_uses_with(reduced_sum)
    gradient.graph.erase_node(gradient)
    return reduced_sum


def _is_linear(node: fx.Node) -> bool:
    """Return whether an operator of a reduction's subgraph commutes with sums: f(a + b) = f(a) + f(b)."""
    if _pads_with_nonzero(node):
        return False
    return is_linear_reduction(node) or is_wait(node) or node.target in REASSEMBLES


def _exclusive_ancestors(gradient: fx.Node) -> set[fx.Node]:
    """Return the operators that may belong to the reduction of a gradient: the gradient itself, and ancestors of it.

    An ancestor qualifies if only other operators of the set use it, and if it has one operand or reassembles shards.
    """
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
    """Return whether an operator has one operand or reassembles a tensor from shards, for example by `cat`."""
    return len(node.all_input_nodes) == 1 or node.target in REASSEMBLES


def _nodes_between(source: fx.Node, target: fx.Node, allowed: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes after `source`, up to `target`, on paths of allowed nodes; they compute `target` from `source`.

    Return the empty set if there is no path, or if these nodes also read another value.
    """
    descendants = set(walk([source], lambda node: allowed.intersection(node.users))) - {source}
    nodes = descendants & _ancestors_within(target, descendants)
    depends_on_source_only = target in nodes and all(
        operand in nodes or operand is source for node in nodes for operand in node.all_input_nodes
    )
    return nodes if depends_on_source_only else set()


def _has_shape_and_dtype_of(node: fx.Node, primal: fx.Node) -> bool:
    """Return whether a value has a weight's shape and dtype."""
    value, weight = node.meta[VALUE], primal.meta[VALUE]
    return value.shape == weight.shape and value.dtype == weight.dtype
