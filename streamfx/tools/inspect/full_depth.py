"""The joint graph of all layers of a model, written from that of few: a period of layers is repeated, for plans alone.

    few    embed 0 | 1 | 2 | 3 head        all    embed 0 | 1 | copies of 2 | 2 | 3 head

Each copy reads of the periods beside it what the second period reads of those beside it.
That two neighbouring periods do the same is proven on the graph (`segments.py`), that all of them do by `layer_repeat.py`.
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
from streamfx.torch_private.aot_joint import describe_plain, fake_twin, is_plain


@dataclass(frozen=True)
class FullGraph:
    """The joint graph of all layers; for each of its primals, by position, that of few layers that it is, or is a copy of."""

    module: fx.GraphModule
    origins: tuple[int, ...]


@dataclass(frozen=True)
class ExpandedGraph:
    """A graph that was written from that of few layers: which node of that each of its nodes is, or is a copy of, in the order of
    the graph; of copies, their period's number; and the two periods of which the second one was copied.
    """

    graph: fx.Graph
    stands_for: Mapping[fx.Node, fx.Node]
    copies: Mapping[fx.Node, int]
    periods: Periods


@dataclass(frozen=True)
class LayerSubset:
    """How all layers are made of few, and the name of the list that they are in, as tracing notes it down."""

    repeat: Repeat
    name: str

    def number_of(self, node: fx.Node, half: str) -> int | None:
        """The number of the layer that an operator of a half is in."""
        stack = node.meta.get(half) or {}
        found = (self._number_in(entry[0]) for entry in stack.values())
        return next((number for number in found if number is not None), None)

    def _number_in(self, path: str) -> int | None:
        found = re.search(rf"(?:^|\.){re.escape(self.name)}\.(\d+)$", plain_path(path))
        return None if found is None else int(found[1])


def of_all_layers(
    joint: fx.GraphModule, num_primals: int, num_outputs: int, said: Mapping[int, Any], few: LayerSubset
) -> FullGraph:
    """The joint graph of all layers, given that of few, and what is `said` of primals by position, which has to be the same of
    like ones. Raises `Unlike` where few cannot stand for all.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    written = graph_of_all_layers(joint.graph, num_primals, num_outputs, few)
    positions = {node: position for position, node in enumerate(placeholders)}
    first, second = written.periods.first, written.periods.second
    if any(
        said.get(positions[a]) != said.get(positions[b]) for a, b in zip(first[Track.INPUTS], second[Track.INPUTS], strict=True)
    ):
        raise LayersDifferError("inputs of which other things are known")
    count = num_primals + few.repeat.copies * len(second[Track.INPUTS])
    primals = written.graph.find_nodes(op="placeholder")[:count]
    return FullGraph(LazyGraphModule(joint, written.graph), tuple(positions[written.stands_for[node]] for node in primals))


def graph_of_all_layers(graph: fx.Graph, num_primals: int, num_outputs: int, few: LayerSubset) -> ExpandedGraph:
    """The graph of all layers, given that of few. Raises `Unlike`."""
    placeholders = graph.find_nodes(op="placeholder")
    if has_collectives(graph) or not is_plain(graph, num_primals) or any(_is_symbolic(node) for node in placeholders):
        raise LayersDifferError("inputs or results that are no plain tensors")
    if len(results_of(graph)) != num_outputs + num_primals:
        raise LayersDifferError("gradients that are none of inputs")
    periods = periods_of(graph, num_primals, num_outputs, few.repeat, few.number_of)
    return _LayerExpander(graph, num_primals, num_outputs, periods, few).written()


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get(VALUE)
    return isinstance(value, SymInt) or any(isinstance(size, SymInt) for size in getattr(value, "shape", ()))


