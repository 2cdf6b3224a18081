"""Attention with a decay, whose state is a matrix. It takes rows in blocks: a row's state depends on its position in one, states
at the beginning of each block are saved for the backward, and a flag requests the last state.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import streamfx

BLOCK = 4


def attended(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the rows of one block, and the state after them."""
    rows = []
    for t in range(q.shape[1]):
        state = (g[:, t] / (1 + t)).exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append(scale * torch.einsum("bhw,bhwu->bhu", q[:, t], state))
    return torch.stack(rows, 1), state.clone()


@torch.library.custom_op("streamfx_tests::blocks", mutates_args=())
def blocks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, first: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """S_t = exp(g_t / (1 + t % 4)) S_(t-1) + k_t v_t;  y_t = scale q_t S_t. q, k, v [b t h w], g [b t h], the state [b h w w]."""
    states, rows = [q.new_zeros(q.shape[0], q.shape[2], q.shape[3], q.shape[3]) if first is None else first], []
    for begin in range(0, q.shape[1], BLOCK):
        own = slice(begin, begin + BLOCK)
        y, last = attended(q[:, own], k[:, own], v[:, own], g[:, own], states[-1], scale)
        rows.append(y)
        states.append(last)
    return torch.cat(rows, 1), states[-1] if output_final_state else q.new_empty(0), torch.stack(states[:-1], 1)


@torch.library.custom_op("streamfx_tests::blocks_backward", mutates_args=())
def blocks_backward(
    dy: Tensor, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, saved: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The states are known only from the saved values."""
    carried, rows = torch.zeros_like(saved[:, 0]) if dlast is None else dlast, []
    for *own, after, state in reversed(
        [*zip(*(item.split(BLOCK, 1) for item in (q, k, v, g, dy)), saved.unbind(1), strict=True)]
    ):
        _, pull = torch.func.vjp(partial(attended, scale=scale), *own, state)
        *made, carried = pull((after, carried))
        rows.append(made)
    return (*(torch.cat(items[::-1], 1) for items in zip(*rows, strict=True)), carried.clone())  # type: ignore[return-value]


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
