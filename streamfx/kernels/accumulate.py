"""Accumulate over the chunks of a sequence in place, so that a second gradient of a weight is never alive.

Loops over chunks call these functions. `total` is the buffer for a sum over chunks, for example the gradient of a weight. The
first chunk that runs (`is_first`) overwrites the total, so the buffer may be uninitialized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.products import ADD_PRODUCT
from streamfx.kernels import cuda_products  # noqa: F401  (implements `ADD_PRODUCT`)
from streamfx.kernels.device_kinds import device_kind

aten = torch.ops.aten


def add_part(total: Tensor, part: Tensor, is_first: bool) -> None:
    """Add a chunk's contribution `part` to `total`, in place; if `is_first`, overwrite `total`. The dtypes may differ.

    Complex tensors are added as pairs of real numbers, because an addition with a scale factor, even of one, would mix
    real and imaginary parts: inf * (1 + 0i) has a nan.
    """
    if total.is_complex():
        total, part = torch.view_as_real(total), torch.view_as_real(part.to(total.dtype).resolve_conj())
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


def add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """total [.. m n] += left [.. m k] @ right [.. k n], in place; if `is_first`, overwrite the total instead.

    It is one matrix product, rounded once, to the dtype of the total. On CUDA the factors may have a half dtype and the
    total float32 (`cuda_products.py`); elsewhere the factors are converted.
    """
    if total.dtype != left.dtype and device_kind(left.device).type == "cuda":
        ADD_PRODUCT(total, left, right, is_first)
        return
    left, right = left.to(total.dtype), right.to(total.dtype)
    is_matrix = left.dim() == 2
    if is_first:
        (torch.mm if is_matrix else torch.bmm)(left, right, out=total)
    else:
        (torch.addmm if is_matrix else torch.baddbmm)(total, left, right, out=total)


def add_embedding_gradient(total: Tensor, gradient: Tensor, index: Tensor, padding: int) -> None:
    """Add the gradient of an embedding: rows of `gradient` [..., d] to the rows `index` [...] of total [v d], in place.

    Tokens whose index equals `padding` contribute nothing; -1: no such index.
    """
    indices, width = index.reshape(-1), gradient.shape[-1]
    row_gradients = gradient.reshape(-1, width).to(total.dtype)
    if padding >= 0:
        row_gradients = row_gradients.masked_fill((indices == padding).unsqueeze(-1), 0)
    total.index_add_(0, indices, row_gradients)


def scatter_rows(total: Tensor, dim: int, index: Tensor, rows: Tensor) -> None:
    """Write `rows` at the positions `index` along `dim` of `total`, in place; no other chunk writes these positions."""
    total.scatter_(dim, index, rows.to(total.dtype))
