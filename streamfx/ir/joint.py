"""The joint graph: the forward and backward graph of one traced function, as AOTAutograd builds it.

Its inputs are *primals* (inputs of the forward graph: parameters, buffers, data) and *tangents* (the gradients that backward
gets, one per forward output). Its results are the forward outputs, then the gradients of primals.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import networkx
import sympy
import torch
from torch import fx

from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.sizes import Size, free_symbols, numeric, product, shape_of, size_of
from streamfx.node_meta import KEPT_WITHOUT_USERS, STATIC_ADDRESS, VALUE
from streamfx.torch_private import FakeTensor, inputs_of_gradients, is_token
from streamfx.torch_private.graph_nodes import add_copy, operands_of

T = TypeVar("T")
# numbers are faster to compare than operators, and each pass tests each operator
_ASSERTION_IDS = frozenset(map(id, of_kind(Kind.ASSERTION)))


@dataclass(frozen=True)
class JointGraph:
    """A copy of a joint graph, which passes may rewrite.

    `outputs` are the forward results in order (nodes or constants), `gradients` the results after them (None for a primal
    without one); `trained` pairs gradients with their primals. `forward` holds the ancestors of the outputs, and of
    assertions that depend on no tangent. All other nodes belong to the backward graph.
    """

    graph: fx.Graph
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    forward: frozenset[fx.Node]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The primals that the caller passes, in order. The other primals are effect tokens, which have no gradient."""
        return tuple(primal for primal in self.primals if not is_token(primal))

    @property
    def trained(self) -> list[tuple[int, fx.Node, fx.Node]]:
        """The primals that have a gradient, as (index in `gradients`, primal, gradient)."""
        reported = inputs_of_gradients(self.graph, len(self.outputs))
        inputs = self.inputs if reported is None else reported
        pairs = enumerate(zip(inputs, self.gradients, strict=False))
        return [(i, primal, gradient) for i, (primal, gradient) in pairs if primal is not None and is_tensor(gradient)]

    @property
    def nodes(self) -> list[fx.Node]:
        """All operators in program order, except assertions, which have no result."""
        return [
            node
            for node in self.graph.nodes  # `is_assertion` without a call: all passes list the nodes
            if node.op == "call_function" and id(node.target) not in _ASSERTION_IDS and KEPT_WITHOUT_USERS not in node.meta
        ]

    @property
    def assertions(self) -> list[fx.Node]:
        """All assertions in program order."""
        return [node for node in self.graph.nodes if is_assertion(node)]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """Values that no operator computes: primals, tangents, and constants captured by tracing."""
        return (*self.primals, *self.tangents, *self.graph.find_nodes(op="get_attr"))


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device on which a graph computes: the first that is neither CPU nor meta, else the CPU."""
    devices = [node.meta[VALUE].device for node in graph.nodes if is_tensor(node)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def device_of_value(node: fx.Node) -> torch.device:
    """Return the device of a value, or of the first tensor among an operator's results (there must be one)."""
    return next(value.device for value in results_of(node) if value is not None)


