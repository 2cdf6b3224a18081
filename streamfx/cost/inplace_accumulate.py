"""Bytes that products move to accumulate into a total in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.products import ADD_ARRANGED_OUTER, ADD_PRODUCT
from streamfx.kernels import grouped_mm

ACCUMULATING_OPERATORS = (torch.ops.aten.addmm.out, torch.ops.aten.baddbmm.out, ADD_PRODUCT, ADD_ARRANGED_OUTER)


def find_total(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the total to which an operator adds a product; None for other operators, and if it overwrites the total."""
    is_first = func is ADD_PRODUCT and args[-1]
    return kwargs.get("out", args[0]) if func in ACCUMULATING_OPERATORS and not is_first else None


def bytes_of_total(func: Any, args: Sequence[Any], total: Tensor) -> int:
    """Return the bytes of the total that an operator reads and writes.

    If a grouped product adds group by group, only groups with rows count: at most as many as there are rows.
    """
    if func is not ADD_ARRANGED_OUTER:
        return 2 * total.nbytes
    _, x, y, order, ends = args
    if grouped_mm.has_kernel(x, y) and not grouped_mm.adds_by_group(total, x, y):
        addend_bytes = total.numel() * x.element_size()  # written, filled with zeros for empty groups, and added
        return 2 * total.nbytes + 4 * addend_bytes
    num_groups = max(len(ends), 1)
    return 2 * total.nbytes * min(len(order), num_groups) // num_groups
