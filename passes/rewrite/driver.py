"""Apply a table of rewrite rules to a graph until it no longer changes.

Each sweep tries the rules of each operator, merges equal operators (common subexpression elimination), and drops unused
ones. A rule (`pattern.py`) inserts new nodes before the node that it rewrites, and returns which values they replace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

from torch import fx

from streamfx.ir.joint import erase_unused, is_tensor, walk
from streamfx.ir.operator_table import OPERATORS
from streamfx.ir.writer import GraphWriter
from streamfx.passes.ops.aliasing import memories
from streamfx.passes.ops.hub_kernels import operator_name
from streamfx.passes.ops.opaque import may_be_merged
from streamfx.passes.ops.traits import is_random
from streamfx.passes.rewrite.pattern import RewriteRule
from streamfx.torch_private.graph_nodes import operands_of

ADDS_AXES = frozenset(operator for operator, record in OPERATORS.items() if record.adds_axes)


def simplify(graph: fx.Graph, rules: Iterable[RewriteRule], num_results: int | None = None) -> bool:
    """Apply rules to a graph in place until none applies; return whether it changed. It keeps its inputs and outputs.

    The first `num_results` outputs (all, if None) are returned to the user, who may write to them later. So these outputs
    are not merged with equal values: a write to one tensor must not change another.
    """
    rules_by_target: dict[Any, list[RewriteRule]] = defaultdict(list)
    for rule in rules:
        for target in rule.targets:
            rules_by_target[target].append(rule)

    @cache
    def rules_for(target: Any) -> list[RewriteRule]:
        """Return the rules for an operator: by its target, or by name if another package defines it."""
        return rules_by_target.get(target) or rules_by_target.get(operator_name(target)) or []

    erase_unused(graph)
    is_changed = False
    while _sweep(graph, rules_for, num_results):
        is_changed = True
        erase_unused(graph)
    return is_changed


def _sweep(graph: fx.Graph, rules_for: Callable[[Any], list[RewriteRule]], num_results: int | None) -> bool:
    """Try the rules on each operator once, in graph order, else merge it with an earlier equal one; return if the graph changed.

    Operators whose memory may be returned to the user (the first `num_results` outputs) are not merged.
    """
    writer = GraphWriter(graph)
    first_by_key: dict[Any, fx.Node] = {}  # by operator and arguments: the first operator that has them
    is_changed = False
    outputs: Any = graph.output_node().args[0]
    result_memories = {memory for output in outputs[:num_results] if is_tensor(output) for memory in memories(output)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.users:
            for rule in rules_for(node.target):
                if rule.may_match(node) and _apply_rule(rule, node, writer):
                    is_changed = True
                    break
            else:
                is_changed |= node not in result_memories and _merge(node, first_by_key)
    return is_changed


def _apply_rule(rule: RewriteRule, node: fx.Node, writer: GraphWriter) -> bool:
    """Apply one rule to a node, and return whether it replaced a value; raise an error if the graph would have a cycle."""
    num_nodes_before = len(writer.new_nodes)
    result = rule.rewrite(node, writer.move_before(node))
    if result is None:
        return False
    new_nodes = {*writer.new_nodes[num_nodes_before:]}
    replacements = {node: result} if isinstance(result, fx.Node) else result
    if any(_reads(new, old, new_nodes) for old, new in replacements.items() if old is not new):  # the graph would have a cycle
        raise AssertionError(f"rule {rule.name}: a replacement depends on the node that it replaces")
    changes = [replace(old, new, is_new=new in new_nodes) for old, new in replacements.items()]
    return any(changes)


def _reads(new: fx.Node, old: fx.Node, new_nodes: Collection[fx.Node]) -> bool:
    """Return whether `new` depends on `old` through nodes that the rule has inserted."""
    inserted = walk([new], lambda node: [source for source in node.all_input_nodes if source in new_nodes])
    return any(old in node.all_input_nodes for node in inserted)


def replace(node: fx.Node, replacement: fx.Node, is_new: bool) -> bool:
    """Replace the uses of a node by `replacement`, and return whether anything changed.

    `is_new`: a rule has inserted the replacement. An older tensor does not replace an output of the graph: it may be an
    output itself, and the caller may rely on two outputs being two tensors.
    """
    is_old_tensor = is_tensor(node) and not is_new
    return bool(
        node.replace_all_uses_with(
            replacement, delete_user_cb=lambda user: not (is_old_tensor and user.op == "output"), propagate_meta=False
        )
    )


def _merge(node: fx.Node, first_by_key: dict[Any, fx.Node]) -> bool:
    """Replace a node by an earlier node with equal operator and arguments, and return whether anything changed.

    `first_by_key` holds the first node for each operator and arguments; this function adds the node if it is the first.
    """
    if 1 in [len(operand.users) for operand in operands_of(node)]:  # an equal operator would be a second user
        return False
    if is_random(node) or introduces_axes(node) or not may_be_merged(node.target):
        return False
    first = first_by_key.setdefault(merge_key(node), node)
    return first is not node and replace(node, first, is_new=False)


def introduces_axes(node: fx.Node) -> bool:
    """Return whether a result may have dimensions that no operand has, as for `arange(n)`, `expand` or `cat`.

    Such operators are not merged: `arange(n)` for the batch and for the sequence are equal if both have n rows, but after a
    merge, the analysis of axes would take both dimensions for one axis.
    """
    return node.target in ADDS_AXES or not any(map(is_tensor, operands_of(node)))


def merge_key(node: fx.Node) -> Any:
    """Return a key that is equal for operators with equal targets and arguments, or unique if arguments are unhashable."""
    key = (node.target, _hashable(node.args), _hashable(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return id(node)
    return key


def _hashable(item: Any) -> Any:
    """Return an argument as a hashable value that also distinguishes types and the signs of zeros."""
    if isinstance(item, fx.Node):  # the most frequent case: a node equals only itself
        return item
    item_type = type(item)
    if item_type is int or item_type is bool or item is None:  # the second most frequent case
        return (item_type, item)
    if isinstance(item, (list, tuple)):
        return tuple([_hashable(element) for element in item])
    if isinstance(item, dict):
        return tuple(sorted((key, _hashable(value)) for key, value in item.items()))
    sign = math.copysign(1.0, item) if isinstance(item, float) else None
    return (type(item), item, sign)  # 1, 1.0 and True are different arguments, and so are 0.0 and -0.0
