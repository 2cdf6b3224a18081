"""Opaque operators: higher-order operators, operators of other packages, and operators that read strides.

No axis rule covers them. They run between loops on the full sequence, exactly as they were traced, and on operands
with the traced strides, because a loop stores the rows of its results in another layout than the traced producer.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.ir.joint import is_tensor, tensor_operands
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.sizes import Size, shape_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.rules.decompositions import WIDEST
from streamfx.passes.ops.rules.registry import rule_for
from streamfx.passes.ops.rules.stateful import BACKWARDS
from streamfx.runtime.restride import item_at, strided, strided_scatter
from streamfx.torch_private import AUTO_FUNCTIONALIZED, HigherOrderOperator, OpOverload

aten = torch.ops.aten
UNPAIRED_BACKWARD = "{operator}: its operands do not identify the call of {forward} whose states it needs"
TRACED_NAMES: dict[Any, str] = {strided: "aten.as_strided.default", strided_scatter: "aten.as_strided_scatter.default"}
MERGEABLE_NAMESPACES = ("aten", "prims", "streamfx")  # namespaces
POOLED = (
    f"{{target}} falls back: adjacent windows stream, and windows of at most {WIDEST} with stride 1, both without the padding "
    "argument (torch.nn.functional.pad streams)"
)
MAX_POOLED = f"{{target}} falls back: windows of at most {WIDEST} with stride 1 stream as x.unfold(dim, size, 1).amax(-1)"
SPARSE_GRADIENT = "{target} builds a sparse gradient from all rows: with sparse=False it streams"
REASONS: dict[Any, str] = {
    aten.avg_pool2d.default: POOLED,
    aten.avg_pool2d_backward.default: POOLED,
    aten._adaptive_avg_pool2d.default: POOLED,
    aten._adaptive_avg_pool2d_backward.default: POOLED,
    aten.max_pool2d_with_indices.default: MAX_POOLED,
    aten.max_pool2d_with_indices_backward.default: MAX_POOLED,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: SPARSE_GRADIENT,
}


def is_opaque(node: fx.Node) -> bool:
    """Return whether an operator has no axis rule, so that it falls back to the full sequence; tuple items are not operators."""
    return node.op == "call_function" and node.target is not operator.getitem and rule_for(node) is None


def describe_opaque(node: fx.Node) -> str:
    """Return the reason why an operator without an axis rule falls back (is not chunked), as text for the user."""
    if node.target in TRACED_NAMES or is_kind(node, Kind.STRIDED):
        return f"{TRACED_NAMES.get(node.target, node.target)} reads memory by strides, and loops store values in another layout"
    if is_triton(node):
        return f"{node.target} runs a Triton kernel, and no rule says how it maps rows"
    if isinstance(node.target, HigherOrderOperator):
        inner = next((argument for argument in node.args if isinstance(argument, OpOverload)), None)
        if node.target is AUTO_FUNCTIONALIZED:
            return f"{inner} writes to its arguments, so it falls back"
        if inner is None:
            return f"{node.target} calls functions, for which no rule exists"
        return f"{inner} has side effects, so it runs once"
    if isinstance(node.target, OpOverload) and (declared := BACKWARDS.get(node.target.name())) is not None:
        return UNPAIRED_BACKWARD.format(operator=node.target, forward=declared.operators[0])
    if is_collective(node):
        return f"{node.target} runs on all ranks at once, so it falls back"
    return REASONS.get(node.target, "no rule for {target}").format(target=node.target)


def is_triton(node: fx.Node) -> bool:
    """Return whether an operator launches a Triton kernel that Dynamo traced."""
    return isinstance(node.target, HigherOrderOperator) and str(node.target).startswith("triton_kernel_wrapper")


@lru_cache(1 << 10)
def may_be_merged(target: Any) -> bool:
    """Return whether two equal calls of an operator return equal results, so that one of them may be removed.

    A function called by a higher-order operator, or an operator of another package, may draw random numbers.
    """
    if isinstance(target, HigherOrderOperator) or target is ALL_REDUCE:  # other ranks may pass two different values
        return False
    return not isinstance(target, OpOverload) or target.namespace in MERGEABLE_NAMESPACES


def match_operand_dims(value: torch.Tensor, node: fx.Node) -> list[tuple[fx.Node, int] | None]:
    """Guess, for each dimension of an opaque operator's result `value`, which operand's dimension is the same axis.

    Return (operand, dimension) per dimension: of equal index and size, of the first such operand of equal rank; None for
    size 1 or if there is none. For x[2, 10] -> value[2, 5]: [(x, 0), None].

    This needs no proof, because the operator is not chunked, and loops may slice its result along any axis. After a wrong
    guess, fewer operators are chunked.
    """
    operands = [operand for operand in tensor_operands(node) if operand.meta[VALUE].dim() == value.dim()]
    operand_sizes: list[tuple[Size, ...]] = [shape_of(operand.meta[VALUE]) for operand in operands]
    return [
        next(((operand, i) for operand, sizes in zip(operands, operand_sizes, strict=True) if sizes[i] == size != 1), None)
        for i, size in enumerate(shape_of(value))
    ]


def is_nested_result(node: fx.Node) -> bool:
    """Return whether a node selects a tensor of a nested result, such as the list in `(tensor, [tensor, tensor])`."""
    return node.target is item_at and is_tensor(node)
