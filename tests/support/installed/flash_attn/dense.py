"""Attention of heads [b m h d]: operators and functions as flash_attn_interface.py has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn.arithmetic import HEAD, backward, forward

FORWARD = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
    "Tensor(a8!)? dv, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), schema=FORWARD)
def _forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *how, alibi_slopes, return_softmax = others
    assert q.shape[-1] % HEAD == 0 and dropout_p == 0.0 and alibi_slopes is None and not return_softmax
    made = [forward(*item, *how) for item in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(items) for items in zip(*made, strict=True))
    return out.contiguous(), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, m, h, _ = q.shape
    lse = q.new_empty((b, h, m), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), schema=BACKWARD)
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any) -> Tensor:
    dq, dk, dv, _, *how = others[:9]
    made = [backward(*item, *how) for item in zip(dout, q, k, v, out, softmax_lse, strict=True)]
    *gradients, delta = (torch.stack(items) for items in zip(*made, strict=True))
    for written, gradient in zip((dq, dk, dv), gradients, strict=True):
        written.copy_(gradient)
    return delta.contiguous()


@_backward.register_fake
def _(dout: Tensor, q: Tensor, *others: Any) -> Tensor:
    b, m, h, _ = q.shape
    return q.new_empty((b, h, m), dtype=torch.promote_types(q.dtype, torch.float32))


class FlashAttnFunc(torch.autograd.Function):
    """As the package has it: heads are padded, gradients are made empty and written."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: tuple[Any, ...], deterministic: bool, is_grad: bool) -> Tensor:
        dropout, scale, *others = how
        how = (dropout, q.shape[-1] ** -0.5 if scale is None else scale, *others)
        width = q.shape[-1]
        if width % HEAD:
            q, k, v = (pad(item, [0, HEAD - width % HEAD]) for item in (q, k, v))
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *how, False)
        if is_grad:
            ctx.save_for_backward(q, k, v, out, lse, state)
            ctx.how = (*how, deterministic)
        return out[..., :width]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(item) for item in (q, k, v))
        width = dout.shape[-1]
        padded = pad(dout, [0, HEAD - width % HEAD]) if width % HEAD else dout
        torch.ops.flash_attn._flash_attn_backward(padded, q, k, v, out, lse, dq, dk, dv, *ctx.how, rng_state=state)
        return (*(item[..., :width] for item in (dq, dk, dv)), None, None, None)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    how = (dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes)
    return FlashAttnFunc.apply(q, k, v, how, deterministic, torch.is_grad_enabled())  # type: ignore[no-any-return]
