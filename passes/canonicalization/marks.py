"""Conjugates and negatives that are only marked as such, on a view of the memory of what they are of, as numbers of their own.

A loop stores numbers, and code that is compiled reads them from memory as they are.
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import node_argument
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization.equation import equation

aten = torch.ops.aten


@equation(aten._conj.default)
def marked_conjugate(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """_conj(x) -> conj_physical(x)"""
    return writer.call(aten.conj_physical.default, node_argument(node))


@equation(aten._neg_view.default)
def marked_negative(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """_neg_view(x) -> neg(x)"""
    return writer.call(aten.neg.default, node_argument(node))
