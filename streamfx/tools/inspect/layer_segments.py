"""Find the subgraphs of two neighboring periods of layers in a joint graph, and prove that they are equal.

    inputs     ... | 1 | 2 | ...        1 and 2 are the two periods. Each operator of one has a counterpart in the other,
    forward    ... | 1 | 2 | ...        with operands of equal type from corresponding positions: from its own period,
    backward   ... | 2 | 1 | ...        from the previous or the next one, or from one node outside of all periods.
    gradients  ... | 1 | 2 | ...

Only neighboring code may use values of a period, so that another period can be inserted between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, fx

from streamfx.cost.repeats import Repeat
from streamfx.errors import StreamFXError
from streamfx.node_meta import VALUE
from streamfx.torch_private import tree_leaves

FORWARD, BACKWARD = "nn_module_stack", "fwd_nn_module_stack"
LayerIndexOf = Callable[[fx.Node, str], "int | None"]  # of a node of the forward or backward graph; None outside layers


class LayersDifferError(StreamFXError):
    """Two periods of layers differ, or code that is not next to them uses their values."""


class Track(Enum):
    """The parts of a period: inputs and operators of the forward graph, operators of the backward graph."""

    INPUTS = "inputs"
    FORWARD = "forward"
    BACKWARD = "backward"


class OperatorPlace(NamedTuple):
    """An operator by its index within a period: its own period (0), the previous one (-1) or the next one (1) in
    forward order.
    """

    track: Track
    position: int
    period_offset: int = 0


@dataclass
class Periods:
    """Two neighboring periods of a joint graph. `roles` gives the place of each operand of the second period that is in
    a period.
    """

    first: dict[Track, list[fx.Node]]
    second: dict[Track, list[fx.Node]]
    roles: dict[fx.Node, OperatorPlace] = field(default_factory=dict)

    @property
    def places(self) -> dict[fx.Node, tuple[int, OperatorPlace]]:
        """Map each node of the two periods to its period (1 or 2) and its place."""
        return {
            node: (period, OperatorPlace(track, position))
            for period, tracks in ((1, self.first), (2, self.second))
            for track, nodes in tracks.items()
            for position, node in enumerate(nodes)
        }


def periods_of(graph: fx.Graph, num_primals: int, num_outputs: int, repeat: Repeat, layer_index: LayerIndexOf) -> Periods:
    """Return the first two periods of the repeated layers, proven to be equal. Raises `LayersDifferError`."""
    nodes = list(graph.nodes)
    front, period = repeat.front, repeat.period
    forward_firsts, backward_firsts = dict[int, int](), dict[int, int]()  # the index of the first operator of each layer
    for firsts, half in ((forward_firsts, FORWARD), (backward_firsts, BACKWARD)):
        for i, node in enumerate(nodes):
            if node.op == "call_function" and (layer := layer_index(node, half)) is not None:
                firsts.setdefault(layer, i)
    forward_bounds = [forward_firsts.get(layer) for layer in (front, front + period, front + 2 * period)]
    backward_bounds = [backward_firsts.get(layer) for layer in (front + 2 * period - 1, front + period - 1, front - 1)]
    bounds = [bound for bound in (*forward_bounds, *backward_bounds) if bound is not None]
    if len(bounds) < 6 or bounds != sorted(set(bounds)):
        raise LayersDifferError("the layers are not consecutive")
    # The first period is [a, b) in the forward and [e, f) in the backward graph, the second [b, c) and [d, e).
    a, b, c, d, e, f = bounds
    nodes_by_period = [nodes[a:b], nodes[e:f]], [nodes[b:c], nodes[d:e]]
    inputs = _primals_by_period(nodes[:num_primals], nodes_by_period[0][0], nodes_by_period[1][0])
    first, second = (
        dict(zip(Track, (primals, *operators), strict=True)) for primals, operators in zip(inputs, nodes_by_period, strict=True)
    )
    periods = Periods(first, second)
    _PeriodMatcher(periods, graph, num_primals, num_outputs).prove({node: i for i, node in enumerate(nodes)}, f)
    return periods


def _primals_by_period(primals: Sequence[fx.Node], *periods: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return, per period, the primals whose first reader is in it. `periods` are the forward nodes of each.

    Raise `LayersDifferError` unless they are consecutive primals, in the order of the periods.
    """
    period_of_node = {node: period for period, nodes in enumerate(periods) for node in nodes}
    inputs_by_period: list[list[fx.Node]] = [[] for _ in periods]
    indices: list[int] = []
    for index, primal in enumerate(primals):
        reader = next(iter(primal.users), None)
        if reader in period_of_node:
            inputs_by_period[period_of_node[reader]].append(primal)
            indices.append(index)
    are_consecutive = not indices or indices == list(range(indices[0], indices[0] + len(indices)))
    are_in_period_order = [primals[index] for index in indices] == [primal for nodes in inputs_by_period for primal in nodes]
    if not (are_consecutive and are_in_period_order):
        raise LayersDifferError("the inputs of layers are not consecutive")
    return inputs_by_period


