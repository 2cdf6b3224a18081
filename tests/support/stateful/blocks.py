"""Attention with a decay, whose state is a matrix. It takes rows in blocks: what a row leaves depends on its place in one, states
at the beginning of each block are saved for the backward, and a flag asks for the last state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import streamfx

BLOCK = 4


@torch.library.custom_op("streamfx_tests::blocks", mutates_args=())
def blocks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, first: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """S_t = exp(g_t / (1 + t % 4)) S_(t-1) + k_t v_t;  y_t = scale q_t S_t. q, k, v [b t h w], g [b t h], the state [b h w w]."""
    states = _states(k, v, g, first)
    y = torch.stack([scale * torch.einsum("bhw,bhwu->bhu", q[:, t], states[t + 1]) for t in range(q.shape[1])], 1)
    return y, states[-1].clone() if output_final_state else q.new_empty(0), torch.stack(states[:-1:BLOCK], 1)


@torch.library.custom_op("streamfx_tests::blocks_backward", mutates_args=())
def blocks_backward(
    dy: Tensor, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, saved: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    states: list[Tensor] = []
    for begin in range(0, q.shape[1], BLOCK):  # only what was saved tells the states
        own = slice(begin, begin + BLOCK)
        states += _states(k[:, own], v[:, own], g[:, own], saved[:, begin // BLOCK])[:-1]
    carried = torch.zeros_like(saved[:, 0]) if dlast is None else dlast
    rows = []
    for t in reversed(range(q.shape[1])):
        decay = _decay(g, t)
        after = decay * states[t] + k[:, t, :, :, None] * v[:, t, :, None]
        carried = carried + scale * q[:, t, :, :, None] * dy[:, t, :, None]
        dk, dv = torch.einsum("bhwu,bhu->bhw", carried, v[:, t]), torch.einsum("bhwu,bhw->bhu", carried, k[:, t])
        dg = (carried * decay * states[t]).sum((-1, -2)) / (1 + t % BLOCK)
        rows.append((scale * torch.einsum("bhu,bhwu->bhw", dy[:, t], after), dk, dv, dg))
        carried = carried * decay
    return (*(torch.stack(items[::-1], 1) for items in zip(*rows, strict=True)), carried.clone())  # type: ignore[return-value]


def _states(k: Tensor, v: Tensor, g: Tensor, first: Tensor | None) -> list[Tensor]:
    states = [k.new_zeros(k.shape[0], k.shape[2], k.shape[3], k.shape[3]) if first is None else first]
    for t in range(k.shape[1]):
        states.append(_decay(g, t) * states[-1] + k[:, t, :, :, None] * v[:, t, :, None])
    return states


def _decay(g: Tensor, t: int) -> Tensor:
    return (g[:, t] / (1 + t % BLOCK)).exp()[..., None, None]


@blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, first: Any, output_final_state: bool) -> tuple[Tensor, ...]:
    state = q.new_empty(q.shape[0], q.shape[2], q.shape[3], q.shape[3])
    saved = q.new_empty(q.shape[0], (q.shape[1] + BLOCK - 1) // BLOCK, *state.shape[1:])
    return torch.empty_like(q), state if output_final_state else q.new_empty(0), saved


@blocks_backward.register_fake
def _(dy: Tensor, dlast: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, saved: Tensor, scale: float) -> tuple[Tensor, ...]:
    return (*map(torch.empty_like, (q, k, v, g)), torch.empty_like(saved[:, 0]))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, g, ctx.scale, first, ctx.has_last = inputs
    ctx.has_first = first is not None
    ctx.save_for_backward(q, k, v, g, output[2])


def _backward(ctx: Any, dy: Tensor, dlast: Tensor, dsaved: Any) -> Any:
    made = blocks_backward(dy, dlast if ctx.has_last else None, *ctx.saved_tensors, ctx.scale)
    return (*made[:4], None, made[4] if ctx.has_first else None, None)


blocks.register_autograd(_backward, setup_context=_setup)

streamfx.register_recurrence(
    blocks,
    blocks_backward,
    rows=dict.fromkeys("qkvg", 1),
    results=(1, None, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("q", "k", "v", "g", "first"),
    saved={"saved": 2},
    always={"output_final_state": True},
    block=BLOCK,
)
