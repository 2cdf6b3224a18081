"""Registration and lookup of axis rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.argument_checks import describe_value
from streamfx.errors import StreamFXError, describe_error
from streamfx.ir.axis_table import AxisTable, Dim
from streamfx.ir.joint import bound_arguments, results_of, shape_of_node, tensor_operands
from streamfx.ir.signature import FullAxis, Index, LetterDim, LetterShape, Signature
from streamfx.ir.sizes import Size, shape_of
from streamfx.passes.ops.traits import only_moves_elements, overload_name
from streamfx.torch_private import OpOverload

Rule: TypeAlias = "Callable[[RuleCall], Signature | None]"
FAILS = "the rule for {target} raises {error}"
NO_SIGNATURE = "the rule for {target} must return a Signature or None, and returns {found}"
NOT_COVERED = "the rule for {target} does not cover these arguments"
OTHER_DIMENSIONS = "the signature from the rule for {target} has other tensors, or other dimensions, than the call"
OTHER_ROWS = "{target} regroups rows of one length into rows of another"


class RuleCall:
    """One call of an operator, as the argument of a rule: arguments by name, shapes, and the operands' axes."""

    def __init__(self, node: fx.Node, axes: AxisTable, dims: Mapping[fx.Node, tuple[Dim, ...]]) -> None:
        """Read the operands, the shapes and the result shapes of a node; `dims` holds the axes of all values before it."""
        self.node = node
        self.axes = axes
        self.operands = tensor_operands(node)
        self.shapes: tuple[tuple[Size, ...], ...] = tuple(shape_of_node(operand) for operand in self.operands)
        self.result_shapes = tuple(shape_of(result) if result is not None else () for result in results_of(node))
        self._dims = dims

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape of the first result."""
        return self.result_shapes[0]

    def dims(self, operand: int) -> tuple[Dim, ...]:
        """Return the resolved axes of an operand's dimensions."""
        return tuple(self.axes.resolve(dim) for dim in self._dims[self.operands[operand]])

    def axis_of(self, value: fx.Node, position: int) -> Dim | None:
        """Return the axes of a dimension of any value before this node, if known."""
        return self._dims[value][position] if value in self._dims else None

    def arguments(self) -> dict[str, Any]:
        """Return the node's arguments by name, with defaults."""
        return bound_arguments(self.node)


