"""The device's fused attention kernels behind one operator: square causal attention, or all keys and a bias.

All of them compute the result and the log-sum-exp of each query, and take both back in the backward; they differ in names,
in what they need of a bias, and in whether they know grouped queries. `streamfx::attention` is what the passes write for
any of them (`passes/fused.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Result: TypeAlias = "tuple[Tensor, Tensor]"
Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor]"

FLASH_TYPES = {torch.float16, torch.bfloat16}
FLASH_WIDTH = 256  # the widest head of the flash kernels
BIAS_ALIGNMENT = 16  # elements: rows of a bias start at multiples of this
LSE_ALIGNMENT = 32  # rows: the memory-efficient kernels read a log-sum-exp in blocks of so many


class Kernels(NamedTuple):
    """One device's: (q, k, v, bias, causal, scale), and the same with (gradient, ..., out, lse, ...)."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float | None], Result]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float | None], Gradients]


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Result:
    """Result [b h m e] and log-sum-exp [b h m] of queries [b h m d] over keys [b g n d] and values [b g n e]."""
    if not query.shape[2] or not key.shape[2]:  # kernels divide by both
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.promote_types(query.dtype, torch.float32))
        return query.new_zeros((*query.shape[:3], value.shape[3])), lse
    return KERNELS[query.device.type].forward(query, key, value, bias, causal, scale)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Gradients:
    """Gradients of queries, keys and values."""
    if not query.shape[2] or not key.shape[2]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    return KERNELS[query.device.type].backward(gradient, query, key, value, out, lse, bias, causal, scale)


# -- CPU


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Result:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


# -- CUDA: flash attention where it can, memory-efficient attention for single precision and biases


def _is_flash(query: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    width = query.shape[-1]
    return bias is None and query.dtype in FLASH_TYPES and width == value.shape[-1] <= FLASH_WIDTH and width % 8 == 0


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Result:
    if _is_flash(query, value, bias):
        made = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return made[0], made[1]
    key, value = (_for_all_heads(item, query) for item in (key, value))
    bias = _aligned(bias, query, key)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : query.shape[2]]


def _cuda_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Gradients:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    if _is_flash(query, value, bias):
        seed, offset = (torch.zeros(size, dtype=torch.uint64, device=query.device) for size in ((2,), ()))  # of no dropout
        ends = (None, None, query.shape[2], key.shape[2])
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse.contiguous(), *ends, 0.0, causal, seed, offset, scale=scale
        )
    groups = key.shape[1]
    key, value = (_for_all_heads(item, query) for item in (key, value))
    bias, lse = _aligned(bias, query, key), _padded(lse)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, bias, out, lse, seed, offset, 0.0, wanted, causal, scale=scale
    )
    return dq, _for_groups(dk, groups), _for_groups(dv, groups)


def _for_all_heads(heads: Tensor, query: Tensor) -> Tensor:
    """Keys or values [b g n d], repeated for the h queries' heads."""
    return heads if heads.shape[1] == query.shape[1] else heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def _for_groups(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def _aligned(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A bias as the memory-efficient kernels ask for it: of all heads, its rows beginning at aligned addresses."""
    if bias is None:
        return None
    keys = key.shape[2]
    bias = bias.to(query.dtype).expand(*bias.shape[:-1], keys)
    bias = F.pad(bias, (0, -keys % BIAS_ALIGNMENT))[..., :keys] if keys % BIAS_ALIGNMENT else bias.contiguous()
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def _padded(lse: Tensor) -> Tensor:
    """A log-sum-exp with the rows that the memory-efficient kernels read beyond the last: they weigh nothing."""
    return F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf")).contiguous()


KERNELS = {
    "cpu": Kernels(_cpu_forward, _cpu_backward),
    "cuda": Kernels(_cuda_forward, _cuda_backward),
}


# -- the operator that the passes write


_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, bool is_causal=False, float? scale=None) "
    "-> (Tensor output, Tensor logsumexp)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, *, "
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Result:
    return forward(query, key, value, attn_mask, is_causal, scale)


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
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
    return backward(grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)


@torch.library.register_fake("streamfx::attention", lib=_library)  # type: ignore[untyped-decorator]
def _fake_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Result:
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.transpose(1, 2)
    out = rows.new_empty(*rows.shape[:-1], value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=precision)


@torch.library.register_fake("streamfx::attention_backward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_attention_backward(
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
    dq, dk, dv = (torch.empty_like(item.transpose(1, 2)).transpose(1, 2) for item in (query, key, value))
    return dq, dk, dv


ATTENTION = torch.ops.streamfx.attention.default
ATTENTION_BACKWARD = torch.ops.streamfx.attention_backward.default
