"""Matrix products that torch lacks: into a total in place, and with one of several weights per row.

    add_product_(total [.. m n], left [.. m k], right [.. k n], is_first)       total += left @ right; = instead of += if is_first
    grouped_mm(x [s k], weight [e k n], group [s]) -> [s n]           row i is x[i] @ weight[group[i]]
    grouped_outer(x [s k], y [s n], group [s], e) -> [e k n]          for each group the sum of outer products of its rows

Groups are the experts of a mixture. A row whose group index is e or more belongs to no group: its product is zero. Group
indices are not negative. In a chunk, `arrange(group, e)` sorts the rows by group once for all products that share their
groups, and returns (the order [s] of the rows, the end [e] of each group in that order), which the operators `arranged_*` take
in place of `group`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.declare import declare

# -- results on fake tensors


def _no_result(*_: Any) -> None:
    """Allocate nothing: the operator writes into its first operand."""


def _fake_product(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Return uninitialized products [s n] of x [s k] and weight [e k n]."""
    return x.new_empty(x.shape[0], weight.shape[2])


def _fake_grouped_outer(x: Tensor, y: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return uninitialized sums [e k n] of outer products."""
    return x.new_empty(groups, x.shape[1], y.shape[1])


def _fake_arranged_outer(x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return uninitialized sums [e k n] of outer products; e is the length of `ends`."""
    return _fake_grouped_outer(x, y, order, ends.shape[0])


def _fake_arrange(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return an uninitialized order [s] of rows, and an uninitialized end [e] of each group."""
    return group.new_empty(group.shape, dtype=torch.int64), group.new_empty((groups,), dtype=torch.int32)


# -- FLOPs; arguments are shapes


def _add_product_flops(total: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Count a product of [.. m k] and [.. k n]."""
    return 2 * math.prod(left) * right[-1]


def _product_flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Count s products of a row [k] with a matrix [k n]; as many as s outer products of rows [k] and [n]."""
    return 2 * x[0] * x[1] * weight[-1]


def _added_outer_flops(total: Any, *operands: Any, **__: Any) -> int:
    """Count s outer products, which are added to `total`."""
    return _product_flops(*operands)


ADD_PRODUCT = declare(
    "add_product_(Tensor(a!) total, Tensor left, Tensor right, bool is_first) -> ()", _no_result, _add_product_flops
)
GROUPED_MM = declare("grouped_mm(Tensor x, Tensor weight, Tensor group) -> Tensor", _fake_product, _product_flops)
GROUPED_OUTER = declare(
    "grouped_outer(Tensor x, Tensor y, Tensor group, SymInt groups) -> Tensor", _fake_grouped_outer, _product_flops
)
ARRANGE = declare("arrange(Tensor group, SymInt groups) -> (Tensor order, Tensor ends)", _fake_arrange)
ARRANGED_MM = declare("arranged_mm(Tensor x, Tensor weight, Tensor order, Tensor ends) -> Tensor", _fake_product, _product_flops)
ARRANGED_OUTER = declare(
    "arranged_outer(Tensor x, Tensor y, Tensor order, Tensor ends) -> Tensor", _fake_arranged_outer, _product_flops
)
ADD_ARRANGED_OUTER = declare(
    "add_arranged_outer(Tensor(a!) total, Tensor x, Tensor y, Tensor order, Tensor ends) -> ()", _no_result, _added_outer_flops
)
