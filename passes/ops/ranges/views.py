"""Transfer functions of operators that keep numbers (views, indexing, concatenation) or write constants.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. A transfer function gets a
`RangeCall`, which knows the arguments, shapes and operand ranges of one call, and returns the range of each result.
"""

from __future__ import annotations

import math

import torch

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.ir.joint import shape_of_node
from streamfx.ir.operator_table import OPERATORS, SELECTS_ELEMENTS, Kind, of_kind
from streamfx.ir.ranges import MAX_ROWS, Range, activation, constant, full_range, hull
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.transfer import RangeCall, max_size, range_of_argument, structural

aten = torch.ops.aten
ZERO = constant(0)


@structural(*SELECTS_ELEMENTS - of_kind(Kind.SPLIT, Kind.UNBIND))
def _selected_elements(call: RangeCall) -> Range:
    """Return the range of the first argument: the others select its elements."""
    return call.range(next(iter(call.arguments)))


@structural(*of_kind(Kind.SPLIT, Kind.UNBIND))
def _selected_rows(call: RangeCall) -> tuple[Range, ...]:
    return (call.range("self"),) * len(call.node.meta[VALUE])


@structural(aten.amax.default, aten.amin.default, arguments="self dim keepdim")
@structural(aten.max.default, aten.min.default, arguments="self")
def _largest(call: RangeCall) -> Range:
    return call.range("self")


@structural(aten.max.dim, aten.min.dim, arguments="self dim keepdim")
def _largest_of_dim(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(*of_kind(Kind.SORT, Kind.TOPK), arguments="self k stable dim descending largest sorted")
def _sort(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(*of_kind(Kind.ARGSORT), aten.argmax.default, aten.argmin.default, arguments="self stable dim descending keepdim")
def _argsort(call: RangeCall) -> Range:
    return index_range(call, call.arguments["dim"])


def index_range(call: RangeCall, dim: int | None) -> Range:
    """Return the range of indices along dimension `dim` of the argument `self`; of flat indices if `dim` is None."""
    shape = call.shape("self")
    if dim is None or not shape:
        return Range(0, MAX_ROWS)
    return Range(0, max(max_size(shape[dim % len(shape)]) - 1, 0))


@structural(aten.cat.default, aten.stack.default, arguments="tensors dim")
def _concat(call: RangeCall) -> Range:
    nonempty = [item for item in call.arguments["tensors"] if 0 not in shape_of_node(item)]
    return hull(*(range_of_argument(item, call.reader) for item in nonempty)) if nonempty else full_range(call.dtype)


@structural(aten.tril.default, aten.triu.default, arguments="self diagonal")
def _triangle(call: RangeCall) -> Range:
    return hull(call.range("self"), ZERO)


@structural(aten.constant_pad_nd.default, arguments="self pad value")
def _padded(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("value"))


@structural(aten.copy.default, arguments="self src")
def _copied(call: RangeCall) -> Range:
    return call.range("src")


@structural(*of_kind(Kind.OVERWRITE_ROWS), aten.scatter.src, arguments="self src dim index start end step")
def _overwritten_rows(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("src"))


@structural(aten.scatter.value, arguments="self dim index value")
def _scatter_value(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("value"))


@structural(*of_kind(Kind.PUT), arguments="self indices values accumulate")
def _index_put(call: RangeCall) -> Range:
    return full_range(call.dtype) if call.arguments["accumulate"] else hull(call.range("self"), call.range("values"))


@structural(aten.masked_scatter.default, arguments="self mask source")
def _masked_scatter(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("source"))


@structural(*of_kind(Kind.EMBED), arguments="grad_output input_sizes dim start end step index offset dim1 dim2")
def _embedded(call: RangeCall) -> Range:
    return hull(call.range("grad_output"), ZERO)


@structural(RELATIVE_SHIFT, arguments="x dim first columns")
def _relative_shift(call: RangeCall) -> Range:
    return call.range("x")


@structural(RELATIVE_SHIFT_BACKWARD, arguments="gradient dim first width")
def _relative_shift_backward(call: RangeCall) -> Range:
    return hull(call.range("gradient"), ZERO)


# -- constants and factories


@structural(*of_kind(Kind.FILL), arguments="self size fill_value dtype")
def _filled(call: RangeCall) -> Range:
    fill = OPERATORS[call.node.target].fill
    return call.range("fill_value") if fill is None else constant(fill)


@structural(aten.scalar_tensor.default, arguments="s dtype")
def _scalar_tensor(call: RangeCall) -> Range:
    return call.range("s")


@structural(*of_kind(Kind.ARANGE), arguments="start end step dtype")
def _arange(call: RangeCall) -> Range:
    """Return the range of `arange(start, end, step)`: from `start` to `end`, exclusive.

    Floating-point steps may round up to the end, and slightly beyond: the range is widened by a step.
    """
    start = range_of_argument(call.arguments.get("start", 0), call.reader)
    step = range_of_argument(call.arguments.get("step", 1), call.reader)
    end = call.range("end")
    is_integer = all(isinstance(bound, int) for known in (start, end, step) for bound in (known.low, known.high))
    if not is_integer or call.dtype.is_floating_point or step.has_zero:
        low, high = min(start.low, end.low), max(start.high, end.high)
        reach = step.magnitude
        return Range(low - reach, high + reach)
    if step.low > 0:
        return Range(start.low, max(start.high, end.high - 1))
    return Range(min(start.low, end.low + 1), start.high)


@structural(aten.rand.default, aten.rand_like.default, arguments="self size dtype")
@structural(aten.bernoulli.default, arguments="self")
def _rand(call: RangeCall) -> Range:
    return Range(0, 1)


@structural(aten.randn.default, arguments="size dtype")
def _randn(call: RangeCall) -> Range:
    return activation(call.dtype)


@structural(aten.native_dropout.default, arguments="input p train")
def _native_dropout(call: RangeCall) -> tuple[Range, Range]:
    """Return the ranges of dropout's result, in which each element is scaled by 1 / (1 - p) or zero, and of its mask."""
    operand, p = call.range("input"), call.arguments["p"]
    if not isinstance(p, (int, float)) or not 0 <= p < 1:
        return full_range(call.dtype), Range(0, 1)
    if p == 0 or call.arguments["train"] is False:
        return operand, Range(0, 1)
    scale = 1.001 / (1 - p)
    nan = operand.nan or math.isinf(operand.magnitude)  # zero times infinity
    return hull(Range(operand.low * scale, operand.high * scale, nan), operand, ZERO), Range(0, 1)
