"""Ranges of matrix products and attention: a `Range` [low, high] bounds all elements of a value, which may be NaN if `nan`.

This module makes the one assumption about magnitudes (docs/internals.md): weights are trained, so a product of
ordinary numbers is an ordinary number. It does not extend to operands that may be infinite, or so large that they
represent infinity.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from streamfx.cost.flops import PACKED
from streamfx.dialect.attention import ATTENTION
from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.ir.joint import is_parameter, tensor_operands
from streamfx.ir.ranges import INFINITY, MAX_ROWS, Range, activation, full_range, hull
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.arithmetic import plus, times
from streamfx.passes.ops.ranges.transfer import RangeCall, Reader, max_num_elements, max_size, structural
from streamfx.passes.ops.ranges.views import ZERO
from streamfx.passes.ops.traits import is_dequantizer
from streamfx.torch_private import OpOverload

aten = torch.ops.aten


def product(dtype: torch.dtype, count: int, *operands: Range) -> Range:
    """Return the range, in `dtype`, of a sum of at most `count` products of one element of each operand.

    It is an ordinary number (assumed: at most 1e6) if the operands are ordinary and one is a weight or activation
    (`assumed`). Otherwise, the bound is `count` times the product of all magnitudes, with 1 % for rounding.
    """
    nan = any(operand.nan for operand in operands)
    if not dtype.is_floating_point:
        return full_range(dtype)
    if any(operand.is_zero for operand in operands) and all(operand.is_ordinary for operand in operands):
        return Range(0, 0, nan)
    if any(operand.assumed for operand in operands) and all(operand.is_ordinary for operand in operands):
        ordinary = activation(dtype)
        return Range(ordinary.low, ordinary.high, nan, assumed=1)
    bound = math.prod((1.01 * count, *(operand.magnitude for operand in operands)))
    return Range(-bound, bound, nan) if bound < torch.finfo(dtype).max else full_range(dtype)


@structural(aten.mm.default, aten.bmm.default, arguments="self mat2")
def _mm(call: RangeCall) -> Range:
    return product(call.dtype, max_size(call.shape("self")[-1]), call.range("self"), call.range("mat2"))


@structural(aten.mv.default, arguments="self vec")
def _mv(call: RangeCall) -> Range:
    return product(call.dtype, max_size(call.shape("self")[-1]), call.range("self"), call.range("vec"))


@structural(aten.dot.default, arguments="self tensor")
def _dot(call: RangeCall) -> Range:
    return product(call.dtype, max_size(call.shape("self")[-1]), call.range("self"), call.range("tensor"))


@structural(aten.addmm.default, arguments="self mat1 mat2 beta alpha")
def _addmm(call: RangeCall) -> Range:
    return _scaled_sum(call, "mat1")


@structural(aten.baddbmm.default, arguments="self batch1 batch2 beta alpha")
def _baddbmm(call: RangeCall) -> Range:
    return _scaled_sum(call, "batch1")


def _scaled_sum(call: RangeCall, left: str) -> Range:
    """Return the range of beta * self + alpha * (left @ right), of `addmm` or `baddbmm`; zero beta: `self` is not read.

    `left`: the name of the left factor's argument, "mat1" or "batch1".
    """
    right = call.range("mat2" if left == "mat1" else "batch2")
    product_range = times(product(call.dtype, max_size(call.shape(left)[-1]), call.range(left), right), call.range("alpha"))
    beta = call.range("beta")
    return product_range if beta.constant == 0 else plus(times(call.range("self"), beta), product_range)


@structural(aten.convolution.default, arguments="input weight bias stride padding dilation transposed output_padding groups")
def _convolution(call: RangeCall) -> Range:
    product_range = product(call.dtype, max_num_elements(*call.shape("weight")), call.range("input"), call.range("weight"))
    return product_range if call.arguments["bias"] is None else plus(product_range, call.range("bias"))


@structural(aten._cdist_forward.default, arguments="x1 x2 p compute_mode")
def _distance(call: RangeCall) -> Range:
    """Return the range of pairwise distances `cdist(x1, x2, p)`: at most the sum of all coordinate differences, for p >= 1.

    For smaller p, or if squares, which kernels compute, may overflow, it is unbounded. Weights and activations
    (`assumed`) are assumed to have ordinary distances.
    """
    x1, x2, count = call.range("x1"), call.range("x2"), max_size(call.shape("x1")[-1])
    distance = x1.magnitude + x2.magnitude
    if not call.arguments["p"] >= 1 or count * distance * distance > torch.finfo(call.dtype).max / 4:
        return Range(0, INFINITY, nan=True)
    if x1.assumed or x2.assumed:
        return Range(0, max(activation(call.dtype).high, 1.01 * distance), x1.nan or x2.nan)
    return Range(0, 1.01 * count * distance, x1.nan or x2.nan)


@structural(GROUPED_MM, arguments="x weight group")
def _grouped_mm(call: RangeCall) -> Range:
    return product(call.dtype, max_size(call.shape("x")[-1]), call.range("x"), call.range("weight"))


@structural(GROUPED_OUTER, arguments="x y group groups")
def _grouped_outer(call: RangeCall) -> Range:
    return product(call.dtype, max_size(call.shape("x")[0]), call.range("x"), call.range("y"))


@structural(ATTENTION, arguments="query key value attn_mask is_causal scale")
def _attention(call: RangeCall) -> tuple[Range, ...]:
    """Return the range of attention's first result: convex combinations of the values; zero if a query sees no key.

    Scores that may be infinite or NaN make it NaN. 1.01 allows for rounding.
    """
    value = call.range("value")
    scores = product(call.dtype, max_size(call.shape("query")[-1]), call.range("query"), call.range("key"))
    nan = value.nan or scores.nan or math.isinf(scores.magnitude) or math.isinf(value.magnitude)
    combination = hull(value, ZERO)
    return (Range(combination.low * 1.01, combination.high * 1.01, nan),)


def unpacked_product(node: fx.Node, reader: Reader) -> Range | None:
    """Return the range of `x @ unpacked` for a packed (quantized) weight, or of an unpacked weight; `reader`: ranges by node.

    They are ordinary numbers if all packed operands are parameters. None for any other operator or operand.
    """
    if not isinstance(node.target, OpOverload) or not (is_dequantizer(node) or node.target.name() in PACKED):
        return None
    operands = tensor_operands(node)
    unpacked_operands = () if is_dequantizer(node) else operands[:1]
    if not all(map(is_parameter, operands[len(unpacked_operands) :])):
        return None
    dtype: torch.dtype = node.meta[VALUE].dtype
    return product(dtype, MAX_ROWS, activation(dtype), *(reader(item) for item in unpacked_operands))
