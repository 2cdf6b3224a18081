"""Build the joint graph of all layers from the graph of the kept layers, by repeating one period of layers. Used for plans only.

    kept    embed 0 | 1 | 2 | 3 head        all    embed 0 | 1 | copies of 2 | 2 | 3 head

Each copy reads from its neighboring periods the values that the second period reads from its neighbors. `layer_segments.py`
proves on the graph that two neighboring periods are equal; `layer_repeat.py` proves that all are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import SymInt, fx

from streamfx.cost.repeats import Repeat
from streamfx.ir.lazy_module import LazyGraphModule
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.partition.stage_names import plain_path
from streamfx.tools.inspect.layer_segments import (
    BACKWARD,
    FORWARD,
    LayersDifferError,
    OperatorPlace,
    Periods,
    Track,
    periods_of,
    results_of,
)
from streamfx.torch_private import FakeTensor
from streamfx.torch_private.aot_joint import copy_fake_tensor, has_default_descriptors, set_default_descriptors


@dataclass(frozen=True)
class FullGraph:
    """The joint graph of all layers. `origins[i]` is the index of primal `i`, or of the primal that it copies, in the graph
    of the kept layers.
    """

    module: fx.GraphModule
    origins: tuple[int, ...]


@dataclass(frozen=True)
class ExpandedGraph:
    """The graph of all layers, expanded from the graph of the kept layers.

    `original_of` maps each node, in graph order, to its original in the graph of the kept layers; `copies` maps a copied node to
    the index of its period; the second of the two `periods` was copied.
    """

    graph: fx.Graph
    original_of: Mapping[fx.Node, fx.Node]
    copies: Mapping[fx.Node, int]
    periods: Periods


@dataclass(frozen=True)
class LayerSubset:
    """The layer repetition, and the name of the module list that holds the layers, as recorded by tracing."""

    repeat: Repeat
    name: str

    def layer_index(self, node: fx.Node, half: str) -> int | None:
        """Return the index of the layer that contains a node of the forward or backward graph."""
        paths = (plain_path(entry[0]) for entry in (node.meta.get(half) or {}).values())
        matches = (re.search(rf"(?:^|\.){re.escape(self.name)}\.(\d+)$", path) for path in paths)  # paths that end at a layer
        return next((int(match[1]) for match in matches if match is not None), None)


def of_all_layers(
    joint: fx.GraphModule, num_primals: int, num_outputs: int, primal_facts: Mapping[int, Any], subset: LayerSubset
) -> FullGraph:
    """Return the joint graph of all layers, built from the graph `joint` of the kept layers.

    `primal_facts` are known facts about primals by index; they must be equal for corresponding primals. Raises
    `LayersDifferError` if the kept layers do not represent all.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    expanded = graph_of_all_layers(joint.graph, num_primals, num_outputs, subset)
    positions = {node: position for position, node in enumerate(placeholders)}
    first, second = expanded.periods.first, expanded.periods.second
    if any(
        primal_facts.get(positions[a]) != primal_facts.get(positions[b])
        for a, b in zip(first[Track.INPUTS], second[Track.INPUTS], strict=True)
    ):
        raise LayersDifferError("inputs with different known facts")
    num_all_primals = num_primals + subset.repeat.copies * len(second[Track.INPUTS])
    primals = expanded.graph.find_nodes(op="placeholder")[:num_all_primals]
    return FullGraph(LazyGraphModule(joint, expanded.graph), tuple(positions[expanded.original_of[node]] for node in primals))


def graph_of_all_layers(graph: fx.Graph, num_primals: int, num_outputs: int, subset: LayerSubset) -> ExpandedGraph:
    """Return the graph of all layers, built from the graph of the kept layers. Raises `LayersDifferError`."""
    values = [node.meta.get(VALUE) for node in graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in (value, *getattr(value, "shape", ()))]
    is_symbolic = any(isinstance(size, SymInt) for size in sizes)
    if has_collectives(graph) or not has_default_descriptors(graph, num_primals) or is_symbolic:
        raise LayersDifferError("inputs or results that are not plain tensors")
    if len(results_of(graph)) != num_outputs + num_primals:
        raise LayersDifferError("gradients that do not belong to inputs")
    periods = periods_of(graph, num_primals, num_outputs, subset.repeat, subset.layer_index)
    return _LayerExpander(graph, num_primals, num_outputs, periods, subset).build()


