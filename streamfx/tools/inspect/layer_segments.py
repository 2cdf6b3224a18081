"""Which stretches of a joint graph are two neighbouring periods of a model's layers, and do they do the same?

    inputs     ... | 1 | 2 | ...        1 and 2 are the two periods; every operator of the one has its like in the other,
    forward    ... | 1 | 2 | ...        on values of the same kind, which come from the like places: from the like operator of the
    backward   ... | 2 | 1 | ...        own period, of the period before or behind, or from one place for all
    gradients  ... | 1 | 2 | ...

Nothing else may look into a period but what stands beside it, so that another period can be put between them.
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
NumberOf = Callable[[fx.Node, str], "int | None"]  # of the layer that an operator of this half is in


class LayersDifferError(StreamFXError):
    """Two periods of layers do not do the same, or something else looks into them."""


class Track(Enum):
    """What a period has a stretch of: inputs and operators of the forward half, operators of the backward half."""

    INPUTS = "inputs"
    FORWARD = "forward"
    BACKWARD = "backward"


class OperatorPlace(NamedTuple):
    """The operator with a number, of a period: of the own one, the one `before` it (-1) or behind it (1) in the forward half."""

    track: Track
    number: int
    beside: int = 0


@dataclass
class Periods:
    """Two neighbouring periods of a joint graph. `roles` says where operands of the second one stand, those in a period."""

    first: dict[Track, list[fx.Node]]
    second: dict[Track, list[fx.Node]]
    roles: dict[fx.Node, OperatorPlace] = field(default_factory=dict)

    @property
    def places(self) -> dict[fx.Node, tuple[int, OperatorPlace]]:
        """Of each node of both: in which period it stands, and where."""
        return {
            node: (period, OperatorPlace(track, number))
            for period, tracks in ((1, self.first), (2, self.second))
            for track, nodes in tracks.items()
            for number, node in enumerate(nodes)
        }


def periods_of(graph: fx.Graph, num_primals: int, num_outputs: int, repeat: Repeat, number_of: NumberOf) -> Periods:
    """The first two periods of the layers that repeat, which are proven to do the same. Raises `LayersDifferError`."""
    nodes, front, period = list(graph.nodes), repeat.front, repeat.period
    calls = [(i, node) for i, node in enumerate(nodes) if node.op == "call_function"]
    begins, ends = (_firsts(calls, half, number_of) for half in (FORWARD, BACKWARD))
    ahead = [begins.get(layer) for layer in (front, front + period, front + 2 * period)]
    back = [ends.get(layer) for layer in (front + 2 * period - 1, front + period - 1, front - 1)]
    bounds = [bound for bound in (*ahead, *back) if bound is not None]
    if len(bounds) < 6 or bounds != sorted(set(bounds)):
        raise LayersDifferError("layers do not follow one another")
    a, b, c, d, e, f = bounds
    halves = [nodes[a:b], nodes[e:f]], [nodes[b:c], nodes[d:e]]
    inputs = _inputs_of(nodes[:num_primals], halves[0][0], halves[1][0])
    first, second = (dict(zip(Track, (given, *own), strict=True)) for given, own in zip(inputs, halves, strict=True))
    found = Periods(first, second)
    _Likeness(found, graph, num_primals, num_outputs).prove({node: i for i, node in enumerate(nodes)}, b, f)
    return found


def _firsts(calls: Sequence[tuple[int, fx.Node]], half: str, number_of: NumberOf) -> dict[int, int]:
    """Where the first operator of each layer stands in a half."""
    found: dict[int, int] = {}
    for position, node in calls:
        number = number_of(node, half)
        if number is not None:
            found.setdefault(number, position)
    return found


def _inputs_of(primals: Sequence[fx.Node], *periods: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The inputs that each period is the first to read: those of one, and then those of the next."""
    inside = [set(nodes) for nodes in periods]
    own: list[list[fx.Node]] = [[] for _ in periods]
    stands: list[int] = []
    for position, primal in enumerate(primals):
        reader = next(iter(primal.users), None)
        for number, nodes in enumerate(inside):
            if reader in nodes:
                own[number].append(primal)
                stands.append(position)
    if [primal for nodes in own for primal in nodes] != [primals[position] for position in stands] or stands != list(
        range(stands[0] if stands else 0, (stands[0] if stands else 0) + len(stands))
    ):
        raise LayersDifferError("inputs of layers do not follow one another")
    return own


