"""Packed documents on CUDA: one variable-length call of flash attention for all documents of a chunk.

A chunk contains the end of one document, complete documents, and the beginning of another. Each has some rows and the
keys that these rows see; the causal mask, or the window, is aligned at the bottom right. A `Varlen` has the ends of documents:
document i has the rows `rows[i] .. rows[i + 1]` and the keys `keys[i] .. keys[i + 1]`.

PyTorch's sources under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp: mha_varlen_fwd and
mha_varlen_bwd take the rows of all sequences as [m h d], and the indices at which each sequence begins and ends. Each
device's kernels are tested once on known values. If they raise an error or differ, documents are split into tiles
(`mask_tiles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.kernels import cuda_attention, flash_window, kernel_selftest, layouts
from streamfx.kernels.attention_call import AttentionCall, BottomRightCausal, Causal, Gradients, Result, Varlen
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
Operands: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]"  # gradient, query, key, value, out, log-sum-exp
PADDING_ROWS = 128  # rows: mha_varlen_bwd: dq_accum has this many extra rows for each document
MIN_DOCUMENT_LIMIT = 16  # a backward call may always have this many documents, even if they have few rows

# Test cases: a single row, more keys than rows, more rows than one kernel tile (flash_fwd_launch_template.h:
# kBlockM). The first rows of each document see few keys, so that a single extra key would be noticed.
ROWS, KEYS = (0, 3, 4, 150, 155), (0, 5, 6, 153, 158)
TEST_CASES = (Varlen(ROWS, KEYS), Varlen(ROWS, KEYS, left=3), Varlen(ROWS, KEYS, causal=False))


def forward(call: AttentionCall) -> Result:
    """Return the output and the log-sum-exp.

    Packed documents (`Varlen`) take the variable-length kernel, one batch item at a time, without the bias; any other mask
    goes to `flash_window.forward`.
    """
    causal = _simplify(call.causal)
    if not isinstance(causal, Varlen):
        return flash_window.forward(call._replace(causal=causal))
    query, key, value, _, _, scale = cuda_attention.to_kernel_layout(call)
    results = [_flash(*batch_item, causal, scale) for batch_item in zip(query, key, value, strict=True)]
    out, lse = (_stack(per_item) for per_item in zip(*results, strict=True))
    return out, lse


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv).

    Packed documents (`Varlen`) take the variable-length kernels, one batch item at a time, and ignore the bias; any other
    mask goes to `flash_window.backward`.
    """
    causal = _simplify(call.causal)
    if not isinstance(causal, Varlen):
        return flash_window.backward(call._replace(causal=causal), gradient, out, lse)
    query, key, value, _, _, scale = cuda_attention.to_kernel_layout(call)
    gradient, out = cuda_attention.results_to_kernel_layout(gradient, out, query)
    results = [_gradients(batch_item, causal, scale) for batch_item in zip(gradient, query, key, value, out, lse, strict=True)]
    dq, dk, dv = (_stack(per_item) for per_item in zip(*results, strict=True))
    return dq, dk, dv


def supports(call: AttentionCall) -> bool:
    """Return whether one call computes all documents of these operands: the kernel supports them and passes its test."""
    query = call.query
    if not cuda_attention.flash_supports(call):
        return False
    width = query.shape[3] + -query.shape[3] % layouts.ALIGNMENT
    return isinstance(query, FakeTensor) or separates_documents(query.device, query.dtype, width)


@kernel_selftest.selftest("flash attention of documents")
def separates_documents(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether the device's flash attention separates documents at this head width, by a test on a few rows."""
    sizes = kernel_selftest.AttentionSizes(device, dtype, (2, ROWS[-1]), (1, KEYS[-1]), width)
    return all(kernel_selftest.matches_reference(forward, backward, documents, sizes) for documents in TEST_CASES)


def _simplify(causal: Causal) -> Causal:
    """Replace a single document by a bottom-right mask, or by no mask, over all rows; return any other mask unchanged."""
    if not isinstance(causal, Varlen) or len(causal.rows) > 2:
        return causal
    return BottomRightCausal(causal.left) if causal.causal else False


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack the results of batch items along a new batch dimension; a single one is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tuple(tensors))


# -- one batch item: heads [h m d]


