"""Registration of rules for user-defined operators.

A rule relates the dimensions of an operator's operands and results, mostly in einsum-like notation: "m k, k n -> m n" for a
matrix product. It lets loops over chunks of the sequence run the operator. Errors say the request (`asked`), the value found,
and the remedy (`do`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from streamfx.argument_checks import check_call
from streamfx.errors import RuleError, with_article
from streamfx.ir.signature import Signature
from streamfx.passes.ops.rules.decompositions import DECOMPOSITIONS
from streamfx.passes.ops.rules.registry import RULES, RuleCall, find_operator_rule, notation_rule
from streamfx.passes.ops.rules.stateful import is_declared
from streamfx.torch_private import OpOverload, OpOverloadPacket

Rule: TypeAlias = "str | Callable[[RuleCall], Signature | None]"

TENSORS = ("Tensor", "Optional[Tensor]")  # schema types of tensor arguments, required or optional
_TOKEN = re.compile(r"(\.\.\.|[A-Za-z_]\w*!?)$")


@check_call(RuleError, "streamfx.register_rule(...)")
def register_rule(operator: Any, rule: Rule) -> None:
    """Register how a user-defined operator treats each dimension, so that graphs that use it can be chunked.

    In the notation, each tensor argument and each result has one letter per dimension:

    - a letter on both sides is kept: row i of the result needs row i of the operand;
    - a letter missing on the right is summed over, and partial sums may be added;
    - a letter missing on the left is a new dimension, all of whose rows the operator computes at once;
    - a letter with `!` is needed in full, because the operator mixes its elements (normalizes, sorts, splits in halves);
    - `...` are any leading dimensions, the same ones everywhere; results have them only if operands do.

    For example `"... d!, d -> ... d"` is a norm with a weight, and `"... d!, ... d!, d -> ... d, d"` is its backward
    operator, whose second result is summed over the rows. The forward and the backward operator each need a rule.
    Rules apply to graphs that are compiled afterwards.

    Args:
        operator: the result of `torch.library.custom_op`, or `torch.ops.<namespace>.<name>` (with its overload).
        rule: notation, or a function from a `RuleCall` to a `Signature` (None: not these arguments). If it raises an
            error, or returns anything else, the operator is not chunked, and the reason says so.

    Raises:
        RuleError: `operator` is not an operator, has a rule already, or the notation does not fit its schema.

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
        raise RuleError(asked, found="the operator already has a rule", do="use the existing rule, which is tested")
    if isinstance(rule, str):
        _check_notation(rule, overload, asked)
        RULES[overload] = notation_rule(rule)
    elif callable(rule):
        RULES[overload] = _without_diagonals(rule)
    else:
        raise RuleError(
            asked, found=with_article(type(rule).__name__), do='give notation such as "... d!, d -> ... d", or a function'
        )


def has_rule(operator: OpOverload[Any, Any]) -> bool:
    """Return whether an operator is supported already: by a rule, torch's pointwise tag, a declared state, or decomposition."""
    return find_operator_rule(operator) is not None or is_declared(operator) or operator in DECOMPOSITIONS


def overload_of(operator: Any, asked: str) -> OpOverload[Any, Any]:
    """Return the `OpOverload` of an operator, the form that occurs in graphs; `asked` is the first line of an error.

    Takes an overload, a packet (`torch.ops.<namespace>.<name>`) or the result of `torch.library.custom_op`. Raise `RuleError` for
    any other object, and for a packet with several overloads.
    """
    if isinstance(operator, OpOverloadPacket):
        if len(operator.overloads()) > 1:
            names = ", ".join(f"{operator}.{name}" for name in operator.overloads())
            raise RuleError(asked, found="it has several overloads", do=f"give one of them: {names}")
        operator = getattr(operator, operator.overloads()[0])
    operator = getattr(operator, "_opoverload", operator)  # the result of `torch.library.custom_op`
    if isinstance(operator, OpOverload):
        return operator
    raise RuleError(
        asked,
        found=f"{with_article(type(operator).__name__)}, which does not occur in graphs",
        do="register the function with torch.library.custom_op, and give torch.ops.<namespace>.<name>.default",
    )


def _without_diagonals(rule: Callable[[RuleCall], Signature | None]) -> Callable[[RuleCall], Signature | None]:
    """Return the rule of a user so that it returns None (no rule applies) if a tensor has the same label twice."""

    def declining(call: RuleCall) -> Signature | None:
        """Return the rule's signature; None if a tensor has a letter twice (a diagonal), which loops cannot run."""
        signature = rule(call)
        if not isinstance(signature, Signature):
            return signature  # `evaluate_rule` reports its type
        shapes = ([label for dim in shape for label in dim] for shape in (*signature.operands, *signature.results))
        return signature if all(len(set(shape)) == len(shape) for shape in shapes) else None

    return declining


def labels(tensor: str) -> list[str]:
    """Return the labels of one tensor in the notation.

    >>> labels("... d! e")
    ['...', 'd', 'e']
    """
    return [token.rstrip("!") for token in tensor.split()]


def _check_notation(notation: str, operator: OpOverload[Any, Any], asked: str) -> None:
    """Raise `RuleError` unless the notation, such as "m k, k n -> m n", is well-formed and fits the operator's schema.

    A tensor has no label twice, `...` is on the right only if it is on the left, and there is an entry for each tensor argument
    (optional ones may be missing) and for each result.
    """
    sides = notation.split("->")
    if len(sides) != 2 or any(not _TOKEN.match(token) for token in notation.replace("->", " ").replace(",", " ").split()):
        raise RuleError(asked, found=f"{notation!r}", do='use the form "m k, k n -> m n": letters, `!`, `...`, commas, one arrow')
    repeating = [tensor for side in sides for tensor in side.split(",") if len({*labels(tensor)}) < len(labels(tensor))]
    if repeating:
        raise RuleError(
            asked,
            found=f"{repeating[0].strip()!r} has a letter twice",
            do="use a different letter for each dimension, and mark both with `!`: a diagonal needs all rows and all columns",
        )
    if "..." in labels(sides[1].replace(",", " ")) and "..." not in labels(sides[0].replace(",", " ")):
        do = "name each new dimension by a letter: `...` are dimensions of the operands"
        raise RuleError(asked, found=f"{notation!r} has ... on the right only", do=do)
    num_operands, num_results = (len(side.split(",")) for side in sides)
    tensors = [argument for argument in operator._schema.arguments if isinstance(argument.type, torch.TensorType)]
    optional = [argument for argument in operator._schema.arguments if str(argument.type) == "Optional[Tensor]"]
    results = operator._schema.returns
    if not len(tensors) <= num_operands <= len(tensors) + len(optional) or num_results != len(results):
        raise RuleError(
            asked,
            found=f"{notation!r} has {num_operands} operands and {num_results} results",
            do=f"describe each of its {len(tensors)} tensor arguments and {len(results)} results: {operator._schema}",
        )
