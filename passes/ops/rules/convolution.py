"""Rules of convolutions over one axis: a row of the result needs a window of rows at a fixed offset.

[b c t], weight [o c k]  ->  [b o t']      row i of t' needs rows i - padding to i - padding + (k - 1) * dilation of t

A convolution over any number of axes whose kernel has one tap only mixes channels (of attention heads, for example).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from streamfx.ir.signature import LetterShape, Signature, Window, full_axes
from streamfx.ir.sizes import Size
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten

# axis labels: batch, input channels, input rows, output channels, output rows, taps, channels of a group (in, out)
B, C, S, F, T, K, CG, FG = range(8)
FIRST_SPATIAL_LABEL = 8  # first label of the spatial axes, if the kernel has one tap
FULL_AXES = full_axes(C, F, K, CG, FG)


def find_window(arguments: dict[str, Any], taps: Any) -> Window | None:
    """Return the window of operand rows that a result row needs; None unless there is one axis with static sizes and stride 1."""
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, output_padding = (arguments[name] for name in names)
    numbers = (taps, *stride, *padding, *dilation, *output_padding)
    if len(numbers) != 5 or not all(isinstance(number, int) for number in numbers):
        return None
    if stride[0] != 1 or output_padding[0] != 0:
        return None
    reach = dilation[0] * (taps - 1)
    return Window(S, padding[0] - reach if arguments["transposed"] else -padding[0], reach)


def is_one_tap(arguments: dict[str, Any], weight: Sequence[Size]) -> bool:
    """Return whether a convolution only mixes channels: weight [o c 1 1] with stride one and no padding."""
    has_unit_stride = all(stride == 1 for stride in arguments["stride"])
    is_unpadded = all(padding == 0 for name in ("padding", "output_padding") for padding in arguments[name])
    return all(taps == 1 for taps in weight[2:]) and has_unit_stride and is_unpadded


def _one_tap_signature(call: RuleCall) -> Signature:
    """Return the signature of a convolution whose kernel has one tap."""
    x, weight, y = _one_tap_letters(call, 0, call.shape)
    bias = (y[1],) * (len(call.operands) - 2)
    return Signature((x, weight, *((dim,) for dim in bias)), (y,), FULL_AXES)


def _one_tap_weight_gradient(call: RuleCall) -> Signature:
    """Return the signature of the weight's gradient of a convolution whose kernel has one tap."""
    x, weight, y = _one_tap_letters(call, 1, call.shapes[0])
    return Signature((y, x, weight), ((), weight, ()), FULL_AXES)


def _one_tap_letters(call: RuleCall, x: int, result: tuple[Any, ...]) -> tuple[LetterShape, LetterShape, LetterShape]:
    """Return the labels of x [b c ...], weight [o c 1 ...] and y [b o ...]."""
    (_, inside, *_), weight, (_, outside, *_) = _letters(call, x, x + 1, result)
    rank = len(result)
    spatial = tuple((FIRST_SPATIAL_LABEL + i,) for i in range(rank - 2))
    return ((B,), inside, *spatial), (*weight[:2], *((),) * (rank - 2)), ((B,), outside, *spatial)


@rule(aten.convolution.default)
def convolution(call: RuleCall) -> Signature | None:
    """Map (x, weight, bias?) to y: channels are mixed within their group, rows within the window."""
    if is_one_tap(call.arguments(), call.shapes[1]):
        return _one_tap_signature(call)
    window = find_window(call.arguments(), call.shapes[1][-1])
    if window is None or len(call.shapes[0]) != 3:
        return None
    x, weight, y = _letters(call, 0, 1, call.shape)
    bias = (y[1],) if len(call.operands) == 3 else ()
    return Signature(
        (x, weight, *((bias,) if bias else ())),
        (y,),
        {**FULL_AXES, T: window},
    )


@rule(aten.convolution_backward.default)
def convolution_weight_gradient(call: RuleCall) -> Signature | None:
    """Map (dy, x, weight) to the gradient of the weight, a sum over rows (`canonicalize` splits off the other gradients).

    A row of x is multiplied by the rows of dy whose windows contain it. A loop from the last chunk to the first has already
    read them.
    """
    arguments = call.arguments()
    if arguments["output_mask"] != [False, True, False]:
        return None
    if is_one_tap(arguments, call.shapes[2]):
        return _one_tap_weight_gradient(call)
    window = find_window(arguments, call.shapes[2][-1])
    if window is None or len(call.shapes[1]) != 3:
        return None
    x, weight, y = _letters(call, 1, 2, call.shapes[0])
    return Signature(
        (y, x, weight),
        ((), weight, ()),
        {**FULL_AXES, S: Window(T, -window.start - window.reach, window.reach)},
    )


def _letters(call: RuleCall, x: int, weight: int, result: tuple[Any, ...]) -> tuple[LetterShape, LetterShape, LetterShape]:
    """Return the labels of x, weight and y. In a depthwise convolution, channels are not mixed."""
    arguments = call.arguments()
    groups, transposed = arguments["groups"], arguments["transposed"]
    channels = call.shapes[x][1]
    if groups == channels == result[1]:
        per_channel: LetterShape = ((C,), (), (K,))
        return ((B,), (C,), (S,)), per_channel, ((B,), (C,), (T,))
    inside, outside = (C if groups == 1 else CG,), (F if groups == 1 else FG,)
    if transposed:
        return ((B,), (C,), (S,)), ((C,), outside, (K,)), ((B,), (F,), (T,))
    return ((B,), (C,), (S,)), ((F,), inside, (K,)), ((B,), (F,), (T,))
