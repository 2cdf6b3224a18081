"""Facts about operators that do not depend on axes: what is linear, what only moves elements, what is expensive."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, tensor_operands
from streamfx.runtime.experts import GROUPED_MM, GROUPED_OUTER
from streamfx.runtime.kernels import ATTENTION, ATTENTION_BACKWARD
from streamfx.runtime.recurrences import Recurrence
from streamfx.runtime.rng import draw_seed

aten = torch.ops.aten

MOVES_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
    }
)

# Operators linear in one tensor operand when all others are held fixed, by that operand's position.
LINEAR_IN: dict[Any, tuple[int, ...]] = {
    aten.neg.default: (0,),
    aten.sum.default: (0,),
    aten.sum.dim_IntList: (0,),
    aten.mean.default: (0,),
    aten.mean.dim: (0,),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    GROUPED_MM: (0, 1),
    GROUPED_OUTER: (0, 1),
    aten.mul.Tensor: (0, 1),
    aten.mul.Scalar: (0,),
    aten.div.Tensor: (0,),
    aten.div.Scalar: (0,),
    aten.slice.Tensor: (0,),
    aten.slice_backward.default: (0,),
    aten.select.int: (0,),
    aten.select_backward.default: (0,),
    aten.constant_pad_nd.default: (0,),
    aten.split.Tensor: (0,),
    aten.split_with_sizes.default: (0,),
    aten.where.self: (),
    aten.nll_loss_backward.default: (0,),
    aten.nll_loss2d_backward.default: (0,),
    aten._log_softmax_backward_data.default: (0,),
    aten._softmax_backward_data.default: (0,),
    aten.embedding_dense_backward.default: (0,),
    aten.native_dropout_backward.default: (0,),
    aten.tanh_backward.default: (0,),
    aten.sigmoid_backward.default: (0,),
    aten.silu_backward.default: (0,),
    aten.gelu_backward.default: (0,),
    aten.threshold_backward.default: (0,),
    aten.hardtanh_backward.default: (0,),
    aten.elu_backward.default: (0,),
    aten.leaky_relu_backward.default: (0,),
    aten.softplus_backward.default: (0,),
    aten.log_sigmoid_backward.default: (0,),
    aten.native_layer_norm_backward.default: (0,),
    aten._fused_rms_norm_backward.default: (0,),
    aten.gather.default: (0,),
    aten._to_copy.default: (0,),
}

READS_STRIDES = (aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype)
CONTRACTIONS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        ATTENTION,
        ATTENTION_BACKWARD,
        GROUPED_MM,
        GROUPED_OUTER,
    }
)


UNPACKERS = ("bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise", "quanto::unpack")


def is_moved_elements(node: fx.Node) -> bool:
    return node.target in MOVES_ELEMENTS


def is_random(node: fx.Node) -> bool:
    """Whether a second run would give something else."""
    if node.target is draw_seed:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = bound_arguments(node)
    return arguments.get("dropout_p", arguments.get("p", 1.0)) != 0.0


def is_expensive(node: fx.Node) -> bool:
    """Worth storing rather than computing twice."""
    producer = node.args[0] if node.target is operator.getitem else node
    return isinstance(producer, fx.Node) and (producer.target in CONTRACTIONS or isinstance(producer.target, Recurrence))


def unpacks(node: fx.Node) -> bool:
    """Whether an operator of another package unpacks a quantized weight: what it is given takes less to hold than what it makes.

    By name: that an operator without a rule gives the same twice is nothing that its schema tells.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in UNPACKERS


def is_linear_map(node: fx.Node) -> bool:
    """Whether a node with a single tensor operand is linear in it, so that it may act on each part of a sum."""
    operands = tensor_operands(node)
    if len(operands) != 1:
        return False
    return node.target in MOVES_ELEMENTS or 0 in LINEAR_IN.get(node.target, ())
