"""A table of theorems about the arguments in which operators are linear.

A row states that the operator is linear in some arguments jointly, while all others are held fixed and meet conditions.
An argument that a row does not name must have its schema default; a call with any other value is not covered. The nodes
in which a call must be linear are *driven*. Jointly linear arguments that are not driven must be zero:
g + 0 is linear in g, and g + 1e-3 is not.

    add(self, other, alpha)          linear in (self, other) for any number alpha
    constant_pad_nd(self, pad, v)    linear in (self, value) if value is zero
    sum(self, dim, keepdim, dtype)   linear in self if dtype is a floating-point type

The theorems ignore the sign of zeros: -1 times 0 is -0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.dialect.scans import REVERSE_SCANS
from streamfx.ir.joint import bound_arguments, results_of
from streamfx.ir.operator_table import SELECTS_ELEMENTS, Kind, of_kind
from streamfx.passes.ops.constants import is_zero
from streamfx.torch_private import GRADIENT_OF_CDIST, OpOverload

aten = torch.ops.aten
Condition: TypeAlias = "Callable[[Any], bool]"


@dataclass(frozen=True)
class Linear:
    """An operator is jointly linear in `linear_arguments`, if its other arguments meet `conditions`."""

    linear_arguments: tuple[str, ...]
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    def holds(self, node: fx.Node, driven: Collection[fx.Node], may_add: bool = False) -> bool:
        """Return whether this row proves that a call is jointly linear in those of its operands that are in `driven`.

        At least one of the row's linear arguments must contain a driven node; all their other items must be zero, or with
        `may_add`, constants, which makes the call affine. Each other argument must contain no driven node and meet the row's
        condition for it.
        """
        arguments = bound_arguments(node)
        return any(not _is_fixed(arguments[name], driven) for name in self.linear_arguments) and all(
            all(may_add or item in driven or _is_zero_or_zero_constant(item) for item in _flat_items(arguments[argument.name]))
            if argument.name in self.linear_arguments
            else _is_fixed(arguments[argument.name], driven) and self._admits(argument, arguments[argument.name])
            for argument in node.target._schema.arguments  # type: ignore[union-attr]
        )

    def _admits(self, argument: Any, value: Any) -> bool:
        """Return whether a fixed argument (from the operator's schema) may have this value.

        It must meet the row's condition for it. If the row does not name the argument, it must have its schema default.
        """
        condition = self.conditions.get(argument.name)
        if condition is not None:
            return condition(value)
        return bool(
            argument.has_default_value() and type(value) is type(argument.default_value) and value == argument.default_value
        )


def is_linear(node: fx.Node, driven: Collection[fx.Node]) -> bool:
    """Return whether a row of the table proves that a call is jointly linear in those of its operands that are in `driven`.

    Operands that are not driven are constants. False if the operator has no row, or no operand is driven.
    """
    return any(row.holds(node, driven) for row in LINEAR.get(node.target, ()))


def is_affine(node: fx.Node, driven: Collection[fx.Node]) -> bool:
    """Return whether a row of the table proves that a call is linear in its operands in `driven`, plus a constant."""
    return any(row.holds(node, driven, may_add=True) for row in LINEAR.get(node.target, ()))


def preserves_scale(dtype: torch.dtype, scale: torch.dtype, gradient: torch.dtype) -> bool:
    """Return whether a gradient may be multiplied by its scale at the end, after an intermediate value was rounded to `dtype`.

    The gradient is computed for a tangent of one, before the tangent is known; `scale` and `gradient` are the dtypes of the
    true tangent and of the final gradient. `dtype` needs the exponent range of float32, since loss scaling, which keeps
    float16 from underflowing, is missing in between. It also needs at least bfloat16's precision, and the smallest of:
    the precision of `scale`, that of `gradient`, and the higher of both less the 16 bits by which float32 exceeds bfloat16.
    """
    if not (dtype.is_floating_point and scale.is_floating_point and gradient.is_floating_point):
        return False
    try:
        limits, float32_limits = torch.finfo(dtype), torch.finfo(torch.float32)
        has_range = math.frexp(limits.max)[1] >= math.frexp(float32_limits.max)[1] and limits.tiny <= float32_limits.tiny
        spare_bits = _significand_bits(torch.float32) - _significand_bits(torch.bfloat16)
        end_bits = _significand_bits(scale), _significand_bits(gradient)
        needed_bits = min(*end_bits, max(end_bits) - spare_bits)
        return has_range and _significand_bits(dtype) >= max(needed_bits, _significand_bits(torch.bfloat16))
    except NotImplementedError:  # finfo is not defined for packed types
        return False


def all_preserve_scale(node: fx.Node, scale: torch.dtype, gradient: torch.dtype) -> bool:
    """Return whether no result of a node is rounded so much that a scale can no longer be applied after it.

    `scale`, `gradient`: the dtypes of the scale and of the final gradient; see `preserves_scale`.
    """
    return all(result is None or preserves_scale(result.dtype, scale, gradient) for result in results_of(node))


def _significand_bits(dtype: torch.dtype) -> int:
    """Return the number of significand bits of a floating-point dtype, with the implicit one: 24 for float32."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _flat_items(value: Any) -> Iterator[Any]:
    """Yield the items of an argument: `[a, (b, c)]` yields a, b, c; a value that is not a list or tuple yields itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat_items(item)
    else:
        yield value


def _is_fixed(value: Any, driven: Collection[fx.Node]) -> bool:
    """Return whether an argument, a node, scalar or list, contains none of the driven nodes."""
    return not any(isinstance(item, fx.Node) and item in driven for item in _flat_items(value))


def _is_zero_or_zero_constant(value: Any) -> bool:
    """Return whether a value is a tensor of constant zeros, or the number zero."""
    return is_zero(value) or (isinstance(value, (int, float)) and value == 0)


# -- conditions on arguments that are held fixed


def any_value(value: Any) -> bool:
    """Accept any value."""
    return True


def is_float(value: Any) -> bool:
    """Accept a floating-point dtype, or None for the operand's dtype. (Integers and booleans would round.)"""
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


def is_none(value: Any) -> bool:
    """Return whether an argument is left out."""
    return value is None


def is_true(value: Any) -> bool:
    """Accept True, for the argument `accumulate`. (Without it, which of two writes to one index wins is not defined.)"""
    return value is True


def requests_only_weight(value: Any) -> bool:
    """Accept the output mask of a convolution's backward that requests only the weight's gradient (of input, weight, bias)."""
    return list(value) == [False, True, False]


def _linear_in(*linear_arguments: str, **conditions: Condition) -> Linear:
    """Return the row of an operator that is jointly linear in the named arguments, if its other arguments meet `conditions`.

    `_linear_in("self", dim=any_value)`: linear in `self` for any `dim`.
    """
    return Linear(linear_arguments, conditions)


def _any_value_of(*names: str) -> dict[str, Condition]:
    """Return the condition that accepts any value, for each of the names."""
    return dict.fromkeys(names, any_value)


def _linear_in_first(target: OpOverload) -> Linear:
    """Return the row of an operator that is linear in its first argument, for any value of the others, which select elements."""
    first, *others = (argument.name for argument in target._schema.arguments)
    return Linear((first,), _any_value_of(*others))


_SUM = _linear_in("self", dim=any_value, keepdim=any_value, dtype=is_float)
_LOSS = _linear_in("grad_output", **_any_value_of("self", "target", "weight", "reduction", "ignore_index", "total_weight"))
_SHARES = _linear_in("grad_output", output=any_value, dim=any_value, input_dtype=is_float)
_ADDED = _linear_in("self", "values", indices=any_value, accumulate=is_true)
_CONVOLVED = _any_value_of("weight", "bias_sizes", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
_POINTWISE = _any_value_of(
    "self", "output", "threshold", "min_val", "max_val", "alpha", "scale", "input_scale", "is_result", "mask"
)
_SLOPE = _linear_in(
    "grad_output", **_POINTWISE, **_any_value_of("self_or_result", "negative_slope", "self_is_result", "beta", "buffer")
)

LINEAR: Mapping[Any, tuple[Linear, ...]] = {
    **{target: (_linear_in_first(target),) for target in SELECTS_ELEMENTS | of_kind(Kind.EMBED)},
    aten.neg.default: (_linear_in("self"),),
    aten.add.Tensor: (_linear_in("self", "other", alpha=any_value),),
    aten.sub.Tensor: (_linear_in("self", "other", alpha=any_value),),
    aten.cat.default: (_linear_in("tensors", dim=any_value),),
    aten.stack.default: (_linear_in("tensors", dim=any_value),),
    aten.sum.default: (_SUM,),
    aten.sum.dim_IntList: (_SUM,),
    aten.mean.default: (_SUM,),
    aten.mean.dim: (_SUM,),
    aten.mm.default: (_linear_in("self", mat2=any_value), _linear_in("mat2", self=any_value)),
    aten.bmm.default: (_linear_in("self", mat2=any_value), _linear_in("mat2", self=any_value)),
    GROUPED_MM: (_linear_in("x", weight=any_value, group=any_value), _linear_in("weight", x=any_value, group=any_value)),
    GROUPED_OUTER: (
        _linear_in("x", y=any_value, group=any_value, groups=any_value),
        _linear_in("y", x=any_value, group=any_value, groups=any_value),
    ),
    aten.mul.Tensor: (_linear_in("self", other=any_value), _linear_in("other", self=any_value)),
    aten.mul.Scalar: (_linear_in("self", other=any_value),),
    aten.div.Tensor: (_linear_in("self", other=any_value),),
    aten.div.Scalar: (_linear_in("self", other=any_value),),
    RELATIVE_SHIFT: (_linear_in("x", **_any_value_of("dim", "first", "columns")),),
    RELATIVE_SHIFT_BACKWARD: (_linear_in("gradient", **_any_value_of("dim", "first", "width")),),
    aten.constant_pad_nd.default: (_linear_in("self", "value", pad=any_value),),
    aten.where.self: (_linear_in("self", "other", condition=any_value),),
    aten.masked_fill.Scalar: (_linear_in("self", "value", mask=any_value),),
    aten.slice_scatter.default: (_linear_in("self", "src", **_any_value_of("dim", "start", "end", "step")),),
    aten.select_scatter.default: (_linear_in("self", "src", **_any_value_of("dim", "index")),),
    aten.cumsum.default: (_linear_in("self", dim=any_value, dtype=is_float),),
    REVERSE_SCANS["cumsum"]: (_linear_in("self", dim=any_value),),
    aten.scatter.src: (_linear_in("self", "src", dim=any_value, index=any_value),),
    aten.scatter_add.default: (_linear_in("self", "src", dim=any_value, index=any_value),),
    aten.index_add.default: (_linear_in("self", "source", **_any_value_of("dim", "index", "alpha")),),
    **dict.fromkeys(of_kind(Kind.PUT), (_ADDED,)),
    aten._to_copy.default: (
        _linear_in("self", dtype=is_float, **_any_value_of("layout", "device", "pin_memory", "non_blocking", "memory_format")),
    ),
    **dict.fromkeys(of_kind(Kind.LABEL_LOSS_BACKWARD), (_LOSS,)),
    aten._log_softmax_backward_data.default: (_SHARES,),
    aten._softmax_backward_data.default: (_SHARES,),
    aten.embedding_dense_backward.default: (
        _linear_in("grad_output", **_any_value_of("indices", "num_weights", "padding_idx", "scale_grad_by_freq")),
    ),
    aten._cdist_backward.default: (_linear_in(GRADIENT_OF_CDIST, **_any_value_of("x1", "x2", "p", "cdist")),),
    aten.convolution.default: (_linear_in("input", bias=is_none, **_any_value_of(*_CONVOLVED.keys() - {"bias_sizes"})),),
    aten.convolution_backward.default: (
        _linear_in("grad_output", **_CONVOLVED, **_any_value_of("input", "output_mask")),
        _linear_in("input", **_CONVOLVED, grad_output=any_value, output_mask=requests_only_weight),
    ),
    aten.native_dropout_backward.default: (_SLOPE,),
    aten.tanh_backward.default: (_SLOPE,),
    aten.sigmoid_backward.default: (_SLOPE,),
    aten.silu_backward.default: (_SLOPE,),
    aten.gelu_backward.default: (_linear_in("grad_output", self=any_value, approximate=any_value),),
    aten.threshold_backward.default: (_SLOPE,),
    aten.hardtanh_backward.default: (_SLOPE,),
    aten.elu_backward.default: (_SLOPE,),
    aten.leaky_relu_backward.default: (_SLOPE,),
    aten.softplus_backward.default: (_SLOPE,),
    aten.log_sigmoid_backward.default: (_SLOPE,),
    aten.native_layer_norm_backward.default: (
        _linear_in("grad_out", **_any_value_of("input", "normalized_shape", "mean", "rstd", "weight", "bias", "output_mask")),
    ),
    aten._fused_rms_norm_backward.default: (
        _linear_in("grad_out", **_any_value_of("input", "normalized_shape", "rstd", "weight", "output_mask")),
    ),
}
