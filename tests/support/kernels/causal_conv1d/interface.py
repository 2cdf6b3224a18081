"""As `causal_conv1d/causal_conv1d_interface.py` has it."""

from typing import Any

import torch
from torch import Tensor

import causal_conv1d.operators  # noqa: F401

ops: Any = torch.ops.DaoAILab


class CausalConv1dFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Any:
        seq_idx, initial_states, return_final_states, final_states_out, activation = others
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        if return_final_states and final_states_out is None:
            shape = x.shape[0], weight.shape[1] - 1, x.shape[1]
            final_states_out = torch.empty(shape, device=x.device, dtype=x.dtype).transpose(1, 2)
        ctx.activation = activation in ("silu", "swish")
        out = torch.empty_like(x)
        last = final_states_out if return_final_states else None
        how = {"seq_idx": seq_idx, "initial_states": initial_states, "silu_activation": ctx.activation}
        ops._causal_conv1d_fwd_cpp(x=x, weight=weight, bias=bias, out=out, final_states_out=last, **how)
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        ctx.return_final_states = return_final_states
        ctx.return_dinitial_states = initial_states is not None and initial_states.requires_grad
        return (out, final_states_out) if return_final_states else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Tensor) -> Any:
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        if dout.stride(2) != 1 and dout.stride(1) != 1:
            dout = dout.contiguous()
        dx, dinitial = torch.empty_like(x), None
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        dbias = None if bias is None else torch.zeros_like(bias, dtype=dweight.dtype)
        if ctx.return_dinitial_states:
            shape = x.shape[0], weight.shape[1] - 1, x.shape[1]
            dinitial = torch.empty(shape, device=x.device, dtype=x.dtype).transpose(1, 2)
        dlast = others[0] if ctx.return_final_states else None
        given = x, weight, bias, dout, seq_idx, initial_states, dlast
        ops._causal_conv1d_bwd_cpp(*given, dx, dweight, dbias, dinitial, ctx.activation)
        made = dweight.type_as(weight), None if dbias is None else dbias.type_as(weight)
        return dx, *made, None, dinitial, None, None, None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """x [b d t], weight [d w], states [b d (w - 1)]."""
    how = bias, seq_idx, initial_states, return_final_states, final_states_out, activation
    return CausalConv1dFn.apply(x, weight, *how)
