"""Operators that make a tensor from nothing but its shape."""

from __future__ import annotations

import torch

from streamfx.ir.signature import Signature, whole
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
    """Every element is made alike: any rows can be made alone."""
    return Signature((), (tuple((i,) for i in range(len(call.shape))),))


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def constant_like_device_of(call: RuleCall) -> Signature:
    """The operand only lends type and device."""
    result = tuple((i,) for i in range(len(call.shape)))
    own = tuple((len(result) + i,) for i in range(len(call.shapes[0])))
    return Signature((own,), (result,), whole(*(letter for dim in own for letter in dim)))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default)
def positions(call: RuleCall) -> Signature:
    """Each element depends on its position: made whole, once."""
    result = tuple((i,) for i in range(len(call.shape)))
    return Signature((), (result,), whole(*range(len(result))))


@rule(aten.tril.default, aten.triu.default)
def triangle(call: RuleCall) -> Signature:
    """Elements are kept by their position, which the rewriter shifts along with the rows."""
    letters = tuple((i,) for i in range(len(call.shape)))
    return Signature((letters,), (letters,), placed=frozenset(range(len(letters))[-2:]))
