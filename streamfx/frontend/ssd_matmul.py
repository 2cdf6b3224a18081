"""Match products with decaying weights over blocks of rows in a Dynamo graph, and replace each by one operator.

    before   weights = exp(segment_sum(pad(decays, (1, 0))))                             [... c z]
             out = einsum("... c z, ... z f -> ... c f", weights, cat([initial, rows]))  out[:, :-1], out[:, -1]
    after    sums, last = streamfx.decayed_sums(decays, rows, initial)                    sums, last

The formula of the weights is proven element by element (`segsum_match.py`). The law exp(a + b) = exp(a) * exp(b)
implies

    out[c + 1] = exp(decays[c]) * out[c] + rows[c]

up to rounding, if no decay is positive. This is proven once the graph is differentiated
(`nonpositive` in `runtime/segment_sum.py`). Until then, and if it does not hold, the operator computes the original
product.

Dimensions have labels, as in an einsum: c (rows of the weights and the product), z (columns of the weights, rows of the other
operand), batch labels, and features f, which the weights lack. The row `initial` before the others is the *leading row*.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.dialect.decayed_sums import DECAYED_SUMS, SUMS_AFTER
from streamfx.frontend.combine_fn import is_plain_tensor
from streamfx.frontend.segsum_match import COLUMN, FormulaKind, FormulaReader, arguments_of, call_name
from streamfx.ir.sizes import Size, shape_of, size_of
from streamfx.ir.sizes import product as product_of
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private import dynamo_copy

EXACT_DTYPES = (torch.float32, torch.float64)  # in narrower dtypes, eager rounds sums of decays and later intermediate results
FUNCTORCH_MODULES = ("torch._functorch", "torch._C._functorch")  # inside these, values have another meaning
Labels = tuple[str, ...]


class LabeledValue(NamedTuple):
    """A tensor, with a label for each dimension."""

    value: fx.Node
    labels: Labels


@dataclass(frozen=True)
class Product:
    """A matrix product with decaying weights. `row_label` (c) and `column_label` (z) are the dimensions of the weights.

    `node` is the product, `out` its labels. If a row was concatenated before the rows, it is `initial`, and `rows` has only the
    others. `matched` has the operators that compute the weights and the leading row.
    """

    node: fx.Node
    row_label: str
    column_label: str
    out: Labels
    decays: LabeledValue
    rows: LabeledValue
    initial: LabeledValue | None
    has_leading_row: bool  # the weights' first row belongs to the row before the others
    matched: frozenset[fx.Node]

    @property
    def batch(self) -> Labels:
        """The labels of batch dimensions (of weights, rows and product), in the order of the product."""
        return tuple(label for label in self.out if label in self.decays.labels and label != self.row_label)

    @property
    def features(self) -> Labels:
        """The labels of feature dimensions, which the decays do not have, in the order of the product."""
        return tuple(label for label in self.out if label not in self.decays.labels)


def replace_ssd_products(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph, nested graphs included, with one operator in place of each product with decaying weights.

    Return the module itself if it has no such product.
    """
    submodules = {
        name: replace_ssd_products(submodule)
        for name, submodule in module.named_children()
        if isinstance(submodule, fx.GraphModule)
    }
    changed = {name: submodule for name, submodule in submodules.items() if submodule is not getattr(module, name)}
    products = list(_find_products(module.graph))
    if not products and not changed:
        return module
    copy, copies = dynamo_copy(module)
    for product in products:
        _ProductBuilder(product, copies).write()
    for name, submodule in changed.items():
        setattr(copy, name, submodule)
    copy.graph.eliminate_dead_code(is_impure_node=lambda node: node not in _matched_copies(products, copies))
    copy.recompile()
    return copy


