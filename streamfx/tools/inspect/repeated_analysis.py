"""What analyses find in the joint graph of all layers, told from what they find in that of few.

    few    embed | 0 | 1 | 2 | 3 | head          all    embed | 0 | 1 | copies of 2 | 2 | 3 | head

Passes up to the causality look at an operator, at those beside it, and at what these have been found to be. So where they find
the same in both of two neighbouring periods, they find it in all that could be put between them. Two answers are votes of the
whole graph: which axis is the sequence, and which of two rows and keys is the keys; they are taken where nobody votes otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, Facts, Shape, SpanFacts
from streamfx.ir.joint import JointGraph, joint_graph
from streamfx.ir.span import Span
from streamfx.node_meta import MEMORIES, PLACES
from streamfx.passes.analysis.access_roles import is_unanimous
from streamfx.passes.ops.opaque import is_opaque
from streamfx.passes.ops.traits import is_random
from streamfx.tools.inspect.full_depth import ExpandedGraph, LayerSubset, graph_of_all_layers
from streamfx.tools.inspect.layer_segments import LayersDifferError, Track
from streamfx.torch_private import OpOverload

T = TypeVar("T")


def facts_of_all_layers(facts: Facts, few: LayerSubset) -> Facts:
    """The facts of all layers, up to the causality, given those of few. Raises `Unlike` where few do not tell."""
    _check_told(facts)
    joint = facts.joint
    written = graph_of_all_layers(joint.graph, len(joint.primals), len(joint.outputs), few)
    for track in Track:
        for before, after in zip(written.periods.first[track], written.periods.second[track], strict=True):
            if _found_of(before, facts) != _found_of(after, facts):
                raise LayersDifferError(f"what is found of {before.name} and {after.name}")
    _name_memories(written)
    count = len(joint.primals) + few.repeat.copies * len(written.periods.second[Track.INPUTS])
    return _FactCopier(written).told(facts, joint_graph(written.graph, count, len(joint.outputs)))


def _check_told(facts: Facts) -> None:
    """Whether analyses have run, and have put nothing into the graph that belongs to a graph as a whole."""
    if facts.found_causality is None or facts.axes.sequence is None or facts.collectives is not None or facts.truncations:
        raise LayersDifferError("a graph without a sequence, or with more than axes, demand and causality")
    for node in facts.joint.graph.nodes:
        is_plain = isinstance(node.target, (str, OpOverload, FunctionType, BuiltinFunctionType))
        if not is_plain or (node.op == "call_function" and (is_random(node) or is_opaque(node))) or _holds_nodes(node.meta):
            raise LayersDifferError(f"{node.name}, which is more than an operator on values")
    if any(facts.joint.graph.output_node().meta.get(PLACES, ())):
        raise LayersDifferError("results that are parts of other values")
    if _voted(facts.axes) != {facts.axes.sequence.main} or not is_unanimous(facts):
        raise LayersDifferError("a sequence, or keys, that not all operators agree on")


def _holds_nodes(meta: Mapping[str, Any]) -> bool:
    values = (item for value in meta.values() for item in (value if isinstance(value, (tuple, list)) else (value,)))
    return any(isinstance(value, fx.Node) for value in values)


def _voted(axes: AxisFacts) -> set[int]:
    """The axes along which fused attention has both rows and keys: these are votes for the sequence, before all others."""
    found: set[int] = set()
    for node, signature in axes.signatures.items():
        atoms = {letter: set(axes.table.resolve(dim)) for letter, dim in axes.letters[node].items()} if signature.keys else {}
        keys = {atom for letter, own in atoms.items() if letter in signature.keys for atom in own}
        found |= keys & {atom for letter, own in atoms.items() if letter not in signature.keys for atom in own}
    return found


def _found_of(node: fx.Node, facts: Facts) -> Any:
    """All that analyses have found of a node, as far as it is the same for like ones."""
    axes, demand, causality = facts.axes, facts.demand, facts.causality
    signature = axes.signatures.get(node)
    letters = {letter: _kind((dim,), axes) for letter, dim in axes.letters.get(node, {}).items()}
    shapes = [_kind(shape, axes) for shape in (axes.shapes.get(node, ()), *axes.results.get(node, ()))]
    return (
        None if signature is None else replace(signature, atoms={}),
        None if signature is None else {letter: _kind((dim,), axes) for letter, dim in signature.atoms.items()},
        letters,
        shapes,
        (axes.declined.get(node), node in axes.static),
        (demand.roles.get(node), demand.forms.get(node), demand.reasons.get(node)),
        (causality.spans.get(node), causality.verdicts.get(node)),
        [node in found for found in (causality.measured, causality.exact, causality.ordinary)],
    )


def _kind(shape: Shape, axes: AxisFacts) -> Any:
    """Of each dimension the sizes of its axes, and which axes of the sequence it has."""
    members = {} if axes.sequence is None else axes.sequence.members
    return [[(axes.table.size(atom), atom if atom in members else None) for atom in axes.table.resolve(dim)] for dim in shape]


def _name_memories(written: ExpandedGraph) -> None:
    """Results show the values that they showed in the graph of few layers, by the names that these have now."""
    output = written.graph.output_node()
    names = {node.name: made.name for made, node in written.stands_for.items() if made not in written.copies}
    output.meta[MEMORIES] = tuple(
        None if shown is None else frozenset(names.get(name, f"{name} of few layers") for name in shown)
        for shown in output.meta.get(MEMORIES, ())
    )


@dataclass(frozen=True)
class _FactCopier:
    written: ExpandedGraph

    def told(self, facts: Facts, joint: JointGraph) -> Facts:
        """Masks that are no longer read belong to the forward half as they did."""
        axes, demand, causality = facts.axes, facts.demand, facts.causality
        return replace(
            facts,
            joint=replace(joint, forward=self._among(facts.joint.forward)),
            found_axes=replace(
                axes,
                shapes=self._of(axes.shapes),
                results=self._of(axes.results),
                signatures=self._of(axes.signatures),
                letters=self._of(axes.letters),
                declined=self._of(axes.declined),
                static=self._among(axes.static),
            ),
            found_demand=AccessFacts(self._of(demand.roles), self._of(demand.forms), self._of(demand.reasons)),
            found_causality=SpanFacts(
                self._spans(causality.spans),
                self._of(causality.verdicts),
                *(self._among(found) for found in (causality.measured, causality.exact, causality.ordinary)),
            ),
        )

    def _of(self, found: Mapping[fx.Node, T]) -> dict[fx.Node, T]:
        return {made: found[node] for made, node in self.written.stands_for.items() if node in found}

    def _among(self, found: Iterable[fx.Node]) -> frozenset[fx.Node]:
        inside = frozenset(found)
        return frozenset(made for made, node in self.written.stands_for.items() if node in inside)

    def _spans(self, spans: Mapping[fx.Node, Span]) -> dict[fx.Node, Span]:
        """Operators that were looked at together have one span, a thing of its own: those of a copy have another one."""
        inside = {node for nodes in self.written.periods.second.values() for node in nodes}
        shared = {id(span) for node, span in spans.items() if node not in inside}
        copied: dict[tuple[int, int], Span] = {}
        found: dict[fx.Node, Span] = {}
        for made, node in self.written.stands_for.items():
            span, number = spans.get(node), self.written.copies.get(made)
            if span is None:
                continue
            is_own = number is None or id(span) in shared
            found[made] = span if is_own else copied.setdefault((number, id(span)), replace(span))  # type: ignore[arg-type]
        return found
