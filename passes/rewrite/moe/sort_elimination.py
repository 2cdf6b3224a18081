"""Remove a permutation of rows that is undone later.

Mixtures of experts sort rows by expert, multiply each group by its expert's weight, and restore the order of the rows.
The operators in between treat all rows alike, so they may act on the rows in their original order, in which chunks of the
sequence are contiguous:

    order = sort(ids)       f(x[order])[inverse of order]    ->    f(x)
                            sum over rows of g(x[order])     ->    sum over rows of g(x)

The proof is an induction over operators. A permuted value v has an unpermuted value w (its twin) with v[i] = w[order[i]].
If an operator's rule keeps the axis label of the rows apart, the operator maps unpermuted operands to the unpermuted
result; if the operator sums over the rows, both results are equal. The graph changes only if a permutation disappears
completely.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.axis_table import AxisTable, Dim
from streamfx.ir.joint import bound_arguments, int_argument, is_assertion, is_tensor, shape_of_node, tensor_operands
from streamfx.ir.signature import Letter, LetterShape, Signature
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE, WHY_WHOLE
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.rules.registry import RuleCall, rule_for, said_by
from streamfx.passes.rewrite.driver import replace
from streamfx.passes.rewrite.views.iota_index import counts_up, looked_up_by_number, row_index
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
LOOKS_UP = (aten.index.Tensor, aten._unsafe_index.Tensor)
Special: TypeAlias = "Callable[[Permutations, fx.Node], None]"


@dataclass(frozen=True)
class Permuted:
    """A node computed from permuted rows; `twin` is the same value computed from the rows in their original order.

    `dims` is the permuted dimension of each result, or None if the result equals the twin's.
    """

    order: fx.Node
    twin: fx.Node
    dims: tuple[int | None, ...] = (0,)


class Permutations:
    """The values of a graph whose rows are permuted, and their unpermuted values."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.writer, self.values = graph, GraphWriter(graph), ValueRanges()
        self.reordered: dict[fx.Node, Permuted] = {}
        self.restored: dict[fx.Node, Permuted] = {}  # values that do not depend on the permutation, and their twins
        self.inverse: dict[fx.Node, fx.Node] = {}  # inverse permutations, and the permutation that each one undoes
        self.sorted_by: dict[fx.Node, fx.Node] = {}  # permutations, and the keys that each one sorts in ascending order

    def find(self, special: Mapping[str, Special]) -> None:
        """Walk the graph. `special` maps operator names to handlers that know more about permutations than the operators'
        rules.
        """
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.reordered or node in self.restored:
                continue
            known = special.get(_name(node), SPECIAL.get(node.target))
            if known is not None:
                known(self, node)
            if node not in self.reordered and node not in self.restored and node not in self.inverse:
                _propagate(self, node)

    def note(self, node: fx.Node, order: fx.Node, twin: fx.Node, dim: int | None = 0) -> None:
        """Record that `node` is `twin` with its rows permuted along `dim`, or equal to `twin` if `dim` is None."""
        (self.restored if dim is None else self.reordered)[node] = Permuted(order, twin, (dim,))

    def at(self, node: Any, dim: int = 0) -> Permuted | None:
        """Return the twin of a value that is permuted along a dimension, else None."""
        found = self.reordered.get(node)
        return found if found is not None and found.dims == (dim % len(shape_of_node(node)),) else None

    def order_of(self, node: Any) -> fx.Node | None:
        """Return the permutation that an index vector applies to the rows it looks up, else None."""
        return node if node in self.sorted_by else None


def undo_orders(graph: fx.Graph, special: Mapping[str, Special]) -> None:
    """Remove, in place, every permutation of rows on which no result depends."""
    orders = Permutations(graph)
    orders.find(special)
    restored = _removable(orders)
    alive = _alive(graph, restored)
    for node in orders.reordered.keys() & alive:
        lasting = next((user.name for user in node.users if user in alive and user not in orders.reordered), "another")
        node.meta[WHY_WHOLE] = f"{node.target}: its rows stand in an order that matters to {lasting}"
    new_nodes = {*orders.writer.made}
    for node, found in restored.items():
        replace(node, found.twin, is_new=found.twin in new_nodes)


