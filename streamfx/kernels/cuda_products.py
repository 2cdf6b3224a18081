"""Matrix products of half-precision operands that accumulate into a float32 total on CUDA, in place if PyTorch can.

A separate float32 product that is then added needs as much memory as the total, and three times the memory traffic.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.products import ADD_PRODUCT

aten = torch.ops.aten


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Implement `streamfx::add_product_`: total [.. m n] += left [.. m k] @ right [.. k n]; = instead of += if `is_first`."""
    if adds_in_place(left.device, left.dtype):
        _add_in_place(total, left, right, is_first)
        return
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    product = multiply(left, right, out_dtype=total.dtype)
    (total.copy_ if is_first else total.add_)(product)


def _add_in_place(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Add a product of matrices, or of batches of them, to a total of another dtype; overwrite the total if `is_first`.

    The matmul kernel itself adds, without a temporary product. It raises an error if it does not support the dtypes.
    """
    is_matrix = left.dim() == 2
    if is_first:
        (aten.mm if is_matrix else aten.bmm).dtype_out(left, right, total.dtype, out=total)
    else:
        (aten.addmm if is_matrix else aten.baddbmm).dtype_out(total, left, right, total.dtype, out=total)


implement(ADD_PRODUCT, _add_product)


@lru_cache
def adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether mm and bmm accumulate factors of this dtype into a float32 total.

    Tested once per device, on matrices and on batches of them: some builds of PyTorch refuse the total's dtype
    (cuda/Blas.cpp: _addmm_dtype_out_cuda).
    """
    size = 16
    factor = torch.ones(size, size, dtype=dtype, device=device)
    total = torch.full((size, size), torch.nan, device=device)
    try:
        for batch_index in ((), (None,)):  # as a matrix, and as a batch of one matrix
            for is_first in (True, False):  # the sum of two products of ones is 2 * size everywhere
                _add_in_place(total[batch_index], factor[batch_index], factor[batch_index], is_first)
    except (AttributeError, RuntimeError):  # the overload does not exist, or rejects the dtypes
        return False
    return bool((total == 2 * size).all())
