"""Remove a permutation of rows that is undone later.

Mixtures of experts sort rows by expert, multiply each group by its expert's weight, and restore the order of the rows.
The operators in between treat all rows alike, so they may act on the rows in their original order, in which chunks of the
sequence are contiguous:

    order = sort(ids)       f(x[order])[inverse of order]    ->    f(x)
                            sum over rows of g(x[order])     ->    sum over rows of g(x)

The proof is an induction over operators. A permuted value v has an unpermuted value w (its *twin*) with v[i] = w[order[i]].
If an operator's rule treats all rows alike (their axis label is not special), the operator maps unpermuted operands to the
unpermuted result; if the operator sums over the rows, both results are equal, and the result is called *restored*. A
look-up at the inverse permutation also restores rows. Restored values are then replaced by their twins. The graph changes
only if a permutation disappears completely. A *handler* records the results of one kind of operator in `Permutations`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.axis_table import AxisTable, Dim
from streamfx.ir.joint import bound_arguments, int_argument, is_assertion, is_tensor, shape_of_node, tensor_operands, walk
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.signature import AxisLabel, LabelShape, Signature
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.rules.registry import RuleCall, evaluate_rule, rule_for
from streamfx.passes.ops.traits import overload_name
from streamfx.passes.rewrite.driver import replace
from streamfx.passes.rewrite.views.iota_index import find_row_index, is_arange, simplify_arange_index

aten = torch.ops.aten
ROW_ORDER = "{target}: its rows are in sorted order, and {reader} depends on that order"
Handler: TypeAlias = "Callable[[Permutations, fx.Node], None]"


@dataclass(frozen=True)
class Permuted:
    """What is known of a node that is computed from permuted rows: `twin` is the same value for rows in their original order.

    `dims` is the permuted dimension of each result, or None if the result equals the twin's.
    """

    order: fx.Node  # the permutation: row i of the node is row order[i] of the twin
    twin: fx.Node
    dims: tuple[int | None, ...] = (0,)


class Permutations:
    """The values of a graph whose rows are permuted, and their unpermuted values."""

    def __init__(self, graph: fx.Graph) -> None:
        """Start without recorded values; each dictionary below is by node. The writer emits the twins."""
        self.graph, self.writer, self.values = graph, GraphWriter(graph), ValueRanges()
        self.permuted: dict[fx.Node, Permuted] = {}
        self.restored: dict[fx.Node, Permuted] = {}  # values that do not depend on the permutation, and their twins
        self.inverse: dict[fx.Node, fx.Node] = {}  # inverse permutations, and the permutation that each one undoes
        self.sort_keys: dict[fx.Node, fx.Node] = {}  # permutations, and the keys that each one sorts in ascending order

    def find(self, more_handlers: Mapping[str, Handler]) -> None:
        """Walk the graph in order, and record permuted and restored values with their twins, which are emitted.

        `more_handlers` maps names of operators to handlers, in addition to `HANDLERS`. Operators without a handler, or about
        which the handler records nothing, are recorded if their axis rule treats all rows alike.
        """
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.permuted or node in self.restored:
                continue
            handler = more_handlers.get(overload_name(node.target), HANDLERS.get(node.target))
            if handler is not None:
                handler(self, node)
            if self.permuted and node not in self.permuted and node not in self.restored and node not in self.inverse:
                _propagate(self, node)

    def record(self, node: fx.Node, order: fx.Node, twin: fx.Node, dim: int | None = 0) -> None:
        """Record that `node` is `twin` with its rows permuted along `dim` by `order`, or equal to `twin` if `dim` is None."""
        (self.restored if dim is None else self.permuted)[node] = Permuted(order, twin, (dim,))

    def permuted_along(self, node: Any, dim: int = 0) -> Permuted | None:
        """Return the record (permutation and twin) of a value whose rows are permuted along `dim`; else None."""
        permuted = self.permuted.get(node)
        return permuted if permuted is not None and permuted.dims == (dim % len(shape_of_node(node)),) else None

    def is_permutation(self, node: Any) -> bool:
        """Return whether a value is a recorded permutation: the indices that a sort returns."""
        return node in self.sort_keys


def remove_undone_permutations(graph: fx.Graph, more_handlers: Mapping[str, Handler]) -> None:
    """Remove, in place, every permutation of rows on which no output of the graph depends, such as a sort by expert.

    Values that do not depend on the permutation are replaced by the same values computed from rows in their original order.
    If an operator stays permuted, its `FALLBACK_REASON` names a reader that depends on the order. `more_handlers` maps
    operator names to functions that know more permuted operators.
    """
    orders = Permutations(graph)
    orders.find(more_handlers)
    if not orders.permuted and not orders.restored:
        return
    replacements = _select_replacements(orders)
    reachable = _reachable(graph, replacements)
    for node in orders.permuted.keys() & reachable:
        reader = next((user.name for user in node.users if user in reachable and user not in orders.permuted), "an operator")
        node.meta[FALLBACK_REASON] = ROW_ORDER.format(target=node.target, reader=reader)
    new_nodes = {*orders.writer.new_nodes}
    for node, permuted in replacements.items():
        replace(node, permuted.twin, is_new=permuted.twin in new_nodes)


def _select_replacements(orders: Permutations) -> dict[fx.Node, Permuted]:
    """Return the restored values whose permutation disappears completely if they are replaced by their twins.

    A permutation stays if the outputs still depend on any value that it permutes. Then none of its restored values is
    replaced, so that other permutations may stay as well: repeat until nothing changes.
    """
    replacements = dict(orders.restored)
    while True:
        reachable = _reachable(orders.graph, replacements)
        remaining_orders = {permuted.order for node, permuted in orders.permuted.items() if node in reachable}
        removable = {node: permuted for node, permuted in replacements.items() if permuted.order not in remaining_orders}
        if len(removable) == len(replacements):
            return replacements
        replacements = removable


def _reachable(graph: fx.Graph, replacements: Mapping[fx.Node, Permuted]) -> set[fx.Node]:
    """Return the nodes on which outputs and assertions depend after the nodes in `replacements` are replaced by their twins."""

    def replaced(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return some nodes, with twins in place of the nodes that are replaced."""
        return [replacements[node].twin if node in replacements else node for node in nodes]

    roots = replaced((graph.output_node(), *filter(is_assertion, graph.nodes)))
    return set(walk(roots, lambda node: replaced(node.all_input_nodes)))