def _removable(orders: Permutations) -> dict[fx.Node, Permuted]:
    """Return the replacements that leave no value permuted by the same permutation alive."""
    kept = dict(orders.restored)
    while True:
        alive = _alive(orders.graph, kept)
        lasting = {found.order for node, found in orders.reordered.items() if node in alive}
        remaining = {node: found for node, found in kept.items() if found.order not in lasting}
        if len(remaining) == len(kept):
            return kept
        kept = remaining


def _alive(graph: fx.Graph, replaced: Mapping[fx.Node, Permuted]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [graph.output_node(), *filter(is_assertion, graph.nodes)]
    while todo:
        node = todo.pop()
        node = replaced[node].twin if node in replaced else node
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, OpOverload) else ""


# -- operators whose rules treat all rows alike


def _propagate(orders: Permutations, node: fx.Node) -> None:
    """Compute an operator's twin from permuted operands, if its rule keeps the axis label of the rows apart."""
    if node.target is operator.getitem:
        return _propagate_getitem(orders, node)
    operands = tensor_operands(node)
    permuted_operands = [orders.reordered.get(operand) for operand in operands]
    known = [mark for mark in permuted_operands if mark is not None]
    if not known or len({mark.order for mark in known}) > 1 or is_reduced_over_ranks(node):
        return None  # (a reduction over ranks would combine rows that each rank has permuted differently)
    signature = _signature(node)
    letter = _letter_of_rows(signature, permuted_operands) if signature is not None else None
    if signature is None or letter is None:
        return None
    dims = tuple(_position(shape, letter) for shape in signature.results)
    if any(letter in dim for shape in signature.results for dim in shape if len(dim) > 1):
        return None
    twins = {operand: mark.twin for operand, mark in zip(operands, permuted_operands, strict=True) if mark is not None}
    writer = orders.writer.before(node)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: twins.get(argument, argument))
    twin = writer.call(node.target, *args, **kwargs)
    twin = looked_up_by_number(twin, writer) or twin
    is_part = not is_tensor(node) or dims[0] is not None
    (orders.reordered if is_part else orders.restored)[node] = Permuted(known[0].order, twin, dims)
    return None


def _propagate_getitem(orders: Permutations, node: fx.Node) -> None:
    source, position = node.args[0], int_argument(node, 1)
    found = orders.reordered.get(source)  # type: ignore[arg-type]
    if found is not None and position < len(found.dims):
        part = orders.writer.before(node).call(operator.getitem, found.twin, position)
        orders.note(node, found.order, part, found.dims[position])


def _signature(node: fx.Node) -> Signature | None:
    """Return the operator's signature for dimensions of which only the sizes are known."""
    rule = rule_for(node)
    if rule is None:
        return None
    table = AxisTable()
    dims: dict[fx.Node, tuple[Dim, ...]] = {
        operand: tuple(table.fresh(size) for size in shape_of_node(operand)) for operand in tensor_operands(node)
    }
    signature = said_by(rule, RuleCall(node, table, dims))
    return None if isinstance(signature, str) else signature


def _letter_of_rows(signature: Signature, permuted_operands: list[Permuted | None]) -> Letter | None:
    """Return the axis label of all permuted dimensions, if it is one, no operand has it unpermuted, and the operator
    keeps it.
    """
    letters: set[Letter] = set()
    for shape, mark in zip(signature.operands, permuted_operands, strict=True):
        if mark is not None:
            (dim,) = mark.dims
            if dim is None or len(shape[dim]) != 1:
                return None
            letters.add(shape[dim][0])
    if len(letters) != 1 or signature.combine not in ("sum", "mean"):
        return None
    (letter,) = letters
    if signature.is_special(letter):
        return None
    for shape, mark in zip(signature.operands, permuted_operands, strict=True):
        places = [position for position, dim in enumerate(shape) if letter in dim]
        if places != ([mark.dims[0]] if mark is not None else []):
            return None
    return letter


