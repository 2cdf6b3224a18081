"""Split the backward of a convolution into one operator per gradient, because each gradient needs different rows."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.convolution import find_window, is_one_tap
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten.convolution_backward.default)
def split_convolution_backward(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """convolution_backward(dy, x, w) -> dx = convolution(dy, w, transposed)      reads rows of dy up to one window ahead
    dw = convolution_backward(only dw)       a sum over rows
    db = sum(dy)                             a sum over rows
    """
    arguments = bound_arguments(node)
    gradient, x, weight = (arguments[name] for name in ("grad_output", "input", "weight"))
    if not _has_axis_rule(arguments, x, weight) or arguments["output_mask"] == [False, True, False]:
        return None
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    stride, padding, dilation, transposed, output_padding, groups = (arguments[name] for name in names)
    gradients: dict[fx.Node, fx.Node] = {}
    for getitem in node.users:
        match getitem.args[1]:  # 0: dx, 1: dw, 2: db
            case 0:
                result = writer.call(
                    aten.convolution.default,
                    gradient,
                    weight,
                    None,
                    stride,
                    padding,
                    dilation,
                    not transposed,
                    output_padding,
                    groups,
                )
            case 1:
                options = (arguments["bias_sizes"], stride, padding, dilation, transposed, output_padding, groups)
                weight_backward = writer.call(
                    aten.convolution_backward.default, gradient, x, weight, *options, [False, True, False]
                )
                result = writer.call(operator.getitem, weight_backward, 1)
            case _:
                dims = [dim for dim in range(len(shape_of_node(gradient))) if dim != 1]
                result = writer.call(aten.sum.dim_IntList, gradient, dims)
        gradients[getitem] = result
    return gradients


def _has_axis_rule(arguments: dict[str, Any], x: fx.Node, weight: fx.Node) -> bool:
    """Return whether later passes know the axes of a convolution: kernel size 1, or stride 1 along one spatial axis.

    `arguments` are the arguments of the convolution's backward, by name; `x` and `weight` are real.
    """
    weight_shape = shape_of_node(weight)
    if not all(item.meta[VALUE].is_floating_point() for item in (x, weight)):  # gradients of complex tensors contain conjugates
        return False
    has_window = len(shape_of_node(x)) == 3 and find_window(arguments, weight_shape[-1]) is not None
    return is_one_tap(arguments, weight_shape) or has_window
