"""Rows without their padding, and back (bert_padding.py, 2.8)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class IndexFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = source.shape[0]
        flat = source.flatten(1)
        return torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1])).reshape(-1, *source.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        flat = gradient.flatten(1)
        made = flat.new_zeros(ctx.rows, flat.shape[1])
        made.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return made.reshape(ctx.rows, *gradient.shape[1:]), None


class IndexPutFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(indices)
        output = values.new_zeros(rows, *values.shape[1:])
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    all_masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (mask.sum(dim=-1, dtype=torch.int32) for mask in (all_masks, attention_mask))
    indices = torch.nonzero(all_masks.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    ends = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return IndexFirstAxis.apply(hidden_states.flatten(0, 1), indices), indices, ends, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    output: Tensor = IndexPutFirstAxis.apply(hidden_states, indices, batch * seqlen)
    return output.unflatten(0, (batch, seqlen))
