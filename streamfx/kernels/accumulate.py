"""Sums over chunks, added in place: no second gradient of a weight is ever alive.

The chunk that runs first (`is_first`) writes its part, whatever the total holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.kernels.cuda_products import ADD_PRODUCT
from streamfx.kernels.device_kinds import kind_of

aten = torch.ops.aten


def add(total: Tensor, part: Tensor, is_first: bool) -> None:
    """total += part, of any types. Complex numbers are added part by part: with a factor, even of one, their parts would mix."""
    if total.is_complex():
        total, part = torch.view_as_real(total), torch.view_as_real(part.to(total.dtype).resolve_conj())
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


def add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """total [.. m n] += left [.. m k] @ right [.. k n], in one product and rounded once, to the total's type."""
    if total.dtype != left.dtype and kind_of(left.device).type == "cuda":
        ADD_PRODUCT(total, left, right, is_first)
        return
    left, right = left.to(total.dtype), right.to(total.dtype)
    is_matrix = left.dim() == 2
    if is_first:
        (torch.mm if is_matrix else torch.bmm)(left, right, out=total)
    else:
        (torch.addmm if is_matrix else torch.baddbmm)(total, left, right, out=total)


def add_looked_up(total: Tensor, gradient: Tensor, index: Tensor, padding: int) -> None:
    """The gradient of a look-up: rows of `gradient` [..., d] are added to rows `index` [...] of total [v d].

    Rows that look up `padding` get no gradient.
    """
    rows, width = index.reshape(-1), gradient.shape[-1]
    parts = gradient.reshape(-1, width).to(total.dtype)
    if padding >= 0:
        parts = parts.masked_fill((rows == padding).unsqueeze(-1), 0)
    total.index_add_(0, rows, parts)


def put(total: Tensor, dim: int, index: Tensor, rows: Tensor) -> None:
    """Rows are written into places of a total that no other chunk writes."""
    total.scatter_(dim, index, rows.to(total.dtype))
