"""Matrix products in which each row selects one of several weights by index: the experts of a mixture.

    grouped_mm(x [s k], weight [e k n], group [s]) -> [s n]           row i is x[i] @ weight[group[i]]
    grouped_outer(x [s k], y [s n], group [s], e) -> [e k n]          for each group the sum of outer products of its rows

A row whose group index is e or more belongs to no group: its product is zero. Group indices are not negative. In a
chunk, the rows are sorted by group once (`arrange`) for all products that share their groups.

The sizes of groups are known only on the device. On a CPU, and on CUDA devices without a better kernel, a loop runs
over the groups; on CUDA the host then waits for the device. PyTorch's grouped product does not wait, but it allocates
a gradient for all groups, which is then added to the total. `triton_grouped_mm.py` accumulates in place, only into the
groups that have rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.products import ADD_ARRANGED_OUTER, ARRANGE, ARRANGED_MM, ARRANGED_OUTER, GROUPED_MM, GROUPED_OUTER
from streamfx.kernels import accumulate, kernel_selftest
from streamfx.kernels.device_kinds import device_kind
from streamfx.torch_private import FakeTensor

ALIGNMENT = 16  # bytes: row alignment that the device's grouped product requires
# Capability of devices whose kernel multiplies all groups in one call; on others the host reads their sizes and loops
GROUPED_CAPABILITY = (9, 0)  # cuda/GroupedBlas.cpp: _grouped_mm_cuda
HALF_DTYPES = (torch.bfloat16, torch.float16)
HALF_CAPABILITY = (8, 0)  # capability of devices whose tensor cores Triton supports for both half dtypes


def arrange(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the row order [s] sorted by group, and the end [groups] of each group in that order, for group indices [s].

        group [1, 0, 1], groups 3 -> order [1, 0, 2], ends [1, 3, 3]

    A group ends where the next index begins. That index is searched in int64 or float64, because the group's own
    dtype may not hold it.
    """
    ordered, order = torch.sort(group.to(torch.float64 if group.is_floating_point() else torch.int64), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(1, groups + 1, device=group.device, dtype=ordered.dtype))
    return order, ends.to(torch.int32)


