"""Rules of operators that create a tensor from a shape."""

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
    """Return a new label per dimension. All elements are computed alike, so any slice can be computed separately."""
    return Signature((), (tuple((i,) for i in range(len(call.shape))),))


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new_constant(call: RuleCall) -> Signature:
    """Return new labels for the result, because the operand only provides dtype and device."""
    result = tuple((i,) for i in range(len(call.shape)))
    operand = tuple((len(result) + i,) for i in range(len(call.shapes[0])))
    return Signature((operand,), (result,), full_axes(*(letter for dim in operand for letter in dim)))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default)
def index_dependent(call: RuleCall) -> Signature:
    """Return labels that are needed in full, because each element depends on its index."""
    result = tuple((i,) for i in range(len(call.shape)))
    return Signature((), (result,), full_axes(*range(len(result))))


@rule(aten.tril.default, aten.triu.default)
def triangle(call: RuleCall) -> Signature:
    """Keep elements by index; the copy in a loop body shifts the diagonal by the chunk's first row."""
    letters = tuple((i,) for i in range(len(call.shape)))
    return Signature((letters,), (letters,), index_dependent=frozenset(range(len(letters))[-2:]))
