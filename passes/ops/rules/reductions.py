"""Rules of reductions and normalizations: a reduced axis is contracted if partial results add up, else needed in full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, broadcast, rule

aten = torch.ops.aten
EMPTY_DIM_KEEPS_ALL = (aten.any.dims, aten.all.dims)  # an empty `dim` reduces no dimension: each element becomes a boolean


def reduced_dims(call: RuleCall) -> set[int]:
    """Return the dimensions that a call reduces. A missing or empty `dim` means all, except for `EMPTY_DIM_KEEPS_ALL`."""
    rank = len(call.shapes[0])
    dims: Any = call.arguments().get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims and call.node.target not in EMPTY_DIM_KEEPS_ALL):
        return set(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, Iterable) else (dims,))} if rank else set()


def reduction(call: RuleCall, summable: bool, combine: str = "sum") -> Signature:
    """Return the signature of a reduction. If `summable`, partial results are combined by `combine`; else the axis is full."""
    rank, reduced = len(call.shapes[0]), reduced_dims(call)
    letters = tuple((i,) for i in range(rank))
    keep = call.arguments().get("keepdim", False)
    result = tuple(() if i in reduced else letters[i] for i in range(rank) if keep or i not in reduced)
    return Signature((letters,), (result,) * len(call.result_shapes), {} if summable else full_axes(*reduced), combine=combine)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_reduction(call: RuleCall) -> Signature:
    """A reduced axis is contracted: partial sums add up."""
    return reduction(call, summable=True)


@rule(aten.mean.default, aten.mean.dim)
def mean_reduction(call: RuleCall) -> Signature:
    """A reduced axis is contracted: partial sums add up to the mean of all elements."""
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
)
def full_axis_reduction(call: RuleCall) -> Signature:
    """A reduced axis is needed in full: partial results do not add up."""
    return reduction(call, summable=False)


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: RuleCall) -> Signature:
    """Each row is normalized along one dimension, which is needed in full."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(broadcast(call), index=full_axes(dim))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: RuleCall) -> Signature:
    """Each row's gradient is computed along one dimension, which is needed in full."""
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
    """Return the signature of operators whose rows depend on all others along one dimension, which is needed in full."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(broadcast(call), index=full_axes(dim))


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def fourier_transform(call: RuleCall) -> Signature:
    """Fourier transforms: each output along a dimension depends on all inputs along it; the size may change."""
    rank = len(call.shape)
    dims = {dim % rank for dim in call.arguments()["dim"]}
    operand = tuple((dim,) for dim in range(rank))
    result = tuple((rank + dim if dim in dims else dim,) for dim in range(rank))
    return Signature((operand,), (result,), full_axes(*dims, *(rank + dim for dim in dims)))


@rule(aten.topk.default, aten.kthvalue.default)
def topk(call: RuleCall) -> Signature:
    """Return the signature of `topk` and `kthvalue`: the searched dimension is needed in full, and its size changes."""
    rank = len(call.shapes[0])
    dim = call.arguments()["dim"] % max(rank, 1)
    letters = tuple((i,) for i in range(rank))
    sized_dim = () if len(call.shape) < rank else ((rank,),)
    result = (*letters[:dim], *sized_dim, *letters[dim + 1 :])
    return Signature((letters,), (result,) * len(call.result_shapes), index=full_axes(dim, *([rank] if sized_dim else [])))


@rule(aten.native_layer_norm.default)
def layer_norm(call: RuleCall) -> Signature:
    """Rows are normalized over the trailing dimensions; weight and bias have those dimensions."""
    rank = len(call.shape)
    inner = rank - len(call.arguments()["normalized_shape"])
    letters = tuple((i,) for i in range(rank))
    affine = (letters[inner:],) * (len(call.operands) - 1)
    statistics = (*letters[:inner], *((),) * (rank - inner))
    return Signature((letters, *affine), (letters, statistics, statistics), index=full_axes(*range(inner, rank)))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: RuleCall) -> Signature:
    """Map (grad, x, mean, rstd, weight?, bias?) to (dx, dweight, dbias); the last two are summed over rows."""
    rank = len(call.shapes[1])
    arguments = call.arguments()
    inner = rank - len(arguments["normalized_shape"])
    letters = tuple((i,) for i in range(rank))
    statistics = (*letters[:inner], *((),) * (rank - inner))
    affine = (letters[inner:],) * (len(call.operands) - 4)
    shapes = (letters, letters[inner:], letters[inner:])
    results = tuple(dims if shape else () for dims, shape in zip(shapes, call.result_shapes, strict=True))
    operands = (letters, letters, statistics, statistics, *affine)
    return Signature(operands, results, index=full_axes(*range(inner, rank)))


@rule(aten._fused_rms_norm.default)
def rms_norm(call: RuleCall) -> Signature:
    """Rows are normalized over the trailing dimensions; the second result is one statistic per row."""
    rank = len(call.shape)
    inner = rank - len(call.arguments()["normalized_shape"])
    letters = tuple((i,) for i in range(rank))
    statistics = (*letters[:inner], *((),) * (rank - inner))
    affine = (letters[inner:],) * (len(call.operands) - 1)
    return Signature((letters, *affine), (letters, statistics), index=full_axes(*range(inner, rank)))


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: RuleCall) -> Signature:
    """Map (grad, x, rstd, weight?) to (dx, dweight); the last is summed over rows."""
    rank = len(call.shapes[1])
    inner = rank - len(call.arguments()["normalized_shape"])
    letters = tuple((i,) for i in range(rank))
    statistics = (*letters[:inner], *((),) * (rank - inner))
    affine = (letters[inner:],) * (len(call.operands) - 3)
    results = (letters, letters[inner:])[: len(call.result_shapes)]
    return Signature((letters, letters, statistics, *affine), results, index=full_axes(*range(inner, rank)))


@rule(aten.histc.default)
def histogram(call: RuleCall) -> Signature | None:
    """Counts over fixed bins add up; bins between the minimum and maximum element depend on all elements."""
    arguments = call.arguments()
    if not arguments["min"] < arguments["max"]:
        return None
    rank = len(call.shapes[0])
    return Signature((tuple((i,) for i in range(rank)),), (((rank,),),), index=full_axes(rank))
