"""The causal-conv1d package's operators with the last rows as a state: a chunk's rows stand behind those that they see of it.

The package's own states ask for channels that lie side by side. Here the rows are joined, which holds for every layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [b d t], weight [d w]; the state [b d (w - 1)]. Also x, behind what is left of it."""
    seen = x if first is None else torch.cat((first, x), 2)
    out, width = torch.empty_like(seen), weight.shape[1] - 1
    _package()._causal_conv1d_fwd_cpp(seen, weight, bias, None, None, out, None, silu)
    last = pad(x, [width, 0]) if first is None else seen
    return (out if first is None else out[..., width:]), last[..., x.shape[2] :].clone()


def backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of x, weight, bias and the state; those of weights in the type in which the package adds them up."""
    width = weight.shape[1] - 1
    state = x.new_zeros(*x.shape[:2], width) if first is None else first
    seen, dout = torch.cat((state, x), 2), pad(dy, [width, 0])
    wide = torch.promote_types(weight.dtype, torch.float32)
    dseen, dweight = torch.empty_like(seen), torch.zeros_like(weight, dtype=wide)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    _package()._causal_conv1d_bwd_cpp(seen, weight, bias, dout, None, None, None, dseen, dweight, dbias, None, silu)
    if dlast is not None:
        dseen[..., x.shape[2] :] += dlast
    return dseen[..., width:].clone(), dweight, dbias, dseen[..., :width].clone()


def _package() -> Any:
    """The operators that the package registers when it is imported: whoever calls one has imported it."""
    return torch.ops.DaoAILab
