"""Rows without their padding, and back (bert_padding.py, 2.8)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    all_masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (mask.sum(dim=-1, dtype=torch.int32) for mask in (all_masks, attention_mask))
    indices = torch.nonzero(all_masks.flatten(), as_tuple=False).flatten()
    ends = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, ends, lengths.max().item(), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    output = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return output.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
