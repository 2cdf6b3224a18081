"""Rules of pointwise operators: each row of the result needs the same row of each operand.

Operators that torch tags as pointwise need no entry; the ones listed here lack the tag.
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
    """Keep all rows; a view created for one reader (`OWN_AXES`) gets new axes."""
    if MATERIALIZED in call.node.meta:
        return _materialized(call)
    if OWN_AXES not in call.node.meta:
        return broadcast(call)
    rank = len(call.shape)
    operand, result = (tuple((first + i,) if size != 1 else () for i, size in enumerate(call.shape)) for first in (0, rank))
    return Signature((operand,), (result,), {letter: Window(letter - rank, 0) for dim in result for letter in dim})


def _materialized(call: RuleCall) -> Signature:
    """Materialize some dimensions: the result has all rows, on a non-sequence axis or on the axis of another value."""
    rank, sources = len(call.shape), call.node.meta[MATERIALIZED]
    operand = tuple((i,) if size != 1 else () for i, size in enumerate(call.shape))
    result = tuple((rank + i,) if dim and i in sources else dim for i, dim in enumerate(operand))
    axes = {rank + i: call.axis_of(*source) for i, source in sources.items() if source is not None}
    letters = (letter for i in sources for letter in (i, rank + i))
    return Signature((operand,), (result,), full_axes(*letters), atoms={i: dim for i, dim in axes.items() if dim is not None})


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(call: RuleCall) -> Signature:
    """Align all operands with the result; the second result, a buffer, is empty on some devices."""
    return broadcast(call, results=2 if call.result_shapes[1] == call.shape else 1)


@rule(aten.view_as_complex.default)
def view_as_complex(call: RuleCall) -> Signature:
    """Drop the last dimension, of real and imaginary parts, which is needed in full."""
    kept = tuple((letter,) for letter in range(len(call.shape)))
    pair = len(call.shape)
    return Signature(((*kept, (pair,)),), (kept,), index=full_axes(pair))


@rule(aten.view_as_real.default)
def view_as_real(call: RuleCall) -> Signature:
    """Add a last dimension of real and imaginary parts, which is produced in full."""
    kept = tuple((letter,) for letter in range(len(call.shape) - 1))
    pair = len(kept)
    return Signature((kept,), ((*kept, (pair,)),), index=full_axes(pair))
