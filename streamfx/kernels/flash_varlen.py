"""Packed documents on CUDA: one call of flash attention for all that a chunk has of them, instead of one for each.

The chunk has the end of one document, whole ones, and the beginning of another. Each has some rows and the keys that these see; a
causal mask, or a window, ends at the last of both.

The place in PyTorch's sources, under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp: mha_varlen_fwd and
mha_varlen_bwd take rows of all sequences as [m h d], and where each begins and ends. No result of theirs was seen by us, so a
device's kernels are tried once on numbers that are known, and where they refuse or differ documents are taken apart
(`mask_tiles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.kernels import cuda_attention, flash_window, kernel_selftest, layouts
from streamfx.kernels.plain_attention import BottomRightCausal, Causal, Varlen
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
Items: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]"  # gradient, query, key, value, out, log-sum-exp
MARGIN = 128  # rows: mha_varlen_bwd: dq_accum has so many more for each document
FEW = 16  # documents: so many are one call of the backward, however few rows they have

# What is tried: a single row, more keys than rows, more rows than kernels take at once (flash_fwd_launch_template.h: kBlockM).
# The first rows of each document see few keys, so that one more would be seen.
ROWS, KEYS = (0, 3, 4, 150, 155), (0, 5, 6, 153, 158)
TRIED = (Varlen(ROWS, KEYS), Varlen(ROWS, KEYS, left=3), Varlen(ROWS, KEYS, causal=False))


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m], as `cuda_windows.forward` gives them, of documents too."""
    causal = _simplest(causal)
    if not isinstance(causal, Varlen):
        return flash_window.forward(query, key, value, bias, causal, scale)
    query, key, value, scale = cuda_attention.readable(query, key, value, scale)
    made = [_flash(*own, causal, scale) for own in zip(query, key, value, strict=True)]
    out, lse = (_stacked(parts) for parts in zip(*made, strict=True))
    return out, lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    causal = _simplest(causal)
    if not isinstance(causal, Varlen):
        return flash_window.backward(gradient, query, key, value, out, lse, bias, causal, scale)
    query, key, value, scale = cuda_attention.readable(query, key, value, scale)
    gradient, out = cuda_attention.readable_results(gradient, out, query)
    made = [_gradients(own, causal, scale) for own in zip(gradient, query, key, value, out, lse, strict=True)]
    dq, dk, dv = (_stacked(parts) for parts in zip(*made, strict=True))
    return dq, dk, dv


def takes(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether documents of these are one call."""
    if not cuda_attention.takes_flash(query, value, scale):
        return False
    width = query.shape[3] + -query.shape[3] % layouts.ALIGNED
    return isinstance(query, FakeTensor) or keeps_apart(query.device, query.dtype, width)


@kernel_selftest.isolated("flash attention of documents")
def keeps_apart(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the device's flash attention keeps documents apart, with heads of a width: seen on a few rows."""
    return all(_is_right(seen, device, dtype, width) for seen in TRIED)


def _is_right(seen: Varlen, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    return kernel_selftest.agree(
        lambda q, k, v: forward(q, k, v, None, seen, None),
        lambda g, q, k, v, out, lse: backward(g, q, k, v, out, lse, None, seen, None),
        seen,
        kernel_selftest.AttentionSizes(device, dtype, (2, ROWS[-1]), (1, KEYS[-1]), width),
    )


def _simplest(causal: Causal) -> Causal:
    """One document is a window, or none, of all rows."""
    if not isinstance(causal, Varlen) or len(causal.rows) > 2:
        return causal
    return BottomRightCausal(causal.left) if causal.causal else False


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(tuple(parts))


# -- one sequence: heads [h m d]


def _gradients(items: Items, seen: Varlen, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """In as many calls as memory asks for."""
    gradient, query, key, value, out, lse = items
    made = []
    for first, stop in _calls(query, key, seen):
        rows, keys = (slice(ends[first], ends[stop]) for ends in (seen.rows, seen.keys))
        own = gradient[:, rows], query[:, rows], key[:, keys], value[:, keys], out[:, rows], lse[:, rows]
        made.append(_of_call(own, _part(seen, first, stop), scale))
    dq, dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*made, strict=True))
    return dq, dk, dv


def _calls(query: Tensor, key: Tensor, seen: Varlen) -> Iterator[tuple[int, int]]:
    """The documents [first, stop) of each: what they take is at most about what the rows take, or that of a few documents; and no
    more keys than `cuda_attention` takes at once."""
    most, size = max(FEW, query.shape[1] // MARGIN), cuda_attention.keys_at_once(query[None], key[None])
    first, count = 0, len(seen.rows) - 1
    for stop in range(1, count + 1):
        if stop == count or stop - first == most or seen.keys[stop + 1] - seen.keys[first] > size:
            yield first, stop
            first = stop


def _part(seen: Varlen, first: int, stop: int) -> Varlen:
    """Some of the documents, counted from their own rows and keys on."""
    rows, keys = (tuple(end - ends[first] for end in ends[first : stop + 1]) for ends in (seen.rows, seen.keys))
    return Varlen(rows, keys, seen.causal, seen.left)


def _of_call(items: Items, seen: Varlen, scale: float | None) -> Sequence[Tensor]:
    causal = _simplest(seen)
    if isinstance(causal, Varlen):
        return _flash_backward(items, causal, scale)
    gradient, query, key, value, out, lse = (item.unsqueeze(0) for item in items)
    made = flash_window.backward(gradient, query, key, value, out, lse, None, causal, scale)
    return [item.squeeze(0) for item in made]


# -- the kernels


def _flash(query: Tensor, key: Tensor, value: Tensor, seen: Varlen, scale: float | None) -> tuple[Tensor, Tensor]:
    by_rows = (item.transpose(0, 1) for item in (query, key, value))
    ends = _ends(seen, query.device)
    out, lse, *_ = aten._flash_attention_forward(*by_rows, *ends, 0.0, False, False, scale=scale, **_window(seen))
    return out.transpose(0, 1), lse


def _flash_backward(items: Items, seen: Varlen, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out, lse = items
    out, lse = layouts.aligned(out), lse.contiguous()  # set_params_fprop takes its pointer and none of its strides
    by_rows = (item.transpose(0, 1) for item in (gradient, query, key, value, out))
    ends, states = _ends(seen, query.device), cuda_attention.no_dropout(query.device)
    made = aten._flash_attention_backward(*by_rows, lse, *ends, 0.0, False, *states, scale=scale, **_window(seen))
    dq, dk, dv = (item.transpose(0, 1) for item in made)
    return dq, dk, dv


def _ends(seen: Varlen, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Where documents begin and end, and how long they are at most. The host does not wait for the copy."""
    ends = torch.tensor((seen.rows, seen.keys), dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_initialized())
    rows, keys = ends.to(device, non_blocking=True).unbind()
    longest, most = (max(stop - start for start, stop in pairwise(own)) for own in (seen.rows, seen.keys))
    return rows, keys, longest, most


def _window(seen: Varlen) -> dict[str, Any]:
    """mha_varlen_fwd: no left end and a right one of 0 is a causal mask; a flag is lost where all documents have one row."""
    left = seen.left if seen.causal else None
    return {"window_size_left": -1 if left is None else left, "window_size_right": 0 if seen.causal else -1}
