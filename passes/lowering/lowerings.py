"""Lowerings of operators that need more than a copy for fewer rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.ir.access import OperandAccess
from streamfx.ir.facts import Role, StorageClass
from streamfx.ir.joint import bound_arguments, node_argument, scalar_argument, shape_of_node, tensor_operands
from streamfx.ir.program import ShiftedRows
from streamfx.ir.signature import SingleRow
from streamfx.ir.sizes import Size, is_at_least
from streamfx.kernels import attention as chunked
from streamfx.kernels import window_ops
from streamfx.kernels.grouped_mm import ARRANGED_MM, ARRANGED_OUTER, GROUPED_MM, GROUPED_OUTER
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.node_meta import REDUCED, VALUE
from streamfx.passes.lowering.accumulating_lowerings import arranged, mean_count
from streamfx.passes.lowering.bodies import BodyBuilder, emit_copy, emits
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.rules.attention import M, N
from streamfx.passes.ops.rules.views import vanishing
from streamfx.runtime import select_row
from streamfx.runtime.collective_calls import ALL_REDUCE, begin, end
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.runtime.runtime_sizes import (
    first_in_chunk,
    first_in_span,
    rows_before_shifted,
    rows_in_chunk,
    rows_shifted,
)

aten = torch.ops.aten
NEXT_ROWS = (
    "{target} takes numbers of the next row where a row ends, as a shift by views does (rel_shift), and nothing proves that "
    "a mask hides them"
)


@emits(aten.mean.default, aten.mean.dim)
def mean(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a mean over the sequence to a sum and a division by the row count.

    A sum over chunks is divided after the loop, any other at once.
    """
    signature, roles = builder.layout.axes.signatures[node], builder.layout.access.roles.get(node, {})
    split = {roles[letter] for letter in signature.contracted_letters() if letter in roles}
    if not split & {Role.ROWS, Role.KEYS}:
        return emit_copy(builder, node)
    arguments = bound_arguments(node)
    (operand,) = builder.operands(node)
    rank = len(builder.layout.axes.shapes[tensor_operands(node)[0]])
    dims = arguments.get("dim") or list(range(rank))
    call, dtype, wide = builder.graph.call_function, node.meta[VALUE].dtype, builder.accumulation_dtype(node)
    total = call(aten.sum.dim_IntList, (operand, list(dims), arguments.get("keepdim", False)), {"dtype": wide})
    if builder.layout.access.storage_class(node) is StorageClass.SUM:
        return total
    share = call(aten.div.Scalar, (total, builder.number(mean_count(node, builder.layout))))
    return share if wide == dtype else call(aten._to_copy.default, (share,), {"dtype": dtype})


