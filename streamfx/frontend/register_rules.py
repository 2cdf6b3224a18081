"""Rules for operators of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from streamfx.argument_checks import refusing
from streamfx.errors import RuleError, one
from streamfx.ir.signature import Signature
from streamfx.passes.ops.rules.decompositions import DECOMPOSITIONS
from streamfx.passes.ops.rules.registry import RULES, RuleCall, notation_rule, rule_of
from streamfx.passes.ops.rules.stateful import is_declared
from streamfx.torch_private import OpOverload, OpOverloadPacket

Rule: TypeAlias = "str | Callable[[RuleCall], Signature | None]"

TENSORS = ("Tensor", "Optional[Tensor]")  # types of arguments that are tensors, or may be
_TOKEN = re.compile(r"(\.\.\.|[A-Za-z_]\w*!?)$")


@refusing(RuleError, "streamfx.register_rule(...)")
def register_rule(operator: Any, rule: Rule) -> None:
    """Tell streamfx what an operator of your own does with each dimension, so that what uses it streams.

    In notation each tensor argument and each result has one letter per dimension:

    - a letter on both sides is kept: row i of the result needs row i of the operand;
    - a letter missing on the right is summed over, and parts of the sum may be added up;
    - a letter missing on the left is a new dimension, of which the operator makes all rows at once;
    - a letter with `!` is needed whole, because the operator mixes its elements (normalises, sorts, splits in halves);
    - `...` stands for any leading dimensions, the same ones everywhere; results have them only if operands do.

    For example `"... d!, d -> ... d"` for a norm with a weight, and `"... d!, ... d!, d -> ... d, d"` for its backward, whose
    second result is summed over the rows. An operator has a rule for its forward and one for its backward, which is another
    operator. Rules hold for what is compiled afterwards.

    Args:
        operator: what `torch.library.custom_op` returned, or `torch.ops.<namespace>.<name>` (with an overload of several).
        rule: notation, or a function from a `Call` to a `Signature` (None: not for these arguments). Where it raises an error,
            or returns anything else, the operator runs whole, and the reason says so.

    Raises:
        RuleError: `operator` is no operator, has a rule already, or the notation does not fit its schema.

    Example:
        >>> import torch, streamfx
        >>> @torch.library.custom_op("streamfx_docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> streamfx.register_rule(double, "... d -> ... d")
    """
    asked = f"a rule for {operator}"
    overload = overload_of(operator, asked)
    if has_rule(overload):
        raise RuleError(asked, found="the operator has a rule already", do="leave it: rules that are there are tested")
    if isinstance(rule, str):
        _check_notation(rule, overload, asked)
        RULES[overload] = notation_rule(rule)
    elif callable(rule):
        RULES[overload] = _without_diagonals(rule)
    else:
        raise RuleError(asked, found=one(type(rule).__name__), do='give notation such as "... d!, d -> ... d", or a function')


def has_rule(operator: OpOverload[Any, Any]) -> bool:
    """Whether streamfx knows what an operator does: by a rule, by a tag of torch's, by its state, or by what it is made of."""
    return rule_of(operator) is not None or is_declared(operator) or operator in DECOMPOSITIONS


def overload_of(operator: Any, asked: str) -> OpOverload[Any, Any]:
    if isinstance(operator, OpOverloadPacket):
        if len(operator.overloads()) > 1:
            names = ", ".join(f"{operator}.{name}" for name in operator.overloads())
            raise RuleError(asked, found="it has several overloads", do=f"say which: {names}")
        operator = getattr(operator, operator.overloads()[0])
    operator = getattr(operator, "_opoverload", operator)  # what `torch.library.custom_op` returns
    if isinstance(operator, OpOverload):
        return operator
    raise RuleError(
        asked,
        found=f"{one(type(operator).__name__)}, which graphs do not hold",
        do="register the function as an operator with torch.library.custom_op, and give torch.ops.<namespace>.<name>.default",
    )


def _without_diagonals(rule: Callable[[RuleCall], Signature | None]) -> Callable[[RuleCall], Signature | None]:
    """The rule, which declines where it names a letter twice in one tensor."""

    def declining(call: RuleCall) -> Signature | None:
        signature = rule(call)
        if not isinstance(signature, Signature):
            return signature  # `said_by` tells what it is
        shapes = ([letter for dim in shape for letter in dim] for shape in (*signature.operands, *signature.results))
        return signature if all(len(set(shape)) == len(shape) for shape in shapes) else None

    return declining


def letters(part: str) -> list[str]:
    """The letters of one tensor's part of notation.

    >>> letters("... d! e")
    ['...', 'd', 'e']
    """
    return [token.rstrip("!") for token in part.split()]


def _check_notation(notation: str, operator: OpOverload[Any, Any], asked: str) -> None:
    sides = notation.split("->")
    if len(sides) != 2 or any(not _TOKEN.match(token) for token in notation.replace("->", " ").replace(",", " ").split()):
        raise RuleError(
            asked, found=f"{notation!r}", do='write it like "m k, k n -> m n": letters, `!`, `...`, commas, one arrow'
        )
    twice = [part for side in sides for part in side.split(",") if len({*letters(part)}) < len(letters(part))]
    if twice:
        raise RuleError(
            asked,
            found=f"{twice[0].strip()!r} names a letter twice",
            do="give each dimension a letter of its own, and mark both with `!`: a diagonal needs all rows and all columns",
        )
    if "..." in letters(sides[1].replace(",", " ")) and "..." not in letters(sides[0].replace(",", " ")):
        do = "give new dimensions a letter each: ... are those that operands have"
        raise RuleError(asked, found=f"{notation!r} has ... on the right alone", do=do)
    counts = [len(side.split(",")) for side in sides]
    tensors = [argument for argument in operator._schema.arguments if isinstance(argument.type, torch.TensorType)]
    optional = [argument for argument in operator._schema.arguments if str(argument.type) == "Optional[Tensor]"]
    results = operator._schema.returns
    if not len(tensors) <= counts[0] <= len(tensors) + len(optional) or counts[1] != len(results):
        raise RuleError(
            asked,
            found=f"{notation!r} has {counts[0]} operands and {counts[1]} results",
            do=f"write one part for each of its {len(tensors)} tensor arguments and {len(results)} results: {operator._schema}",
        )
