"""Transfer functions of sums, means, norms, counts and softmax, which depend on the number of elements.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. A transfer function gets a
`RangeCall`, which knows the arguments, shapes and operand ranges of one call, and returns the range of each result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from streamfx.ir.joint import shape_of_node
from streamfx.ir.ranges import INFINITY, Number, Range, cast_range, full_range, hull
from streamfx.passes.ops.ranges.arithmetic import plus, times
from streamfx.passes.ops.ranges.transfer import RangeCall, max_num_elements, structural
from streamfx.passes.ops.ranges.views import ZERO

aten = torch.ops.aten
MAX_FLOAT32_COUNT = 2**24  # float32 represents every integer up to this one
MIN_EPS = 1e-16  # the default eps depends on the dtype
SUM_SLACK = 1.01  # factor by which a sum in low precision may exceed its bound


def sum_range(operand: Range, count: Number, dtype: torch.dtype) -> Range:
    """Return the range of a sum of 0 to `count` numbers in `operand`, each first converted to `dtype`, in which they add up.

    Floating-point sums are widened by their rounding. NaN if partial sums may overflow to infinities of both signs.
    """
    in_dtype = cast_range(operand, dtype)
    total = times(hull(in_dtype, ZERO), Range(0, count))
    if not dtype.is_floating_point:
        return total
    rounding = 1.0 + min(count * torch.finfo(dtype).eps, 1.0)
    low, high = total.low * rounding, total.high * rounding
    max_number = torch.finfo(dtype).max
    return Range(low, high, in_dtype.nan or (low < -max_number and high > max_number))


def reduced_count(call: RangeCall, name: str = "dim") -> Number:
    """Return how many elements of `self` are reduced to one, at most; `name`: the argument with the reduced dimensions.

    None or an empty list means all dimensions.
    """
    shape = call.shape("self")
    dims: Any = call.arguments.get(name)
    if dims is None or dims == []:
        return max_num_elements(*shape)
    chosen: Sequence[int] = [dims] if isinstance(dims, int) else dims
    return max_num_elements(*(shape[dim % len(shape)] for dim in chosen)) if shape else 1


@structural(aten.sum.default, arguments="self dtype")
def _sum(call: RangeCall) -> Range:
    return sum_range(call.range("self"), max_num_elements(*call.shape("self")), call.dtype)


@structural(aten.sum.dim_IntList, arguments="self dim keepdim dtype")
def _sum_dim(call: RangeCall) -> Range:
    return sum_range(call.range("self"), reduced_count(call), call.dtype)


@structural(aten.cumsum.default, arguments="self dim dtype")
def _cumsum(call: RangeCall) -> Range:
    return sum_range(call.range("self"), reduced_count(call), call.dtype)


@structural(aten.mean.default, arguments="self dtype")
def _mean(call: RangeCall) -> Range:
    return _mean_of(call, max_num_elements(*call.shape("self")))


@structural(aten.mean.dim, arguments="self dim keepdim dtype")
def _mean_dim(call: RangeCall) -> Range:
    return _mean_of(call, reduced_count(call))


def _mean_of(call: RangeCall, count: Number) -> Range:
    """Return the range of a mean of `count` elements of `self`: within the operand's, up to rounding.

    If their sum may overflow, it is unbounded. The mean of no elements is NaN.
    """
    operand = cast_range(call.range("self"), call.dtype)
    total = cast_range(sum_range(operand, count, call.dtype), call.dtype)
    if not math.isfinite(total.magnitude):
        return Range(0 if operand.low >= 0 else -INFINITY, 0 if operand.high <= 0 else INFINITY, nan=True)
    low = operand.low * (SUM_SLACK if operand.low < 0 else 1 / SUM_SLACK)
    high = operand.high * (SUM_SLACK if operand.high > 0 else 1 / SUM_SLACK)
    return Range(min(low, high), max(low, high), nan=True)


@structural(aten.any.default, aten.all.default, arguments="self")
def _any(call: RangeCall) -> Range:
    return Range(0, 1)


@structural(aten.var.correction, arguments="self dim correction keepdim")
def _var(call: RangeCall) -> Range:
    """Return the range of a variance: the sum of squared differences from the mean, divided by the count less `correction`.

    Bounded by twice the squared spread for a correction of at most 1 (the default); NaN for too few elements.
    """
    operand, correction = call.range("self"), call.arguments["correction"]
    if not operand.is_finite or correction not in (None, 0, 1):
        return Range(0, INFINITY, nan=True)
    spread = operand.high - operand.low + 1e-5 * operand.magnitude  # the mean is rounded
    return Range(0, 2 * float(spread) * float(spread), nan=True)


@structural(aten.linalg_vector_norm.default, arguments="self ord dim keepdim dtype")
def _norm(call: RangeCall) -> Range:
    """Return the range of a Euclidean norm: at most sqrt(count) times the largest magnitude, unless squares overflow.

    For other orders, nothing is known (the full range of the dtype).
    """
    operand, order = call.range("self"), call.arguments["ord"]
    if order != 2:
        return full_range(call.dtype)
    count, squares = reduced_count(call), float(operand.magnitude) * float(operand.magnitude)
    if count * squares > torch.finfo(torch.float32 if call.dtype.itemsize < 4 else call.dtype).max:
        return Range(0, INFINITY, operand.nan)
    return Range(0, SUM_SLACK * math.sqrt(count) * operand.magnitude if count else 0, operand.nan)


@structural(aten.logsumexp.default, arguments="self dim keepdim")
def _logsumexp(call: RangeCall) -> Range:
    """Return the range of log-sum-exp: from the smallest operand up to the largest plus the log of their count."""
    operand, count = cast_range(call.range("self"), call.dtype), reduced_count(call)
    slack = 1e-3 + 8 * torch.finfo(call.dtype).eps  # error of the sum, which a low-precision type rounds before the logarithm
    return plus(operand, Range(-slack, math.log(max(count, 1)) + slack))


@structural(aten._softmax.default, arguments="self dim half_to_float")
def _softmax(call: RangeCall) -> Range:
    """Return the range of softmax: [0, 1], up to rounding; NaN if all elements are minus infinity, or one is infinite."""
    operand = call.range("self")
    return Range(0, 1 + 1e-3, operand.nan or math.isinf(operand.magnitude))


@structural(aten._safe_softmax.default, arguments="self dim dtype")
def _safe_softmax(call: RangeCall) -> Range:
    return Range(0, 1 + 1e-3, call.range("self").nan or call.range("self").high == INFINITY)


@structural(aten._log_softmax.default, arguments="self dim half_to_float")
def _log_softmax(call: RangeCall) -> Range:
    """Return the range of log-softmax: at most zero, up to rounding; at least -(high - low) - log(count).

    Low and high bound the scores; without such bounds, it is unbounded below.
    """
    operand = call.range("self")
    if not operand.is_finite:
        return Range(-INFINITY, 1e-3, nan=True)
    shape = call.shape("self")
    count = max_num_elements(shape[call.arguments["dim"] % len(shape)]) if shape else 1
    return Range((operand.low - operand.high - math.log(max(count, 1)) - 1) * SUM_SLACK, 1e-3)


@structural(aten._softmax_backward_data.default, arguments="grad_output output dim input_dtype")
def _softmax_backward(call: RangeCall) -> Range:
    """Return the range of softmax's gradient, output * (grad_output - sum): zero (or NaN) if the output is zero, else any."""
    return Range(0, 0, nan=True) if call.range("output").is_zero else full_range(call.dtype)


