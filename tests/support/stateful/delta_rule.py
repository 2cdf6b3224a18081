"""flash-linear-attention's delta rule, where the package is not installed: its operator's contract, with plain arithmetic."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

IS_STAND_IN = importlib.util.find_spec("fla") is None
FEW = 16  # heads as wide as they are here


def ruled(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """h_t = exp(gk_t) h_(t-1) + b_t (a_t h_(t-1)) + k_t v_t;  y_t = scale q_t h_t"""
    rows = []
    for t in range(q.shape[1]):
        seen = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = gk[:, t, :, :, None].exp() * state + outer(b[:, t], seen) + outer(k[:, t], v[:, t])
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state.clone()


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def started(q: Tensor, v: Tensor, h0: Tensor) -> Tensor:
    return h0 if h0.numel() else q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rows, h0, _, scale, has_initial_state, output_final_state, is_varlen, _ = given
    assert not is_varlen and has_initial_state == (h0.numel() > 0), "a state goes with its flag"
    o, last = ruled(*(*rows, started(rows[0], rows[2], h0), scale))
    nothing = o.new_empty(0, dtype=torch.int32)
    return o, last if output_final_state else o.new_empty(0), nothing.view(0, 2), nothing.clone()


def _backward(do: Tensor, dht: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *rows, h0, _, chunk_indices, chunk_offsets, scale, has_initial_state, _, _ = given
    assert chunk_indices.shape == (0, 2) and chunk_offsets.shape == (0,)
    (_, last), pull = torch.func.vjp(partial(ruled, scale=scale), *rows, started(rows[0], rows[2], h0))
    *made, dh0 = pull((do, dht if dht.numel() else torch.zeros_like(last)))
    return (*made, dh0 if has_initial_state else h0.new_empty(0))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if others[-3] else (0,)
    return v.new_empty(v.shape), q.new_empty(shape), *(q.new_empty(size, dtype=torch.int32) for size in ((0, 2), (0,)))


def _backward_fake(do: Tensor, dht: Tensor, *others: Any) -> tuple[Tensor, ...]:
    h0, has_initial_state = others[6], others[11]
    return (*(item.new_empty(item.shape) for item in others[:6]), h0.new_empty(h0.shape if has_initial_state else (0,)))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.has_initial, asks, ctx.is_varlen, ctx.chunk_size = inputs
    ctx.mark_non_differentiable(*output[2:], *([] if asks else [output[1]]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _gradients(ctx: Any, do: Tensor, dht: Tensor | None, *_: Any) -> Any:
    last = do.new_empty(0) if dht is None else dht
    how = ctx.scale, ctx.has_initial, ctx.is_varlen, ctx.chunk_size
    made = torch.ops.fla.chunk_dplr_delta_rule_bwd(do, last, *ctx.saved_tensors, *how)
    return (*made[:6], made[6] if ctx.has_initial else None, *(None for _ in range(6)))


ROWS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor gk, Tensor h0, Tensor cu_seqlens"
HOW, SIZES = "float scale, bool has_initial_state", "bool is_varlen, SymInt chunk_size"
if IS_STAND_IN:
    schemas = (
        f"({ROWS}, {HOW}, bool output_final_state, {SIZES}) -> (Tensor, Tensor, Tensor, Tensor)",
        f"(Tensor do, Tensor dht, {ROWS}, Tensor chunk_indices, Tensor chunk_offsets, {HOW}, {SIZES})"
        f" -> ({', '.join(['Tensor'] * 7)})",
    )
    names = "fla::chunk_dplr_delta_rule_fwd", "fla::chunk_dplr_delta_rule_bwd"
    own = torch.library.custom_op(names[0], _forward, mutates_args=(), schema=schemas[0])
    own.register_fake(_forward_fake)
    own.register_autograd(_gradients, setup_context=_setup)
    torch.library.custom_op(names[1], _backward, mutates_args=(), schema=schemas[1]).register_fake(_backward_fake)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, first: Tensor | None, asks: bool) -> Any:
    """As the package calls it."""
    state = q.new_empty(0) if first is None else first
    lengths = torch.empty(0, dtype=torch.int64)
    return torch.ops.fla.chunk_dplr_delta_rule_fwd(
        q, k, v, a, b, gk, state, lengths, 0.5, first is not None, asks, False, FEW // 4
    )[:2]
