"""Operators that no rule looks into: higher-order ones, those of other packages, and those that read how operands lie in memory.

They run whole, between loops, just as they were traced, and on operands that lie in memory as they did then: a loop puts the rows
of a result side by side, whatever the operator that makes them would have done.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor, tensor_operands
from streamfx.ir.sizes import Size, shape_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.rules.decompositions import WIDEST
from streamfx.passes.ops.rules.registry import rule_for
from streamfx.passes.ops.rules.stateful import BACKWARDS
from streamfx.passes.ops.traits import READS_STRIDES
from streamfx.runtime.collective_calls import ALL_REDUCE
from streamfx.runtime.restride import part_of, strided, strided_scatter
from streamfx.torch_private import AUTO_FUNCTIONALIZED, HigherOrderOperator, OpOverload

aten = torch.ops.aten
ALONE = "{operator} gets no operands that tell which call of {forward} it belongs to, with whose states it would run"
READS_MEMORY: dict[Any, Any] = {strided: aten.as_strided.default, strided_scatter: aten.as_strided_scatter.default}
OF_TORCH_AND_OURS = ("aten", "prims", "streamfx")  # namespaces
POOLED = (
    f"{{target}} pools in one piece: windows that lie side by side stream, and windows of at most {WIDEST} in steps of one, "
    "without padding of its own (torch.nn.functional.pad streams)"
)
LARGEST = f"{{target}} pools in one piece: windows of at most {WIDEST} in steps of one stream as x.unfold(dim, size, 1).amax(-1)"
SPARSE = "{target} puts a sparse gradient together from all rows: with sparse=False it streams"
IN_WORDS: dict[Any, str] = {
    aten.avg_pool2d.default: POOLED,
    aten.avg_pool2d_backward.default: POOLED,
    aten._adaptive_avg_pool2d.default: POOLED,
    aten._adaptive_avg_pool2d_backward.default: POOLED,
    aten.max_pool2d_with_indices.default: LARGEST,
    aten.max_pool2d_with_indices_backward.default: LARGEST,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: SPARSE,
}
READS_MEMORY |= {target: target for target in READS_STRIDES}


def is_opaque(node: fx.Node) -> bool:
    """Whether no rule tells what an operator does with the axes of its operands."""
    return node.op == "call_function" and node.target is not operator.getitem and rule_for(node) is None


def why_opaque(node: fx.Node) -> str:
    """What is in the way of a rule, in a user's words."""
    if node.target in READS_MEMORY:
        return f"{READS_MEMORY[node.target]} reads memory, which loops lay out in other ways"
    if is_triton(node):
        return f"{node.target} runs a kernel of which nobody tells what it does with rows"
    if isinstance(node.target, HigherOrderOperator):
        inner = next((argument for argument in node.args if isinstance(argument, OpOverload)), None)
        if node.target is AUTO_FUNCTIONALIZED:
            return f"{inner} writes into its arguments, and runs in one piece"
        return (
            f"{node.target} calls functions that no rule looks into" if inner is None else f"{inner} has effects, and runs once"
        )
    if isinstance(node.target, OpOverload) and (declared := BACKWARDS.get(node.target.name())) is not None:
        return ALONE.format(operator=node.target, forward=declared.operators[0])
    if is_collective(node):
        return f"{node.target} runs on all ranks at once, in one piece"
    return IN_WORDS.get(node.target, "no rule for {target}").format(target=node.target)


def is_triton(node: fx.Node) -> bool:
    """Whether an operator is a launch of a Triton kernel that Dynamo has traced."""
    return isinstance(node.target, HigherOrderOperator) and str(node.target).startswith("triton_kernel_wrapper")


def may_be_merged(node: fx.Node) -> bool:
    """Whether two equal calls give the same: what a function that an operator calls draws at random, or an operator of another
    package, nobody tells.
    """
    if isinstance(node.target, HigherOrderOperator) or node.target is ALL_REDUCE:  # other ranks' calls may differ from each other
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace in OF_TORCH_AND_OURS


def places_like(value: torch.Tensor, node: fx.Node) -> list[tuple[fx.Node, int] | None]:
    """For each dimension of an opaque operator's result the same dimension of an operand of the same rank, where that is as long.

    The two are taken for one axis. Nothing is claimed by that: the operator runs in one piece, and loops may cut its result
    into rows as they like. A wrong guess costs rows that do not stream.
    """
    operands = [operand for operand in tensor_operands(node) if operand.meta[VALUE].dim() == value.dim()]
    sizes: list[tuple[Size, ...]] = [shape_of(operand.meta[VALUE]) for operand in operands]
    return [
        next(((operand, i) for operand, own in zip(operands, sizes, strict=True) if own[i] == size != 1), None)
        for i, size in enumerate(shape_of(value))
    ]


def is_part_of_opaque(node: fx.Node) -> bool:
    return node.target is part_of and is_tensor(node)
