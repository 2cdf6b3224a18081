"""Match products with decaying weights over blocks of rows in a Dynamo graph, and replace each by one operator.

    before   weights = exp(segment_sum(pad(decays, (1, 0))))                             [... c z]
             out = einsum("... c z, ... z f -> ... c f", weights, cat([first, rows]))    out[:, :-1], out[:, -1]
    after    sums, last = streamfx.decayed_sums(decays, rows, first)                     sums, last

The formula of the weights is proven element by element (`segsum_match.py`). The law exp(a + b) = exp(a) * exp(b)
implies

    out[c + 1] = exp(decays[c]) * out[c] + rows[c]

up to rounding, if no decay is positive. This is proven once the graph is differentiated
(`passes/rewrite/scans/segment_sum.py`). Until then, and if it does not hold, the operator computes the original
product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from streamfx.frontend.combine_fn import EXAMPLE, is_plain
from streamfx.frontend.segsum_match import COLUMN, FactKind, Reader, arguments_of, name_of
from streamfx.ir.sizes import Size, shape_of, size_of
from streamfx.ir.sizes import product as product_of
from streamfx.runtime.segment_sum import DECAYED_SUMS, SUMS_BEHIND
from streamfx.torch_private import dynamo_copy

TYPES = (torch.float32, torch.float64)  # in narrower dtypes, eager rounds sums of decays and later intermediate results
TRANSFORMS = ("torch._functorch", "torch._C._functorch")  # inside these, values have another meaning
Letters = tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """A product with weights, by dimension labels: the weights' rows and columns, the batch, and the features.

    `decays` and `rows` are (value, labels). If a `first` row was concatenated before the rows, it is separate.
    """

    node: fx.Node
    c: str
    z: str
    out: Letters
    decays: tuple[fx.Node, Letters]
    rows: tuple[fx.Node, Letters]
    first: tuple[fx.Node, Letters] | None
    is_shifted: bool  # the weights' first row belongs to the row before the others
    own: frozenset[fx.Node]

    @property
    def batch(self) -> Letters:
        return tuple(letter for letter in self.out if letter in self.decays[1] and letter != self.c)

    @property
    def features(self) -> Letters:
        return tuple(letter for letter in self.out if letter not in self.decays[1])


def with_block_products(module: fx.GraphModule) -> fx.GraphModule:
    """Return a Dynamo graph with one operator in place of each such product; the graph itself if it has none."""
    inner = {name: with_block_products(part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)}
    changed = {name: part for name, part in inner.items() if part is not getattr(module, name)}
    products = list(_products(module.graph))
    if not products and not changed:
        return module
    copy, copies = dynamo_copy(module)
    for product in products:
        _ProductBuilder(product, copies).write()
    for name, part in changed.items():
        setattr(copy, name, part)
    copy.graph.eliminate_dead_code(is_impure_node=lambda node: node not in _unused(products, copies))
    copy.recompile()
    return copy


def _unused(products: Sequence[Product], copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the operators that computed products and weights; they are removed if they have no other user."""
    return {copies[node] for product in products for node in (product.node, *product.own)}


# -- matching


def _products(graph: fx.Graph) -> Iterator[Product]:
    if any(str(getattr(node.target, "__module__", "")).startswith(TRANSFORMS) for node in graph.nodes):
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if name_of(node) in ("einsum", "matmul", "bmm") and is_plain(node) and node.meta[EXAMPLE].dtype in TYPES:
            product = _product_at(node)
            if product is not None and _is_plainly_computed(product, order):
                yield product


def _product_at(node: fx.Node) -> Product | None:
    call = _letters(node)
    if call is None:
        return None
    (one, other), (left, right), out = call
    return _read(node, (one, left), (other, right), out) or _read(node, (other, right), (one, left), out)


def _letters(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node], tuple[Letters, Letters], Letters] | None:
    """Return both operands, and the labels of their dimensions and of the product's."""
    if node.kwargs:
        return None
    if name_of(node) == "einsum":
        equation, *operands = node.args
        operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands  # type: ignore[assignment]
        text = equation.replace(" ", "") if isinstance(equation, str) else ""
        if text.count("->") != 1 or text.count(",") != 1 or "." in text or len(operands) != 2:
            return None
        given, out = text.split("->")
        left, right = given.split(",")
    else:
        operands = list(node.args)
        rank = node.meta[EXAMPLE].dim()
        batch = "".join(chr(ord("a") + i) for i in range(rank - 2))
        left, right, out = f"{batch}IJ", f"{batch}JK", f"{batch}IK"
    if not all(isinstance(operand, fx.Node) and is_plain(operand) for operand in operands):
        return None
    one, other = operands
    ranks = [value.meta[EXAMPLE].dim() for value in (one, other, node)]  # type: ignore[union-attr]
    if ranks != [len(left), len(right), len(out)] or any(len(set(text)) < len(text) for text in (left, right, out)):
        return None
    return (one, other), (tuple(left), tuple(right)), tuple(out)  # type: ignore[return-value]