@emits(aten.sum.default, aten.sum.dim_IntList)
def sum_in_wide_dtype(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sum in the accumulator's dtype: a chunk's sum may overflow a narrow dtype even if the total does not."""
    if builder.layout.access.storage_class(node) is not StorageClass.SUM:
        return emit_copy(builder, node)
    args, kwargs = builder.arguments(node)
    wide = builder.accumulation_dtype(node)
    kwargs = kwargs if wide == node.meta[VALUE].dtype else {**kwargs, "dtype": wide}
    return builder.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


@emits(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeezed(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Squeeze the dimensions that have size one in the full value: in a chunk of one row, sizes alone are ambiguous."""
    (operand,) = builder.operands(node)
    return builder.graph.call_function(aten.squeeze.dims, (operand, vanishing(node)))


@emits(aten.tril.default, aten.triu.default)
def triangle(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Shift the diagonal by the first row and the first column of the chunk."""
    (operand,) = builder.operands(node)
    rank = len(shape_of_node(node))
    diagonal = scalar_argument(bound_arguments(node)["diagonal"])
    shift = _first_index(builder, node, rank - 2) - _first_index(builder, node, rank - 1)
    moved = builder.number(diagonal + shift)
    return builder.graph.call_function(node.target, (operand, moved))  # type: ignore[arg-type]


def _first_index(builder: BodyBuilder, node: fx.Node, position: int) -> Any:
    """Return the first index of the chunk along a dimension of the result."""
    letters = builder.layout.axes.signatures[node].results[0][position]
    return next((first for letter in letters if (first := _first_index_of_label(builder, node, letter)) is not None), 0)


def _first_index_of_label(builder: BodyBuilder, node: fx.Node, letter: int) -> Any:
    """Return the first index of the chunk along a label; None if the chunk has the full axis."""
    axes, role = builder.layout.axes, builder.layout.access.roles.get(node, {}).get(letter)
    if role is Role.ROWS:
        return first_in_chunk(builder.layout.rows(axes.letters[node][letter]), builder.length)
    if role is Role.KEYS:
        span = builder.layout.span(node, builder.requested_span)
        return first_in_span(builder.layout.rows(axes.letters[node][letter]), span, builder.length)
    return None


@emits(RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD)
def relative_shift(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Offset the chunk's first row to the left, and its first column to the right."""
    (operand,) = builder.operands(node)
    dim, first, columns = _size_arguments(node)
    if not _stays_in_rows(builder, node, dim, first):
        raise FallbackError(node, NEXT_ROWS.format(target=node.target))
    row, column = (_first_index_of_label(builder, node, letter) or 0 for letter in (dim, dim + 1))
    if node.target is RELATIVE_SHIFT:
        columns = builder.letter_size(node, dim + 1)
    arguments = (operand, dim, builder.number(first - row + column), builder.number(columns))
    return builder.graph.call_function(node.target, arguments)  # type: ignore[arg-type]


def _size_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments after the first as sizes."""
    return [scalar_argument(item) for item in node.args[1:]]


def _stays_in_rows(builder: BodyBuilder, node: fx.Node, dim: int, first: Size) -> bool:
    """Return whether the chunk reads nothing after the end of its last row."""
    layout, roles = builder.layout, builder.layout.access.roles.get(node, {})
    letters = layout.axes.letters[node]
    width, columns = (layout.axes.table.size_of_dim(letters[letter]) for letter in (len(layout.axes.shapes[node]), dim + 1))
    if dim not in roles or is_at_least(width, first + columns):
        return True
    high = layout.span(node, builder.requested_span).high if roles.get(dim + 1) is Role.KEYS else None
    if high is None:
        return False
    row_offset_less_key_offset = layout.rows(letters[dim]).offset - layout.rows(letters[dim + 1]).offset
    return is_at_least(width, first + row_offset_less_key_offset + high + 1)


@emits(aten.select.int, aten.select_backward.default)
def lower_single_row(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Return the row if the chunk holds it; a slice of one row keeps its dimension."""
    signature, roles = builder.layout.axes.signatures[node], builder.layout.access.roles.get(node, {})
    singles = ((letter, index.row_index) for letter, index in signature.index.items() if isinstance(index, SingleRow))
    single_row = next((item for item in singles if roles.get(item[0]) is Role.ROWS), None)
    if single_row is None:
        return emit_copy(builder, node)
    letter, row = single_row
    (operand,) = builder.operands(node)
    call = builder.graph.call_function
    rows = builder.layout.rows(builder.layout.axes.letters[node][letter])
    position = builder.number(row - first_in_chunk(rows, builder.length))
    if node.target in (aten.select.int, aten.slice.Tensor):
        selected = call(select_row.take_row, (operand, letter, position))
        return selected if node.target is aten.select.int else call(aten.unsqueeze.default, (selected, letter))
    row_alone = operand if node.target is aten.select_backward.default else call(aten.squeeze.dim, (operand, letter))
    return call(select_row.put_row, (row_alone, letter, position, builder.number(builder.letter_size(node, letter))))


@emits(aten.slice.Tensor, aten.slice_backward.default, aten.constant_pad_nd.default)
def shifted_rows(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower slices and pads of the sequence axis: rows that exist in the operand, zeros elsewhere."""
    if any(isinstance(index, SingleRow) for index in builder.layout.axes.signatures[node].index.values()):
        return lower_single_row(builder, node)
    (need,) = builder.layout.needs(node)
    shifted = next((access for access in need.sequence_dims if isinstance(access.selector, ShiftedRows)), None)
    if shifted is None:
        return emit_copy(builder, node)
    placement, _, selector = shifted
    assert isinstance(selector, ShiftedRows)
    operand = builder.operand(need)
    axis_rows, length = placement.rows, builder.length
    count = rows_shifted(selector, axis_rows.length, length)
    before = rows_before_shifted(selector, axis_rows.length, length)
    after = rows_in_chunk(selector.rows, length) - count - before
    if node.target is aten.slice.Tensor:
        return operand
    rank = len(shape_of_node(node))
    pad: list[Any] = [0, 0] * (rank - placement.dim)
    pad[-2:] = [builder.number(before), builder.number(after)]
    value = builder.plain(bound_arguments(node).get("value", 0)) if node.target is aten.constant_pad_nd.default else 0
    return builder.graph.call_function(aten.constant_pad_nd.default, (operand, pad, value))


@emits(aten.convolution.default)
def convolution(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Convolve the rows of the chunk's windows, with zeros for rows outside the sequence."""
    x, *others = builder.layout.needs(node)
    if not x.sequence_dims or not isinstance(x.selector, ShiftedRows):
        return builder.graph.call_function(window_ops.mix_channels, builder.arguments(node)[0])
    arguments = bound_arguments(node)
    rows, weight, *bias = (builder.operand(need) for need in (x, *others))
    around = _rows_around(builder, x)
    options = (arguments["dilation"][0], arguments["transposed"], builder.plain(arguments["groups"]))
    return builder.graph.call_function(window_ops.convolve, (rows, weight, bias[0] if bias else None, around, *options))


@emits(aten.convolution_backward.default)
def weight_gradient(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a convolution's weight gradient to the chunk's windows; kernels of one tap mix channels only."""
    gradient, *others = builder.layout.needs(node)
    if not gradient.sequence_dims or not isinstance(gradient.selector, ShiftedRows):
        return builder.graph.call_function(window_ops.mixing_gradient, builder.arguments(node)[0])
    arguments = bound_arguments(node)
    operands = [builder.operand(need) for need in (gradient, *others)]
    options = (arguments["dilation"][0], arguments["transposed"], builder.plain(arguments["groups"]))
    return builder.graph.call_function(window_ops.weight_gradient, (*operands, _rows_around(builder, gradient), *options))


def _rows_around(builder: BodyBuilder, need: OperandAccess) -> tuple[Any, Any]:
    """Return the number of window rows before the operand's first row, and after its last row."""
    placement, _, selector = need.sequence_dims[0]
    assert isinstance(selector, ShiftedRows)
    length_of_axis, sequence_length = placement.rows.length, builder.length
    before = rows_before_shifted(selector, length_of_axis, sequence_length)
    after = (
        rows_in_chunk(selector.rows, sequence_length)
        + selector.reach
        - before
        - rows_shifted(selector, length_of_axis, sequence_length)
    )
    return builder.number(before), builder.number(after)


@emits(aten.repeat.default)
def repeat(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Repeat a dimension of size one to the chunk's number of rows, and any other by its number of copies."""
    (operand,) = builder.operands(node)
    operand_shape = shape_of_node(tensor_operands(node)[0])
    times = [builder.plain(item) for item in bound_arguments(node)["repeats"]]
    for position, dim in enumerate(builder.layout.axes.signatures[node].results[0]):
        operand_dim = position - (len(times) - len(operand_shape))
        if operand_dim < 0 or operand_shape[operand_dim] == 1 or len(dim) == 2:
            times[position] = builder.number(builder.letter_size(node, dim[0]))
    return builder.graph.call_function(aten.repeat.default, (operand, times))


@emits(aten.native_layer_norm_backward.default)
def layer_norm_backward(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Make the statistics contiguous: the CPU kernel assumes it of mean and scale, and rows of a batch are not."""
    args, kwargs = builder.arguments(node)
    statistics = [builder.graph.call_function(aten.contiguous.default, (item,)) for item in args[3:5]]
    return builder.graph.call_function(aten.native_layer_norm_backward.default, (*args[:3], *statistics, *args[5:]), kwargs)


@emits(GROUPED_MM)
def grouped_mm(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sort the chunk's rows by group, and multiply each group by its weight."""
    x, weight, group = builder.operands(node)
    order = arranged(builder, group, builder.number(shape_of_node(node_argument(node, 1))[0]))
    return builder.graph.call_function(ARRANGED_MM, (x, weight, *order))


@emits(GROUPED_OUTER)
def grouped_outer(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sort the chunk's rows by group, and compute each group's weight gradient."""
    x, y, group = builder.operands(node)
    return builder.graph.call_function(ARRANGED_OUTER, (x, y, *arranged(builder, group, builder.plain(node.args[3]))))


@emits(ALL_REDUCE)
def all_reduce(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Start the reduction at once; `async_waits.py` moves the wait to the first user."""
    (operand,) = builder.operands(node)
    begun = builder.graph.call_function(begin, (operand, *node.args[1:]))
    value, placements = node.meta[VALUE], builder.layout.placements(node)
    begun.meta[REDUCED] = f"{' '.join(map(str, node.args[1:]))} {value.dtype} {list(value.shape)} {placements}"
    return builder.graph.call_function(end, (begun,))


@emits(ATTENTION)
def attention(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Call the kernel on the chunk's queries and the keys they see."""
    query, key, value, *mask = builder.operands(node)
    return builder.graph.call_function(
        chunked.forward, (query, key, value, *_mask_and_window(builder, node, mask)), _score_options(builder, node, mask)
    )


@emits(ATTENTION_BACKWARD)
def attention_backward(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Call the backward kernel on the chunk's queries and the keys they see."""
    gradient, query, key, value, out, lse, *mask = builder.operands(node)
    return builder.graph.call_function(
        chunked.backward,
        (gradient, query, key, value, out, lse, *_mask_and_window(builder, node, mask)),
        _score_options(builder, node, mask),
    )


def _score_options(builder: BodyBuilder, node: fx.Node, mask: list[fx.Node]) -> dict[str, Any]:
    """Return the scale of the scores, and whether they may be too large for a mask's finite numbers to hide."""
    scale = {"scale": builder.plain(bound_arguments(node)["scale"])}
    return scale if not mask or node in builder.layout.key_spans.ordinary_scores else {**scale, "finite_hides": False}


def _mask_and_window(builder: BodyBuilder, node: fx.Node, mask: list[fx.Node]) -> tuple[Any, Any, Any]:
    """Return (mask, first, window). If the mask is exactly a span, the window replaces it.

    `first` is the position of the first query minus the position of the first key; `window` is the span's (low,
    high).
    """
    layout = builder.layout
    span = layout.span(node)
    is_causal = bound_arguments(node)["is_causal"]
    if node in layout.key_spans.exact_masks:
        return None, _first_query_less_first_key(builder, node), (span.low, span.high)
    if is_causal:  # a mask in addition to the causal flag
        causal_end = builder.number(_offset(builder, node, N) - _offset(builder, node, M))
        return (mask[0] if mask else None), _first_query_less_first_key(builder, node), (None, causal_end)
    return (mask[0] if mask else None), None, None


def _first_query_less_first_key(builder: BodyBuilder, node: fx.Node) -> Any:
    """Return the position of the chunk's first query minus that of its first key."""
    return builder.number(_chunk_position(builder, node, M) - _chunk_position(builder, node, N))


def _offset(builder: BodyBuilder, node: fx.Node, letter: int) -> Any:
    """Return the position of row or key 0; 0 if that axis is not the sequence."""
    layout, dim = builder.layout, builder.layout.axes.letters[node][letter]
    return 0 if layout.axes.sequence_atom(dim) is None else layout.rows(dim).offset


def _chunk_position(builder: BodyBuilder, node: fx.Node, letter: int) -> Any:
    """Return the position of a chunk's first row or key in an attention; 0 if that axis is not the sequence."""
    layout, dim = builder.layout, builder.layout.axes.letters[node][letter]
    if layout.axes.sequence_atom(dim) is None:
        return 0
    rows = layout.rows(dim)
    if layout.access.roles[node][letter] is Role.ROWS:
        return first_in_chunk(rows, builder.length) + rows.offset
    return first_in_span(rows, layout.span(node), builder.length) + rows.offset
