"""One record per ATen operator: facts that several passes need, and that no schema states.

To add an operator, add one row to `OPERATORS`; the sets that passes test, such as `of_kind(Kind.RESHAPE)`, follow from it.
An operator without a row is of no kind: passes then know less, and every result stays exact. Facts that a schema states are
computed from it: whether an operator returns a view (`returns_view`), and which argument is the shape of its result
(`SHAPE_ARGUMENT`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from streamfx.torch_private import OpOverload

aten = torch.ops.aten


class Kind(Enum):
    """What an operator does. "Operand": its first tensor; "rows": indices along one dimension."""

    # each element of the result is an element of the operand, chosen by its index alone
    ALIAS = auto()  # the operand itself, as a new value with the same memory
    COPY = auto()
    RESHAPE = auto()  # other sizes, the same elements in row-major order
    UNSQUEEZE = auto()  # insert a dimension of size one
    SQUEEZE = auto()  # remove dimensions of size one
    EXPAND = auto()  # repeat elements along dimensions of size one, or new ones
    PERMUTE = auto()  # reorder dimensions
    REPEAT = auto()
    SLICE = auto()  # a range of rows
    SELECT = auto()  # one row, without the dimension
    SPLIT = auto()  # consecutive ranges of rows, each a result
    UNBIND = auto()  # each row, a result without the dimension
    WINDOW = auto()  # other strided views
    REORDER = auto()  # the same rows in another order
    LOOKUP = auto()  # x[indices]
    GATHER = auto()  # rows or elements by an index tensor along one dimension

    # copies of elements that also come from another operand or a number, are converted, or are read from memory
    CAST = auto()  # copy, converted to another dtype or device
    CONCAT = auto()
    STACK = auto()  # concatenate along a new dimension
    PAD = auto()  # the operand, surrounded by a number
    EMBED = auto()  # the operand as rows of a larger tensor of zeros: the gradient of a view
    WHERE = auto()  # one of two operands, chosen by a mask
    OVERWRITE_ROWS = auto()  # the operand, in which rows are replaced by the second argument
    OVERWRITE = auto()  # the second argument, broadcast to the operand
    PUT = auto()  # x[indices] = or += values
    SCATTER = auto()  # replace, or add to, rows or elements by an index tensor along one dimension
    FILL = auto()  # one number
    EMPTY = auto()  # uninitialized memory
    RANDOM = auto()  # random numbers, in a given shape
    ARANGE = auto()  # 0, 1, 2, ..., or another arithmetic sequence
    STRIDED = auto()  # elements of the operand's memory, by strides

    # arithmetic
    ADD = auto()
    SUBTRACT = auto()  # self - other
    SUBTRACT_FROM = auto()  # other - self
    MULTIPLY = auto()
    DIVIDE = auto()
    FLOOR_DIVIDE = auto()  # quotient rounded down, or its remainder
    SUM = auto()  # sum or mean along dimensions
    CUMULATIVE = auto()  # scan along a dimension
    SORT = auto()  # (sorted values, their indices)
    TOPK = auto()  # (largest values, their indices)
    ARGSORT = auto()  # indices of the sorted values
    MATMUL = auto()
    ADDMM = auto()  # a value plus a matrix product
    CONVOLUTION = auto()  # convolution, or its gradients
    LABEL_LOSS = auto()  # negative log-likelihood of labels
    LABEL_LOSS_BACKWARD = auto()
    ASSERTION = auto()  # raises, and returns nothing


@dataclass(frozen=True)
class Operator:
    """Facts about one operator.

    `fill`: for `Kind.FILL`, the number that all elements equal; None if it is the argument `fill_value`.
    `by_position`: the operator treats the rows of a dimension differently by their positions, so that they have an order.
    `adds_axes`: the result may have dimensions that no operand has. Two equal calls may then have different axes.
    """

    kind: Kind
    fill: int | None = None
    by_position: bool = False
    adds_axes: bool = False


OPERATORS: dict[Any, Operator] = {
    aten.alias.default: Operator(Kind.ALIAS),
    aten.detach.default: Operator(Kind.ALIAS),
    aten.clone.default: Operator(Kind.COPY),
    aten.lift_fresh_copy.default: Operator(Kind.COPY),
    aten._to_copy.default: Operator(Kind.CAST),
    aten.view.default: Operator(Kind.RESHAPE),
    aten._unsafe_view.default: Operator(Kind.RESHAPE),
    aten.reshape.default: Operator(Kind.RESHAPE),
    aten.view_copy.default: Operator(Kind.RESHAPE),
    aten.unsqueeze.default: Operator(Kind.UNSQUEEZE),
    aten.squeeze.default: Operator(Kind.SQUEEZE),
    aten.squeeze.dim: Operator(Kind.SQUEEZE),
    aten.squeeze.dims: Operator(Kind.SQUEEZE),
    aten.expand.default: Operator(Kind.EXPAND, adds_axes=True),
    aten.repeat.default: Operator(Kind.REPEAT, adds_axes=True),
    aten.permute.default: Operator(Kind.PERMUTE),
    aten.transpose.int: Operator(Kind.PERMUTE),
    aten.t.default: Operator(Kind.PERMUTE),
    aten.slice.Tensor: Operator(Kind.SLICE, adds_axes=True),
    aten.select.int: Operator(Kind.SELECT, by_position=True),
    aten.split.Tensor: Operator(Kind.SPLIT, by_position=True),
    aten.split_with_sizes.default: Operator(Kind.SPLIT, by_position=True),
    aten.unsafe_split.Tensor: Operator(Kind.SPLIT, by_position=True),
    aten.unsafe_split_with_sizes.default: Operator(Kind.SPLIT, by_position=True),
    aten.chunk.default: Operator(Kind.SPLIT, by_position=True),
    aten.unbind.int: Operator(Kind.UNBIND, by_position=True),
    aten.unfold.default: Operator(Kind.WINDOW),
    aten.diagonal.default: Operator(Kind.WINDOW),
    aten.flip.default: Operator(Kind.REORDER, by_position=True),
    aten.roll.default: Operator(Kind.REORDER, by_position=True),
    aten.index.Tensor: Operator(Kind.LOOKUP),
    aten._unsafe_index.Tensor: Operator(Kind.LOOKUP),
    aten.index_select.default: Operator(Kind.GATHER),
    aten.gather.default: Operator(Kind.GATHER),
    aten.embedding.default: Operator(Kind.GATHER),
    aten.cat.default: Operator(Kind.CONCAT, by_position=True, adds_axes=True),
    aten.stack.default: Operator(Kind.STACK, adds_axes=True),
    aten.constant_pad_nd.default: Operator(Kind.PAD, adds_axes=True),
    aten.slice_backward.default: Operator(Kind.EMBED, adds_axes=True),
    aten.select_backward.default: Operator(Kind.EMBED, by_position=True, adds_axes=True),
    aten.diagonal_backward.default: Operator(Kind.EMBED),
    aten.where.self: Operator(Kind.WHERE),
    aten.masked_fill.Scalar: Operator(Kind.WHERE),
    aten.masked_fill.Tensor: Operator(Kind.WHERE),
    aten.slice_scatter.default: Operator(Kind.OVERWRITE_ROWS, by_position=True),
    aten.select_scatter.default: Operator(Kind.OVERWRITE_ROWS, by_position=True),
    aten.fill.Scalar: Operator(Kind.OVERWRITE),
    aten.fill.Tensor: Operator(Kind.OVERWRITE),
    aten.copy.default: Operator(Kind.OVERWRITE),
    aten.index_put.default: Operator(Kind.PUT),
    aten._unsafe_index_put.default: Operator(Kind.PUT),
    aten.index_add.default: Operator(Kind.SCATTER),
    aten.scatter.src: Operator(Kind.SCATTER),
    aten.scatter.value: Operator(Kind.SCATTER),
    aten.scatter_add.default: Operator(Kind.SCATTER),
    aten.scatter_reduce.two: Operator(Kind.SCATTER),
    aten.full.default: Operator(Kind.FILL),
    aten.full_like.default: Operator(Kind.FILL),
    aten.new_full.default: Operator(Kind.FILL),
    aten.zeros.default: Operator(Kind.FILL, fill=0),
    aten.zeros_like.default: Operator(Kind.FILL, fill=0),
    aten.new_zeros.default: Operator(Kind.FILL, fill=0),
    aten.ones.default: Operator(Kind.FILL, fill=1),
    aten.ones_like.default: Operator(Kind.FILL, fill=1),
    aten.new_ones.default: Operator(Kind.FILL, fill=1),
    aten.empty.memory_format: Operator(Kind.EMPTY),
    aten.new_empty.default: Operator(Kind.EMPTY),
    aten.new_empty_strided.default: Operator(Kind.EMPTY),
    aten.rand.default: Operator(Kind.RANDOM),
    aten.randn.default: Operator(Kind.RANDOM),
    aten.arange.default: Operator(Kind.ARANGE),
    aten.arange.start: Operator(Kind.ARANGE),
    aten.arange.start_step: Operator(Kind.ARANGE),
    aten.as_strided.default: Operator(Kind.STRIDED),
    aten.as_strided_scatter.default: Operator(Kind.STRIDED),
    aten.add.Tensor: Operator(Kind.ADD),
    aten.add.Scalar: Operator(Kind.ADD),
    aten.sub.Tensor: Operator(Kind.SUBTRACT),
    aten.sub.Scalar: Operator(Kind.SUBTRACT),
    aten.rsub.Tensor: Operator(Kind.SUBTRACT_FROM),
    aten.rsub.Scalar: Operator(Kind.SUBTRACT_FROM),
    aten.mul.Tensor: Operator(Kind.MULTIPLY),
    aten.mul.Scalar: Operator(Kind.MULTIPLY),
    aten.div.Tensor: Operator(Kind.DIVIDE),
    aten.div.Scalar: Operator(Kind.DIVIDE),
    aten.floor_divide.default: Operator(Kind.FLOOR_DIVIDE),
    aten.floor_divide.Scalar: Operator(Kind.FLOOR_DIVIDE),
    aten.remainder.Tensor: Operator(Kind.FLOOR_DIVIDE),
    aten.remainder.Scalar: Operator(Kind.FLOOR_DIVIDE),
    aten.sum.dim_IntList: Operator(Kind.SUM),
    aten.mean.dim: Operator(Kind.SUM),
    aten.cumsum.default: Operator(Kind.CUMULATIVE, by_position=True),
    aten.cumprod.default: Operator(Kind.CUMULATIVE, by_position=True),
    aten.cummax.default: Operator(Kind.CUMULATIVE, by_position=True),
    aten.cummin.default: Operator(Kind.CUMULATIVE, by_position=True),
    aten.logcumsumexp.default: Operator(Kind.CUMULATIVE, by_position=True),
    aten.sort.default: Operator(Kind.SORT),
    aten.sort.stable: Operator(Kind.SORT),
    aten.topk.default: Operator(Kind.TOPK),
    aten.argsort.default: Operator(Kind.ARGSORT),
    aten.argsort.stable: Operator(Kind.ARGSORT),
    aten.mm.default: Operator(Kind.MATMUL),
    aten.bmm.default: Operator(Kind.MATMUL),
    aten.addmm.default: Operator(Kind.ADDMM),
    aten.baddbmm.default: Operator(Kind.ADDMM),
    aten.convolution.default: Operator(Kind.CONVOLUTION),
    aten.convolution_backward.default: Operator(Kind.CONVOLUTION),
    aten.nll_loss_forward.default: Operator(Kind.LABEL_LOSS),
    aten.nll_loss2d_forward.default: Operator(Kind.LABEL_LOSS),
    aten.nll_loss_backward.default: Operator(Kind.LABEL_LOSS_BACKWARD),
    aten.nll_loss2d_backward.default: Operator(Kind.LABEL_LOSS_BACKWARD),
    aten._assert_async.msg: Operator(Kind.ASSERTION),
    aten._assert_async.default: Operator(Kind.ASSERTION),
    aten._assert_scalar.default: Operator(Kind.ASSERTION),
}


# numbers are faster to look up than operators, and passes ask for the kinds of all operators
_KIND_BY_ID = {id(operator): record.kind for operator, record in OPERATORS.items()}


def is_kind(node: fx.Node, *kinds: Kind) -> bool:
    """Return whether a node calls an operator of any of these kinds."""
    return _KIND_BY_ID.get(id(node.target)) in kinds


def of_kind(*kinds: Kind) -> frozenset[OpOverload]:
    """Return the operators of any of these kinds."""
    return frozenset(operator for operator, record in OPERATORS.items() if record.kind in kinds)


COPIES = of_kind(Kind.ALIAS, Kind.COPY)  # the result equals the operand
ARITHMETIC = of_kind(Kind.ADD, Kind.SUBTRACT, Kind.SUBTRACT_FROM, Kind.MULTIPLY, Kind.DIVIDE)
MOVES_ELEMENTS = COPIES | of_kind(Kind.RESHAPE, Kind.UNSQUEEZE, Kind.SQUEEZE, Kind.EXPAND, Kind.PERMUTE)
# all elements of all results are elements of the first operand
SELECTS_ELEMENTS = MOVES_ELEMENTS | of_kind(
    *(Kind.REPEAT, Kind.SLICE, Kind.SELECT, Kind.SPLIT, Kind.UNBIND, Kind.WINDOW, Kind.REORDER, Kind.LOOKUP, Kind.GATHER)
)


def returns_view(target: OpOverload) -> bool:
    """Return whether an operator's schema declares a result that aliases an operand."""
    return any(result.alias_info is not None for result in target._schema.returns)


def _find_shape_argument(target: OpOverload) -> int | None:
    """Return the position of an operator's argument that is, by its name and type, a shape: a list of integers.

    None if no argument is one: `unfold` has an argument `size` that is a number.
    """
    for position, argument in enumerate(target._schema.arguments):
        is_list = isinstance(argument.type, torch.ListType) and isinstance(argument.type.getElementType(), torch.IntType)
        if argument.name in ("size", "shape", "input_sizes") and is_list:
            return position
    return None


# by operator, the position of the argument that is the shape of the result: 1 for `view(self, size)`
SHAPE_ARGUMENT: dict[Any, int] = {
    operator: position
    for operator, record in OPERATORS.items()
    if record.kind is not Kind.STRIDED and (position := _find_shape_argument(operator)) is not None
}