RULES: dict[Any, Rule] = {}
RULES_BY_NAME: dict[str, Rule] = {}  # by operator name, for operators of packages that may be missing


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Register a function from a `RuleCall` to its `Signature` (None: the arguments are not covered)."""

    def register(function: Rule) -> Rule:
        """Register the function for all operators."""
        for operator in operators:
            RULES[operator] = function
        return function

    return register


def signatures(table: Mapping[Any, str]) -> None:
    """Register operators whose signature does not depend on arguments, in einsum notation.

    `m k, k n -> m n` has one label per dimension; `k!` is needed in full; `...` represents any leading dimensions,
    the same ones everywhere; commas separate several results.
    """
    for operator, notation in table.items():
        RULES[operator] = notation_rule(notation)


def notation_rule(notation: str) -> Rule:
    """Return the rule for one string of notation; the rule returns None for a call with other operands or dimensions.

    A label that no operand has is a new dimension, which the operator produces in full.
    """
    left, right = ([part.split() for part in side.split(",")] for side in notation.split("->"))

    def from_notation(call: RuleCall) -> Signature | None:
        """Return the signature of a call, or None if its operands do not fit the notation."""
        if len(left) != len(call.operands):
            return None
        numbers = count()
        letters: dict[str, int] = {}
        full_axes: dict[int, Index] = {}
        spread_ranks: set[int] = set()

        def labels_of(tokens: Sequence[str], rank: int) -> LetterShape:
            """Return the labels of one tensor, with `...` expanded to its rank; record labels that are needed in full."""
            names: list[str] = []
            spread = rank - len(tokens) + 1
            for token in tokens:
                names.extend(f"...{i}" for i in range(spread)) if token == "..." else names.append(token)
            if "..." in tokens:
                spread_ranks.add(spread)
            dims = []
            for name in names:
                letter = letters.setdefault(name.rstrip("!"), next(numbers))
                if name.endswith("!"):
                    full_axes[letter] = FullAxis()
                dims.append((letter,))
            return tuple(dims)

        operands = tuple(labels_of(tokens, len(shape)) for tokens, shape in zip(left, call.shapes, strict=True))
        operand_labels = set(letters.values())
        results = tuple(labels_of(tokens, len(shape)) for tokens, shape in zip(right, call.result_shapes, strict=False))
        shapes = (*zip(operands, call.shapes, strict=True), *zip(results, call.result_shapes, strict=False))
        if any(len(dims) != len(shape) for dims, shape in shapes) or len(spread_ranks) > 1 or not _sizes_match(shapes):
            return None
        return Signature(
            operands, results, {**full_axes, **{letter: FullAxis() for letter in set(letters.values()) - operand_labels}}
        )

    return from_notation


def _sizes_match(shapes: Iterable[tuple[LetterShape, tuple[Size, ...]]]) -> bool:
    """Return whether all dimensions that share a label have the same size: a broadcast row must not share the label."""
    sizes: dict[LetterDim, Size] = {}
    return all(sizes.setdefault(dim, size) == size for dims, shape in shapes for dim, size in zip(dims, shape, strict=True))


def broadcast(call: RuleCall, operands: Sequence[int] | None = None, results: int | None = None) -> Signature:
    """Align every operand with the result at the last dimension; operands of size one are broadcast."""
    shape = call.shape
    letters = tuple((position,) if size != 1 else () for position, size in enumerate(shape))

    def align(operand_shape: tuple[Size, ...]) -> LetterShape:
        """Return the labels of an operand, aligned at the last dimension."""
        skipped = len(shape) - len(operand_shape)
        return tuple(letters[skipped + position] if size != 1 else () for position, size in enumerate(operand_shape))

    return Signature(
        operands=tuple(align(operand_shape) for operand_shape in call.shapes),
        results=tuple(letters for _ in range(len(call.result_shapes) if results is None else results)),
    )


def rule_for(node: fx.Node) -> Rule | None:
    """Return the rule of a node's operator, or None."""
    return find_operator_rule(node.target)


def find_operator_rule(target: Any) -> Rule | None:
    """Return the rule of an operator, or None. Operators that torch tags as pointwise need no entry in the table."""
    registered = RULES.get(target) or RULES.get(type(target)) or RULES_BY_NAME.get(overload_name(target))
    if registered is not None:
        return registered
    return broadcast if is_tagged_pointwise(target) else None


def evaluate_rule(rule: Rule, call: RuleCall) -> Signature | str:
    """Return a rule's signature for a call if its dimensions match the call, or the reason why there is none."""
    target = call.node.target
    try:
        signature: Any = rule(call)
    except StreamFXError:
        raise
    except Exception as error:
        return FAILS.format(target=target, error=describe_error(error))
    if signature is None:
        return (OTHER_ROWS if only_moves_elements(call.node) else NOT_COVERED).format(target=target)
    if not isinstance(signature, Signature):
        return NO_SIGNATURE.format(target=target, found=describe_value(signature))
    labeled = (*zip(signature.operands, call.shapes, strict=False), *zip(signature.results, call.result_shapes, strict=False))
    fits = len(signature.operands) == len(call.shapes) and all(len(letters) == len(shape) for letters, shape in labeled)
    return signature if fits else OTHER_DIMENSIONS.format(target=target)


def is_tagged_pointwise(target: Any) -> bool:
    """Return whether torch tags an operator as pointwise, except for `equal`, which returns one result for all elements."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return all(isinstance(result.type, torch.TensorType) for result in target._schema.returns)
