"""The joint graph: the forward and the backward half of one traced function, as AOTAutograd makes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import networkx
import sympy
import torch
from torch import fx

from streamfx.ir.sizes import Size, free_symbols, shape_of, size_of
from streamfx.node_meta import STATIC_ADDRESS, STAYS, VALUE
from streamfx.torch_private import inputs_of_gradients, is_token

ASSERTIONS = (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default, torch.ops.aten._assert_scalar.default)
_NUMBERS = frozenset(map(id, ASSERTIONS))  # every pass asks every operator; to compare or to hash them takes longer


@dataclass(frozen=True)
class JointGraph:
    """A joint graph of our own (a copy, free to be rewritten).

    `outputs` are the forward results in order (a node, or a constant), `gradients` what follows them; `trained` says of which
    primals these are. `forward` holds the ancestors of the outputs, and of what is asserted before tangents are known; everything
    else belongs to the backward half.
    """

    graph: fx.Graph
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    forward: frozenset[fx.Node]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The primals that the caller gives, in order; the others stand for the order of effects, and have no gradients."""
        return tuple(primal for primal in self.primals if not is_token(primal))

    @property
    def trained(self) -> list[tuple[int, fx.Node, fx.Node]]:
        """The primals that get a gradient: by its place among the gradients, the primal, the gradient."""
        told = inputs_of_gradients(self.graph, len(self.outputs))
        inputs = self.inputs if told is None else told
        pairs = enumerate(zip(inputs, self.gradients, strict=False))
        return [(i, primal, gradient) for i, (primal, gradient) in pairs if primal is not None and is_tensor(gradient)]

    @property
    def nodes(self) -> list[fx.Node]:
        """All operators in program order, but for assertions, which make nothing."""
        return [node for node in self.graph.nodes if node.op == "call_function" and not is_assertion(node)]

    @property
    def assertions(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if is_assertion(node)]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """What no operator makes: primals, tangents, and constants that tracing found."""
        return (*self.primals, *self.tangents, *self.graph.find_nodes(op="get_attr"))