# -- operators whose rules treat all rows alike


def _propagate(orders: Permutations, node: fx.Node) -> None:
    """Record the twin of an operator with permuted operands, if the operator's axis rule treats all rows alike.

    The twin is the same operator on the twins of its operands. The result is permuted in the dimension of the rows, or
    restored if the operator sums over them. All permuted operands must have one permutation.
    """
    if node.target is operator.getitem:
        return _propagate_getitem(orders, node)
    operands = tensor_operands(node)
    permuted_operands = [orders.permuted.get(operand) for operand in operands]
    orders_of_operands = {permuted.order for permuted in permuted_operands if permuted is not None}
    if len(orders_of_operands) != 1 or is_reduced_over_ranks(node):
        return None  # (a reduction over ranks would combine rows that each rank has permuted differently)
    signature = _signature(node)
    row_label = _find_row_label(signature, permuted_operands) if signature is not None else None
    if signature is None or row_label is None:
        return None
    dims = tuple(_dim_of_label(shape, row_label) for shape in signature.results)
    if any(row_label in dim for shape in signature.results for dim in shape if len(dim) > 1):  # merged with another axis
        return None
    twins = {operand: permuted.twin for operand, permuted in zip(operands, permuted_operands, strict=True) if permuted}
    writer = orders.writer.move_before(node)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: twins.get(argument, argument))
    twin = writer.call(node.target, *args, **kwargs)
    twin = simplify_arange_index(twin, writer) or twin
    has_permuted_result = not is_tensor(node) or dims[0] is not None
    (orders.permuted if has_permuted_result else orders.restored)[node] = Permuted(orders_of_operands.pop(), twin, dims)
    return None


def _propagate_getitem(orders: Permutations, node: fx.Node) -> None:
    """Record the twin of a `getitem` of an operator with permuted results: the same result of the operator's twin."""
    producer, result_index = node.args[0], int_argument(node, 1)
    permuted = orders.permuted.get(producer)  # type: ignore[arg-type]
    if permuted is not None and result_index < len(permuted.dims):
        twin = orders.writer.move_before(node).call(operator.getitem, permuted.twin, result_index)
        orders.record(node, permuted.order, twin, permuted.dims[result_index])


def _signature(node: fx.Node) -> Signature | None:
    """Return the operator's signature: axis labels for the dimensions of its operands and results; None without a rule.

    It is evaluated for operands whose dimensions are all different axes, so two dimensions only share a label if the
    operator itself relates them.
    """
    rule = rule_for(node)
    if rule is None:
        return None
    table = AxisTable()
    dims: dict[fx.Node, tuple[Dim, ...]] = {
        operand: tuple(table.fresh(size) for size in shape_of_node(operand)) for operand in tensor_operands(node)
    }
    signature = evaluate_rule(rule, RuleCall(node, table, dims))
    return None if isinstance(signature, str) else signature  # a string is the reason why the rule does not apply


