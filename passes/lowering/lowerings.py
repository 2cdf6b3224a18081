"""Lowerings of operators for which a copy on the chunk's rows would compute another result.

A lowering emits the chunk's version of a joint-graph node into the body of a loop over chunks (rows [s, e) of the sequence), and
returns the body's node. `builder` gives the body's operands and sizes. An axis label (`label`, an integer) names a dimension
in an operator's axis rule (signature); its role says whether the chunk has its own rows of it (ROWS), the key positions that
its queries see (KEYS), or all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.dialect.products import ARRANGED_MM, ARRANGED_OUTER, GROUPED_MM, GROUPED_OUTER
from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.ir.access import OperandAccess
from streamfx.ir.facts import Role, StorageClass
from streamfx.ir.joint import bound_arguments, node_argument, scalar_argument, shape_of_node, tensor_operands
from streamfx.ir.program import ShiftedRows
from streamfx.ir.signature import SingleRow
from streamfx.ir.sizes import Size, is_at_least
from streamfx.kernels import window_ops
from streamfx.kernels.chunk_attention import backward as attention_backward
from streamfx.kernels.chunk_attention import forward as attention_forward
from streamfx.node_meta import COLLECTIVE_TEXT, VALUE
from streamfx.passes.lowering.accumulating_lowerings import mean_divisor, sort_by_group
from streamfx.passes.lowering.bodies import BodyBuilder
from streamfx.passes.lowering.lowering_table import emit_copy, register_lowering
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.rules.attention import M, N
from streamfx.passes.ops.rules.views import squeezed_dims
from streamfx.runtime import select_row
from streamfx.runtime.collective_calls import begin, end
from streamfx.runtime.runtime_sizes import (
    first_in_chunk,
    first_in_span,
    rows_before_shifted,
    rows_in_chunk,
    rows_shifted,
)

aten = torch.ops.aten
READS_NEXT_ROW = (
    "{target} reads elements of the next row after the end of a row, as a shift by views does (rel_shift), and streamfx "
    "cannot prove that a mask hides them"
)


@register_lowering(aten.mean.default, aten.mean.dim)
def lower_mean(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a mean over the chunked sequence to a sum, in a wide dtype, and a division by the number of elements.

    If the sum accumulates over chunks, return the chunk's sum: the division comes after the loop. Other means are copied.
    """
    signature, roles = builder.layout.axes.signatures[node], builder.layout.access.roles.get(node, {})
    contracted_roles = {roles[label] for label in signature.contracted_labels() if label in roles}
    if not contracted_roles & {Role.ROWS, Role.KEYS}:
        return emit_copy(builder, node)
    arguments = bound_arguments(node)
    (operand,) = builder.operands(node)
    rank = len(builder.layout.axes.shapes[tensor_operands(node)[0]])
    dims = arguments.get("dim") or list(range(rank))
    call, dtype, wide_dtype = builder.graph.call_function, node.meta[VALUE].dtype, builder.accumulation_dtype(node)
    total = call(aten.sum.dim_IntList, (operand, list(dims), arguments.get("keepdim", False)), {"dtype": wide_dtype})
    if builder.layout.access.storage_class(node) is StorageClass.SUM:
        return total
    mean = call(aten.div.Scalar, (total, builder.size_argument(mean_divisor(node, builder.layout))))
    return mean if wide_dtype == dtype else call(aten._to_copy.default, (mean,), {"dtype": dtype})


