"""Axis rules of reductions and normalizations: a reduced axis is contracted if partial results add up, else needed in full.

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result; `()` has size one. A label
of operands alone is contracted: a loop adds up the results of chunks. One in `full_axes(...)` is needed in full: the operator
cannot run on a slice of that axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, broadcast, rule

aten = torch.ops.aten


def reduced_dims(call: RuleCall) -> set[int]:
    """Return the dimensions that a reduction reduces, as nonnegative indices. A missing or empty `dim` means all.

    Only for `any` and `all`, an empty list means none: each element becomes a boolean.
    """
    rank = len(call.shapes[0])
    dims: Any = call.arguments().get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims and call.node.target not in (aten.any.dims, aten.all.dims)):
        return set(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, Iterable) else (dims,))} if rank else set()


def reduction(call: RuleCall, summable: bool, combine: str = "sum") -> Signature:
    """Return the signature of a reduction along `reduced_dims`, with one or more results of equal shape.

    If `summable`, a loop combines the partial results of chunks by `combine` ("sum", or "mean" of all elements); otherwise,
    the reduced axes are needed in full.
    """
    rank, reduced = len(call.shapes[0]), reduced_dims(call)
    labels = tuple((i,) for i in range(rank))
    keep = call.arguments().get("keepdim", False)
    result = tuple(() if i in reduced else labels[i] for i in range(rank) if keep or i not in reduced)
    return Signature((labels,), (result,) * len(call.result_shapes), {} if summable else full_axes(*reduced), combine=combine)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_reduction(call: RuleCall) -> Signature:
    """Axis rule of `sum`: a reduced axis is contracted, because partial sums add up."""
    return reduction(call, summable=True)


@rule(aten.mean.default, aten.mean.dim)
def mean_reduction(call: RuleCall) -> Signature:
    """Axis rule of `mean`: a reduced axis is contracted, because partial sums, divided by all elements, add up to the mean."""
    return reduction(call, summable=True, combine="mean")


@rule(
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.prod.default,
    aten.prod.dim_int,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.linalg_vector_norm.default,
    aten.median.dim,
    aten.aminmax.default,
)
def full_axis_reduction(call: RuleCall) -> Signature:
    """Axis rule of `amax`, `var`, `any` ...: a reduced axis is needed in full, because partial results do not add up."""
    return reduction(call, summable=False)


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: RuleCall) -> Signature:
    """Axis rule of softmax: each row is normalized along `dim`, which is needed in full; all axes are kept."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(broadcast(call), index=full_axes(dim))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: RuleCall) -> Signature:
    """Axis rule of softmax's backward, (gradient, output) -> dx: `dim` is needed in full; all axes are kept."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(broadcast(call), index=full_axes(dim))


@rule(
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
)
def full_axis_operator(call: RuleCall) -> Signature:
    """Axis rule of `sort`, `cummax` ...: each element depends on others along `dim`, which is needed in full."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(broadcast(call), index=full_axes(dim))


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def fourier_transform(call: RuleCall) -> Signature:
    """Axis rule of Fourier transforms: each output along a transformed dimension depends on all inputs along it.

    The transformed dimensions of the result are new axes, because their sizes may differ.
    """
    rank = len(call.shape)
    dims = {dim % rank for dim in call.arguments()["dim"]}
    operand = tuple((dim,) for dim in range(rank))
    result = tuple((rank + dim if dim in dims else dim,) for dim in range(rank))
    return Signature((operand,), (result,), full_axes(*dims, *(rank + dim for dim in dims)))


@rule(aten.topk.default, aten.kthvalue.default)
def topk(call: RuleCall) -> Signature:
    """Axis rule of `topk` and `kthvalue`: `dim` is needed in full; in both results, it is a new axis of k elements.

    `kthvalue` without `keepdim` has no such dimension.
    """
    rank = len(call.shapes[0])
    dim = call.arguments()["dim"] % max(rank, 1)
    labels = tuple((i,) for i in range(rank))
    sized_dim = () if len(call.shape) < rank else ((rank,),)
    result = (*labels[:dim], *sized_dim, *labels[dim + 1 :])
    return Signature((labels,), (result,) * len(call.result_shapes), index=full_axes(dim, *([rank] if sized_dim else [])))


@rule(aten.native_layer_norm.default)
def layer_norm(call: RuleCall) -> Signature:
    """Axis rule of (x, weight?, bias?) -> (y, mean, rstd): the trailing, normalized dimensions are needed in full.

    Weight and bias have those dimensions; in mean and rstd, they have size one.
    """
    rank = len(call.shape)
    inner = rank - len(call.arguments()["normalized_shape"])  # the first normalized dimension
    labels = tuple((i,) for i in range(rank))
    affine = (labels[inner:],) * (len(call.operands) - 1)
    statistics = (*labels[:inner], *((),) * (rank - inner))
    return Signature((labels, *affine), (labels, statistics, statistics), index=full_axes(*range(inner, rank)))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: RuleCall) -> Signature:
    """Axis rule of (gradient, x, mean, rstd, weight?, bias?) -> (dx, dweight, dbias); the last two are summed over rows."""
    rank = len(call.shapes[1])
    arguments = call.arguments()
    inner = rank - len(arguments["normalized_shape"])  # the first normalized dimension
    labels = tuple((i,) for i in range(rank))
    statistics = (*labels[:inner], *((),) * (rank - inner))
    affine = (labels[inner:],) * (len(call.operands) - 4)
    shapes = (labels, labels[inner:], labels[inner:])
    results = tuple(dims if shape else () for dims, shape in zip(shapes, call.result_shapes, strict=True))
    operands = (labels, labels, statistics, statistics, *affine)
    return Signature(operands, results, index=full_axes(*range(inner, rank)))


@rule(aten._fused_rms_norm.default)
def rms_norm(call: RuleCall) -> Signature:
    """Axis rule of (x, weight?) -> (y, rstd): the trailing, normalized dimensions are needed in full.

    In rstd, one number per row, they have size one.
    """
    rank = len(call.shape)
    inner = rank - len(call.arguments()["normalized_shape"])  # the first normalized dimension
    labels = tuple((i,) for i in range(rank))
    statistics = (*labels[:inner], *((),) * (rank - inner))
    affine = (labels[inner:],) * (len(call.operands) - 1)
    return Signature((labels, *affine), (labels, statistics), index=full_axes(*range(inner, rank)))


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: RuleCall) -> Signature:
    """Axis rule of (gradient, x, rstd, weight?) -> (dx, dweight); the last is summed over rows."""
    rank = len(call.shapes[1])
    inner = rank - len(call.arguments()["normalized_shape"])  # the first normalized dimension
    labels = tuple((i,) for i in range(rank))
    statistics = (*labels[:inner], *((),) * (rank - inner))
    affine = (labels[inner:],) * (len(call.operands) - 3)
    results = (labels, labels[inner:])[: len(call.result_shapes)]
    return Signature((labels, labels, statistics, *affine), results, index=full_axes(*range(inner, rank)))


@rule(aten.histc.default)
def histogram(call: RuleCall) -> Signature | None:
    """Axis rule of `histc`, x [...] -> counts [bins]: counts over fixed bins add up, so all axes of x are contracted.

    None if `min == max`: then the bins lie between the smallest and the largest of all elements.
    """
    arguments = call.arguments()
    if not arguments["min"] < arguments["max"]:
        return None
    rank = len(call.shapes[0])
    return Signature((tuple((i,) for i in range(rank)),), (((rank,),),), index=full_axes(rank))