def _find_row_label(signature: Signature, permuted_operands: list[Permuted | None]) -> AxisLabel | None:
    """Return the axis label of the permuted dimensions, if the operator treats all rows along it alike; else None.

    `permuted_operands` has the record of each operand, or None for an operand that is not permuted. For `a b, b c -> a c`
    with the first operand permuted along dimension 0, return a. The label must be the label of all permuted dimensions and of no
    other dimension.
    """
    labels: set[AxisLabel] = set()
    for operand_labels, permuted in zip(signature.operands, permuted_operands, strict=True):
        if permuted is not None:
            (dim,) = permuted.dims
            if dim is None or len(operand_labels[dim]) != 1:
                return None
            labels.add(operand_labels[dim][0])
    if len(labels) != 1 or signature.combine not in ("sum", "mean"):
        return None
    (row_label,) = labels
    if signature.is_special(row_label):
        return None
    for operand_labels, permuted in zip(signature.operands, permuted_operands, strict=True):
        row_dims = [dim for dim, dim_labels in enumerate(operand_labels) if row_label in dim_labels]
        if row_dims != ([permuted.dims[0]] if permuted is not None else []):
            return None
    return row_label


def _dim_of_label(shape: LabelShape, label: AxisLabel) -> int | None:
    """Return the index of the dimension that has an axis label; None if no dimension has it."""
    return next((dim for dim, dim_labels in enumerate(shape) if label in dim_labels), None)


# -- operators that create a permutation, index by it, or undo it


def _handle_sort(orders: Permutations, node: fx.Node) -> None:
    """Record the indices that sort a vector as a permutation, and the indices that sort a permutation as its inverse.

    order = argsort(keys): its twin is arange, because order[i] = arange[order[i]]; the sorted keys have the twin `keys`.
    """
    arguments = bound_arguments(node)
    keys = arguments["self"]
    if len(shape_of_node(keys)) != 1 or arguments["descending"]:
        return
    has_values = not is_tensor(node)
    results = {int_argument(user, 1): user for user in node.users if user.target is operator.getitem} if has_values else {1: node}
    order = results.get(1)
    if order is None or (keys in orders.permuted and not orders.is_permutation(keys)):
        return
    writer = orders.writer.move_before(node)
    if orders.is_permutation(keys):
        orders.inverse[order] = keys
        return
    orders.sort_keys[order] = keys
    (size,) = size_arguments(keys, writer)
    order_value = order.meta[VALUE]
    indices = writer.call(aten.arange.start_step, 0, size, 1, dtype=order_value.dtype, device=order_value.device)
    orders.record(order, order, indices)
    if 0 in results:
        orders.record(results[0], order, keys)


def _handle_lookup(orders: Permutations, node: fx.Node) -> None:
    """Record rows[inverse], where rows = twin[order] and `inverse` is the inverse of `order`, as restored: it equals the twin."""
    index = find_row_index(node)
    rows = orders.permuted_along(node.args[0])
    if rows is not None and index is not None and orders.inverse.get(index) is rows.order:
        orders.record(node, rows.order, rows.twin, dim=None)


def _handle_write(orders: Permutations, node: fx.Node) -> None:
    """Record the result of writing rows at a permutation of all row indices, or at its inverse, with `index_put`.

    base[order] = twin[order] is restored: it equals the twin. base[inverse of order] = rows is permuted: rows[order].
    """
    index, arguments = find_row_index(node), bound_arguments(node)
    if index is None:
        return
    base, rows = arguments["self"], arguments["values"]
    if shape_of_node(rows) != shape_of_node(base):
        return
    if orders.is_permutation(index) and not arguments["accumulate"]:
        _record_write(orders, node, index, rows)
    elif index in orders.inverse and rows not in orders.permuted and not (arguments["accumulate"] and not is_zero(base)):
        orders.record(node, orders.inverse[index], rows)


def _record_write(orders: Permutations, node: fx.Node, order: fx.Node, rows: fx.Node) -> None:
    """Record the result `node` of `node[order] = rows`, which writes every row.

    If rows = twin[order], the result is restored: it equals the twin. If rows = arange, it is the inverse permutation.
    """
    permuted_rows = orders.permuted_along(rows)
    if permuted_rows is not None and permuted_rows.order is order:
        orders.record(node, order, permuted_rows.twin, dim=None)
    elif is_arange(rows):
        orders.inverse[node] = order


def _handle_scatter(orders: Permutations, node: fx.Node) -> None:
    """Record a vector that `scatter` or `index_copy` writes at a permutation of all indices: result[order] = rows."""
    arguments = bound_arguments(node)
    index, rows = arguments["index"], arguments.get("src", arguments.get("source"))
    is_vector = shape_of_node(index) == shape_of_node(node) and len(shape_of_node(index)) == 1
    if (
        is_vector
        and orders.is_permutation(index)
        and isinstance(rows, fx.Node)
        and is_tensor(rows)
        and shape_of_node(rows) == shape_of_node(node)
    ):
        _record_write(orders, node, index, rows)


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(of_kind(Kind.SORT, Kind.ARGSORT), _handle_sort),
    **dict.fromkeys(of_kind(Kind.LOOKUP), _handle_lookup),
    **dict.fromkeys(of_kind(Kind.PUT), _handle_write),
    aten.scatter.src: _handle_scatter,
    aten.index_copy.default: _handle_scatter,
}
