"""Lowerings that compute a chunk's contribution to a sum directly in the accumulator, without a temporary.

An *accumulator* is the buffer of a sum over chunks, such as a weight's gradient: `dw += x[s:e].T @ dy[s:e]` for each chunk
[s, e). Each lowering returns the function of `kernels/` to call, and its arguments after the accumulator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from streamfx.dialect.products import ARRANGE, GROUPED_OUTER
from streamfx.ir.access import Layout
from streamfx.ir.sizes import Size, product
from streamfx.kernels import accumulate
from streamfx.kernels.grouped_mm import add_outer

if TYPE_CHECKING:
    from streamfx.passes.lowering.bodies import BodyBuilder

aten = torch.ops.aten


@dataclass(frozen=True)
class AccumulatingLowering:
    """How an operator adds its part of a sum over chunks to an accumulator.

    `emit`: returns a function that adds, and its arguments after the accumulator.
    `writes_all`: it writes all elements of the accumulator; otherwise, they must be zeroed before the first chunk.
    `rounds_once`: a chunk's product is rounded once, before it is added, so with a single chunk the accumulator may have the
    result's dtype. (Rows of an embedding's gradient are rounded with each addition.)
    """

    emit: Callable[[BodyBuilder, fx.Node], tuple[Any, tuple[Any, ...]]]
    writes_all: bool = True
    rounds_once: bool = False


def _add_value(builder: BodyBuilder, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that adds a value to an accumulator; in the first chunk it overwrites."""
    return accumulate.add_part, (builder.value(node), builder.is_first_chunk())


def _add_product(builder: BodyBuilder, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that adds a matrix product to an accumulator; in the first chunk it overwrites."""
    return accumulate.add_product, (*builder.operands(node), builder.is_first_chunk())


def _add_embedding_rows(builder: BodyBuilder, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that adds the chunk's rows of an embedding's gradient to an accumulator (args[3]: padding index)."""
    return accumulate.add_embedding_gradient, (*builder.operands(node), builder.scalar_argument(node.args[3]))


def _put_rows(builder: BodyBuilder, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that writes the chunk's rows into an accumulator by index: `scatter(zeros, dim, index, rows)`."""
    _, index, rows = builder.operands(node)
    return accumulate.scatter_rows, (node.args[1], index, rows)


def _add_outer(builder: BodyBuilder, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that adds the weight gradient of each group (expert) to an accumulator.

    The operands are two values with rows, and the group of each row; args[3] is the number of groups.
    """
    x, y, group = builder.operands(node)
    return add_outer, (x, y, *sort_by_group(builder, group, builder.scalar_argument(node.args[3])))


def sort_by_group(builder: BodyBuilder, group: fx.Node, num_groups: Any) -> tuple[fx.Node, fx.Node]:
    """Emit the sort of the chunk's rows by group (expert), once for all products with the same groups.

    `group`: the group of each row, as a tensor. Return the two results: the order, and the group ends.
    """
    key = ("sorted by group", group, num_groups)
    if key not in builder.lowered:
        pair = builder.graph.call_function(ARRANGE, (group, num_groups))
        builder.lowered[key] = tuple(builder.graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    return builder.lowered[key]  # type: ignore[no-any-return]


ADD_VALUE = AccumulatingLowering(_add_value)  # of all other operators
ACCUMULATING_LOWERINGS: dict[Any, AccumulatingLowering] = {
    GROUPED_OUTER: AccumulatingLowering(_add_outer, writes_all=False, rounds_once=True),
    aten.mm.default: AccumulatingLowering(_add_product, rounds_once=True),
    aten.bmm.default: AccumulatingLowering(_add_product, rounds_once=True),
    aten.embedding_dense_backward.default: AccumulatingLowering(_add_embedding_rows, writes_all=False),
    aten.scatter.src: AccumulatingLowering(_put_rows, writes_all=False),
}


def mean_divisor(node: fx.Node, layout: Layout) -> Size:
    """Return by what a sum over all chunks is divided in the end: for a mean, the number of elements; for a sum, 1."""
    signature = layout.axes.signatures[node]
    if signature.combine != "mean":
        return 1
    table = layout.axes.table
    return product(table.size_of_dim(layout.axes.labels[node][label]) for label in signature.contracted_labels())
