"""Registration and lookup of axis rules: how an operator maps the axes of its operands to those of its results.

A rule turns a call into a `Signature`: for each dimension of each operand and result a tuple of *axis labels*, integers that
are local to the call. `m k, k n -> m n` is operands (((0,), (1,)), ((1,), (2,))) and results (((0,), (2,)),). A label of
operands alone is summed; an axis is *needed in full* if the operator cannot run on a slice of it (`FullAxis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from operator import eq
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.argument_checks import describe_value
from streamfx.errors import StreamFXError, describe_error
from streamfx.ir.axis_table import AxisTable, Dim
from streamfx.ir.joint import bound_arguments, results_of, shape_of_node, tensor_operands
from streamfx.ir.signature import FullAxis, Index, LabelDim, LabelShape, Signature
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
        """Read the tensor operands and all shapes of `node`.

        `axes` knows all axis factors; `dims` holds, for each value before this node, the axis factors of each dimension.
        """
        self.node = node
        self.axes = axes
        self.operands = tensor_operands(node)
        self.shapes: tuple[tuple[Size, ...], ...] = tuple(map(shape_of_node, self.operands))
        self.result_shapes = tuple([shape_of(result) if result is not None else () for result in results_of(node)])
        self._dims = dims

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape of the first result."""
        return self.result_shapes[0]

    def dims(self, operand: int) -> tuple[Dim, ...]:
        """Return, for each dimension of the tensor operand with this index, the axis factors whose product it is."""
        return tuple(self.axes.resolve(dim) for dim in self._dims[self.operands[operand]])

    def axis_of(self, value: fx.Node, dim: int) -> Dim | None:
        """Return the axis factors of dimension `dim` of any value before this node; None if they are not known."""
        return self._dims[value][dim] if value in self._dims else None

    def arguments(self) -> dict[str, Any]:
        """Return the node's arguments by name, with defaults."""
        return bound_arguments(self.node)


