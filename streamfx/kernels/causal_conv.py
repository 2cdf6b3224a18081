"""The causal-conv1d package's operators on a chunk of the sequence, with the last w - 1 rows before it as a state.

Sizes: b batch, d channels, t rows of the chunk, w kernel width. The chunk's rows are appended to the state. (The package has
states itself, but requires a channels-last layout for them. Concatenation works for every layout.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve x [b d t] with weight [d w]; return the output [b d t], and the state [b d (w - 1)] after x.

    `silu`: apply this activation to the output. `first`: the state before x; None if x begins the sequence.
    """
    with_state = x if first is None else torch.cat((first, x), 2)
    out, width = torch.empty_like(with_state), weight.shape[1] - 1
    _package()._causal_conv1d_fwd_cpp(with_state, weight, bias, None, None, out, None, silu)
    last = pad(x, [width, 0]) if first is None else with_state
    return (out if first is None else out[..., width:]), last[..., x.shape[2] :].clone()


def backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of x, weight, bias (None without one) and the state before x.

    `silu`: the output has this activation. `dy`: the gradient of the output; `dlast`: of the state after x, or None if it
    has none. `first`: the state before x; None if x begins the sequence. Gradients of parameters have the dtype in which
    the package accumulates.
    """
    width = weight.shape[1] - 1
    state = x.new_zeros(*x.shape[:2], width) if first is None else first
    with_state, dout = torch.cat((state, x), 2), pad(dy, [width, 0])
    accumulation_dtype = torch.promote_types(weight.dtype, torch.float32)
    dwith_state, dweight = torch.empty_like(with_state), torch.zeros_like(weight, dtype=accumulation_dtype)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=accumulation_dtype)
    _package()._causal_conv1d_bwd_cpp(with_state, weight, bias, dout, None, None, None, dwith_state, dweight, dbias, None, silu)
    if dlast is not None:
        dwith_state[..., x.shape[2] :] += dlast
    return dwith_state[..., width:].clone(), dweight, dbias, dwith_state[..., :width].clone()


def _package() -> Any:
    """Return the namespace of the operators that the package registers on import.

    The caller has already imported the package.
    """
    return torch.ops.DaoAILab