def _read(node: fx.Node, weights: tuple[fx.Node, Letters], rows: tuple[fx.Node, Letters], out: Letters) -> Product | None:
    """Return the product if one operand is proven to be weights, and the labels describe weights times rows."""
    reader = Reader()
    fact = reader.fact(weights[0])
    if (
        fact.kind is not FactKind.WEIGHTS
        or fact.rows not in fact.dims
        or fact.source.meta[EXAMPLE].dtype != node.meta[EXAMPLE].dtype
    ):
        return None
    by_place = dict(zip(fact.dims, weights[1], strict=True))
    c, z = by_place[fact.rows], by_place[COLUMN]
    batch = set(weights[1]) - {c, z}
    features = set(rows[1]) - batch - {z}
    if None in fact.dims or c in rows[1] or not batch <= set(rows[1]) or z not in rows[1]:
        return None
    if set(out) != batch | features | {c} or not _have_one_size(node, weights, rows, out):
        return None
    decays = fact.source, tuple(by_place[place] for place in range(fact.source.meta[EXAMPLE].dim()))
    moved = reader.fact(rows[0])
    if moved.kind is FactKind.SOURCE and None not in moved.dims:
        rows = moved.source, tuple(letter for _, letter in sorted(zip(moved.dims, rows[1], strict=True)))  # type: ignore[type-var]
    product = _parted(Product(node, c, z, out, decays, rows, None, False, frozenset()), reader)
    return product if _has_its_order(product) else None


def _have_one_size(node: fx.Node, *parts: Any) -> bool:
    """Return whether each label has the same size everywhere, so that nothing is broadcast."""
    *operands, out = parts
    sizes = [*zip(out, shape_of(node.meta[EXAMPLE]), strict=True)]
    for value, letters in operands:
        sizes += zip(letters, shape_of(value.meta[EXAMPLE]), strict=True)
    known = dict(sizes)
    return all(known[letter] == size for letter, size in sizes)


def _parted(product: Product, reader: Reader) -> Product:
    """Separate a first row from decays and rows if both have one; the first decay occurs in no weight."""
    (decays, own), (rows, others) = product.decays, product.rows
    behind = _behind_first(decays, own.index(product.c), reader)
    apart = _behind_first(rows, others.index(product.z), reader)
    shift = (
        behind is not None
        and apart is not None
        and (behind[0] is None or not behind[0].meta[EXAMPLE].requires_grad)
        and (apart[0] is not None or apart[2] in (None, 0))
    )
    if not shift or behind is None or apart is None:
        return replace(product, own=frozenset(reader.own - {decays, rows}))
    first = None if apart[0] is None or _is_zero(apart[0]) else (apart[0], others)
    return replace(
        product,
        decays=(behind[1], own),
        rows=(apart[1], others),
        first=first,
        is_shifted=True,
        own=frozenset(reader.own | {decays, rows}),
    )


def _is_zero(node: fx.Node) -> bool:
    """Return whether a value is created as zeros; its other arguments do not matter."""
    return name_of(node) in ("zeros", "zeros_like", "new_zeros") and not node.meta[EXAMPLE]._version


def _behind_first(node: fx.Node, dim: int, reader: Reader) -> tuple[fx.Node | None, fx.Node, Any] | None:
    """Match a row concatenated or padded before others: return that row or None, the others, the fill value."""
    rank = node.meta[EXAMPLE].dim()
    if name_of(node) == "pad":
        arguments = arguments_of(node, "input", "pad", "mode", "value")
        pads = [] if arguments is None else list(arguments["pad"])
        one_before = [0] * (2 * (rank - 1 - dim)) + [1, 0]
        is_one = pads[: len(one_before)] == one_before and not any(pads[len(one_before) :])
        if arguments is None or not is_one or arguments.get("mode", "constant") != "constant":
            return None
        return None, arguments["input"], arguments.get("value")
    if name_of(node) != "cat":
        return None
    arguments = arguments_of(node, "tensors", "dim")
    parts: Any = () if arguments is None else arguments["tensors"]
    along = None if arguments is None else arguments.get("dim", 0)
    if len(parts) != 2 or not all(map(is_plain, parts)) or type(along) is not int or along % rank != dim:
        return None
    kinds = {(part.meta[EXAMPLE].dim(), part.meta[EXAMPLE].dtype) for part in parts}
    is_one = kinds == {(rank, node.meta[EXAMPLE].dtype)} and shape_of(parts[0].meta[EXAMPLE])[dim] == 1
    return (parts[0], parts[1], None) if is_one else None


def _has_its_order(product: Product) -> bool:
    """Return whether eager's product has the memory layout of the replacement: batch, rows, features."""
    value = product.node.meta[EXAMPLE]
    sizes = dict(zip(product.out, shape_of(value), strict=True))
    strides = dict(zip(product.out, map(size_of, value.stride()), strict=True))
    dense: Size = 1
    for letter in reversed((*product.batch, product.c, *product.features)):
        if sizes[letter] != 1 and strides[letter] != dense:
            return False
        dense = product_of((dense, sizes[letter]))
    return len(product.features) < 2 or all(isinstance(sizes[letter], int) for letter in product.features)


