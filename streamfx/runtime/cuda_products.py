"""Products of half types added to a float32 total on CUDA: in place, in one product, where PyTorch's build can.

A product that is made in float32 and then added takes as much memory as the total, and moves it three times more.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
IN_PLACE = {2: aten.addmm.dtype_out, 3: aten.baddbmm.dtype_out}  # by dimensions of the factors
MADE = {2: aten.mm.dtype, 3: aten.bmm.dtype}

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()")


@torch.library.impl(_library, "add_product_", "CompositeExplicitAutograd")
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [.. m n] += left [.. m k] @ right [.. k n]."""
    if adds_in_place(left.device, left.dtype):
        IN_PLACE[left.dim()](total, left, right, total.dtype, out=total)
    else:
        total.add_(MADE[left.dim()](left, right, total.dtype))


@torch.library.register_fake("streamfx::add_product_", lib=_library)  # type: ignore[untyped-decorator]
def _fake_add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Takes no memory."""


@lru_cache
def adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products add to a total of another type than their factors', in matrices and in batches of them.

    Tried once per device: builds of PyTorch that do not refuse the total's type (cuda/Blas.cpp: _addmm_dtype_out_cuda).
    """
    size = 16
    factor = torch.ones(size, size, dtype=dtype, device=device)
    total = torch.ones(size, size, device=device)
    try:
        IN_PLACE[2](total, factor, factor, total.dtype, out=total)
        IN_PLACE[3](total[None], factor[None], factor[None], total.dtype, out=total[None])
    except RuntimeError:
        return False
    return bool((total == 2 * size + 1).all())


@register_flop_formula(torch.ops.streamfx.add_product_)
def _flops(total: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], **_: Any) -> int:
    return 2 * math.prod(left) * right[-1]


ADD_PRODUCT = torch.ops.streamfx.add_product_.default
