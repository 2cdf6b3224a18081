"""Derive the analyses of the joint graph of all layers from the analyses of the graph of the kept layers.

    kept    embed | 0 | 1 | 2 | 3 | head          all    embed | 0 | 1 | copies of 2 | 2 | 3 | head

Passes up to the key spans depend only on an operator, its neighbors and their facts. If these facts are equal in two neighboring
periods, they are equal in all periods inserted between the two. Two facts are votes of the whole graph: which axis is the
sequence, and which of two candidate axes are the key positions. They are copied only if the vote is unanimous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, DimAxes, Facts, SpanFacts
from streamfx.ir.joint import JointGraph, joint_graph
from streamfx.ir.span import Span
from streamfx.node_meta import ALIASES, RESULT_VIEWS
from streamfx.passes.analysis.access_roles import is_unanimous
from streamfx.passes.ops.opaque import is_opaque
from streamfx.passes.ops.traits import is_random
from streamfx.tools.inspect.full_depth import ExpandedGraph, LayerSubset, graph_of_all_layers
from streamfx.tools.inspect.layer_segments import LayersDifferError, Track
from streamfx.torch_private import OpOverload

T = TypeVar("T")


def facts_of_all_layers(facts: Facts, subset: LayerSubset) -> Facts:
    """Return the facts of all layers, up to the key spans, derived from the `facts` of the kept layers.

    Raises `LayersDifferError` if that is impossible.
    """
    _check_transferable(facts)
    joint = facts.joint
    expanded = graph_of_all_layers(joint.graph, len(joint.primals), len(joint.outputs), subset)
    for track in Track:
        for first_node, second_node in zip(expanded.periods.first[track], expanded.periods.second[track], strict=True):
            if _node_facts(first_node, facts) != _node_facts(second_node, facts):
                raise LayersDifferError(f"different facts about {first_node.name} and {second_node.name}")
    _name_memories(expanded)
    num_primals = len(joint.primals) + subset.repeat.copies * len(expanded.periods.second[Track.INPUTS])
    return _copy_facts(expanded, facts, joint_graph(expanded.graph, num_primals, len(joint.outputs)))


def _check_transferable(facts: Facts) -> None:
    """Check that the analyses have run, and that the graph holds no state that belongs to the graph as a whole."""
    if facts.found_key_spans is None or facts.axes.sequence is None or facts.collectives is not None or facts.truncations:
        raise LayersDifferError("a graph without a sequence, or with more than axes, access roles and key spans")
    for node in facts.joint.graph.nodes:
        is_plain = isinstance(node.target, (str, OpOverload, FunctionType, BuiltinFunctionType))
        is_plain &= not (node.op == "call_function" and (is_random(node) or is_opaque(node)))
        values = (value if isinstance(value, (tuple, list)) else (value,) for value in node.meta.values())
        if not is_plain or any(isinstance(element, fx.Node) for value in values for element in value):
            raise LayersDifferError(f"{node.name} is not a plain operator on values")
    if any(facts.joint.graph.output_node().meta.get(RESULT_VIEWS, ())):
        raise LayersDifferError("results that are parts of other values")
    if _voted(facts.axes) != {facts.axes.sequence.main} or not is_unanimous(facts):
        raise LayersDifferError("operators disagree about the sequence or the keys")


def _voted(axes: AxisFacts) -> set[int]:
    """Return the axes along which fused attention has both query and key positions: these votes for the sequence come first."""
    voted: set[int] = set()
    for node, signature in axes.signatures.items():
        factors = {label: set(axes.table.resolve(dim)) for label, dim in axes.labels[node].items()} if signature.keys else {}
        keys = {factor for label, axis_factors in factors.items() if label in signature.keys for factor in axis_factors}
        voted |= keys & {
            factor for label, axis_factors in factors.items() if label not in signature.keys for factor in axis_factors
        }
    return voted


def _node_facts(node: fx.Node, facts: Facts) -> Any:
    """Return all facts about a node that must be equal for corresponding nodes."""
    axes, access, key_spans = facts.axes, facts.access, facts.key_spans
    signature = axes.signatures.get(node)
    labels = {label: _sizes_of_dims((dim,), axes) for label, dim in axes.labels.get(node, {}).items()}
    shapes = [_sizes_of_dims(shape, axes) for shape in (axes.shapes.get(node, ()), *axes.results.get(node, ()))]
    return (
        None if signature is None else replace(signature, factors={}),
        None if signature is None else {label: _sizes_of_dims((dim,), axes) for label, dim in signature.factors.items()},
        labels,
        shapes,
        (axes.missing_rules.get(node), node in axes.static),
        (access.roles.get(node), access.storage_classes.get(node), access.reasons.get(node)),
        (key_spans.spans.get(node), key_spans.span_kinds.get(node)),
        [node in nodes for nodes in (key_spans.recomputed_per_consumer, key_spans.exact_masks, key_spans.ordinary_scores)],
    )


def _sizes_of_dims(shape: DimAxes, axes: AxisFacts) -> Any:
    """Describe each dimension of a shape by the sizes of its axes and its axes of the sequence."""
    members = {} if axes.sequence is None else axes.sequence.members
    return [
        [(axes.table.size(factor), factor if factor in members else None) for factor in axes.table.resolve(dim)] for dim in shape
    ]


def _name_memories(expanded: ExpandedGraph) -> None:
    """Update the names of the values whose memory the outputs use to the names in the expanded graph."""
    output = expanded.graph.output_node()
    names = {node.name: copy.name for copy, node in expanded.original_of.items() if copy not in expanded.copies}
    output.meta[ALIASES] = tuple(
        None if memories is None else frozenset(names.get(name, f"{name} of few layers") for name in memories)
        for memories in output.meta.get(ALIASES, ())
    )


def _copy_facts(expanded: ExpandedGraph, facts: Facts, joint: JointGraph) -> Facts:
    """Return the facts of `joint`, the graph of all layers. Masks without readers stay in its forward graph."""
    axes, access, key_spans = facts.axes, facts.access, facts.key_spans

    def copied(facts_by_node: Mapping[fx.Node, T]) -> dict[fx.Node, T]:
        """Map each node of the expanded graph to the fact of its original."""
        return {copy: facts_by_node[node] for copy, node in expanded.original_of.items() if node in facts_by_node}

    def copies_of(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """Return the nodes of the expanded graph whose originals are among the given nodes."""
        return frozenset(copied(dict.fromkeys(nodes)))

    return replace(
        facts,
        joint=replace(joint, forward=copies_of(facts.joint.forward)),
        found_axes=replace(
            axes,
            shapes=copied(axes.shapes),
            results=copied(axes.results),
            signatures=copied(axes.signatures),
            labels=copied(axes.labels),
            missing_rules=copied(axes.missing_rules),
            static=copies_of(axes.static),
        ),
        found_access=AccessFacts(copied(access.roles), copied(access.storage_classes), copied(access.reasons)),
        found_key_spans=SpanFacts(
            _copy_spans(key_spans.spans, expanded),
            copied(key_spans.span_kinds),
            *map(copies_of, (key_spans.recomputed_per_consumer, key_spans.exact_masks, key_spans.ordinary_scores)),
        ),
    )


def _copy_spans(spans: Mapping[fx.Node, Span], expanded: ExpandedGraph) -> dict[fx.Node, Span]:
    """Map each node of the expanded graph to its span.

    Operators analyzed together share one `Span` object; each copied period gets a separate object.
    """
    repeated_nodes = {node for nodes in expanded.periods.second.values() for node in nodes}
    shared = {id(span) for node, span in spans.items() if node not in repeated_nodes}
    copied_spans: dict[tuple[int, int], Span] = {}
    result: dict[fx.Node, Span] = {}
    for copy, node in expanded.original_of.items():
        span, period = spans.get(node), expanded.copies.get(copy)
        if span is None:
            continue
        keeps_span = period is None or id(span) in shared
        result[copy] = span if keeps_span else copied_spans.setdefault((period, id(span)), replace(span))  # type: ignore[arg-type]
    return result
