"""Axis rules of pointwise operators: each row of the result needs the same row of each operand.

Operators that torch tags as pointwise need no entry; the ones listed here lack the tag. A rule returns a `Signature`: axis
labels (integers) for each dimension of each operand and result; a dimension of size one has none: `()`. A label in
`full_axes(...)` is needed in full; one with a `Window` has the rows of another label's axis, here each the same row.
"""

from __future__ import annotations

import torch

from streamfx.ir.signature import Signature, Window, full_axes
from streamfx.node_meta import MATERIALIZED, OWN_AXES
from streamfx.passes.ops.rules.registry import RuleCall, broadcast, rule

aten = torch.ops.aten

rule(
    aten._to_copy.default,
    aten.copy.default,
    aten.fill.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.exponential.default,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.native_dropout.default,
    aten.softplus_backward.default,
    aten.hardtanh_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.log_sigmoid_backward.default,
    aten.masked_fill.Tensor,
    aten.polar.default,
    aten.complex.default,
    aten.conj_physical.default,
    aten.real.default,
    aten.imag.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.scalar_tensor.default,
)(broadcast)


@rule(aten.alias.default)
def alias(call: RuleCall) -> Signature:
    """Axis rule of `alias`: keep all rows. Passes insert an alias, with metadata, to give a value other axes.

    `OWN_AXES`: a view of a shared table for one reader, whose axes differ from other readers' but have the same rows.
    `MATERIALIZED`: a value of which every chunk reads all rows, see `_materialized`.
    """
    if MATERIALIZED in call.node.meta:
        return _materialized(call)
    if OWN_AXES not in call.node.meta:
        return broadcast(call)
    rank = len(call.shape)
    operand = tuple((i,) if size != 1 else () for i, size in enumerate(call.shape))
    result = tuple((rank + i,) if size != 1 else () for i, size in enumerate(call.shape))
    same_row = {label: Window(source=label - rank, start=0) for dim in result for label in dim}
    return Signature((operand,), (result,), same_row)


def _materialized(call: RuleCall) -> Signature:
    """Axis rule of an `alias` whose metadata `MATERIALIZED` names dimensions of which all rows exist at once.

    For each such dimension, the metadata has (value, dimension) whose axis the result gets, or None for a new axis. Both
    axes are needed in full; other dimensions keep their axis.
    """
    rank, target_axes = len(call.shape), call.node.meta[MATERIALIZED]
    operand = tuple((i,) if size != 1 else () for i, size in enumerate(call.shape))
    result = tuple((rank + i,) if dim and i in target_axes else dim for i, dim in enumerate(operand))
    axes = {rank + i: call.axis_of(*target) for i, target in target_axes.items() if target is not None}
    labels = (label for i in target_axes for label in (i, rank + i))
    return Signature((operand,), (result,), full_axes(*labels), factors={i: dim for i, dim in axes.items() if dim is not None})


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(call: RuleCall) -> Signature:
    """Axis rule of x -> (log sigmoid, buffer): both have the axes of x. On some devices, the buffer is empty: no label."""
    return broadcast(call, results=2 if call.result_shapes[1] == call.shape else 1)


@rule(aten.view_as_complex.default)
def view_as_complex(call: RuleCall) -> Signature:
    """Axis rule of [..., 2] -> complex [...]: the last dimension, real and imaginary parts, is needed in full."""
    kept = tuple((label,) for label in range(len(call.shape)))
    pair = len(call.shape)
    return Signature(((*kept, (pair,)),), (kept,), index=full_axes(pair))


@rule(aten.view_as_real.default)
def view_as_real(call: RuleCall) -> Signature:
    """Axis rule of complex [...] -> [..., 2]: the new last dimension, real and imaginary parts, is produced in full."""
    kept = tuple((label,) for label in range(len(call.shape) - 1))
    pair = len(kept)
    return Signature((kept,), ((*kept, (pair,)),), index=full_axes(pair))
