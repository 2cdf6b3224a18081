"""Facts about single operators that do not depend on axes: whether one moves data, is random, or is expensive."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.ir.joint import bound_arguments, node_argument
from streamfx.ir.operator_table import MOVES_ELEMENTS, Kind, is_kind, of_kind
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.restride import item_at
from streamfx.runtime.rng import draw_seed
from streamfx.torch_private import OpOverload

aten = torch.ops.aten

READS_LAYOUT = of_kind(Kind.STRIDED) | {aten.as_strided_copy.default}  # their results depend on their operands' strides, too
CONTRACTIONS = of_kind(Kind.MATMUL, Kind.ADDMM, Kind.CONVOLUTION) | {ATTENTION, ATTENTION_BACKWARD, GROUPED_MM, GROUPED_OUTER}


DEQUANTIZERS = ("bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise", "quanto::unpack", "streamfx::unpacked")


def only_moves_elements(node: fx.Node) -> bool:
    """Return whether an operator only moves elements: a view or a copy."""
    return node.target in MOVES_ELEMENTS


def overload_name(target: Any) -> str:
    """Return the name of an operator, such as `aten::add.Tensor`; the empty string for a Python function."""
    return target.name() if isinstance(target, OpOverload) else ""


def before_copies(node: fx.Node) -> fx.Node:
    """Return the value of which this one is a copy or alias, through any number of clones; the value itself if it is none."""
    while is_kind(node, Kind.ALIAS, Kind.COPY):
        node = node_argument(node)
    return node


def is_random(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers, so that a second run may return another result.

    A dropout with probability 0 does not, nor does attention without dropout.
    """
    if node.target is draw_seed:
        return True
    if not _may_draw(node.target):
        return False
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":  # the meaning of its arguments is unknown
        return True
    arguments = bound_arguments(node)
    return arguments.get("dropout_p", arguments.get("p", 1.0)) != 0.0


@lru_cache(1 << 10)
def _may_draw(target: Any) -> bool:
    """Return whether an operator is marked as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_expensive(node: fx.Node) -> bool:
    """Return whether a value is so expensive that it should be stored, not recomputed: a matmul, recurrence, all-reduce."""
    return node.target is ALL_REDUCE or is_product(node)


def is_product(node: fx.Node) -> bool:
    """Return whether a value is computed by an operator that dominates run time: a matmul, convolution, attention, recurrence."""
    producer = node.args[0] if node.target is operator.getitem else node
    return isinstance(producer, fx.Node) and (producer.target in CONTRACTIONS or isinstance(producer.target, Recurrence))


def is_dequantizer(node: fx.Node) -> bool:
    """Return whether an operator of another package dequantizes a weight: its operands take less memory than its result.

    Such operators are listed by name, because a schema does not state whether an operator is deterministic.
    """
    return isinstance(node.target, OpOverload) and node.target.name() in DEQUANTIZERS


def is_tuple_item(node: fx.Node) -> bool:
    """Return whether a node selects one item of an operator's tuple (`getitem`), or of its nested result (`item_at`)."""
    return node.target is operator.getitem or node.target is item_at


def producer_of(node: fx.Node) -> fx.Node:
    """Return the operator that computes a value: for an item of a tuple, the operator that returns the tuple, else `node`."""
    return node_argument(node) if is_tuple_item(node) else node