RULES: dict[Any, Rule] = {}
RULES_BY_NAME: dict[str, Rule] = {}  # by operator name, for operators of packages that may be missing


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Decorator: register the decorated axis rule for these operators.

    The rule gets a `RuleCall` and returns its `Signature`, or None if it does not cover the arguments.
    """

    def register(function: Rule) -> Rule:
        """Put the rule into the table for each operator; return it unchanged."""
        for operator in operators:
            RULES[operator] = function
        return function

    return register


def signatures(table: Mapping[Any, str]) -> None:
    """Register axis rules, given in einsum notation, of operators whose signature does not depend on arguments.

    `m k, k n -> m n` has one label per dimension; `k!` is needed in full; `...` represents any leading dimensions,
    the same ones everywhere; commas separate several results.
    """
    for operator, notation in table.items():
        RULES[operator] = notation_rule(notation)


def notation_rule(notation: str) -> Rule:
    """Return the axis rule for one string of notation, such as `m k, k n -> m n` (see `signatures`).

    The rule returns None for a call with other operands, ranks or unequal sizes of one label. A label that no operand has is
    a new dimension, which the operator produces in full.
    """
    left, right = ([part.split() for part in side.split(",")] for side in notation.split("->"))

    @lru_cache(1 << 10)
    def from_shapes(shapes: tuple[tuple[Size, ...], ...], result_shapes: tuple[tuple[Size, ...], ...]) -> Signature | None:
        """Return the signature of calls with these shapes, or None if they do not fit `left`, the names of dimensions."""
        if len(left) != len(shapes):
            return None
        fresh_labels = count()
        label_of_name: dict[str, int] = {}
        full_axes: dict[int, Index] = {}
        ellipsis_ranks: set[int] = set()

        def labels_of(tokens: Sequence[str], rank: int) -> LabelShape:
            """Return the axis labels of one tensor of this rank. `...` becomes the names `...0`, `...1` to fill the rank.

            Equal names share a label across the call. Also note labels that are needed in full (`k!`).
            """
            names: list[str] = []
            ellipsis_rank = rank - len(tokens) + 1
            for token in tokens:
                names.extend(f"...{i}" for i in range(ellipsis_rank)) if token == "..." else names.append(token)
            if "..." in tokens:
                ellipsis_ranks.add(ellipsis_rank)
            dims = []
            for name in names:
                label = label_of_name.setdefault(name.rstrip("!"), next(fresh_labels))
                if name.endswith("!"):
                    full_axes[label] = FullAxis()
                dims.append((label,))
            return tuple(dims)

        operands = tuple(labels_of(tokens, len(shape)) for tokens, shape in zip(left, shapes, strict=True))
        operand_labels = set(label_of_name.values())
        results = tuple(labels_of(tokens, len(shape)) for tokens, shape in zip(right, result_shapes, strict=False))
        labeled = (*zip(operands, shapes, strict=True), *zip(results, result_shapes, strict=False))
        if any(len(dims) != len(shape) for dims, shape in labeled) or len(ellipsis_ranks) > 1 or not _sizes_match(labeled):
            return None
        new_labels = set(label_of_name.values()) - operand_labels
        return Signature(operands, results, {**full_axes, **{label: FullAxis() for label in new_labels}})

    return lambda call: from_shapes(call.shapes, call.result_shapes)


def _sizes_match(shapes: Iterable[tuple[LabelShape, tuple[Size, ...]]]) -> bool:
    """Return whether all dimensions that share a label have the same size: `shapes` pairs labels with sizes, per tensor.

    A dimension of size one that torch would broadcast does not fit its label.
    """
    sizes: dict[LabelDim, Size] = {}
    return all(sizes.setdefault(dim, size) == size for dims, shape in shapes for dim, size in zip(dims, shape, strict=True))


def broadcast(call: RuleCall, results: int | None = None) -> Signature:
    """Axis rule of pointwise operators: align every operand with the result at the last dimension, as torch broadcasts.

    Dimensions of size one have no label. `results`: how many results to label, by default all, all like the first.
    """
    return _broadcast(call.shape, call.shapes, len(call.result_shapes) if results is None else results)


@lru_cache(1 << 10)
def _broadcast(shape: tuple[Size, ...], operand_shapes: tuple[tuple[Size, ...], ...], num_results: int) -> Signature:
    """Return the signature of a pointwise operator with results of this shape: one object for all calls of equal shapes."""
    labels = tuple((dim,) if size != 1 else () for dim, size in enumerate(shape))

    def align(operand_shape: tuple[Size, ...]) -> LabelShape:
        """Return the result's labels for an operand's dimensions: its last dimension has the result's last label."""
        num_missing_dims = len(shape) - len(operand_shape)
        return tuple(labels[num_missing_dims + dim] if size != 1 else () for dim, size in enumerate(operand_shape))

    return Signature(
        operands=tuple(align(operand_shape) for operand_shape in operand_shapes),
        results=(labels,) * num_results,
    )


def rule_for(node: fx.Node) -> Rule | None:
    """Return the axis rule of a node's operator; None if it has none, so that the operator falls back."""
    return find_operator_rule(node.target)


def find_operator_rule(target: Any) -> Rule | None:
    """Return the axis rule registered for an operator, its type (for operators that are objects), or its name.

    Other operators that torch tags as pointwise have the rule `broadcast`; the rest have none (None).
    """
    registered = RULES.get(target) or RULES.get(type(target)) or RULES_BY_NAME.get(overload_name(target))
    if registered is not None:
        return registered
    return broadcast if is_tagged_pointwise(target) else None


def evaluate_rule(rule: Rule, call: RuleCall) -> Signature | str:
    """Apply an axis rule to a call. Return the signature, or a text for the user that says why there is none.

    There is none if the rule raises, does not cover the arguments, or returns another number of tensors or dimensions than
    the call has.
    """
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
    ranks, result_ranks = [[*map(len, shapes)] for shapes in (call.shapes, call.result_shapes)]
    fits = [*map(len, signature.operands)] == ranks and all(map(eq, map(len, signature.results), result_ranks))
    return signature if fits else OTHER_DIMENSIONS.format(target=target)


@lru_cache(1 << 10)
def is_tagged_pointwise(target: Any) -> bool:
    """Return whether torch tags an operator as pointwise, except for `equal`, which returns one result for all elements."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return all(isinstance(result.type, torch.TensorType) for result in target._schema.returns)
