"""The package's operators and functions (flash_attn_interface.py): heads are [b m h d], or [m h d] of several sequences.

Sequence i begins at row `cu_seqlens[i]`. The package computes nothing for a row of no sequence: here it is zero.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn.arithmetic import HEAD, backward, forward

ENDS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
SAVED = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
    "Tensor(a8!)? dv, "
)
HOW = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, "
)
OPTIONAL = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
    "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False"
)
QKV, FOUR, WRITTEN = "Tensor q, Tensor k, Tensor v, ", " -> (Tensor, Tensor, Tensor, Tensor)", ("dq", "dk", "dv")
FORWARD, BACKWARD = (
    f"({QKV}{HOW}bool return_softmax){FOUR}",
    f"({SAVED}{HOW}bool deterministic, Tensor? rng_state=None) -> Tensor",
)
VARLEN_FORWARD, VARLEN_BACKWARD = (
    f"({QKV}{ENDS}{OPTIONAL}){FOUR}",
    f"({SAVED}{ENDS}{HOW}bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor",
)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# -- heads [b m h d]


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
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    return torch.empty_like(q), q.new_empty((b, h, m), dtype=_wide(q)), q.new_empty(0), state


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=WRITTEN, schema=BACKWARD)
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any) -> Tensor:
    dq, dk, dv, _, *how = others[:9]
    made = [backward(*item, *how) for item in zip(dout, q, k, v, out, softmax_lse, strict=True)]
    *gradients, delta = (torch.stack(items) for items in zip(*made, strict=True))
    for written, gradient in zip((dq, dk, dv), gradients, strict=True):
        written.copy_(gradient)
    return delta.contiguous()


# -- heads [m h d] of several sequences


def _places(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys of each sequence."""
    for one, other in zip(queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
        yield slice(*one), slice(*other)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), schema=VARLEN_FORWARD)
def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second, most_rows, most_keys, dropout, *how = others[:10]  # the last ones, where they are no defaults
    assert q.shape[-1] % HEAD == 0 and dropout == 0.0 and first.dtype == second.dtype == torch.int32
    assert not any(item is not None and item is not False for item in others[10:]), "slopes, tables"
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q))
    for rows, keys in _places(first, second):
        assert rows.stop - rows.start <= most_rows and keys.stop - keys.start <= most_keys
        out[rows], lse[:, rows] = forward(q[rows], k[keys], v[keys], *how)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@_varlen_forward.register_fake
def _(q: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=_wide(q)), q.new_empty(0), state


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=WRITTEN, schema=VARLEN_BACKWARD)
def _varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any) -> Tensor:
    dq, dk, dv, first, second, _, _, _, *how = others[:13]
    sums = torch.zeros_like(softmax_lse)
    for item in (dq, dk, dv):
        item.zero_()
    for rows, keys in _places(first, second):
        parts = dout[rows], q[rows], k[keys], v[keys], out[rows], softmax_lse[:, rows]
        dq[rows], dk[keys], dv[keys], sums[:, rows] = backward(*parts, *how)
    return sums


@_backward.register_fake
@_varlen_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *others: Any, **more: Any) -> Tensor:
    return torch.empty_like(softmax_lse)


# -- functions


class FlashAttnFunc(torch.autograd.Function):
    """Like those of the package: heads are padded; gradients are allocated, and the operator writes them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: tuple[Any, ...], *others: Any) -> Tensor:
        deterministic, is_grad, ends = others[0], others[1], others[2:]  # Dynamo of 2.11 unpacks no starred targets
        dropout, scale, *more = how
        how, width = (dropout, q.shape[-1] ** -0.5 if scale is None else scale, *more), q.shape[-1]
        if width % HEAD:
            q, k, v = (pad(item, [0, HEAD - width % HEAD]) for item in (q, k, v))
        if ends:
            names = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
            named = {**dict(zip(names, how, strict=True)), "return_softmax": False, "block_table": None}
            out, lse, _, state = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, *ends, **named)
        else:
            out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *how, False)
        if is_grad:
            ctx.save_for_backward(q, k, v, out, lse, state, *ends[:2])
            ctx.how = (*ends[2:], *how, deterministic)
        return out[..., :width]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, state, *ends = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(item) for item in (q, k, v))
        width = dout.shape[-1]
        padded = pad(dout, [0, HEAD - width % HEAD]) if width % HEAD else dout
        given = (padded, q, k, v, out, lse, dq, dk, dv, *ends, *ctx.how)
        if ends:
            torch.ops.flash_attn._flash_attn_varlen_backward(*given, rng_state=state)
        else:
            torch.ops.flash_attn._flash_attn_backward(*given, rng_state=state)
        return (*(item[..., :width] for item in (dq, dk, dv)), *[None] * (3 + 2 * len(ends)))


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
    *ends: Any,
) -> Tensor:
    how = (dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes)
    return FlashAttnFunc.apply(q, k, v, how, deterministic, torch.is_grad_enabled(), *ends)  # type: ignore[no-any-return]


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
    how = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *how, *ends)