def _is_plainly_computed(product: Product, order: dict[fx.Node, int]) -> bool:
    """Return whether no operand is written to, and no mode changes, from the first matched operator on."""
    used = {product.decays[0], product.rows[0], *([product.first[0]] if product.first else ())}
    if any(node.meta[EXAMPLE]._version for node in (*product.own, *used, product.node)):
        return False
    start = min((order[node] for node in product.own), default=order[product.node])
    between = [node for node, place in order.items() if start <= place <= order[product.node]]
    return all(node.meta.get(EXAMPLE) is not None for node in between)


# -- writing


class _ProductBuilder:
    """Writes the operator before a product, and replaces the users of the product."""

    def __init__(self, product: Product, copies: dict[fx.Node, fx.Node]) -> None:
        self.product, self.copies = product, copies
        self.place = copies[product.node]
        self.widths = self._sizes(product.features)

    def _sizes(self, letters: Letters) -> list[Any]:
        sizes = dict(zip(self.product.out, self.product.node.meta[EXAMPLE].shape, strict=True))
        return [sizes[letter] for letter in letters]

    def write(self) -> None:
        product = self.product
        with self.place.graph.inserting_before(self.place):
            decays = self._ordered(product.decays, (*product.batch, product.c))
            rows = self._flat(self._ordered(product.rows, (*product.batch, product.z, *product.features)))
            first = None
            if product.first is not None:
                joined = self._flat(self._ordered(product.first, (*product.batch, product.z, *product.features)))
                first = self._call(torch.select, joined, -2, 0)
            both = self._call(DECAYED_SUMS if product.is_shifted else SUMS_BEHIND, decays, rows, first)
            sums, last = (self._call(operator.getitem, both, place) for place in range(2))
            if product.is_shifted and all(self._part(user) is not None for user in product.node.users):
                self._replace_users(sums, last)
            else:
                out = self._joined(sums, last) if product.is_shifted else sums
                self.place.replace_all_uses_with(self._shaped(out, product.c), propagate_meta=False)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        out = self.place.graph.call_function(target, args)
        with torch.no_grad():
            value = target(*fx.node.map_arg(args, lambda node: node.meta[EXAMPLE]))
        out.meta = {**self.place.meta, EXAMPLE: value}
        return out

    def _ordered(self, part: tuple[fx.Node, Letters], wanted: Letters) -> fx.Node:
        value, letters = part
        order = [letters.index(letter) for letter in wanted]
        node = self.copies[value]
        return node if order == sorted(order) else self._call(torch.permute, node, order)

    def _flat(self, node: fx.Node) -> fx.Node:
        """Flatten the feature dimensions into one."""
        count = len(self.product.features)
        if count == 1:
            return node
        return self._call(torch.flatten, node, -count, -1) if count else self._call(torch.unsqueeze, node, -1)

    def _shaped(self, node: fx.Node, *more: str) -> fx.Node:
        """Restore the product's dimensions and their order."""
        product = self.product
        if len(product.features) > 1:
            node = self._call(torch.unflatten, node, -1, self.widths)
        elif not product.features:
            node = self._call(torch.squeeze, node, -1)
        letters = (*product.batch, *more, *product.features)
        order = [letters.index(letter) for letter in product.out if letter in letters]
        return node if order == sorted(order) else self._call(torch.permute, node, order)

    def _joined(self, sums: fx.Node, last: fx.Node) -> fx.Node:
        return self._call(torch.cat, [sums, self._call(torch.unsqueeze, last, -2)], -2)

    def _replace_users(self, sums: fx.Node, last: fx.Node) -> None:
        out = {True: lambda: self._shaped(last), False: lambda: self._shaped(sums, self.product.c)}
        shaped: dict[bool, fx.Node] = {}
        for user in list(self.product.node.users):
            is_last = bool(self._part(user))
            shaped[is_last] = value = shaped.get(is_last) or out[is_last]()
            self.copies[user].replace_all_uses_with(value, propagate_meta=False)
            self.place.graph.erase_node(self.copies[user])

    def _part(self, user: fx.Node) -> bool | None:
        """Return True if a user takes the last row, False if it takes all others, and None for other users."""
        if name_of(user) != "getitem" or user.args[0] is not self.product.node:
            return None
        index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
        at = self.product.out.index(self.product.c)
        others = [item for i, item in enumerate(index) if i != at]
        if len(index) <= at or any(not isinstance(item, slice) or item != slice(None) for item in others):
            return None
        taken = index[at]
        if isinstance(taken, slice):
            return False if taken in (slice(None, -1), slice(None, -1, 1), slice(0, -1)) else None
        return True if type(taken) is int and taken == -1 else None
