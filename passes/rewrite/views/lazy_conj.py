"""Materialize lazy conjugates and negatives, which are views with a conj or neg bit.

If the bit is set, memory holds the numbers before they are conjugated or negated. Loops store resolved values, and compiled
code reads memory without regard to these bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor, node_argument, tensor_operands
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.strided_access import reads_memory, view_chain
from streamfx.runtime.restride import has_lazy_bit
from streamfx.torch_private.lines import source_line

aten = torch.ops.aten
READS_LAZY_MEMORY = (
    "{operator} returns a lazy conjugate or negative, and the caller, or an operator that streamfx does not know, reads its "
    "memory{where}: call resolve_conj() or resolve_neg()"
)


def find_lazy_memory_read(graph: fx.Graph, results: Sequence[Any]) -> str | None:
    """Return a diagnostic if the memory of a lazy conjugate or negative is read, so that the graph cannot be rewritten.

    Memory is read by the caller, for the graph's `results`, and by operators without an axis rule. Return None if neither
    gets a lazy value or a view of one.
    """
    readers = filter(reads_memory, graph.nodes)
    read_values = [*filter(is_tensor, results), *(operand for node in readers for operand in tensor_operands(node))]
    lazy_value = next((value for value in read_values if any(map(_is_lazy, view_chain(value)))), None)
    if lazy_value is None:
        return None
    line = source_line(lazy_value)
    return READS_LAZY_MEMORY.format(operator=lazy_value.target, where=f" ({line})" if line else "")


def _is_lazy(node: fx.Node) -> bool:
    """Return whether a tensor has a conj or neg bit."""
    return is_tensor(node) and has_lazy_bit(node.meta[VALUE])


@rewrite_rule(aten._conj.default)
def conj_to_conj_physical(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """_conj(x) -> conj_physical(x); a number's conjugate -> the constant"""
    if isinstance(number := node.args[0], (int, float, complex)):
        value = node.meta[VALUE]
        return writer.call(aten.full.default, [], number.conjugate(), dtype=value.dtype, device=value.device)
    return writer.call(aten.conj_physical.default, node_argument(node))


@rewrite_rule(aten._neg_view.default)
def neg_view_to_neg(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """_neg_view(x) -> neg(x)"""
    return writer.call(aten.neg.default, node_argument(node))