def device_of(graph: fx.Graph) -> torch.device:
    """The device on which a graph computes: the first that is not the CPU, and where numbers are."""
    devices = [node.meta[VALUE].device for node in graph.nodes if is_tensor(node)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def device_of_value(node: fx.Node) -> torch.device:
    """Where a value, or the first of an operator's results, lies."""
    return next(value.device for value in results_of(node) if value is not None)


def ancestors(roots: Iterator[Any] | tuple[Any, ...]) -> frozenset[fx.Node]:
    """The nodes that `roots` depend on, themselves included."""
    found: set[fx.Node] = set()
    todo = [root for root in roots if isinstance(root, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return frozenset(found)


def descendants(roots: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of some nodes, in the order of their graph, that depend on `roots` through one another, and the roots."""
    found = set(roots)
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def linked(nodes: Iterable[fx.Node], links: Iterable[tuple[fx.Node, fx.Node]]) -> list[list[fx.Node]]:
    """The nodes in groups that no link leads out of, groups and what is in them in the order of the nodes."""
    position = {node: i for i, node in enumerate(nodes)}
    network = networkx.Graph()
    network.add_nodes_from(position)
    network.add_edges_from(links)
    return [sorted(group, key=position.__getitem__) for group in networkx.connected_components(network)]


def trained_sources(joint: JointGraph) -> frozenset[fx.Node]:
    """What is trained, activations that are handed in and get a gradient, and the gradients that come in."""
    return frozenset(joint.tangents) | {primal for _, primal, _ in joint.trained}


def trained_values(joint: JointGraph) -> frozenset[fx.Node]:
    """What the forward half makes of the primals that get a gradient, and these."""
    trained = {primal for _, primal, _ in joint.trained}
    return frozenset(descendants(trained, (node for node in joint.nodes if node in joint.forward)))


def joint_graph(graph: fx.Graph, num_primals: int, num_outputs: int) -> JointGraph:
    """Read `graph` as a joint graph whose first placeholders are primals and whose first outputs are forward results."""
    placeholders = tuple(graph.find_nodes(op="placeholder"))
    results = outputs_of(graph)
    outputs = results[:num_outputs]
    early = [
        node for node in graph.nodes if is_assertion(node) and not ancestors((node,)).intersection(placeholders[num_primals:])
    ]
    forward = ancestors((*outputs, *early)).difference(early)
    parts = {user for node in forward for user in node.users if user.target is operator.getitem}
    return JointGraph(
        graph=graph,
        primals=placeholders[:num_primals],
        tangents=placeholders[num_primals:],
        outputs=outputs,
        gradients=results[num_outputs:],
        forward=forward | parts,
    )


def graph_copy(graph: fx.Graph) -> fx.Graph:
    """A graph of the same operators. (`deepcopy` also copies how arguments are packed, of which torch warns.)"""
    own = fx.Graph()
    own.output(own.graph_copy(graph, {})).meta = dict(graph.output_node().meta)
    return own


def drop_unused(graph: fx.Graph, but_for: Callable[[fx.Node], bool] = lambda node: False) -> list[fx.Node]:
    """Erase what nothing needs, but for assertions, and for what is asked to stay; returns it."""
    dropped = []
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_assertion(node) and not but_for(node):
            graph.erase_node(node)
            dropped.append(node)
    return dropped


def is_assertion(node: fx.Node) -> bool:
    """Whether an operator is there to raise an error, or for what it does with other ranks: it has no users, and stays."""
    return id(node.target) in _NUMBERS or node.meta.get(STAYS, False)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get(VALUE), torch.Tensor)


def is_parameter(node: fx.Node) -> bool:
    """Whether an input is a parameter or a buffer rather than data, as far as capture could tell."""
    return bool(node.meta.get(STATIC_ADDRESS, False))


def is_size(node: Any) -> bool:
    """Whether a node is a number known from shapes (a `SymInt` and its kin)."""
    return isinstance(node, fx.Node) and isinstance(
        node.meta.get(VALUE), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def input_symbols(joint: JointGraph) -> set[sympy.Symbol]:
    """Symbols in the sizes of what is given: numbers that are known before the graph runs."""
    tensors = (size for node in joint.primals if is_tensor(node) for size in shape_of_node(node))
    return free_symbols([*tensors, *(size_of(node.meta[VALUE]) for node in joint.primals if is_size(node))])


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns: nodes and constants."""
    results = graph.output_node().args[0]
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def handed_over(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """For each input of a backward half the value that its forward half saves for it; tangents are none of them."""
    saved = sizes_first(outputs_of(forward)[num_outputs:])
    return dict(zip(backward.find_nodes(op="placeholder"), saved, strict=False))


def sizes_first(saved: Iterable[Any]) -> list[Any]:
    """What a forward half saves, in the order in which its backward half takes it: AOTAutograd hands sizes over in front."""
    return sorted(saved, key=lambda node: not is_size(node))


def is_object(node: Any) -> bool:
    """Whether a node is an input that is handed through as it is: no tensor and no size, such as the mesh of a sharded weight."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and not (is_tensor(node) or is_size(node) or is_token(node))


def node_argument(node: fx.Node, position: int = 0) -> fx.Node:
    """An argument that the operator's schema says is a tensor (or a tuple of results, for `getitem`)."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def int_argument(node: fx.Node, position: int) -> int:
    """An argument that the operator's schema says is a plain integer: a dimension, the position of a result."""
    argument = node.args[position]
    assert isinstance(argument, int)
    return argument


def tensor_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor arguments in the order of the call, with repetitions; a tuple-valued operand counts for `getitem`."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda argument: found.append(argument) if is_tensor(argument) else None)
    return tuple(found)


def is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values are of one type, on one device."""
    one, another = node.meta[VALUE], other.meta[VALUE]
    return bool(one.dtype == another.dtype and one.device == another.device)


def results_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The node's results as FakeTensors; None for results that are no tensors."""
    value = node.meta.get(VALUE)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in values)


def shape_of_node(node: fx.Node) -> tuple[Size, ...]:
    return shape_of(node.meta[VALUE])


def number_of(argument: Any) -> Any:
    """A number that an operator is given: of a node that holds one, the size that it stands for."""
    return size_of(argument.meta[VALUE]) if is_size(argument) else argument


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of the operator's schema, defaults filled in."""
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            arguments[argument.name] = node.args[position]
        else:
            arguments[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return arguments