class _LayerExpander:
    """Builds the graph of all layers: copies of the second period are inserted between the two periods."""

    def __init__(self, graph: fx.Graph, num_primals: int, num_outputs: int, periods: Periods, subset: LayerSubset) -> None:
        self.graph, self.periods, self.subset = graph, periods, subset
        self.num_primals, self.num_outputs = num_primals, num_outputs
        self.copies, self.expanded = subset.repeat.copies, fx.Graph()
        self.places = periods.places
        self.copy_of_original: dict[fx.Node, fx.Node] = {}
        self.copies_by_period: list[dict[Track, list[fx.Node]]] = [{track: [] for track in Track} for _ in range(self.copies)]
        self.stacks: dict[Any, Any] = {}
        self.fake_values: list[dict[int, FakeTensor]] = [{} for _ in range(self.copies)]

    def build(self) -> ExpandedGraph:
        """Return the graph with the copies inserted between the two periods: after the first period in the forward graph, after
        the second period in the backward graph.
        """
        copies_after: dict[fx.Node, tuple[Track, range]] = {}
        for track, nodes, order in (
            (Track.INPUTS, self.periods.first, range(self.copies)),
            (Track.FORWARD, self.periods.first, range(self.copies)),
            (Track.BACKWARD, self.periods.second, range(self.copies)[::-1]),
        ):
            if nodes[track]:
                copies_after[nodes[track][-1]] = track, order
        for node in self.graph.nodes:
            if node.op == "output":
                break
            self._copy_node(node)
            track, order = copies_after.get(node, (Track.INPUTS, range(0)))
            for copy_index in order:
                for template in self.periods.second[track]:
                    self.copies_by_period[copy_index][track].append(self._copy_to_period(template, copy_index))
        self._finish()
        originals = {counterpart: node for node, counterpart in self.copy_of_original.items()}
        period_of_copy: dict[fx.Node, int] = {}
        for copy_index, copy in enumerate(self.copies_by_period):
            for track, copies_by_period in copy.items():
                originals.update(zip(copies_by_period, self.periods.second[track], strict=True))
                period_of_copy.update(dict.fromkeys(copies_by_period, copy_index))
        original_of = {node: originals[node] for node in self.expanded.nodes if node.op != "output"}
        return ExpandedGraph(self.expanded, original_of, period_of_copy, self.periods)

    # -- nodes

    def _copy_node(self, node: fx.Node) -> None:
        """Copy a node of the graph of the kept layers, with the layer indices that it has among all layers."""
        period, _ = self.places.get(node, (0, None))
        new = self.copy_of_original[node] = self.expanded.node_copy(
            node, lambda source: self._operand_of_original(period, source)
        )
        repeat = self.subset.repeat
        first_layer = {0: repeat.front + repeat.period, 1: repeat.count, 2: 0}[period]
        self._shift_layer_indices(new, first_layer, self.copies)

    def _operand_of_original(self, period: int, source: fx.Node) -> fx.Node:
        """Return the operand that replaces `source` in a node of `period` (0: outside of both periods).

        Reads across the two periods are redirected to the copies between them.
        """
        source_period, place = self.places.get(source, (0, None))
        if place is None or period in (0, source_period) or not self.copies:
            return self.copy_of_original[source]
        neighbor = self.copies_by_period[0 if period == 1 else -1]
        return neighbor[place.track][place.position]

    def _copy_to_period(self, template: fx.Node, copy_index: int) -> fx.Node:
        """Copy a node of the second period into the inserted period `copy_index`, and return the copy."""
        new = self.expanded.node_copy(template, lambda source: self._operand(source, copy_index))
        self._shift_layer_indices(new, 0, copy_index)
        if VALUE in new.meta:
            new.meta[VALUE] = self._own_fake_value(new.meta[VALUE], copy_index)
        return new

    def _own_fake_value(self, value: Any, copy_index: int) -> Any:
        """Return a new fake value for a copy, because nodes are identified by their values. Tuples keep their structure."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._own_fake_value(element, copy_index) for element in value)
        if not isinstance(value, FakeTensor):
            return value
        fake_values = self.fake_values[copy_index]
        if id(value) not in fake_values:
            fake_values[id(value)] = copy_fake_tensor(value)
        return fake_values[id(value)]

    def _operand(self, source: fx.Node, copy_index: int) -> fx.Node:
        """Return the operand of a copy that corresponds to an operand of the second period."""
        place = self.periods.roles.get(source)
        return self.copy_of_original[source] if place is None else self._node_at(place, copy_index)

    def _node_at(self, place: OperatorPlace, copy_index: int) -> fx.Node:
        """Return the node at a place relative to a copy: in a copy, or in the first or second period next to the copies."""
        copy_index += place.period_offset
        if copy_index < 0:
            return self.copy_of_original[self.periods.first[place.track][place.position]]
        if copy_index >= self.copies:
            return self.copy_of_original[self.periods.second[place.track][place.position]]
        return self.copies_by_period[copy_index][place.track][place.position]

    def _shift_layer_indices(self, node: fx.Node, first_layer: int, num_periods: int) -> None:
        """Shift the layer indices in a node's module stack: layers from `first_layer` on move by `num_periods` periods."""
        if node.op == "placeholder":
            node.target = node.name
        for half in (FORWARD, BACKWARD):
            if stack := node.meta.get(half):
                key = tuple(entry[0] for entry in stack.values()), first_layer, num_periods
                if key not in self.stacks:
                    self.stacks[key] = {
                        name: (self._shifted_path(path, first_layer, num_periods), *entry_rest)
                        for name, (path, *entry_rest) in stack.items()
                    }
                node.meta[half] = self.stacks[key]

    def _shifted_path(self, path: str, first_layer: int, num_periods: int) -> str:
        """Return a module path with its layer index moved by `num_periods` periods if it is at least `first_layer`."""
        match = re.fullmatch(rf"(|.*?\.)({re.escape(self.subset.name)}\.)(\d+)(|\..*)", plain_path(path))
        if match is None or int(match[3]) < first_layer:
            return path
        return f"{match[1]}{match[2]}{int(match[3]) + num_periods * self.subset.repeat.period}{match[4]}"

    # -- results

    def _finish(self) -> None:
        """Emit the outputs, and the gradients of all inputs in their order."""
        results = results_of(self.graph)
        primals = self.graph.find_nodes(op="placeholder")[: self.num_primals]
        gradients: list[Any] = []
        inputs = self.periods.first[Track.INPUTS], self.periods.second[Track.INPUTS]
        gradient_of = dict(zip(primals, results[self.num_outputs :], strict=True))
        for primal, gradient in gradient_of.items():
            period, _ = self.places.get(primal, (0, None))
            gradients.append(self._operand_of_original(period, gradient) if isinstance(gradient, fx.Node) else gradient)
            for copy_index in range(self.copies) if inputs[0] and primal is inputs[0][-1] else ():
                templates = map(gradient_of.__getitem__, inputs[1])
                gradients += (self._operand(item, copy_index) if isinstance(item, fx.Node) else item for item in templates)
        outputs = [
            self.copy_of_original[result] if isinstance(result, fx.Node) else result for result in results[: self.num_outputs]
        ]
        output = self.expanded.output((*outputs, *gradients))
        output.meta = dict(self.graph.output_node().meta)
        num_all_primals = self.num_primals + self.copies * len(inputs[1])
        set_default_descriptors(self.expanded, num_all_primals, self.num_outputs)
