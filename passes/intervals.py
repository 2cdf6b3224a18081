"""What an operator makes of one interval of delta, given one fact about each operand.

Where an operator's meaning is known (comparisons, logic, choices, sums with minus infinity) it is applied to the facts; constants
are computed by the operator itself; a number that was computed stays one; of anything else nothing is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import tensor_operands
from streamfx.ir.pieces import (
    ORDINARY,
    SWAMPS,
    SWAMPS_HALF,
    UNKNOWN,
    Const,
    Fact,
    Ordinary,
    Pieces,
    Slope,
    absolute,
    compare_slope,
    everywhere,
)

aten = torch.ops.aten

COMPARISONS = {
    getattr(getattr(aten, name), overload): name
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
STAYS_ORDINARY = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.abs.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.relu.default,
    aten._to_copy.default,
    aten.pow.Tensor_Scalar,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.native_dropout_backward.default,
    aten.threshold_backward.default,
}
ZERO_TIMES_ANYTHING = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.native_dropout_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
}


def is_minus_infinity(fact: Fact, finite_too: bool) -> bool:
    if not isinstance(fact, Const) or isinstance(fact.value, bool):
        return False
    return fact.value == float("-inf") or (finite_too and fact.value <= SWAMPS)


def is_zero(fact: Fact) -> bool:
    return isinstance(fact, Const) and fact.is_zero()


def filled(node: fx.Node) -> Fact:
    if node.target in (aten.full.default, aten.full_like.default):
        value = node.args[1]
        return Const(value) if isinstance(value, (bool, int, float)) else UNKNOWN
    one = node.target in (aten.ones.default, aten.ones_like.default)
    return Const(bool(one)) if node.meta["val"].dtype == torch.bool else Const(int(one))


def evaluate(node: fx.Node, facts: tuple[Fact, ...]) -> Pieces:
    """One operator on one interval."""
    target = node.target
    special = _SPECIAL.get(target)
    if special is not None:
        outcome = special(*facts[: special.__code__.co_argcount])
        if outcome is not None:
            return outcome
    relation = COMPARISONS.get(target)
    if relation is not None and len(facts) == 2:
        left, right = facts
        if isinstance(left, Slope) and isinstance(right, Const):
            return compare_slope(relation, left, right.value)
        if isinstance(right, Slope) and isinstance(left, Const):
            return compare_slope(MIRRORED[relation], right, left.value)
    if any(isinstance(fact, Slope) for fact in facts):
        return _slope_arithmetic(node, facts)
    if all(isinstance(fact, Const) for fact in facts):
        return everywhere(_fold(node, facts))
    if target in ZERO_TIMES_ANYTHING and any(is_zero(fact) for fact in facts):
        return everywhere(Const(0.0))
    if target in STAYS_ORDINARY:
        return everywhere(ordinary(target, facts, node.meta["val"].dtype, bool(node.kwargs)))
    return everywhere(UNKNOWN)


def ordinary(target: Any, facts: tuple[Fact, ...], dtype: torch.dtype, scaled: bool) -> Fact:
    """A computed number stays one, unless it meets minus infinity (which it becomes) or something unknown."""
    swamps = SWAMPS_HALF if dtype == torch.float16 else SWAMPS
    huge = [fact for fact in facts if isinstance(fact, Const) and fact.value <= swamps]
    if huge:
        is_sum = target in (aten.add.Tensor, aten.add.Scalar) and not scaled
        return Const(float("-inf") if huge[0].value == float("-inf") else min(huge[0].value, SWAMPS)) if is_sum else UNKNOWN
    divided_by_zero = target in (aten.div.Tensor, aten.div.Scalar) and is_zero(facts[-1])
    if all(isinstance(fact, (Ordinary, Const)) for fact in facts) and not divided_by_zero:
        return ORDINARY
    return UNKNOWN


def _slope_arithmetic(node: fx.Node, facts: tuple[Fact, ...]) -> Pieces:
    target, (first, *others) = node.target, facts
    other = others[0] if others else None
    if target in (aten.neg.default, aten.abs.default) and isinstance(first, Slope):
        return everywhere(Slope(-first.factor, -first.offset)) if target is aten.neg.default else absolute(first)
    if target is aten._to_copy.default or target is aten.clone.default:
        return everywhere(first)
    moves = target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs
    if moves and isinstance(first, Slope) and isinstance(other, Const) and isinstance(other.value, int):
        sign = 1 if target is aten.add.Tensor else -1
        return everywhere(Slope(first.factor, first.offset + sign * other.value))
    return everywhere(ORDINARY if target in STAYS_ORDINARY and node.meta["val"].is_floating_point() else UNKNOWN)


def _fold(node: fx.Node, facts: tuple[Fact, ...]) -> Fact:
    """Evaluate an operator that works element by element on the constants themselves; sums and the like see more than one."""
    if node.target is not aten._to_copy.default and torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return UNKNOWN
    values = iter(fact.value for fact in facts if isinstance(fact, Const))
    operands = set(tensor_operands(node))

    def argument(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return item
        value = next(values)
        return torch.tensor(value, dtype=item.meta["val"].dtype) if item in operands else value

    try:
        arguments = [argument(item) for item in node.args]
        keywords = {name: value for name, value in node.kwargs.items() if name in ("dtype", "alpha", "rounding_mode")}
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, StopIteration):
        return UNKNOWN
    return Const(result.item()) if isinstance(result, torch.Tensor) and result.numel() == 1 else UNKNOWN


def _and(left: Fact, right: Fact) -> Pieces | None:
    if Const(False) in (left, right):
        return everywhere(Const(False))
    if left == Const(True) or right == Const(True):
        return everywhere(right if left == Const(True) else left)
    return None


def _or(left: Fact, right: Fact) -> Pieces | None:
    if Const(True) in (left, right):
        return everywhere(Const(True))
    if left == Const(False) or right == Const(False):
        return everywhere(right if left == Const(False) else left)
    return None


def _where(condition: Fact, yes: Fact, no: Fact) -> Pieces | None:
    if isinstance(condition, Const):
        return everywhere(yes if condition.value else no)
    return everywhere(either(yes, no))


def either(one: Fact, other: Fact) -> Fact:
    if one == other:
        return one
    plain = all(isinstance(fact, Ordinary) or (isinstance(fact, Const) and abs(fact.value) < 1e4) for fact in (one, other))
    return ORDINARY if plain else UNKNOWN


def _masked_fill(value: Fact, mask: Fact, fill: Fact) -> Pieces | None:
    return _where(mask, fill, value)


_SPECIAL: dict[Any, Any] = {
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.bitwise_or.Tensor: _or,
    aten.logical_or.default: _or,
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
}