@register_lowering(aten.sum.default, aten.sum.dim_IntList)
def lower_sum(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sum in the accumulator's dtype: a chunk's sum may overflow a narrow dtype even if the total does not."""
    if builder.layout.access.storage_class(node) is not StorageClass.SUM:
        return emit_copy(builder, node)
    args, kwargs = builder.arguments(node)
    wide_dtype = builder.accumulation_dtype(node)
    kwargs = kwargs if wide_dtype == node.meta[VALUE].dtype else {**kwargs, "dtype": wide_dtype}
    return builder.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


@register_lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def lower_squeeze(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Squeeze the dimensions that have size one in the full value, because other dimensions may have size one in a chunk."""
    (operand,) = builder.operands(node)
    return builder.graph.call_function(aten.squeeze.dims, (operand, squeezed_dims(node)))


@register_lowering(aten.tril.default, aten.triu.default)
def lower_triangle(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower `tril` or `triu`: of rows s, s + 1, ... and columns c, c + 1, ..., the diagonal d becomes d + s - c."""
    (operand,) = builder.operands(node)
    rank = len(shape_of_node(node))
    diagonal = scalar_argument(bound_arguments(node)["diagonal"])
    shift = _first_index(builder, node, rank - 2) - _first_index(builder, node, rank - 1)
    shifted_diagonal = builder.size_argument(diagonal + shift)
    return builder.graph.call_function(node.target, (operand, shifted_diagonal))  # type: ignore[arg-type]


def _first_index(builder: BodyBuilder, node: fx.Node, dim: int) -> Any:
    """Return the index in the full value of the chunk's first row (or key) along a result dimension; 0 if it is not chunked."""
    labels = builder.layout.axes.signatures[node].results[0][dim]
    return next((first for label in labels if (first := _first_index_of_label(builder, node, label)) is not None), 0)


def _first_index_of_label(builder: BodyBuilder, node: fx.Node, label: int) -> Any:
    """Return the index of the chunk's first row, or first visible key, along the axis with a label; None for the full axis."""
    axes, role = builder.layout.axes, builder.layout.access.roles.get(node, {}).get(label)
    if role is Role.ROWS:
        return first_in_chunk(builder.layout.rows(axes.labels[node][label]), builder.length)
    if role is Role.KEYS:
        span = builder.layout.span(node, builder.requested_span)
        return first_in_span(builder.layout.rows(axes.labels[node][label]), span, builder.length)
    return None


@register_lowering(RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD)
def lower_relative_shift(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a relative shift (each row starts one column further left than the row before) to the chunk's rows and columns.

    Its arguments are (operand, dim of rows, column that row 0 reads first, number of columns). The chunk's first row reads
    `row_in_full` columns earlier, and its first column is `column_in_full`, not 0. Raise `FallbackError` if a row may read
    elements of the next row.
    """
    (operand,) = builder.operands(node)
    dim, first_column, num_columns = _size_arguments(node)
    if not _reads_only_own_row(builder, node, dim, first_column):
        raise FallbackError(node, READS_NEXT_ROW.format(target=node.target))
    row_in_full, column_in_full = (_first_index_of_label(builder, node, label) or 0 for label in (dim, dim + 1))
    if node.target is RELATIVE_SHIFT:
        num_columns = builder.label_size(node, dim + 1)
    first_of_chunk = builder.size_argument(first_column - row_in_full + column_in_full)
    arguments = (operand, dim, first_of_chunk, builder.size_argument(num_columns))
    return builder.graph.call_function(node.target, arguments)  # type: ignore[arg-type]


def _size_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments after the operand as sizes (integers or symbolic expressions)."""
    return [scalar_argument(item) for item in node.args[1:]]


def _reads_only_own_row(builder: BodyBuilder, node: fx.Node, dim: int, first_column: Size) -> bool:
    """Return whether each row of a relative shift in this chunk reads only the same row of the operand.

    `dim`: the dimension and label of rows; `first_column`: the column that row 0 reads first. The operand's rows must be wide
    enough for all columns, or for the columns up to the last key that the chunk's queries see.
    """
    layout, roles = builder.layout, builder.layout.access.roles.get(node, {})
    labels = layout.axes.labels[node]
    width, num_columns = (layout.axes.table.size_of_dim(labels[label]) for label in (len(layout.axes.shapes[node]), dim + 1))
    if dim not in roles or is_at_least(width, first_column + num_columns):
        return True
    high = layout.span(node, builder.requested_span).high if roles.get(dim + 1) is Role.KEYS else None
    if high is None:
        return False
    offset_difference = layout.rows(labels[dim]).offset - layout.rows(labels[dim + 1]).offset
    return is_at_least(width, first_column + offset_difference + high + 1)


@register_lowering(aten.select.int, aten.select_backward.default)
def lower_single_row(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower the selection of one row, or its gradient: take or put the row if the chunk has it.

    A chunk without the row returns the additive identity: -0 for a selection, zeros for a gradient. A slice of one row keeps its
    dimension.
    """
    signature, roles = builder.layout.axes.signatures[node], builder.layout.access.roles.get(node, {})
    single_rows = ((label, index.row_index) for label, index in signature.index.items() if isinstance(index, SingleRow))
    chunked = next(((label, row) for label, row in single_rows if roles.get(label) is Role.ROWS), None)
    if chunked is None:
        return emit_copy(builder, node)
    label, row = chunked
    (operand,) = builder.operands(node)
    call = builder.graph.call_function
    rows = builder.layout.rows(builder.layout.axes.labels[node][label])
    row_in_chunk = builder.size_argument(row - first_in_chunk(rows, builder.length))
    if node.target in (aten.select.int, aten.slice.Tensor):
        selected = call(select_row.take_row, (operand, label, row_in_chunk))
        return selected if node.target is aten.select.int else call(aten.unsqueeze.default, (selected, label))
    squeezed = operand if node.target is aten.select_backward.default else call(aten.squeeze.dim, (operand, label))
    num_rows = builder.size_argument(builder.label_size(node, label))
    return call(select_row.put_row, (squeezed, label, row_in_chunk, num_rows))


@register_lowering(aten.slice.Tensor, aten.slice_backward.default, aten.constant_pad_nd.default)
def lower_shifted_rows(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a slice or a padding along the sequence.

    The operand read for a chunk has only those shifted rows that exist. A slice is that operand; a padding adds the
    missing rows before and after it, with the pad value. A single row, and rows that are not shifted, are lowered
    elsewhere.
    """
    if any(isinstance(index, SingleRow) for index in builder.layout.axes.signatures[node].index.values()):
        return lower_single_row(builder, node)
    (access,) = builder.layout.operand_accesses(node)
    shifted = next((dim for dim in access.sequence_dims if isinstance(dim.selector, ShiftedRows)), None)
    if shifted is None:
        return emit_copy(builder, node)
    operand = builder.operand(access)
    if node.target is aten.slice.Tensor:
        return operand
    placement, _, selector = shifted
    assert isinstance(selector, ShiftedRows)
    axis_length, length = placement.rows.length, builder.length
    before = rows_before_shifted(selector, axis_length, length)
    after = rows_in_chunk(selector.rows, length) - rows_shifted(selector, axis_length, length) - before
    rank = len(shape_of_node(node))
    pad: list[Any] = [0, 0] * (rank - placement.dim)
    pad[-2:] = [builder.size_argument(before), builder.size_argument(after)]
    value = builder.scalar_argument(bound_arguments(node).get("value", 0)) if node.target is aten.constant_pad_nd.default else 0
    return builder.graph.call_function(aten.constant_pad_nd.default, (operand, pad, value))


@register_lowering(aten.convolution.default)
def lower_convolution(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Convolve the rows of the chunk's windows, with zeros for rows outside the sequence.

    A convolution that does not slide along the sequence only mixes channels.
    """
    x, *others = builder.layout.operand_accesses(node)
    if not x.sequence_dims or not isinstance(x.selector, ShiftedRows):
        return builder.graph.call_function(window_ops.mix_channels, builder.arguments(node)[0])
    arguments = bound_arguments(node)
    rows, weight, *bias = (builder.operand(access) for access in (x, *others))
    missing = _missing_window_rows(builder, x)
    options = (arguments["dilation"][0], arguments["transposed"], builder.scalar_argument(arguments["groups"]))
    return builder.graph.call_function(window_ops.convolve, (rows, weight, bias[0] if bias else None, missing, *options))


@register_lowering(aten.convolution_backward.default)
def lower_convolution_backward(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Compute a convolution's weight gradient from the chunk's windows.

    A convolution that does not slide along the sequence only mixes channels.
    """
    gradient, *others = builder.layout.operand_accesses(node)
    if not gradient.sequence_dims or not isinstance(gradient.selector, ShiftedRows):
        return builder.graph.call_function(window_ops.mixing_gradient, builder.arguments(node)[0])
    arguments = bound_arguments(node)
    operands = [builder.operand(access) for access in (gradient, *others)]
    options = (arguments["dilation"][0], arguments["transposed"], builder.scalar_argument(arguments["groups"]))
    missing = _missing_window_rows(builder, gradient)
    return builder.graph.call_function(window_ops.weight_gradient, (*operands, missing, *options))


def _missing_window_rows(builder: BodyBuilder, access: OperandAccess) -> tuple[Any, Any]:
    """Return two numbers of rows, as body arguments: how many rows of the chunk's windows lie before the operand's first row,
    and how many after its last row.
    """
    placement, selector = access.placement, access.selector
    assert isinstance(selector, ShiftedRows)
    axis_length, length = placement.rows.length, builder.length
    before = rows_before_shifted(selector, axis_length, length)
    existing = rows_shifted(selector, axis_length, length)
    after = rows_in_chunk(selector.rows, length) + selector.reach - before - existing
    return builder.size_argument(before), builder.size_argument(after)


@register_lowering(aten.repeat.default)
def lower_repeat(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Repeat a dimension of size one up to its size in the chunk, and any other by its number of copies."""
    (operand,) = builder.operands(node)
    operand_shape = shape_of_node(tensor_operands(node)[0])
    repeats = [builder.scalar_argument(item) for item in bound_arguments(node)["repeats"]]
    for dim, labels in enumerate(builder.layout.axes.signatures[node].results[0]):
        operand_dim = dim - (len(repeats) - len(operand_shape))
        if operand_dim < 0 or operand_shape[operand_dim] == 1 or len(labels) == 2:
            repeats[dim] = builder.size_argument(builder.label_size(node, labels[0]))
    return builder.graph.call_function(aten.repeat.default, (operand, repeats))


@register_lowering(aten.native_layer_norm_backward.default)
def lower_layer_norm_backward(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Copy the operator, with contiguous mean and inverse deviation: the CPU kernel assumes it, and a chunk's slices are not."""
    (gradient, x, normalized_shape, mean, rstd, *others), kwargs = builder.arguments(node)
    mean, rstd = (builder.graph.call_function(aten.contiguous.default, (item,)) for item in (mean, rstd))
    args = (gradient, x, normalized_shape, mean, rstd, *others)
    return builder.graph.call_function(aten.native_layer_norm_backward.default, args, kwargs)


@register_lowering(GROUPED_MM)
def lower_grouped_mm(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sort the chunk's rows by group, and multiply each group by its weight."""
    x, weight, group = builder.operands(node)
    order = sort_by_group(builder, group, builder.size_argument(shape_of_node(node_argument(node, 1))[0]))
    return builder.graph.call_function(ARRANGED_MM, (x, weight, *order))


@register_lowering(GROUPED_OUTER)
def lower_grouped_outer(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Sort the chunk's rows by group, and compute each group's weight gradient."""
    x, y, group = builder.operands(node)
    return builder.graph.call_function(
        ARRANGED_OUTER, (x, y, *sort_by_group(builder, group, builder.scalar_argument(node.args[3])))
    )


@register_lowering(ALL_REDUCE)
def lower_all_reduce(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Emit the start of the reduction and its wait, which `async_waits.py` moves to the first user; return the wait.

    The start is annotated with the text by which ranks compare their collectives.
    """
    (operand,) = builder.operands(node)
    start = builder.graph.call_function(begin, (operand, *node.args[1:]))
    value, placements = node.meta[VALUE], builder.layout.placements(node)
    start.meta[COLLECTIVE_TEXT] = f"{' '.join(map(str, node.args[1:]))} {value.dtype} {list(value.shape)} {placements}"
    return builder.graph.call_function(end, (start,))


@register_lowering(ATTENTION)
def lower_attention(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Call the kernel on the chunk's queries and the keys they see."""
    query, key, value, *mask = builder.operands(node)
    return builder.graph.call_function(
        attention_forward, (query, key, value, *_mask_and_window(builder, node, mask)), _score_options(builder, node, mask)
    )


@register_lowering(ATTENTION_BACKWARD)
def lower_attention_backward(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Call the backward kernel on the chunk's queries and the keys they see."""
    gradient, query, key, value, out, lse, *mask = builder.operands(node)
    return builder.graph.call_function(
        attention_backward,
        (gradient, query, key, value, out, lse, *_mask_and_window(builder, node, mask)),
        _score_options(builder, node, mask),
    )


def _score_options(builder: BodyBuilder, node: fx.Node, mask: list[fx.Node]) -> dict[str, Any]:
    """Return the attention kernel's keyword arguments: the scale of the scores, and `finite_hides=False` if necessary.

    By default, large negative numbers of a mask hide keys as minus infinity does. This is wrong if scores may be as large.
    """
    options = {"scale": builder.scalar_argument(bound_arguments(node)["scale"])}
    if mask and node not in builder.layout.key_spans.ordinary_scores:
        options["finite_hides"] = False
    return options


def _mask_and_window(builder: BodyBuilder, node: fx.Node, mask: list[fx.Node]) -> tuple[Any, Any, Any]:
    """Return the attention kernel's arguments (mask, first_query, window); each may be None.

    `mask` is empty, or has one node. `first_query`: the position of the chunk's first query minus the position of its first
    key. `window`: (low, high), a query at position p sees keys from p + low to p + high, inclusive (None: no limit).
    """
    layout = builder.layout
    mask_argument = mask[0] if mask else None
    if node in layout.key_spans.exact_masks:  # the window shows the same keys as the mask
        span = layout.span(node)
        return None, _first_query(builder, node), (span.low, span.high)
    if bound_arguments(node)["is_causal"]:
        causal_end = builder.size_argument(_offset(builder, node, N) - _offset(builder, node, M))
        return mask_argument, _first_query(builder, node), (None, causal_end)
    return mask_argument, None, None


def _first_query(builder: BodyBuilder, node: fx.Node) -> Any:
    """Return the position of the chunk's first query minus the position of its first key, as a body argument."""
    return builder.size_argument(_chunk_position(builder, node, M) - _chunk_position(builder, node, N))


def _offset(builder: BodyBuilder, node: fx.Node, label: int) -> Any:
    """Return the position of an axis's first row in the sequence; 0 if the axis is not the sequence."""
    layout, dim = builder.layout, builder.layout.axes.labels[node][label]
    return 0 if layout.axes.sequence_factor(dim) is None else layout.rows(dim).offset


def _chunk_position(builder: BodyBuilder, node: fx.Node, label: int) -> Any:
    """Return the position of the chunk's first query or key of an attention; 0 if that axis is not the sequence."""
    layout, dim = builder.layout, builder.layout.axes.labels[node][label]
    if layout.axes.sequence_factor(dim) is None:
        return 0
    rows = layout.rows(dim)
    if layout.access.roles[node][label] is Role.ROWS:
        return first_in_chunk(rows, builder.length) + rows.offset
    return first_in_span(rows, layout.span(node), builder.length) + rows.offset
