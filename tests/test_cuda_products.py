"""Products that are added to a total of another type, by stand-ins for CUDA's that hold their contracts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.cost.meter import Meter
from streamfx.kernels import cuda_products
from streamfx.kernels.cuda_products import ADD_PRODUCT
from streamfx.torch_private import FakeTensorMode

HALF = torch.bfloat16


@contextmanager
def stand_ins(takes_other_totals: bool) -> Iterator[list[str]]:
    """cuda/Blas.cpp: _mm_dtype_out_cuda, _addmm_dtype_out_cuda; which totals are taken depends on the version of PyTorch."""
    called: list[str] = []

    def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        called.append("product")
        assert left.dtype == right.dtype == HALF and out_dtype == torch.float32
        return left.float() @ right.float()

    def added(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
        called.append("added")
        assert left.dtype == right.dtype == HALF and not factors
        if out_dtype != out.dtype or out.shape != (*left.shape[:-1], right.shape[-1]):
            raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
        if total.dtype != left.dtype and not takes_other_totals:
            raise RuntimeError("self and mat2 must have the same dtype")
        return out.copy_(total + left.float() @ right.float())

    def written(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        called.append("written")
        assert left.dtype == right.dtype == HALF and out_dtype == out.dtype
        return out.copy_(left.float() @ right.float())

    library = torch.library.Library("aten", "IMPL")
    for name, function in {"mm.dtype": product, "mm.dtype_out": written, "addmm.dtype_out": added}.items():
        library.impl("baddbmm.dtype_out" if function is added else f"b{name}", function, "CPU")
        library.impl(name, function, "CPU")
    cuda_products.adds_in_place.cache_clear()
    try:
        yield called
    finally:
        library._destroy()
        cuda_products.adds_in_place.cache_clear()


@pytest.mark.parametrize("takes_other_totals", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_is_added(batch: tuple[int, ...], takes_other_totals: bool) -> None:
    """In place where it can be; the other way where it cannot, and not by trying at each product."""
    left, right = torch.randn(*batch, 5, 7).to(HALF), torch.randn(*batch, 7, 4).to(HALF)
    total = torch.full((*batch, 5, 4), torch.nan)  # the first part is written, whatever the total holds
    with stand_ins(takes_other_totals) as called:
        for is_first in (True, False, False):
            ADD_PRODUCT(total, left, right, is_first)
    torch.testing.assert_close(total, 3 * (left.float() @ right.float()))
    tried = 4 if takes_other_totals else 2
    assert called[tried:] == (["written", "added", "added"] if takes_other_totals else ["product"] * 3)


def test_it_takes_no_memory_but_flops() -> None:
    with FakeTensorMode():
        total, left, right = torch.zeros(64, 32), torch.zeros(64, 16, dtype=HALF), torch.zeros(16, 32, dtype=HALF)
        with Meter() as meter:
            ADD_PRODUCT(total, left, right, False)
    assert (meter.peak, meter.flops, meter.moved) == (0, 2 * 64 * 16 * 32, 0)
