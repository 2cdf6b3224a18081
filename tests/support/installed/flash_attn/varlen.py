"""Attention of heads [m h d] of several sequences, one after the other: sequence i begins at row `cu_seqlens[i]`.

Of a row that belongs to none of them the package computes nothing: here it is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn.arithmetic import HEAD, backward, forward


def _places(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys of each sequence."""
    for one, other in zip(queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
        yield slice(*one), slice(*other)


FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
    "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
    "Tensor(a8!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
    "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), schema=FORWARD)
def _forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second, most_rows, most_keys, dropout, *how = others[:10]  # the last ones, where they are no defaults
    assert q.shape[-1] % HEAD == 0 and dropout == 0.0 and first.dtype == second.dtype == torch.int32
    assert not any(item is not None and item is not False for item in others[10:])  # slopes, tables, and what is shown
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys in _places(first, second):
        assert rows.stop - rows.start <= most_rows and keys.stop - keys.start <= most_keys
        out[rows], lse[:, rows] = forward(q[rows], k[keys], v[keys], *how)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@_forward.register_fake
def _(q: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"), schema=BACKWARD)
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any) -> Tensor:
    dq, dk, dv, first, second, _, _, _, *how = others[:13]
    sums = torch.zeros_like(softmax_lse)
    for item in (dq, dk, dv):
        item.zero_()
    for rows, keys in _places(first, second):
        parts = dout[rows], q[rows], k[keys], v[keys], out[rows], softmax_lse[:, rows]
        dq[rows], dk[keys], dv[keys], sums[:, rows] = backward(*parts, *how)
    return sums


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any, **more: Any) -> Tensor:
    return torch.empty_like(softmax_lse)


class FlashAttnVarlenFunc(torch.autograd.Function):
    """As the package has it: heads are padded, gradients are made empty and written."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor, *others: Any) -> Tensor:
        most_rows, most_keys, (dropout, scale, *more), deterministic, is_grad = others
        how = (dropout, q.shape[-1] ** -0.5 if scale is None else scale, *more)
        width = q.shape[-1]
        if width % HEAD:
            q, k, v = (pad(item, [0, HEAD - width % HEAD]) for item in (q, k, v))
        names = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
        named = dict(zip(names, how, strict=True))
        ends = (first, second, most_rows, most_keys)
        made = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, *ends, **named, return_softmax=False, block_table=None)
        out, lse, _, state = made
        if is_grad:
            ctx.save_for_backward(q, k, v, out, lse, first, second, state)
            ctx.how = (most_rows, most_keys, *how, deterministic)
        return out[..., :width]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, first, second, state = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(item) for item in (q, k, v))
        width = dout.shape[-1]
        padded = pad(dout, [0, HEAD - width % HEAD]) if width % HEAD else dout
        given = (padded, q, k, v, out, lse, dq, dk, dv, first, second, *ctx.how)
        torch.ops.flash_attn._flash_attn_varlen_backward(*given, rng_state=state)
        return (*(item[..., :width] for item in (dq, dk, dv)), *[None] * 7)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    how = (dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes)
    made: Tensor = FlashAttnVarlenFunc.apply(q, k, v, *ends, how, deterministic, torch.is_grad_enabled())
    return made