def _matched_copies(products: Sequence[Product], copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the copies of products and of operators that compute their weights: only these are removed if nothing uses them."""
    return {copies[node] for product in products for node in (product.node, *product.matched)}


# -- matching


def _find_products(graph: fx.Graph) -> Iterator[Product]:
    """Yield the products with decaying weights in a graph; none if it contains functorch transformations such as `vmap`."""
    if any(str(getattr(node.target, "__module__", "")).startswith(FUNCTORCH_MODULES) for node in graph.nodes):
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if (
            call_name(node) in ("einsum", "matmul", "bmm")
            and is_plain_tensor(node)
            and node.meta[EXAMPLE_VALUE].dtype in EXACT_DTYPES
        ):
            product = _match_product(node)
            if product is not None and _has_no_writes(product, order):
                yield product


def _match_product(node: fx.Node) -> Product | None:
    """Match a product whose left or right operand is a matrix of decaying weights; None for any other operator."""
    call = _match_labels(node)
    if call is None:
        return None
    left, right, out = call
    return _match_weights_times_rows(node, left, right, out) or _match_weights_times_rows(node, right, left, out)


def _match_labels(node: fx.Node) -> tuple[LabeledValue, LabeledValue, Labels] | None:
    """Return the two operands of an einsum, matmul or bmm with their labels, and the labels of the result; else None.

    einsum("bcz,bzf->bcf", x, y) -> (x, b c z), (y, b z f), b c f. A matmul gets the labels a, b, ... (batch), I, J and
    K. None if an operand is not a plain tensor, is broadcast, or has a label twice.
    """
    if node.kwargs:
        return None
    if call_name(node) == "einsum":
        equation, *operands = node.args
        operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands  # type: ignore[assignment]
        text = equation.replace(" ", "") if isinstance(equation, str) else ""
        if text.count("->") != 1 or text.count(",") != 1 or "." in text or len(operands) != 2:
            return None
        operand_labels, out = text.split("->")
        left, right = operand_labels.split(",")
    else:
        operands = list(node.args)
        rank = node.meta[EXAMPLE_VALUE].dim()
        batch = "".join(chr(ord("a") + i) for i in range(rank - 2))
        left, right, out = f"{batch}IJ", f"{batch}JK", f"{batch}IK"
    if not all(isinstance(operand, fx.Node) and is_plain_tensor(operand) for operand in operands):
        return None
    left_value, right_value = operands
    ranks = [value.meta[EXAMPLE_VALUE].dim() for value in (left_value, right_value, node)]  # type: ignore[union-attr]
    if ranks != [len(left), len(right), len(out)] or any(len(set(text)) < len(text) for text in (left, right, out)):
        return None
    return LabeledValue(left_value, tuple(left)), LabeledValue(right_value, tuple(right)), tuple(out)  # type: ignore[arg-type]


def _match_weights_times_rows(node: fx.Node, weights: LabeledValue, rows: LabeledValue, out: Labels) -> Product | None:
    """Return the product if `weights` is proven to be a matrix of decaying weights, and the labels say: weights times rows.

    That is, labels (..., c, z) times (..., z, f) -> (..., c, f), in any order. Else None. The operands of the product are then
    the source of the weights (the decays) and the rows, both without views, and without a leading row.
    """
    reader = FormulaReader()
    formula = reader.formula(weights.value)
    if (
        formula.kind is not FormulaKind.WEIGHTS
        or formula.row_dim not in formula.dims
        or formula.source.meta[EXAMPLE_VALUE].dtype != node.meta[EXAMPLE_VALUE].dtype
    ):
        return None
    label_of = dict(zip(formula.dims, weights.labels, strict=True))
    row_label, column_label = label_of[formula.row_dim], label_of[COLUMN]
    batch = set(weights.labels) - {row_label, column_label}
    features = set(rows.labels) - batch - {column_label}
    if None in formula.dims or row_label in rows.labels or not batch | {column_label} <= set(rows.labels):
        return None
    if set(out) != batch | features | {row_label} or not _have_equal_sizes(node, weights, rows, out):
        return None
    decays = LabeledValue(formula.source, tuple(label_of[dim] for dim in range(formula.source.meta[EXAMPLE_VALUE].dim())))
    rows_formula = reader.formula(rows.value)
    if rows_formula.kind is FormulaKind.SOURCE and None not in rows_formula.dims:
        labels = tuple(label for _, label in sorted(zip(rows_formula.dims, rows.labels, strict=True)))  # type: ignore[type-var]
        rows = LabeledValue(rows_formula.source, labels)
    product = _separate_first_row(Product(node, row_label, column_label, out, decays, rows, None, False, frozenset()), reader)
    return product if _has_row_order(product) else None


def _have_equal_sizes(node: fx.Node, weights: LabeledValue, rows: LabeledValue, out: Labels) -> bool:
    """Return whether each label has the same size in both operands and the result, so that nothing is broadcast."""
    sizes = [*zip(out, shape_of(node.meta[EXAMPLE_VALUE]), strict=True)]
    for value, labels in (weights, rows):
        sizes += zip(labels, shape_of(value.meta[EXAMPLE_VALUE]), strict=True)
    size_of_label = dict(sizes)
    return all(size_of_label[label] == size for label, size in sizes)


def _separate_first_row(product: Product, reader: FormulaReader) -> Product:
    """Return the product with the leading row separated from decays and rows, if both are concatenations or paddings.

    Rows cat([initial, rows]) become `rows` and `initial` (None if it is zero). Decays cat([any, decays]) become `decays`: no
    weight contains the first decay. If they do not match, the product is complete without a leading row.
    """
    (decays, decay_labels), (rows, row_labels) = product.decays, product.rows
    split_decays = _match_leading_row(decays, decay_labels.index(product.row_label))
    split_rows = _match_leading_row(rows, row_labels.index(product.column_label))
    if (
        split_decays is None
        or split_rows is None
        or (split_decays.row is not None and split_decays.row.meta[EXAMPLE_VALUE].requires_grad)
        or (split_rows.row is None and split_rows.fill_value not in (None, 0))
    ):
        return replace(product, matched=frozenset(reader.matched - {decays, rows}))
    has_initial = split_rows.row is not None and not _is_zero(split_rows.row)
    return replace(
        product,
        decays=LabeledValue(split_decays.others, decay_labels),
        rows=LabeledValue(split_rows.others, row_labels),
        initial=LabeledValue(split_rows.row, row_labels) if has_initial else None,  # type: ignore[arg-type]
        has_leading_row=True,
        matched=frozenset(reader.matched | {decays, rows}),
    )


def _is_zero(node: fx.Node) -> bool:
    """Return whether a node creates zeros that no operator writes to (its tensor's version counter is 0)."""
    return call_name(node) in ("zeros", "zeros_like", "new_zeros") and not node.meta[EXAMPLE_VALUE]._version


class LeadingRow(NamedTuple):
    """A row before `others`: the tensor `row` that is concatenated; for a padding, None and `fill_value` (None is zero)."""

    row: fx.Node | None
    others: fx.Node
    fill_value: Any


def _match_leading_row(node: fx.Node, dim: int) -> LeadingRow | None:
    """Match `cat([row, others], dim)`, or `pad(others, ...)` by one row before the others along `dim`; None if neither."""
    rank = node.meta[EXAMPLE_VALUE].dim()
    if call_name(node) == "pad":
        arguments = arguments_of(node, "input", "pad", "mode", "value")
        pads = [] if arguments is None else list(arguments["pad"])
        one_before = [0] * (2 * (rank - 1 - dim)) + [1, 0]  # (before, after) for each dimension, the last dimension first
        is_single_row = pads[: len(one_before)] == one_before and not any(pads[len(one_before) :])
        if arguments is None or not is_single_row or arguments.get("mode", "constant") != "constant":
            return None
        return LeadingRow(None, arguments["input"], arguments.get("value"))
    if call_name(node) != "cat":
        return None
    arguments = arguments_of(node, "tensors", "dim")
    tensors: Any = () if arguments is None else arguments["tensors"]
    cat_dim = None if arguments is None else arguments.get("dim", 0)
    if len(tensors) != 2 or not all(map(is_plain_tensor, tensors)) or type(cat_dim) is not int or cat_dim % rank != dim:
        return None
    types = {(part.meta[EXAMPLE_VALUE].dim(), part.meta[EXAMPLE_VALUE].dtype) for part in tensors}
    is_single_row = types == {(rank, node.meta[EXAMPLE_VALUE].dtype)} and shape_of(tensors[0].meta[EXAMPLE_VALUE])[dim] == 1
    return LeadingRow(tensors[0], tensors[1], None) if is_single_row else None


def _has_row_order(product: Product) -> bool:
    """Return whether eager's product is contiguous in the order batch, rows, features, as the replacement's result is."""
    value = product.node.meta[EXAMPLE_VALUE]
    sizes = dict(zip(product.out, shape_of(value), strict=True))
    strides = dict(zip(product.out, map(size_of, value.stride()), strict=True))
    dense: Size = 1  # the stride of the current label in such a layout
    for label in reversed((*product.batch, product.row_label, *product.features)):
        if sizes[label] != 1 and strides[label] != dense:
            return False
        dense = product_of((dense, sizes[label]))
    return len(product.features) < 2 or all(isinstance(sizes[label], int) for label in product.features)


def _has_no_writes(product: Product, order: dict[fx.Node, int]) -> bool:
    """Return whether no operator writes to an operand, and no mode changes, from the first matched operator to the product.

    `order` has the index of each node in the graph. A node that changes a mode has no example value.
    """
    inputs = {operand.value for operand in (product.decays, product.rows, product.initial) if operand is not None}
    if any(node.meta[EXAMPLE_VALUE]._version for node in (*product.matched, *inputs, product.node)):
        return False
    start = min((order[node] for node in product.matched), default=order[product.node])
    between = [node for node, index in order.items() if start <= index <= order[product.node]]
    return all(node.meta.get(EXAMPLE_VALUE) is not None for node in between)


# -- writing


class _ProductBuilder:
    """Inserts the operator that replaces a product, and replaces the uses of the product."""

    def __init__(self, product: Product, copies: dict[fx.Node, fx.Node]) -> None:
        """Prepare to replace a product in a copied graph; `copies` maps original nodes to their copies."""
        self.product, self.copies = product, copies
        self.product_copy = copies[product.node]
        self.feature_sizes = self._sizes(product.features)

    def _sizes(self, labels: Labels) -> list[Any]:
        """Return the sizes of the product's result along these labels."""
        sizes = dict(zip(self.product.out, self.product.node.meta[EXAMPLE_VALUE].shape, strict=True))
        return [sizes[label] for label in labels]

    def write(self) -> None:
        """Insert the replacing operator, which returns the sums of all rows but the last, and the last sum, before the product.

        If all users slice the product into out[:, :-1] and out[:, -1], they are replaced by its two results; otherwise the
        product is replaced by their concatenation. Without a leading row, the product is replaced by the sums after each row.
        """
        product = self.product
        with self.product_copy.graph.inserting_before(self.product_copy):
            decays = self._permuted(product.decays, (*product.batch, product.row_label))
            row_order = (*product.batch, product.column_label, *product.features)
            rows = self._with_one_feature(self._permuted(product.rows, row_order))
            initial = None
            if product.initial is not None:
                initial_rows = self._with_one_feature(self._permuted(product.initial, row_order))
                initial = self._call(torch.select, initial_rows, -2, 0)
            results = self._call(DECAYED_SUMS if product.has_leading_row else SUMS_AFTER, decays, rows, initial)
            sums, last = (self._call(operator.getitem, results, index) for index in range(2))
            if product.has_leading_row and all(self._takes_last_row(user) is not None for user in product.node.users):
                self._replace_users(sums, last)
            else:
                out = self._concatenated(sums, last) if product.has_leading_row else sums
                self.product_copy.replace_all_uses_with(self._with_product_dims(out, product.row_label), propagate_meta=False)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert a call before the product, with the example value that `target` returns on fake tensors, and return its node."""
        out = self.product_copy.graph.call_function(target, args)
        with torch.no_grad():
            value = target(*fx.node.map_arg(args, lambda node: node.meta[EXAMPLE_VALUE]))
        out.meta = {**self.product_copy.meta, EXAMPLE_VALUE: value}
        return out

    def _permuted(self, operand: LabeledValue, labels: Labels) -> fx.Node:
        """Return an operand with its dimensions permuted to the order of these labels, as a node of the copied graph."""
        order = [operand.labels.index(label) for label in labels]
        node = self.copies[operand.value]
        return node if order == sorted(order) else self._call(torch.permute, node, order)

    def _with_one_feature(self, node: fx.Node) -> fx.Node:
        """Return the value with its feature dimensions, the last ones, flattened into one; if it has none, with one of size 1."""
        num_features = len(self.product.features)
        if num_features == 1:
            return node
        return self._call(torch.flatten, node, -num_features, -1) if num_features else self._call(torch.unsqueeze, node, -1)

    def _with_product_dims(self, node: fx.Node, *more: str) -> fx.Node:
        """Return a result of the replacing operator, [batch, *more, one feature], in the dimensions and order of the product.

        `more` is the row label for the sums of all rows, and empty for the last sum.
        """
        product = self.product
        if len(product.features) > 1:
            node = self._call(torch.unflatten, node, -1, self.feature_sizes)
        elif not product.features:
            node = self._call(torch.squeeze, node, -1)
        labels = (*product.batch, *more, *product.features)
        order = [labels.index(label) for label in product.out if label in labels]
        return node if order == sorted(order) else self._call(torch.permute, node, order)

    def _concatenated(self, sums: fx.Node, last: fx.Node) -> fx.Node:
        """Return cat([sums, last]) along rows: [... n f], [... f] -> [... n + 1, f]."""
        return self._call(torch.cat, [sums, self._call(torch.unsqueeze, last, -2)], -2)

    def _replace_users(self, sums: fx.Node, last: fx.Node) -> None:
        """Replace users out[:, -1] of the product by `last`, and users out[:, :-1] by `sums`, and erase these users."""
        builders = {
            True: lambda: self._with_product_dims(last),
            False: lambda: self._with_product_dims(sums, self.product.row_label),
        }
        replacements: dict[bool, fx.Node] = {}
        for user in list(self.product.node.users):
            is_last = bool(self._takes_last_row(user))
            replacements[is_last] = value = replacements.get(is_last) or builders[is_last]()
            self.copies[user].replace_all_uses_with(value, propagate_meta=False)
            self.product_copy.graph.erase_node(self.copies[user])

    def _takes_last_row(self, user: fx.Node) -> bool | None:
        """Return True for a user out[:, -1], which takes the last row, False for out[:, :-1], and None for any other user."""
        if call_name(user) != "getitem" or user.args[0] is not self.product.node:
            return None
        index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
        row_dim = self.product.out.index(self.product.row_label)
        other_indices = [entry for i, entry in enumerate(index) if i != row_dim]
        if len(index) <= row_dim or any(not isinstance(entry, slice) or entry != slice(None) for entry in other_indices):
            return None
        row_index = index[row_dim]
        if isinstance(row_index, slice):
            return False if row_index in (slice(None, -1), slice(None, -1, 1), slice(0, -1)) else None
        return True if type(row_index) is int and row_index == -1 else None
