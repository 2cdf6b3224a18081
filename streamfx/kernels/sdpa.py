"""The fused attention kernels of all devices as one operator, with a causal mask or with all keys and a bias.

All kernels compute the output and the log-sum-exp of each query, and take both in the backward. They differ in names,
in the layout of a bias, and in support for grouped queries. The passes write `streamfx::attention` for all of them
(`passes/rewrite/attention/sdpa_variants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.dialect.declare import implement
from streamfx.kernels import cuda_attention, flash_varlen, flash_window, layouts, plain_attention
from streamfx.kernels.attention_call import AttentionCall, BottomRightCausal, Gradients, Result, for_all_heads, for_groups
from streamfx.kernels.device_kinds import device_kind
from streamfx.torch_private import OpOverload

aten = torch.ops.aten


class Kernels(NamedTuple):
    """The kernels of a device, with the dtypes that they support.

    `supports_bottom_right(call, bottom_right)`: whether the mask of the call may be this bottom-right mask.
    `supports_documents(call)`: whether the mask may be a `Varlen`. `has_kernels(query)`: whether this device's kernels support
    the dtype of the query.
    """

    types: Collection[torch.dtype]
    forward: Callable[[AttentionCall], Result]
    backward: Callable[[AttentionCall, Tensor, Tensor, Tensor], Gradients]
    supports_bottom_right: Callable[[AttentionCall, BottomRightCausal], bool] = lambda *_: False
    has_kernels: Callable[[Tensor], bool] = lambda _: True
    supports_documents: Callable[[AttentionCall], bool] = lambda _: False


def forward(call: AttentionCall) -> Result:
    """Return the output and log-sum-exp, by the device's kernels or by plain operators."""
    query, key, value = call[:3]
    if not math.prod(query.shape[:3]) or not key.shape[2]:  # kernels divide by these sizes
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.promote_types(query.dtype, torch.float32))
        return query.new_zeros((*query.shape[:3], value.shape[3])), lse
    out, lse = _kernels(query).forward(_for_kernels(call))
    return out[..., : value.shape[3]], lse


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv), by the device's kernels or by plain operators."""
    query, key, value = call[:3]
    if not math.prod(query.shape[:3]) or not key.shape[2]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if call.bias is not None:  # if it hides all keys of a row, all probabilities of the row are 0: exp(x - inf)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq, dk, dv = _kernels(query).backward(_for_kernels(call), gradient, out, lse)
    dk, dv = for_groups(dk, key.shape[1]), for_groups(dv, value.shape[1])
    width = query.shape[3]
    return dq[..., :width], dk[..., :width], dv[..., : value.shape[3]]


def supports_bottom_right(call: AttentionCall, bottom_right: BottomRightCausal) -> bool:
    """Return whether one call computes queries that end at the last key, with this bottom-right mask."""
    return _kernels(call.query).supports_bottom_right(call, bottom_right)


def supports_documents(call: AttentionCall) -> bool:
    """Return whether one call computes several documents: whether its mask may be a `Varlen`."""
    return _kernels(call.query).supports_documents(call)


def _kernels(query: Tensor) -> Kernels:
    """Return the device's kernels if they support the dtype, otherwise plain operators."""
    kernels = KERNELS[device_kind(query.device).type]
    return kernels if query.dtype in kernels.types and query.shape[-1] and kernels.has_kernels(query) else PLAIN


def _for_kernels(call: AttentionCall) -> AttentionCall:
    """Return the call as kernels take it: a bias with four dimensions or None, and a mask that they apply themselves.

    Kernels apply minus infinity before they scale, which is wrong if the scale is not positive. Then the causal mask becomes
    a part of the bias. If keys and values have different head counts, both are repeated for all query heads, because kernels
    use the count of the keys for both.
    """
    query, key, value, bias, causal, scale = call
    if bias is not None and bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if causal and scale is not None and scale <= 0:
        causal_bias = plain_attention.causal_bias(query, key, causal)
        bias, causal = causal_bias if bias is None else bias + causal_bias, False
    call = call._replace(bias=bias, causal=causal)
    return call if key.shape[1] == value.shape[1] else for_all_heads(call)


# -- CPU


def _cpu_forward(call: AttentionCall) -> Result:
    """Run the CPU's flash attention; return the output and the log-sum-exp."""
    query, key, value, bias, causal, scale = _for_cpu(call)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Run the backward of the CPU's flash attention; return (dq, dk, dv), as wide as the padded heads."""
    query, key, value, bias, causal, scale = _for_cpu(call)
    gradient, out = (layouts.dense_last(layouts.padded_last(heads, query.shape[3])) for heads in (gradient, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _for_cpu(call: AttentionCall) -> AttentionCall:
    """Return the call with heads padded by zeros to one width, and with a dense last dimension.

    Padding would change the default scale, so the scale is the default for the original width.
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: cpu_flash_attention takes no stride of the last dimension; all
    operands have one width (attention.cpp: _scaled_dot_product_flash_attention_cpu).
    """
    query_width, scale = call.query.shape[3], call.scale
    width = max(query_width, call.value.shape[3])
    if query_width < width and scale is None:
        scale = query_width**-0.5
    query, key, value = (layouts.dense_last(layouts.padded_last(heads, width)) for heads in call[:3])
    return call._replace(query=query, key=key, value=value, scale=scale)


KERNELS = {
    "cpu": Kernels((torch.float64, torch.float32, torch.float16, torch.bfloat16), _cpu_forward, _cpu_backward),
    "cuda": Kernels(
        cuda_attention.TYPES,
        flash_varlen.forward,
        flash_varlen.backward,
        flash_window.supports_bottom_right,
        cuda_attention.has_kernels,
        flash_varlen.supports,
    ),
}
PLAIN = Kernels((), plain_attention.forward, plain_attention.backward)


# -- the operator that the passes write


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Result:
    """Implement `streamfx::attention`; return the output and the log-sum-exp. The arguments are those of its schema."""
    return forward(AttentionCall(query, key, value, attn_mask, is_causal, scale))


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Gradients:
    """Implement `streamfx::attention_backward`; return (dq, dk, dv). The arguments are those of its schema."""
    return backward(AttentionCall(query, key, value, attn_mask, is_causal, scale), grad_out, out, logsumexp)


OPERATOR_IMPLEMENTATIONS: dict[OpOverload, Callable[..., Any]] = {ATTENTION: _attention, ATTENTION_BACKWARD: _attention_backward}
for operator, implementation in OPERATOR_IMPLEMENTATIONS.items():
    implement(operator, implementation)
