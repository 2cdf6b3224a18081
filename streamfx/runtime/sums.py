"""Sums over chunks, added in place: no second gradient of a weight is ever alive."""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.runtime.cuda_products import ADD_PRODUCT
from streamfx.runtime.device_kinds import kind_of

aten = torch.ops.aten


def add(total: Tensor, part: Tensor) -> None:
    """total += part, of any types. Complex numbers are added part by part: with a factor, even of one, their parts would mix."""
    if total.is_complex():
        total, part = torch.view_as_real(total), torch.view_as_real(part.to(total.dtype).resolve_conj())
    total.add_(part)


def add_mm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [m n] += left [m k] @ right [k n], in one product and rounded once, to the total's type."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif kind_of(left.device).type == "cuda":
        ADD_PRODUCT(total, left, right)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), out=total)


def add_bmm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [b m n] += left [b m k] @ right [b k n]."""
    if total.dtype == left.dtype:
        torch.baddbmm(total, left, right, out=total)
    elif kind_of(left.device).type == "cuda":
        ADD_PRODUCT(total, left, right)
    else:
        torch.baddbmm(total, left.to(total.dtype), right.to(total.dtype), out=total)


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