class _PeriodMatcher:
    """Proves that two periods are equal, node by node, and that only neighboring code uses their values."""

    def __init__(self, periods: Periods, graph: fx.Graph, num_primals: int, num_outputs: int) -> None:
        self.periods, self.graph, self.num_primals, self.num_outputs = periods, graph, num_primals, num_outputs
        self.places = periods.places
        self.first_of_second: dict[fx.Node, fx.Node] = {}
        self.second_of_first: dict[fx.Node, fx.Node] = {}

    def prove(self, order: Mapping[fx.Node, int], end: int) -> None:
        """Match the two periods and check all other uses of their values.

        `order` maps each node to its index, and `end` is the index after the backward graph of the first period.
        """
        for track in Track:
            first_nodes, second_nodes = self.periods.first[track], self.periods.second[track]
            if len(first_nodes) != len(second_nodes):
                raise LayersDifferError(f"{track.value} of different lengths: {len(first_nodes)} and {len(second_nodes)}")
            for first_node, second_node in zip(first_nodes, second_nodes, strict=True):
                self._match_nodes(first_node, second_node)
        primals = self.graph.find_nodes(op="placeholder")[: self.num_primals]
        results = results_of(self.graph)
        gradients = dict(zip(primals, results[self.num_outputs :], strict=True))
        for first_node, second_node in zip(self.periods.first[Track.INPUTS], self.periods.second[Track.INPUTS], strict=True):
            self._match_arguments(gradients[first_node], gradients[second_node])
        self._check_other_users(order, end, results[: self.num_outputs], gradients)

    def _match_nodes(self, first_node: fx.Node, second_node: fx.Node) -> None:
        """Check that two nodes agree in operator, value type and operands."""
        kinds = [
            (node.op, None if node.op == "placeholder" else node.target, value_type(node.meta.get(VALUE)))
            for node in (first_node, second_node)
        ]
        if kinds[0] != kinds[1] or first_node.op == "call_module":
            raise LayersDifferError(f"{first_node.name} and {second_node.name}")
        if first_node.op != "placeholder":
            self._match_arguments((first_node.args, first_node.kwargs), (second_node.args, second_node.kwargs))

    def _match_arguments(self, first_argument: Any, second_argument: Any) -> None:
        """Check that nested arguments of two corresponding nodes are equal, and match the nodes among them."""
        (first_nodes, first_text), (second_nodes, second_text) = map(_nodes_and_text, (first_argument, second_argument))
        if first_text != second_text:
            raise LayersDifferError(f"{first_argument} and {second_argument}")
        for first_node, second_node in zip(first_nodes, second_nodes, strict=True):
            self._match_operands(first_node, second_node)

    def _match_operands(self, first_node: fx.Node, second_node: fx.Node) -> None:
        """Match two operands one to one, and record the place of the second period's operand."""
        match self.places.get(first_node), self.places.get(second_node):
            case None, None if first_node is second_node:
                place = None
            case (1, first_place), (2, place) if first_place == place:
                pass
            case None, (1, previous_place):  # the second period reads the first one, which reads the code before it
                place = previous_place._replace(period_offset=-1)
            case (2, next_place), None:  # the first period reads the second one, which reads the code after it
                place = next_place._replace(period_offset=1)
            case _:
                raise LayersDifferError(f"{first_node.name} and {second_node.name}")
        partners = (
            self.first_of_second.setdefault(second_node, first_node),
            self.second_of_first.setdefault(first_node, second_node),
        )
        types = [value_type(node.meta.get(VALUE)) for node in (first_node, second_node)]
        if partners != (first_node, second_node) or types[0] != types[1]:
            raise LayersDifferError(f"{first_node.name} and {second_node.name}")
        if place is not None:
            self.periods.roles[second_node] = place

    def _check_other_users(
        self, order: Mapping[fx.Node, int], end: int, results: Sequence[Any], gradients: Mapping[fx.Node, Any]
    ) -> None:
        """Check the users outside of both periods: only earlier layers may read values of the first, later layers of the second.

        `end` is the index after the backward graph of the first period; backward graphs of earlier layers come after it.
        """
        output, inputs = self.graph.output_node(), self.periods.first[Track.INPUTS]
        for node, (period, _) in self.places.items():
            for user in node.users:
                is_of_earlier_layer = order[user] >= end
                if user is not output and user not in self.places and is_of_earlier_layer is not (period == 1):
                    raise LayersDifferError(f"{user.name} reads {node.name}")
        if any(result in self.places for result in results if isinstance(result, fx.Node)):
            raise LayersDifferError("a value of a layer is a result of the graph")
        first_input = order[inputs[0]] if inputs else 0
        for primal, gradient in gradients.items():
            is_of_period = isinstance(gradient, fx.Node) and gradient in self.places and primal not in self.places
            if is_of_period and (order[primal] < first_input) is not (self.places[gradient][0] == 1):
                raise LayersDifferError(f"the gradient of {primal.name} is {gradient.name}")


def _nodes_and_text(argument: Any) -> tuple[list[fx.Node], str]:
    """Return the nodes in nested arguments, with repetitions, and a text that represents everything else in them."""
    nodes: list[fx.Node] = []

    def mark(node: fx.Node) -> str:
        """Collect a node, and return its text."""
        nodes.append(node)
        return "a node"

    return nodes, repr(fx.node.map_arg(argument, mark))


def results_of(graph: fx.Graph) -> list[Any]:
    """Return the outputs of a joint graph as a flat list."""
    return tree_leaves(graph.output_node().args[0], is_leaf=lambda item: item is None)


def value_type(value: Any) -> Any:
    """Return the properties in which two corresponding values of a trace must agree."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(value_type, value))
    return type(value), repr(value)
