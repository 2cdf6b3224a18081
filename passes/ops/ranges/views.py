"""Transfer functions of operators that keep numbers (views, indexing, concatenation) or write constants.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. A transfer function gets a
`RangeCall`, which knows the arguments, shapes and operand ranges of one call, and returns the range of each result.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.ir.joint import shape_of_node
from streamfx.ir.ranges import MAX_ROWS, Range, activation, constant, full_range, hull
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.transfer import RangeCall, max_size, range_of_argument, structural

aten = torch.ops.aten
ZERO = constant(0)

ELEMENT_SELECTIONS: dict[Any, str] = {  # the first result contains elements of `self` alone; other arguments select them
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.reshape.default: "shape",
    aten.unsqueeze.default: "dim",
    aten.squeeze.default: "",
    aten.squeeze.dim: "dim",
    aten.squeeze.dims: "dim",
    aten.expand.default: "size",
    aten.permute.default: "dims",
    aten.transpose.int: "dim0 dim1",
    aten.t.default: "",
    aten.clone.default: "",
    aten.alias.default: "",
    aten.detach.default: "",
    aten.repeat.default: "repeats",
    aten.slice.Tensor: "dim start end step",
    aten.select.int: "dim index",
    aten.index.Tensor: "indices",
    aten._unsafe_index.Tensor: "indices",
    aten.index_select.default: "dim index",
    aten.gather.default: "dim index sparse_grad",
    aten.flip.default: "dims",
    aten.roll.default: "shifts dims",
    aten.unfold.default: "dimension size step",
    aten.diagonal.default: "offset dim1 dim2",
    aten.amax.default: "dim keepdim",
    aten.amin.default: "dim keepdim",
    aten.max.default: "",
    aten.min.default: "",
}
for _operator, _names in ELEMENT_SELECTIONS.items():

    @structural(_operator, arguments=f"self {_names}")
    def _part(call: RangeCall) -> Range:
        return call.range("self")


@structural(aten.max.dim, aten.min.dim, arguments="self dim keepdim")
def _largest_of_dim(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(aten.topk.default, arguments="self k dim largest sorted")
def _topk(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(aten.sort.default, arguments="self dim descending")
def _sort(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(aten.sort.stable, arguments="self stable dim descending")
def _sort_stable(call: RangeCall) -> tuple[Range, Range]:
    return call.range("self"), index_range(call, call.arguments["dim"])


@structural(aten.argsort.default, arguments="self dim descending")
def _argsort(call: RangeCall) -> Range:
    return index_range(call, call.arguments["dim"])


@structural(aten.argsort.stable, arguments="self stable dim descending")
def _argsort_stable(call: RangeCall) -> Range:
    return index_range(call, call.arguments["dim"])


@structural(aten.argmax.default, aten.argmin.default, arguments="self dim keepdim")
def _argmax(call: RangeCall) -> Range:
    return index_range(call, call.arguments["dim"])


def index_range(call: RangeCall, dim: int | None) -> Range:
    """Return the range of indices along dimension `dim` of the argument `self`; of flat indices if `dim` is None."""
    shape = call.shape("self")
    if dim is None or not shape:
        return Range(0, MAX_ROWS)
    return Range(0, max(max_size(shape[dim % len(shape)]) - 1, 0))


def _all_results(call: RangeCall) -> tuple[Range, ...]:
    """Return the range of `self` once per result: each result has elements of `self`."""
    return (call.range("self"),) * len(call.node.meta[VALUE])


structural(aten.split.Tensor, arguments="self split_size dim")(_all_results)
structural(aten.split_with_sizes.default, arguments="self split_sizes dim")(_all_results)
structural(aten.unbind.int, arguments="self dim")(_all_results)


@structural(aten.embedding.default, arguments="weight indices padding_idx scale_grad_by_freq sparse")
def _embedding(call: RangeCall) -> Range:
    return call.range("weight")


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


@structural(aten.slice_scatter.default, arguments="self src dim start end step")
def _slice_scatter(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("src"))


@structural(aten.select_scatter.default, aten.scatter.src, arguments="self src dim index")
def _select_scatter(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("src"))


@structural(aten.scatter.value, arguments="self dim index value")
def _scatter_value(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("value"))


@structural(aten.index_put.default, aten._unsafe_index_put.default, arguments="self indices values accumulate")
def _index_put(call: RangeCall) -> Range:
    return full_range(call.dtype) if call.arguments["accumulate"] else hull(call.range("self"), call.range("values"))


@structural(aten.masked_scatter.default, arguments="self mask source")
def _masked_scatter(call: RangeCall) -> Range:
    return hull(call.range("self"), call.range("source"))


@structural(aten.slice_backward.default, arguments="grad_output input_sizes dim start end step")
def _slice_backward(call: RangeCall) -> Range:
    return hull(call.range("grad_output"), ZERO)


@structural(RELATIVE_SHIFT, arguments="x dim first columns")
def _relative_shift(call: RangeCall) -> Range:
    return call.range("x")


@structural(RELATIVE_SHIFT_BACKWARD, arguments="gradient dim first width")
def _relative_shift_backward(call: RangeCall) -> Range:
    return hull(call.range("gradient"), ZERO)


@structural(aten.select_backward.default, arguments="grad_output input_sizes dim index")
def _select_backward(call: RangeCall) -> Range:
    return hull(call.range("grad_output"), ZERO)


# -- constants and factories


@structural(aten.full.default, arguments="size fill_value dtype")
def _full(call: RangeCall) -> Range:
    return call.range("fill_value")


@structural(aten.full_like.default, arguments="self fill_value dtype")
def _full_like(call: RangeCall) -> Range:
    return call.range("fill_value")


@structural(aten.scalar_tensor.default, arguments="s dtype")
def _scalar_tensor(call: RangeCall) -> Range:
    return call.range("s")


@structural(aten.zeros.default, arguments="size dtype")
def _zeros(call: RangeCall) -> Range:
    return ZERO


@structural(aten.zeros_like.default, arguments="self dtype")
def _zeros_like(call: RangeCall) -> Range:
    return ZERO


@structural(aten.ones.default, arguments="size dtype")
def _ones(call: RangeCall) -> Range:
    return constant(1)


@structural(aten.ones_like.default, arguments="self dtype")
def _ones_like(call: RangeCall) -> Range:
    return constant(1)


@structural(aten.arange.default, arguments="end dtype")
def _arange(call: RangeCall) -> Range:
    return _arange_range(ZERO, call.range("end"), constant(1), call.dtype)


@structural(aten.arange.start, arguments="start end dtype")
def _arange_start(call: RangeCall) -> Range:
    return _arange_range(call.range("start"), call.range("end"), constant(1), call.dtype)


@structural(aten.arange.start_step, arguments="start end step dtype")
def _arange_start_step(call: RangeCall) -> Range:
    return _arange_range(call.range("start"), call.range("end"), call.range("step"), call.dtype)


def _arange_range(start: Range, end: Range, step: Range, dtype: torch.dtype) -> Range:
    """Return the range of `arange(start, end, step)` in `dtype`: from `start` to `end`, exclusive.

    Floating-point steps may round up to the end, and slightly beyond: the range is widened by a step.
    """
    is_integer = all(isinstance(bound, int) for known in (start, end, step) for bound in (known.low, known.high))
    if not is_integer or dtype.is_floating_point or step.has_zero:
        low, high = min(start.low, end.low), max(start.high, end.high)
        reach = step.magnitude
        return Range(low - reach, high + reach)
    if step.low > 0:
        return Range(start.low, max(start.high, end.high - 1))
    return Range(min(start.low, end.low + 1), start.high)


@structural(aten.rand.default, arguments="size dtype")
def _rand(call: RangeCall) -> Range:
    return Range(0, 1)


@structural(aten.rand_like.default, arguments="self dtype")
def _rand_like(call: RangeCall) -> Range:
    return Range(0, 1)


@structural(aten.randn.default, arguments="size dtype")
def _randn(call: RangeCall) -> Range:
    return activation(call.dtype)


@structural(aten.bernoulli.default, arguments="self")
def _bernoulli(call: RangeCall) -> Range:
    return Range(0, 1)


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