# -- normalizations


@structural(aten.native_layer_norm.default, arguments="input normalized_shape weight bias eps")
def _layer_norm(call: RangeCall) -> tuple[Range, ...]:
    mean = call.range("input")
    return _apply_weight_and_bias(call, _normalized(call)), Range(mean.low, mean.high, nan=True), Range(0, INFINITY, nan=True)


@structural(aten._fused_rms_norm.default, arguments="input normalized_shape weight eps")
def _rms_norm(call: RangeCall) -> tuple[Range, ...]:
    return _apply_weight_and_bias(call, _normalized(call)), Range(0, INFINITY, nan=True)


def _normalized(call: RangeCall) -> Range:
    """Return the range of a layer norm's or RMS norm's input divided by its norm, which is at least sqrt(eps).

    The result is also at most sqrt(number of elements), but not for large, nearly equal numbers, because the mean is
    rounded: this bound is used for activations (`assumed`) only, which are assumed not to be such numbers.
    """
    operand, eps = call.range("input"), call.arguments["eps"]
    eps = MIN_EPS if eps is None else eps
    if not isinstance(eps, float) or eps <= 0 or math.isinf(operand.magnitude):
        return Range(-INFINITY, INFINITY, nan=True)
    bound = 2 * SUM_SLACK * operand.magnitude / math.sqrt(eps)
    if operand.assumed:
        bound = min(bound, SUM_SLACK * math.sqrt(max_num_elements(*call.shape("input"))))
    may_overflow = not operand.magnitude < 1e15  # in its square
    return Range(-bound, bound, operand.nan or may_overflow)


def _apply_weight_and_bias(call: RangeCall, normalized: Range) -> Range:
    """Return the range of `normalized * weight + bias`; the call may have neither, either or both."""
    for name, operation in (("weight", times), ("bias", plus)):
        if call.arguments.get(name) is not None:
            normalized = operation(normalized, call.range(name))
    return normalized


# -- counts


@structural(aten.histc.default, arguments="self bins min max")
def _histogram(call: RangeCall) -> Range:
    """Return the range of a histogram's counts: from 0 to the number of elements.

    If a size is dynamic, at most 2^24, up to which float32 counts exactly: counts are assumed to be exact, as in eager.
    """
    shape = call.shape("self")
    count = max_num_elements(*shape)
    return Range(0, count if all(isinstance(size, int) for size in shape) else min(count, MAX_FLOAT32_COUNT))


@structural(aten.bincount.default, arguments="self minlength")
def _bincount(call: RangeCall) -> Range:
    return Range(0, max_num_elements(*call.shape("self")))


@structural(aten.index_add.default, arguments="self dim index source alpha")
def _index_add(call: RangeCall) -> Range:
    added = sum_range(times(call.range("source"), call.range("alpha")), max_num_elements(*call.shape("source")), call.dtype)
    return plus(call.range("self"), added)


@structural(aten.scatter_add.default, arguments="self dim index src")
def _scatter_add(call: RangeCall) -> Range:
    added = sum_range(call.range("src"), max_num_elements(*shape_of_node(call.arguments["index"])), call.dtype)
    return plus(call.range("self"), added)