def _gradients(operands: Operands, documents: Varlen, scale: float | None) -> Gradients:
    """Return (dq, dk, dv) of one batch item, from as many kernel calls as the memory limit requires.

    Each call has some consecutive documents, and so a slice of the rows and of the keys; results are concatenated.
    """
    gradient, query, key, value, out, lse = operands
    results = []
    for first, stop in _calls(query, key, documents):
        rows, keys = slice(documents.rows[first], documents.rows[stop]), slice(documents.keys[first], documents.keys[stop])
        call_operands = gradient[:, rows], query[:, rows], key[:, keys], value[:, keys], out[:, rows], lse[:, rows]
        results.append(_call_gradients(call_operands, _documents_slice(documents, first, stop), scale))
    dq, dk, dv = (per_call[0] if len(per_call) == 1 else torch.cat(per_call, 1) for per_call in zip(*results, strict=True))
    return dq, dk, dv


def _calls(query: Tensor, key: Tensor, documents: Varlen) -> Iterator[tuple[int, int]]:
    """Yield the indices [first, stop) of the documents of each call, for operands [h m d] and [g n d] of one batch item.

    A call has no more keys than `cuda_attention` allows, and no more documents than keep the workspace for padding
    rows small compared with that for the rows.
    """
    max_documents = max(MIN_DOCUMENT_LIMIT, query.shape[1] // PADDING_ROWS)
    max_keys = cuda_attention.keys_at_once(query[None], key[None])
    first, num_documents = 0, len(documents.rows) - 1
    for stop in range(1, num_documents + 1):
        if stop == num_documents or stop - first == max_documents or documents.keys[stop + 1] - documents.keys[first] > max_keys:
            yield first, stop
            first = stop


def _documents_slice(documents: Varlen, first: int, stop: int) -> Varlen:
    """Return documents [first, stop), with rows and keys counted from the first of them."""
    rows, keys = (tuple(end - ends[first] for end in ends[first : stop + 1]) for ends in (documents.rows, documents.keys))
    return Varlen(rows, keys, documents.causal, documents.left)


def _call_gradients(operands: Operands, documents: Varlen, scale: float | None) -> Sequence[Tensor]:
    """Return (dq, dk, dv) of the documents of one call; a single document takes the kernels of `flash_window`."""
    causal = _simplify(documents)
    if isinstance(causal, Varlen):
        return _flash_backward(operands, causal, scale)
    gradient, query, key, value, out, lse = (operand.unsqueeze(0) for operand in operands)
    results = flash_window.backward(AttentionCall(query, key, value, None, causal, scale), gradient, out, lse)
    return [gradient.squeeze(0) for gradient in results]


# -- the kernels


def _flash(query: Tensor, key: Tensor, value: Tensor, documents: Varlen, scale: float | None) -> Result:
    """Run the variable-length kernel on one batch item; return the output [h m e] and the log-sum-exp [h m]."""
    by_rows = (operand.transpose(0, 1) for operand in (query, key, value))
    ends = _ends(documents, query.device)
    out, lse, *_ = aten._flash_attention_forward(*by_rows, *ends, 0.0, False, False, scale=scale, **_window(documents))
    return out.transpose(0, 1), lse


def _flash_backward(operands: Operands, documents: Varlen, scale: float | None) -> Gradients:
    """Run the backward of the variable-length kernel on one batch item; return (dq, dk, dv)."""
    gradient, query, key, value, out, lse = operands
    out, lse = layouts.align(out), lse.contiguous()  # set_params_fprop reads its pointer and ignores its strides
    by_rows = (operand.transpose(0, 1) for operand in (gradient, query, key, value, out))
    ends, states = _ends(documents, query.device), cuda_attention.no_dropout(query.device)
    results = aten._flash_attention_backward(*by_rows, lse, *ends, 0.0, False, *states, scale=scale, **_window(documents))
    dq, dk, dv = (result.transpose(0, 1) for result in results)
    return dq, dk, dv


def _ends(documents: Varlen, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return four arguments of the kernel: the ends of rows and of keys as tensors on the device, and the longest of each.

    The host does not wait for the copy to the device.
    """
    ends = torch.tensor((documents.rows, documents.keys), dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_initialized())
    rows, keys = ends.to(device, non_blocking=True).unbind()
    longest_rows, longest_keys = (
        max(stop - start for start, stop in pairwise(ends_by_document)) for ends_by_document in (documents.rows, documents.keys)
    )
    return rows, keys, longest_rows, longest_keys


def _window(documents: Varlen) -> dict[str, Any]:
    """Return the kernel's keyword arguments for the mask inside each document; -1 means unbounded.

    mha_varlen_fwd: no left bound and a right bound of 0 is a causal mask; the `is_causal` flag is ignored if all
    documents have one row.
    """
    left = documents.left if documents.causal else None
    return {"window_size_left": -1 if left is None else left, "window_size_right": 0 if documents.causal else -1}
