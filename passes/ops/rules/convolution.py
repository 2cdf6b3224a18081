"""Rules of convolutions over one axis: a row of the result needs a window of rows at a fixed offset.

[b c t], weight [o c k]  ->  [b o t']      row i of t' needs rows i - padding to i - padding + (k - 1) * dilation of t

A convolution over any number of axes whose kernel has one tap only mixes channels (of attention heads, for example).

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result; `()` has none. A label in
`index` is needed in full, or reads a `Window` (source label, first row relative to its own, reach) of another label's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from streamfx.ir.signature import LabelShape, Signature, Window, full_axes
from streamfx.ir.sizes import Size
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten

# axis labels: batch, input channels, input rows, output channels, output rows, taps, channels of a group (in, out)
B, C, S, F, T, K, CG, FG = range(8)
FIRST_SPATIAL_LABEL = 8  # first label of the spatial axes, if the kernel has one tap
FULL_AXES = full_axes(C, F, K, CG, FG)


def find_window(arguments: dict[str, Any], taps: Any) -> Window | None:
    """Return the window of operand rows (label S) that a result row needs, for a kernel of `taps` elements.

    Row i reads rows i - padding to i - padding + (taps - 1) * dilation. None unless there is one spatial axis, with stride
    1 and static numbers. `arguments`: the convolution's, by name.
    """
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, output_padding = (arguments[name] for name in names)
    numbers = (taps, *stride, *padding, *dilation, *output_padding)
    if len(numbers) != 5 or not all(isinstance(number, int) for number in numbers):  # 5: one spatial axis
        return None
    if stride[0] != 1 or output_padding[0] != 0:
        return None
    reach = dilation[0] * (taps - 1)
    return Window(S, padding[0] - reach if arguments["transposed"] else -padding[0], reach)


def is_one_tap(arguments: dict[str, Any], weight: Sequence[Size]) -> bool:
    """Return whether a convolution only mixes channels: `weight`, its shape, is [o c 1 1], with stride 1 and no padding."""
    has_unit_stride = all(stride == 1 for stride in arguments["stride"])
    is_unpadded = all(padding == 0 for name in ("padding", "output_padding") for padding in arguments[name])
    return all(taps == 1 for taps in weight[2:]) and has_unit_stride and is_unpadded


def _one_tap_signature(call: RuleCall) -> Signature:
    """Return the signature of (x, weight, bias?) -> y if the kernel has one tap: all positions are independent."""
    x, weight, y = _one_tap_labels(call, 0, call.shape)
    bias = (y[1],) * (len(call.operands) - 2)
    return Signature((x, weight, *((dim,) for dim in bias)), (y,), FULL_AXES)


def _one_tap_weight_gradient(call: RuleCall) -> Signature:
    """Return the signature of (dy, x, weight) -> (none, dweight, none) if the kernel has one tap: a sum over positions."""
    x, weight, y = _one_tap_labels(call, 1, call.shapes[0])
    return Signature((y, x, weight), ((), weight, ()), FULL_AXES)


def _one_tap_labels(call: RuleCall, x_index: int, y_shape: tuple[Any, ...]) -> tuple[LabelShape, LabelShape, LabelShape]:
    """Return the axis labels of x [b c ...], weight [o c 1 ...] and y [b o ...]; `...`: any number of spatial axes.

    `x_index`: the operand that is x; the weight is the next operand.
    """
    (_, in_channels, *_), weight, (_, out_channels, *_) = _convolution_labels(call, x_index, x_index + 1, y_shape)
    rank = len(y_shape)
    spatial = tuple((FIRST_SPATIAL_LABEL + i,) for i in range(rank - 2))
    return ((B,), in_channels, *spatial), (*weight[:2], *((),) * (rank - 2)), ((B,), out_channels, *spatial)


@rule(aten.convolution.default)
def convolution(call: RuleCall) -> Signature | None:
    """Axis rule of (x, weight, bias?) -> y: a row of y needs a window of rows of x, and all channels of its group.

    None unless the kernel has one tap, or x is [b c t] with stride 1.
    """
    if is_one_tap(call.arguments(), call.shapes[1]):
        return _one_tap_signature(call)
    window = find_window(call.arguments(), call.shapes[1][-1])
    if window is None or len(call.shapes[0]) != 3:
        return None
    x, weight, y = _convolution_labels(call, 0, 1, call.shape)
    bias = (y[1],) if len(call.operands) == 3 else ()
    return Signature(
        (x, weight, *((bias,) if bias else ())),
        (y,),
        {**FULL_AXES, T: window},
    )


@rule(aten.convolution_backward.default)
def convolution_weight_gradient(call: RuleCall) -> Signature | None:
    """Axis rule of (dy, x, weight) -> dweight, a sum over rows; `canonicalize` splits off the other gradients before.

    A row of x is multiplied by the rows of dy whose windows contain it. A loop from the last chunk to the first has already
    read them. None for other output masks, for strides, and for several spatial axes.
    """
    arguments = call.arguments()
    if arguments["output_mask"] != [False, True, False]:
        return None
    if is_one_tap(arguments, call.shapes[2]):
        return _one_tap_weight_gradient(call)
    window = find_window(arguments, call.shapes[2][-1])
    if window is None or len(call.shapes[1]) != 3:
        return None
    x, weight, y = _convolution_labels(call, 1, 2, call.shapes[0])
    return Signature(
        (y, x, weight),
        ((), weight, ()),
        {**FULL_AXES, S: Window(T, -window.start - window.reach, window.reach)},
    )


def _convolution_labels(
    call: RuleCall, x_index: int, weight_index: int, y_shape: tuple[Any, ...]
) -> tuple[LabelShape, LabelShape, LabelShape]:
    """Return the axis labels of x [b c s], weight [o c k] (transposed: [c o k]) and y [b o t].

    `x_index`, `weight_index`: which operands they are. In a depthwise convolution, input and output channels are one axis;
    with other groups, the weight's channels are those of one group, an axis separate from all channels.
    """
    arguments = call.arguments()
    groups, transposed = arguments["groups"], arguments["transposed"]
    channels = call.shapes[x_index][1]
    if groups == channels == y_shape[1]:
        per_channel: LabelShape = ((C,), (), (K,))
        return ((B,), (C,), (S,)), per_channel, ((B,), (C,), (T,))
    in_channels, out_channels = (C if groups == 1 else CG,), (F if groups == 1 else FG,)
    if transposed:
        return ((B,), (C,), (S,)), ((C,), out_channels, (K,)), ((B,), (F,), (T,))
    return ((B,), (C,), (S,)), ((F,), in_channels, (K,)), ((B,), (F,), (T,))