class _Likeness:
    def __init__(self, periods: Periods, graph: fx.Graph, num_primals: int, num_outputs: int) -> None:
        self.periods, self.graph, self.num_primals, self.num_outputs = periods, graph, num_primals, num_outputs
        self.places = periods.places
        self.partners: dict[fx.Node, fx.Node] = {}
        self.alike: dict[fx.Node, fx.Node] = {}

    def prove(self, order: Mapping[fx.Node, int], middle: int, end: int) -> None:
        """`middle` is where the second period begins, `end` where the backward half of the first one is through."""
        for track in Track:
            one, other = self.periods.first[track], self.periods.second[track]
            if len(one) != len(other):
                raise LayersDifferError(f"{len(one)} and {len(other)} of the {track.value}")
            for before, after in zip(one, other, strict=True):
                self._match(before, after)
        primals = self.graph.find_nodes(op="placeholder")[: self.num_primals]
        results = results_of(self.graph)
        gradients = dict(zip(primals, results[self.num_outputs :], strict=True))
        for before, after in zip(self.periods.first[Track.INPUTS], self.periods.second[Track.INPUTS], strict=True):
            self._match_arguments(gradients[before], gradients[after])
        self._guard(order, end, results[: self.num_outputs], gradients)

    def _match(self, before: fx.Node, after: fx.Node) -> None:
        is_same = (before.op, kind_of(before.meta.get(VALUE))) == (after.op, kind_of(after.meta.get(VALUE)))
        if not is_same or before.op == "call_module" or (before.op != "placeholder" and before.target != after.target):
            raise LayersDifferError(f"{before.name} and {after.name}")
        if before.op != "placeholder":
            self._match_arguments((before.args, dict(before.kwargs)), (after.args, dict(after.kwargs)))

    def _match_arguments(self, before: Any, after: Any) -> None:
        if isinstance(before, fx.Node) and isinstance(after, fx.Node):
            self._match_operands(before, after)
        elif isinstance(before, (tuple, list)) and type(before) is type(after) and len(before) == len(after):
            for one, other in zip(before, after, strict=True):
                self._match_arguments(one, other)
        elif isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
            for key, one in before.items():
                self._match_arguments(one, after[key])
        elif type(before) is not type(after) or before != after or isinstance(before, (fx.Node, slice)):
            raise LayersDifferError(f"{before} and {after}")

    def _match_operands(self, before: fx.Node, after: fx.Node) -> None:
        """Two operands stand for each other, and for no others; the place of that of the second period is noted."""
        one, other = self.places.get(before), self.places.get(after)
        place: OperatorPlace | tuple[()] | None
        if one is None and other is None:
            place = None if before is after else ()
        elif one is not None and other is not None:
            place = other[1] if (one[0], other[0]) == (1, 2) and one[1] == other[1] else ()
        elif one is None and other is not None:  # the second reads the first, and the first what is in front
            place = other[1]._replace(beside=-1) if other[0] == 1 else ()
        else:
            assert one is not None
            place = one[1]._replace(beside=1) if one[0] == 2 else ()
        known = self.partners.setdefault(after, before), self.alike.setdefault(before, after)
        if place == () or known != (before, after) or kind_of(before.meta.get(VALUE)) != kind_of(after.meta.get(VALUE)):
            raise LayersDifferError(f"{before.name} and {after.name}")
        if isinstance(place, OperatorPlace):
            self.periods.roles[after] = place

    def _guard(self, order: Mapping[fx.Node, int], end: int, results: Sequence[Any], gradients: Mapping[fx.Node, Any]) -> None:
        """Nobody looks into the periods but what is beside them: in front of the first one, behind the second."""
        output, inputs = self.graph.output_node(), self.periods.first[Track.INPUTS]
        for node, (period, _) in self.places.items():
            for user in node.users:
                is_front = order[user] >= end
                if user is not output and user not in self.places and is_front is not (period == 1):
                    raise LayersDifferError(f"{user.name} reads {node.name}")
        if any(result in self.places for result in results if isinstance(result, fx.Node)):
            raise LayersDifferError("a layer's value is a result")
        begin = order[inputs[0]] if inputs else 0
        for primal, gradient in gradients.items():
            is_inside = isinstance(gradient, fx.Node) and gradient in self.places and primal not in self.places
            if is_inside and (order[primal] < begin) is not (self.places[gradient][0] == 1):
                raise LayersDifferError(f"the gradient of {primal.name} is {gradient.name}")


def results_of(graph: fx.Graph) -> list[Any]:
    """What a joint graph returns, in one list."""
    return tree_leaves(graph.output_node().args[0], is_leaf=lambda item: item is None)


def kind_of(value: Any) -> Any:
    """What two values of a trace have in common that are alike."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(kind_of, value))
    return type(value), repr(value)
