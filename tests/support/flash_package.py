"""A stand-in for the flash-attn package: operators as it registers them (flash_attn_interface.py, 2.8), with plain arithmetic.

Heads are [b m h d], a causal mask ends at the last row and key, windows are (keys before, keys after) with -1 for all, and the
backward writes into the gradients that it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HEAD = 8  # the package pads heads to a multiple of this


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """[b h m n]; hidden ones are minus infinity."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    rows, keys = scores.shape[2:]
    delta = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= delta <= right if right >= 0 else True
    seen &= delta >= -left if left >= 0 else True
    return scores.masked_fill(~seen, float("-inf"))


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert q.shape[-1] % HEAD == 0 and dropout_p == 0.0 and alibi_slopes is None and not return_softmax
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(-1)
    value = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhmn,bnhd->bmhd", (scores - lse[..., None]).exp(), value).contiguous()
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, m, h, _ = q.shape
    lse = q.new_empty((b, h, m), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert dq is not None and dk is not None and dv is not None and not softcap
    groups, each = k.shape[2], q.shape[2] // k.shape[2]
    key, value = (item.repeat_interleave(each, 2) for item in (k, v))
    weights = (_scores(q, k, softmax_scale, causal, window_size_left, window_size_right) - softmax_lse[..., None]).exp()
    delta = (dout * out).sum(-1).transpose(1, 2)
    inner = weights * (torch.einsum("bmhd,bnhd->bhmn", dout, value) - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhmn,bnhd->bmhd", inner, key))
    dk.copy_(torch.einsum("bhmn,bmhd->bnhd", inner, q).unflatten(2, (groups, each)).sum(3))
    dv.copy_(torch.einsum("bhmn,bmhd->bnhd", weights, dout).unflatten(2, (groups, each)).sum(3))
    return delta.contiguous()


@_backward.register_fake
def _(dout: Tensor, q: Tensor, *others: Any) -> Tensor:
    b, m, h, _ = q.shape
    return q.new_empty((b, h, m))


class FlashAttnFunc(torch.autograd.Function):
    """As the package has it: heads are padded, gradients are made empty and written."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, cap: float) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        width = q.shape[-1]
        if width % HEAD:
            q, k, v = (torch.nn.functional.pad(item, [0, HEAD - width % HEAD]) for item in (q, k, v))
        made = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, scale, causal, window[0], window[1], cap, None, False)
        out, lse, _, state = made
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.how = (0.0, scale, causal, window[0], window[1], cap, None, False)
        return out[..., :width]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(item) for item in (q, k, v))
        width = dout.shape[-1]
        padded = torch.nn.functional.pad(dout, [0, HEAD - width % HEAD]) if width % HEAD else dout
        torch.ops.flash_attn._flash_attn_backward(padded, q, k, v, out, lse, dq, dk, dv, *ctx.how, rng_state=state)
        return (*(item[..., :width] for item in (dq, dk, dv)), None, None, None, None)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    made: Tensor = FlashAttnFunc.apply(q, k, v, softmax_scale, causal, window_size, softcap)  # type: ignore[no-untyped-call]
    return made