def _position(shape: LetterShape, letter: Letter) -> int | None:
    return next((position for position, dim in enumerate(shape) if letter in dim), None)


# -- operators that create a permutation, index by it, or undo it


def _sort(orders: Permutations, node: fx.Node) -> None:
    """The indices of a sorted vector are a permutation; the indices of a sorted permutation are its inverse."""
    arguments = bound_arguments(node)
    keys = arguments["self"]
    if len(shape_of_node(keys)) != 1 or arguments["descending"]:
        return
    is_pair = not is_tensor(node)
    parts = {int_argument(user, 1): user for user in node.users if user.target is operator.getitem} if is_pair else {1: node}
    order = parts.get(1)
    if order is None or (keys in orders.reordered and orders.order_of(keys) is None):
        return
    writer = orders.writer.before(node)
    if orders.order_of(keys) is not None:
        orders.inverse[order] = keys
        return
    orders.sorted_by[order] = keys
    (size,) = size_arguments(keys, writer)
    own = order.meta[VALUE]
    numbers = writer.call(aten.arange.start_step, 0, size, 1, dtype=own.dtype, device=own.device)
    orders.note(order, order, numbers)
    if 0 in parts:
        orders.note(parts[0], order, keys)


def _look_up(orders: Permutations, node: fx.Node) -> None:
    """Permuted rows, indexed by the inverse permutation, are in their original order."""
    index = row_index(node)
    rows = orders.at(node.args[0])
    if rows is not None and index is not None and orders.inverse.get(index) is rows.order:
        orders.note(node, rows.order, rows.twin, None)


def _write(orders: Permutations, node: fx.Node) -> None:
    """Rows written by a permutation, which covers all rows, are in their original order; rows written by an inverse are
    permuted.
    """
    index, arguments = row_index(node), bound_arguments(node)
    if index is None:
        return
    base, rows = arguments["self"], arguments["values"]
    if shape_of_node(rows) != shape_of_node(base):
        return
    if (order := orders.order_of(index)) is not None and not arguments["accumulate"]:
        _written(orders, node, order, rows)
    elif index in orders.inverse and rows not in orders.reordered and not (arguments["accumulate"] and not is_zero(base)):
        orders.note(node, orders.inverse[index], rows)


def _written(orders: Permutations, node: fx.Node, order: fx.Node, rows: fx.Node) -> None:
    """result[order[i]] = rows[i]"""
    found = orders.at(rows)
    if found is not None and found.order is order:
        orders.note(node, order, found.twin, None)
    elif counts_up(rows):
        orders.inverse[node] = order


def _scatter(orders: Permutations, node: fx.Node) -> None:
    """Handle `scatter(base, 0, order, rows)` and `index_copy` of vectors likewise."""
    arguments = bound_arguments(node)
    index, rows = arguments["index"], arguments.get("src", arguments.get("source"))
    is_vector = shape_of_node(index) == shape_of_node(node) and len(shape_of_node(index)) == 1
    order = orders.order_of(index)
    if (
        is_vector
        and order is not None
        and isinstance(rows, fx.Node)
        and is_tensor(rows)
        and shape_of_node(rows) == shape_of_node(node)
    ):
        _written(orders, node, order, rows)


SPECIAL: dict[Any, Special] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.argsort.default: _sort,
    aten.argsort.stable: _sort,
    aten.scatter.src: _scatter,
    aten.index_copy.default: _scatter,
    **dict.fromkeys(LOOKS_UP, _look_up),
    **dict.fromkeys(WRITES, _write),
}
