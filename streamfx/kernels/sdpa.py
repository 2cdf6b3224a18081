"""The fused attention kernels of all devices as one operator, with a causal mask or with all keys and a bias.

All kernels compute the output and the log-sum-exp of each query, and take both in the backward. They differ in names,
in the layout of a bias, and in support for grouped queries. The passes write `streamfx::attention` for all of them
(`passes/rewrite/attention/sdpa_variants.py`).

Sizes: b batch, h query heads, g heads of keys and values (each shared by h / g query heads), m queries, n keys, d and e widths
of a head. `bias` (at most [b h m n]) is added to the scores; `scale` multiplies them, None: 1 / sqrt(d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.dialect.declare import implement
from streamfx.kernels import cuda_attention, flash_varlen, flash_window, layouts, plain_attention
from streamfx.kernels.device_kinds import device_kind
from streamfx.kernels.plain_attention import BottomRightCausal, Causal
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
Result: TypeAlias = "tuple[Tensor, Tensor]"
Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


class Kernels(NamedTuple):
    """The kernels of a device, with the dtypes that they support.

    `forward` takes (q, k, v, bias, causal, scale) and `backward` takes (gradient, q, k, v, out, lse, bias, causal,
    scale). `supports_bottom_right` (q, k, v, scale, bottom_right): whether `causal` may be this bottom-right mask.
    `supports_documents` (q, k, v, scale): whether `causal` may be a `Varlen`. `has_kernels` (q): whether this device's
    kernels support the dtype of q.
    """

    types: Collection[torch.dtype]
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Causal, float | None], Result]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Causal, float | None], Gradients]
    supports_bottom_right: Callable[[Tensor, Tensor, Tensor, float | None, BottomRightCausal], bool] = lambda *_: False
    has_kernels: Callable[[Tensor], bool] = lambda _: True
    supports_documents: Callable[[Tensor, Tensor, Tensor, float | None], bool] = lambda *_: False


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> Result:
    """Return the output [b h m e] and log-sum-exp [b h m] of queries [b h m d] over keys [b g n d] and values [b g n e].

    If `causal` is False, queries see all keys; if True, query i sees keys 0 .. i, for any number of keys. With
    BOTTOM_RIGHT, which not all kernels support, the last query sees all keys and each query before it one key fewer; with
    `BottomRightCausal(left)` each query also sees at most `left` keys before its own key. With `Varlen`, documents are
    separate.
    """
    if not math.prod(query.shape[:3]) or not key.shape[2]:  # kernels divide by these sizes
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.promote_types(query.dtype, torch.float32))
        return query.new_zeros((*query.shape[:3], value.shape[3])), lse
    bias, causal = _bias_and_causal(query, key, bias, causal, scale)
    key, value = _with_equal_heads(query, key, value)
    out, lse = _kernels(query).forward(query, key, value, bias, causal, scale)
    return out[..., : value.shape[3]], lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> Gradients:
    """Return (dq, dk, dv); `gradient` is the gradient of the output, `out` and `lse` are the results of `forward`."""
    if not math.prod(query.shape[:3]) or not key.shape[2]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if bias is not None:  # if it hides all keys of a row, all probabilities of the row are 0: exp(x - inf)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    bias, causal = _bias_and_causal(query, key, bias, causal, scale)
    keys, values = _with_equal_heads(query, key, value)
    dq, dk, dv = _kernels(query).backward(gradient, query, keys, values, out, lse, bias, causal, scale)
    dk, dv = (
        plain_attention.for_groups(gradient_of_heads, operand.shape[1]) for gradient_of_heads, operand in ((dk, key), (dv, value))
    )
    width = query.shape[3]
    return dq[..., :width], dk[..., :width], dv[..., : value.shape[3]]


def supports_bottom_right(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, bottom_right: BottomRightCausal
) -> bool:
    """Return whether one call computes queries that end at the last key, with this bottom-right mask."""
    return _kernels(query).supports_bottom_right(query, key, value, scale, bottom_right)


def supports_documents(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return whether one call computes several documents: whether `causal` may be a `Varlen` for these operands."""
    return _kernels(query).supports_documents(query, key, value, scale)


def _kernels(query: Tensor) -> Kernels:
    """Return the device's kernels if they support the dtype, otherwise plain operators."""
    kernels = KERNELS[device_kind(query.device).type]
    return kernels if query.dtype in kernels.types and query.shape[-1] and kernels.has_kernels(query) else PLAIN


def _with_equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return (key, value) with equal head counts, because kernels use the count of the keys for both.

    If the counts differ, both are repeated for all query heads.
    """
    if key.shape[1] == value.shape[1]:
        return key, value
    return plain_attention.for_all_heads(key, query), plain_attention.for_all_heads(value, query)


def _bias_and_causal(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor | None, Causal]:
    """Return (bias, causal) as kernels take them: a bias with four dimensions or None, and a mask that they apply themselves.

    Kernels apply minus infinity before they scale, which is wrong if the scale is not positive. Then the causal mask becomes
    a part of the bias, and False is returned in its place.
    """
    if bias is not None and bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if causal and scale is not None and scale <= 0:
        causal_bias = plain_attention.causal_bias(query, key, causal)
        return (causal_bias if bias is None else bias + causal_bias), False
    return bias, causal


# -- CPU


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> Result:
    """Run the CPU's flash attention; return the output and the log-sum-exp."""
    query, key, value, scale = _for_cpu(query, key, value, scale)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> Gradients:
    """Run the backward of the CPU's flash attention; return (dq, dk, dv), as wide as the padded heads."""
    query, key, value, scale = _for_cpu(query, key, value, scale)
    gradient, out = (layouts.dense_last(layouts.padded_last(heads, query.shape[3])) for heads in (gradient, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _for_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Return (query, key, value, scale) with heads padded by zeros to one width, and with a dense last dimension.

    Padding would change the default scale, so the default for the original width is returned.
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: cpu_flash_attention takes no stride of the last dimension; all
    operands have one width (attention.cpp: _scaled_dot_product_flash_attention_cpu).
    """
    width = max(query.shape[3], value.shape[3])
    if query.shape[3] < width and scale is None:
        scale = query.shape[3] ** -0.5
    query, key, value = (layouts.dense_last(layouts.padded_last(heads, width)) for heads in (query, key, value))
    return query, key, value, scale


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
    return forward(query, key, value, attn_mask, is_causal, scale)


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
    return backward(grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)


OPERATOR_IMPLEMENTATIONS: dict[OpOverload, Callable[..., Any]] = {ATTENTION: _attention, ATTENTION_BACKWARD: _attention_backward}
for operator, implementation in OPERATOR_IMPLEMENTATIONS.items():
    implement(operator, implementation)