class _LayerExpander:
    def __init__(self, graph: fx.Graph, num_primals: int, num_outputs: int, periods: Periods, few: LayerSubset) -> None:
        self.graph, self.num_primals, self.num_outputs, self.periods, self.few = graph, num_primals, num_outputs, periods, few
        self.copies, self.made = few.repeat.copies, fx.Graph()
        self.places = periods.places
        self.own: dict[fx.Node, fx.Node] = {}
        self.copied: list[dict[Track, list[fx.Node]]] = [{track: [] for track in Track} for _ in range(self.copies)]
        self.stacks: dict[Any, Any] = {}
        self.twins: list[dict[int, FakeTensor]] = [{} for _ in range(self.copies)]

    def written(self) -> ExpandedGraph:
        """The copies of each stretch stand between the two: in the forward half behind the first one, which is behind the second
        in the backward half.
        """
        behind: dict[fx.Node, tuple[Track, range]] = {}
        for track, nodes, order in (
            (Track.INPUTS, self.periods.first, range(self.copies)),
            (Track.FORWARD, self.periods.first, range(self.copies)),
            (Track.BACKWARD, self.periods.second, range(self.copies)[::-1]),
        ):
            if nodes[track]:
                behind[nodes[track][-1]] = track, order
        for node in self.graph.nodes:
            if node.op == "output":
                break
            self._copy_own(node)
            track, order = behind.get(node, (Track.INPUTS, range(0)))
            for number in order:
                for pattern in self.periods.second[track]:
                    self.copied[number][track].append(self._copy(pattern, number))
        self._finish()
        patterns = {own: node for node, own in self.own.items()}
        numbers: dict[fx.Node, int] = {}
        for number, copy in enumerate(self.copied):
            for track, made in copy.items():
                patterns.update(zip(made, self.periods.second[track], strict=True))
                numbers.update(dict.fromkeys(made, number))
        stands_for = {node: patterns[node] for node in self.made.nodes if node.op != "output"}
        return ExpandedGraph(self.made, stands_for, numbers, self.periods)

    @property
    def _count(self) -> int:
        return self.num_primals + self.copies * len(self.periods.second[Track.INPUTS])

    # -- nodes

    def _copy_own(self, node: fx.Node) -> None:
        period, _ = self.places.get(node, (0, None))
        made = self.own[node] = self.made.node_copy(node, lambda source: self._beside_copies(period, source))
        first = {0: self.few.repeat.front + self.few.repeat.period, 1: self.few.repeat.count, 2: 0}[period]
        self._number(made, first, self.copies)

    def _beside_copies(self, period: int, source: fx.Node) -> fx.Node:
        """An operand of a node that is there: what one period reads of the other it reads of the copy between."""
        stands = self.places.get(source)
        if stands is None or period == 0 or stands[0] == period:
            return self.own[source]
        copy = self.copied[0 if period == 1 else -1] if self.copies else None
        return self.own[source] if copy is None else copy[stands[1].track][stands[1].number]

    def _copy(self, pattern: fx.Node, number: int) -> fx.Node:
        made = self.made.node_copy(pattern, lambda source: self._operand(source, number))
        self._number(made, 0, number)
        if VALUE in made.meta:
            made.meta[VALUE] = self._twin(made.meta[VALUE], number)
        return made

    def _twin(self, value: Any, number: int) -> Any:
        """A value of a copy's own, as nodes are told apart by; a part of a tuple is still that."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._twin(item, number) for item in value)
        if not isinstance(value, FakeTensor):
            return value
        twins = self.twins[number]
        if id(value) not in twins:
            twins[id(value)] = fake_twin(value)
        return twins[id(value)]

    def _operand(self, source: fx.Node, number: int) -> fx.Node:
        """What a copy reads in place of what the second period reads."""
        place = self.periods.roles.get(source)
        return self.own[source] if place is None else self._at(place, number)

    def _at(self, place: OperatorPlace, number: int) -> fx.Node:
        """What stands at a place as seen from a copy: in a copy, or in the first or the second period beside them."""
        number += place.beside
        if number < 0:
            return self.own[self.periods.first[place.track][place.number]]
        if number >= self.copies:
            return self.own[self.periods.second[place.track][place.number]]
        return self.copied[number][place.track][place.number]

    def _number(self, made: fx.Node, first: int, periods: int) -> None:
        """Let what tracing noted down about modules name the layer that an operator is in now: from the `first` on they come so
        many periods later.
        """
        if made.op == "placeholder":
            made.target = made.name
        for half in (FORWARD, BACKWARD):
            if stack := made.meta.get(half):
                key = tuple(entry[0] for entry in stack.values()), first, periods
                if key not in self.stacks:
                    self.stacks[key] = {
                        name: (self._renamed(path, first, periods), *rest) for name, (path, *rest) in stack.items()
                    }
                made.meta[half] = self.stacks[key]

    def _renamed(self, path: str, first: int, periods: int) -> str:
        found = re.fullmatch(rf"(|.*?\.)({re.escape(self.few.name)}\.)(\d+)(|\..*)", plain_path(path))
        if found is None or int(found[3]) < first:
            return path
        return f"{found[1]}{found[2]}{int(found[3]) + periods * self.few.repeat.period}{found[4]}"

    # -- results

    def _finish(self) -> None:
        """The results, and the gradients of all inputs in their order."""
        results, primals = results_of(self.graph), self.graph.find_nodes(op="placeholder")[: self.num_primals]
        gradients: list[Any] = []
        inputs = self.periods.first[Track.INPUTS], self.periods.second[Track.INPUTS]
        for primal, gradient in zip(primals, results[self.num_outputs :], strict=True):
            period, _ = self.places.get(primal, (0, None))
            gradients.append(self._beside_copies(period, gradient) if isinstance(gradient, fx.Node) else gradient)
            if inputs[0] and primal is inputs[0][-1]:
                gradients += self._gradients_of_copies(dict(zip(primals, results[self.num_outputs :], strict=True)))
        own = [self.own[result] if isinstance(result, fx.Node) else result for result in results[: self.num_outputs]]
        output = self.made.output((*own, *gradients))
        output.meta = dict(self.graph.output_node().meta)
        describe_plain(self.made, self._count, self.num_outputs)

    def _gradients_of_copies(self, gradients: dict[fx.Node, Any]) -> list[Any]:
        patterns = [gradients[primal] for primal in self.periods.second[Track.INPUTS]]
        return [
            self._operand(pattern, number) if isinstance(pattern, fx.Node) else pattern
            for number in range(self.copies)
            for pattern in patterns
        ]
