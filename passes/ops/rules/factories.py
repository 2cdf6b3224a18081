"""Axis rules of operators that create a tensor from a shape.

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result. A label in
`full_axes(...)` is needed in full: the operator cannot run on a slice of that axis.
"""

from __future__ import annotations

import torch

from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.rand.default,
    aten.randn.default,
)
def constant(call: RuleCall) -> Signature:
    """Axis rule of `full`, `zeros`, `rand`: no operands, and a new label per dimension of the result.

    All elements are computed alike, so any slice can be computed separately.
    """
    return Signature((), (tuple((i,) for i in range(len(call.shape))),))


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new_constant(call: RuleCall) -> Signature:
    """Axis rule of `new_zeros`, `new_full`: the result has new labels, because the operand only provides dtype and device."""
    result = tuple((i,) for i in range(len(call.shape)))
    operand = tuple((len(result) + i,) for i in range(len(call.shapes[0])))
    return Signature((operand,), (result,), full_axes(*(label for dim in operand for label in dim)))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default)
def index_dependent(call: RuleCall) -> Signature:
    """Axis rule of `arange`, `linspace`, `eye`: each element depends on its index, so all axes are produced in full."""
    result = tuple((i,) for i in range(len(call.shape)))
    return Signature((), (result,), full_axes(*range(len(result))))


@rule(aten.tril.default, aten.triu.default)
def triangle(call: RuleCall) -> Signature:
    """Axis rule of `tril`, `triu`: all axes are kept, but the result depends on the indices along the last two.

    A loop therefore shifts the `diagonal` argument by the chunk's first row.
    """
    labels = tuple((i,) for i in range(len(call.shape)))
    return Signature((labels,), (labels,), index_dependent=frozenset(range(len(labels))[-2:]))