def walk(roots: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield `roots`, and all items to which `successors` leads from them, each once, depth first.

    The successors of an item are requested after the caller has received it, so the caller may stop the walk at any item.
    """
    todo, seen = list(roots), set[T]()
    while todo:
        item = todo.pop()
        if item not in seen:
            seen.add(item)
            yield item
            todo.extend(successors(item))


def ancestors(roots: Iterator[Any] | tuple[Any, ...]) -> frozenset[fx.Node]:
    """Return the nodes on which `roots` depend, and the roots; roots that are constants are ignored."""
    return frozenset(walk((root for root in roots if isinstance(root, fx.Node)), operands_of))


def descendants(roots: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `roots`, and the nodes among `nodes` (given in graph order) that depend on them through `nodes` only."""
    dependent = set(roots)
    for node in nodes:
        if not dependent.isdisjoint(operands_of(node)):
            dependent.add(node)
    return dependent


def connected_components(nodes: Iterable[fx.Node], links: Iterable[tuple[fx.Node, fx.Node]]) -> list[list[fx.Node]]:
    """Return the connected components of an undirected graph with these nodes and links (pairs of nodes).

    The components, and the nodes in each, are in the order of `nodes`.
    """
    node_order = {node: i for i, node in enumerate(nodes)}
    network = networkx.Graph()
    network.add_nodes_from(node_order)
    network.add_edges_from(links)
    return [sorted(component, key=node_order.__getitem__) for component in networkx.connected_components(network)]


def trained_sources(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the inputs that gradients depend on or belong to: all tangents, and the primals that have a gradient."""
    return frozenset(joint.tangents) | {primal for _, primal, _ in joint.trained}


def trained_values(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the primals that have a gradient, and the forward values that depend on them."""
    trained = {primal for _, primal, _ in joint.trained}
    return frozenset(descendants(trained, (node for node in joint.nodes if node in joint.forward)))


def joint_graph(graph: fx.Graph, num_primals: int, num_outputs: int) -> JointGraph:
    """Wrap a graph (without copying it) as a joint graph.

    Its first `num_primals` placeholders are primals, the others tangents. Its first `num_outputs` results are forward outputs,
    the others gradients.
    """
    placeholders = tuple(graph.find_nodes(op="placeholder"))
    results = outputs_of(graph)
    outputs = results[:num_outputs]
    forward_assertions = [
        node for node in graph.nodes if is_assertion(node) and not ancestors((node,)).intersection(placeholders[num_primals:])
    ]
    forward = ancestors((*outputs, *forward_assertions)).difference(forward_assertions)
    selected_results = {user for node in forward for user in node.users if user.target is operator.getitem}  # even if unused
    return JointGraph(
        graph=graph,
        primals=placeholders[:num_primals],
        tangents=placeholders[num_primals:],
        outputs=outputs,
        gradients=results[num_outputs:],
        forward=forward | selected_results,
    )


def graph_copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph. (`deepcopy` also copies how arguments are packed, and torch warns about that.)"""
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = add_copy(copied, node, copies)
    return copied


def erase_unused(graph: fx.Graph, keep: Callable[[fx.Node], bool] = lambda node: False) -> list[fx.Node]:
    """Erase operators without users, then operators that lose their last user by this, and so on; return the erased nodes.

    Assertions, and nodes for which `keep` returns True, stay.
    """
    erased = []
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_assertion(node) and not keep(node):
            graph.erase_node(node)
            erased.append(node)
    return erased


def is_assertion(node: fx.Node) -> bool:
    """Return whether an operator must run even if nothing uses its result: an assertion, or one that a pass marked so."""
    return id(node.target) in _ASSERTION_IDS or KEPT_WITHOUT_USERS in node.meta


def is_tensor(node: Any) -> bool:
    """Return whether a value is a node with one tensor as its result."""
    value = node.meta.get(VALUE) if isinstance(node, fx.Node) else None
    return type(value) is FakeTensor or isinstance(value, torch.Tensor)  # `isinstance` of tensors is slow


def is_parameter(node: fx.Node) -> bool:
    """Return whether capture has marked an input as a parameter or a buffer, rather than data."""
    return bool(node.meta.get(STATIC_ADDRESS, False))


def is_size(node: Any) -> bool:
    """Return whether a node is a number computed from shapes (a `SymInt` or a related type)."""
    return isinstance(node, fx.Node) and isinstance(
        node.meta.get(VALUE), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def input_symbols(joint: JointGraph) -> set[sympy.Symbol]:
    """Return the symbols (dynamic sizes) in the shapes of primals, and in primals that are sizes themselves.

    Their numbers are known before the graph runs. (The numbers of sizes that depend on data are not known.)
    """
    tensor_sizes = (size for node in joint.primals if is_tensor(node) for size in shape_of_node(node))
    return free_symbols([*tensor_sizes, *(size_of(node.meta[VALUE]) for node in joint.primals if is_size(node))])


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the results of a graph: nodes and constants."""
    results = graph.output_node().args[0]
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def saved_values(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """Map each input of a backward graph, except tangents, to the forward value that is saved for it.

    `forward` and `backward` are the graphs after partitioning: the results of `forward` are `num_outputs` outputs, then the
    saved values.
    """
    saved = sort_sizes_first(outputs_of(forward)[num_outputs:])
    return dict(zip(backward.find_nodes(op="placeholder"), saved, strict=False))


def sort_sizes_first(saved: Iterable[Any]) -> list[Any]:
    """Return the saved forward values in the order of the backward graph's inputs: first sizes, then tensors, as AOTAutograd."""
    return sorted(saved, key=lambda node: not is_size(node))


def is_object(node: Any) -> bool:
    """Return whether a node is an opaque input, neither tensor nor size, such as the mesh of a sharded weight."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and not (is_tensor(node) or is_size(node) or is_token(node))


def node_argument(node: fx.Node, position: int = 0) -> fx.Node:
    """Return a positional argument that must be a node: a tensor, or for `getitem` an operator with several results."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def int_argument(node: fx.Node, position: int) -> int:
    """Return a positional argument that must be an integer: a dimension, or for `getitem` the index of a result."""
    argument = node.args[position]
    assert isinstance(argument, int)
    return argument


def tensor_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor arguments in call order, with repetitions."""
    args, kwargs = node.args, node.kwargs
    operands = [argument for argument in args if is_tensor(argument)]
    if kwargs or (len(operands) < len(args) and any(isinstance(argument, (list, tuple, dict, slice)) for argument in args)):
        operands.clear()
        fx.node.map_arg((args, kwargs), lambda argument: operands.append(argument) if is_tensor(argument) else None)
    return tuple(operands)  # type: ignore[arg-type]


def has_same_type(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two values have the same dtype and device."""
    value, other_value = node.meta[VALUE], other.meta[VALUE]
    return bool(value.dtype == other_value.dtype and value.device == other_value.device)


def results_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Return the fake tensors of a node's results, a tuple even for one result; None for a result that is not a tensor."""
    value = node.meta.get(VALUE)
    if type(value) is FakeTensor:
        return (value,)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in values)


def shape_of_node(node: fx.Node) -> tuple[Size, ...]:
    """Return the sizes of a node's tensor, as integers or expressions."""
    return shape_of(node.meta[VALUE])


def num_elements(node: fx.Node) -> int:
    """Return the number of elements of a node's tensor, for typical lengths if its shape is dynamic: to compare costs."""
    number = node.meta[VALUE].numel()
    return number if isinstance(number, int) else numeric(product(shape_of_node(node)))


def scalar_argument(argument: Any) -> Any:
    """Return a scalar argument of an operator; if it is a node that computes a size, return the size as an expression."""
    return size_of(argument.meta[VALUE]) if is_size(argument) else argument


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by the names in the operator's schema, with defaults filled in."""
    args, kwargs = node.args, node.kwargs
    num_args = len(args)
    return {
        name: args[position] if position < num_args and not is_keyword else kwargs.get(name, default)
        for position, (name, default, is_keyword) in enumerate(schema_arguments(node.target))
    }


@cache
def schema_arguments(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return (name, default, whether it is keyword-only) of each argument in an operator's schema; none without a schema.

    The default of an argument that has none is None.
    """
    schema = getattr(target, "_schema", None)
    return tuple((item.name, item.default_value, item.kwarg_only) for item in schema.arguments) if schema is not None else ()