def arranged_mm(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return [s n]: each row of x [s k] times its group's weight [k n] of weight [e k n]; zero for rows of no group.

    `order` and `ends` are the results of `arrange`. The rows of the result are in the order of x.
    """
    if not has_kernel(x, weight) and multiplies_by_group(x, weight):
        return _triton().multiply(x, weight, order, ends)  # type: ignore[no-any-return]
    rows = x[order]
    if has_kernel(rows, weight):
        products = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
        products = products.masked_fill_((torch.arange(len(order), device=x.device) >= ends[-1]).unsqueeze(1), 0)
    else:
        products = rows.new_zeros(len(order), weight.shape[2])
        for index, (start, stop) in enumerate(_group_ranges(ends)):
            if start < stop:
                torch.mm(rows[start:stop], weight[index], out=products[start:stop])
    return torch.empty_like(products).index_copy_(0, order, products)


def arranged_outer(x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return [e k n]: for each group, the sum of the outer products of its rows of x [s k] and y [s n]; zeros without rows.

    `order` and `ends` are the results of `arrange`.
    """
    if has_kernel(x, y):
        result = torch.nn.functional.grouped_mm(x[order].t(), y[order], offs=ends)
        is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return result.masked_fill_(is_empty[:, None, None], 0)
    total = x.new_zeros(len(ends), x.shape[1], y.shape[1])
    add_arranged_outer(total, x, y, order, ends)
    return total


def add_arranged_outer(total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
    """total [e k n] += arranged_outer(x, y, order, ends), in place, by the best kernel that the device has."""
    if adds_by_group(total, x, y):
        _triton().add_outer(total, x, y, order, ends)
        return
    if has_kernel(x, y):
        total.add_(arranged_outer(x, y, order, ends))
        return
    x, y = x[order], y[order]
    for index, (start, stop) in enumerate(_group_ranges(ends)):
        if start < stop:
            accumulate.add_product(total[index], x[start:stop].t(), y[start:stop], is_first=False)


def _group_ranges(ends: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each group's rows in sorted order; on CUDA the host waits for the device.

    ends [1, 3, 3] -> [(0, 1), (1, 3), (3, 3)]
    """
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether PyTorch's grouped product runs these operands: all groups in one call, without their sizes on the host.

    It needs bfloat16, aligned rows, and a device with `GROUPED_CAPABILITY`.
    """
    kind = device_kind(x.device)
    if kind.type != "cuda" or kind.capability < GROUPED_CAPABILITY or x.dtype != torch.bfloat16 or weight.dtype != x.dtype:
        return False
    is_dense = sorted(weight.stride()[-2:]) in ([1, weight.shape[-1]], [1, weight.shape[-2]])
    is_aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in (x.shape[-1], *weight.shape[-2:]))
    return is_dense and is_aligned


def adds_by_group(total: Tensor, x: Tensor, y: Tensor) -> bool:
    """Return whether a Triton kernel adds outer products of x and y to `total` in place, only to groups that have rows.

    The host does not need to know the groups' sizes. If the device is only planned for, the kernel is assumed to pass its
    self-test.
    """
    if total.dtype not in (torch.float32, *HALF_DTYPES) or not _has_half_products(x, y):
        return False
    return _is_simulated(x) or _add_outer_is_correct(x.device, x.dtype, total.dtype)


def multiplies_by_group(x: Tensor, weight: Tensor) -> bool:
    """Return whether a Triton kernel multiplies rows by their group's weight, without the groups' sizes on the host.

    If the device is only planned for, the kernel is assumed to pass its self-test.
    """
    return _has_half_products(x, weight) and (_is_simulated(x) or _multiply_is_correct(x.device, x.dtype))


def _has_half_products(x: Tensor, weight: Tensor) -> bool:
    """Return whether tensor cores multiply these operands: both of one half dtype, on a new enough device."""
    kind = device_kind(x.device)
    return kind.type == "cuda" and kind.capability >= HALF_CAPABILITY and x.dtype in HALF_DTYPES and weight.dtype == x.dtype


def _is_simulated(x: Tensor) -> bool:
    """Return whether the device is only planned for: tensors are fake, or on the CPU in place of a CUDA device."""
    return isinstance(x, FakeTensor) or x.device.type != "cuda"


@kernel_selftest.selftest("sums of experts' outer products")
def _add_outer_is_correct(device: torch.device, dtype: torch.dtype, total_type: torch.dtype) -> bool:
    """Return whether the device's Triton kernel accumulates correctly, by a test on small integers."""
    return _triton().add_outer_is_correct(device, dtype, total_type)  # type: ignore[no-any-return]


@kernel_selftest.selftest("products with experts' weights")
def _multiply_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device's Triton kernel multiplies correctly, by a test on small integers."""
    return _triton().multiply_is_correct(device, dtype)  # type: ignore[no-any-return]


def _triton() -> ModuleType:
    """Import the Triton kernels on first use: only CUDA builds have Triton."""
    from streamfx.kernels import triton_grouped_mm

    return triton_grouped_mm


def _grouped_mm(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    return arranged_mm(x, weight, *arrange(group, weight.shape[0]))


def _grouped_outer(x: Tensor, y: Tensor, group: Tensor, groups: int) -> Tensor:
    return arranged_outer(x, y, *arrange(group, groups))


implement(GROUPED_MM, _grouped_mm)
implement(GROUPED_OUTER, _grouped_outer)
implement(ARRANGE, arrange)
implement(ARRANGED_MM, arranged_mm)
implement(ARRANGED_OUTER, arranged_outer)
implement(ADD_ARRANGED_OUTER, add_arranged_outer)


def add_outer(total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
    """Add outer products of rows to total [e k n], in place: `add_arranged_outer`, called by loop bodies.

    It is a Python function, not an operator, because Inductor would reject an operator that changes the total.
    """
    ADD_ARRANGED_OUTER(total, x, y, order, ends)
