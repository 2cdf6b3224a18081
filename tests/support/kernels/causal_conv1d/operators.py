"""The package's operators (`causal_conv1d/cpp_functions.py`): they write results into given tensors, and add
to the gradients of weights. Channels of states have to be contiguous.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, Tensor(a5!) out, "
    "Tensor(a6!)? final_states_out, bool silu_activation) -> ()"
)
BACKWARD = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, Tensor? initial_states, "
    "Tensor(a6!)? dfinal_states, Tensor(a7!) dx, Tensor(a8!) dweight, Tensor(a9!)? dbias, Tensor(a10!)? dinitial_states, "
    "bool silu_activation) -> ()"
)
WRITTEN = ("dfinal_states", "dx", "dweight", "dbias", "dinitial_states")


@torch.library.custom_op("DaoAILab::_causal_conv1d_fwd_cpp", mutates_args=("out", "final_states_out"), schema=FORWARD)
def _forward(x: Tensor, weight: Tensor, *others: Any) -> None:
    bias, seq_idx, initial_states, out, final_states_out, silu_activation = others
    _check(x, weight, initial_states, final_states_out)
    made = _made(x, weight, bias, seq_idx, initial_states)
    out.copy_(F.silu(made) if silu_activation else made)
    if final_states_out is not None:
        final_states_out.copy_(_padded(x, weight, initial_states)[..., x.shape[2] :])


@torch.library.custom_op("DaoAILab::_causal_conv1d_bwd_cpp", mutates_args=WRITTEN, schema=BACKWARD)
def _backward(x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, *others: Any) -> None:
    seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu_activation = others
    _check(x, weight, initial_states, dfinal_states, dinitial_states)
    if silu_activation:
        made = _made(x, weight, bias, seq_idx, initial_states)
        share = made.sigmoid()
        dout = dout * share * (1 + made * (1 - share))
    padded, width, length = _padded(x, weight, initial_states), weight.shape[1], x.shape[2]
    rows = torch.zeros_like(padded)
    for i in range(width):
        seen = _seen(seq_idx, width - 1 - i, x)
        rows[..., i : i + length] += dout * weight[:, i, None] * seen
        dweight[:, i] += (dout * padded[..., i : i + length] * seen).sum((0, 2))
    if dfinal_states is not None:
        rows[..., length:] += dfinal_states
    dx.copy_(rows[..., width - 1 :])
    if dbias is not None:
        dbias += dout.sum((0, 2))
    if dinitial_states is not None:
        dinitial_states.copy_(rows[..., : width - 1])


def _check(x: Tensor, weight: Tensor, *states: Tensor | None) -> None:
    assert x.stride(2) == 1 or x.stride(1) == 1, "rows or channels side by side"
    assert 2 <= weight.shape[1] <= 4
    if any(state is not None for state in states):
        assert x.stride(1) == 1 and x.stride(2) > 1 and x.shape[1] % 8 == 0, "states with channels side by side only"


def _made(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, first: Tensor | None) -> Tensor:
    padded, width, length = _padded(x, weight, first), weight.shape[1], x.shape[2]
    seen = [padded[..., i : i + length] * weight[:, i, None] * _seen(seq_idx, width - 1 - i, x) for i in range(width)]
    made = torch.stack(seen).sum(0)
    return made if bias is None else made + bias[:, None]


def _padded(x: Tensor, weight: Tensor, first: Tensor | None) -> Tensor:
    return F.pad(x, [weight.shape[1] - 1, 0]) if first is None else torch.cat((first, x), 2)


def _seen(seq_idx: Tensor | None, back: int, x: Tensor) -> Tensor:
    """Whether the row so far back is of the same sequence."""
    if seq_idx is None:
        return x.new_ones(())
    before = F.pad(seq_idx, [back, 0], value=-1)[:, : seq_idx.shape[1]]
    return (before == seq_idx)[:, None].to(x.dtype)
