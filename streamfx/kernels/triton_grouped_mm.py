"""Grouped matrix products as Triton kernels, which read the end of each group on the device, so the host never waits.

    add_outer    total[e] += x[rows of e]^T @ y[rows of e]      in place; a group without rows is neither read nor written
    multiply     out[rows of e] = x[rows of e] @ weight[e]      rows of no group are zero

Sizes: s rows, e groups, k and n columns. `order` [s] sorts the rows by group, `ends` [e] are the ends of the groups in
that order: group g has the rows order[ends[g - 1]] .. order[ends[g] - 1]. The kernels gather rows by index, so no sorted
copies are allocated. Each kernel is tested once per device and dtype, on small integers, so that results must match bit
by bit.

Only PyTorch's CUDA builds include Triton, so this module is imported on first use by a CUDA device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # columns of an output tile, and rows of a total
ROWS = 64  # rows of x and y per iteration
DEPTH = 64  # elements of the reduction dimension per iteration


@triton.jit  # type: ignore[untyped-decorator]
def _add_outer(  # type: ignore[no-untyped-def]
    total, x, y, order, ends, height, width,
    total_group, total_row, total_column, x_row, x_column, y_row, y_column,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add to one tile of one group's total [height width] the product of the group's rows of x and y.

    Program (tile, group). `total_group`, `total_row`, ... `y_column` are strides.
    """
    group = tl.program_id(1)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    if start < stop:
        tiles_across = tl.cdiv(width, TILE)
        # int64, because strides may be as long as the sequence
        i = ((tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)).to(tl.int64)
        j = ((tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)).to(tl.int64)
        accumulated = tl.zeros((TILE, TILE), dtype=tl.float32)
        for first in range(start, stop, ROWS):
            positions = first + tl.arange(0, ROWS)
            row = tl.load(order + positions, mask=positions < stop, other=0).to(tl.int64)
            is_left = (positions < stop)[:, None] & (i < height)[None, :]
            is_right = (positions < stop)[:, None] & (j < width)[None, :]
            left = tl.load(x + row[:, None] * x_row + i[None, :] * x_column, mask=is_left, other=0.0)
            right = tl.load(y + row[:, None] * y_row + j[None, :] * y_column, mask=is_right, other=0.0)
            accumulated = tl.dot(tl.trans(left), right, accumulated)
        pointers = total + group.to(tl.int64) * total_group + i[:, None] * total_row + j[None, :] * total_column
        is_inside = (i < height)[:, None] & (j < width)[None, :]
        previous = tl.load(pointers, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(pointers, (previous + accumulated).to(total.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    out, x, weight, order, ends, groups, depth, width,
    out_row, out_column, x_row, x_column, weight_group, weight_row, weight_column,
    GROUPS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one output tile: `ROWS` rows of one group, by `TILE` columns.

    Program (row tile, column tile). Row tiles are numbered group by group, so the group of a tile is searched. `depth` is the
    number of columns of x; `out_row`, ... `weight_column` are strides.
    """
    tile = tl.program_id(0)
    indices = tl.arange(0, GROUPS)
    stops = tl.load(ends + indices, mask=indices < groups, other=0)
    starts = tl.load(ends + indices - 1, mask=(indices > 0) & (indices < groups), other=0)
    tiles = tl.cdiv(tl.maximum(stops - starts, 0), ROWS)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    if group < groups:
        is_group = indices == group
        first = tl.sum(tl.where(is_group, starts, 0)) + (tile - tl.sum(tl.where(indices < group, tiles, 0))) * ROWS
        positions = first + tl.arange(0, ROWS)
        is_row = positions < tl.sum(tl.where(is_group, stops, 0))
        row = tl.load(order + positions, mask=is_row, other=0).to(tl.int64)
        j = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
        accumulated = tl.zeros((ROWS, TILE), dtype=tl.float32)
        group_weight = weight + group.to(tl.int64) * weight_group
        for first_k in range(0, depth, DEPTH):
            k = (first_k + tl.arange(0, DEPTH)).to(tl.int64)
            is_left = is_row[:, None] & (k < depth)[None, :]
            is_right = (k < depth)[:, None] & (j < width)[None, :]
            left = tl.load(x + row[:, None] * x_row + k[None, :] * x_column, mask=is_left, other=0.0)
            right = tl.load(group_weight + k[:, None] * weight_row + j[None, :] * weight_column, mask=is_right, other=0.0)
            accumulated = tl.dot(left, right, accumulated)
        pointers = out + row[:, None] * out_row + j[None, :] * out_column
        tl.store(pointers, accumulated.to(out.dtype.element_ty), mask=is_row[:, None] & (j < width)[None, :])


def add_outer(total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
    """Add to total [e k n], for each group, the outer products of its rows of x [s k] and y [s n], in place."""
    groups, height, width = total.shape
    tiles = triton.cdiv(height, TILE) * triton.cdiv(width, TILE)
    if not tiles or not groups or not len(order):
        return
    strides = *total.stride(), *x.stride(), *y.stride()
    with torch.cuda.device_of(total):
        _add_outer[tiles, groups](
            total, x, y, order, ends, height, width, *strides, TILE=TILE, ROWS=ROWS, num_warps=8, num_stages=3
        )  # fmt: skip


def multiply(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return [s n]: each row of x [s k] times its group's weight [k n] of weight [e k n]; zero for rows of no group."""
    groups, depth, width = weight.shape
    out = x.new_zeros(len(order), width)
    if not out.numel() or not groups:
        return out
    grid = triton.cdiv(len(order), ROWS) + groups, triton.cdiv(width, TILE)
    strides = *out.stride(), *x.stride(), *weight.stride()
    with torch.cuda.device_of(x):
        _multiply[grid](
            out, x, weight, order, ends, groups, depth, width, *strides,
            GROUPS=triton.next_power_of_2(groups), TILE=TILE, ROWS=ROWS, DEPTH=DEPTH, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


# -- self-tests

GROUP_SIZES = (0, 1, ROWS + 6, 0, 5, 0)  # rows of each group; UNGROUPED_ROWS more rows belong to no group
UNGROUPED_ROWS = 2
HEIGHT, WIDTH = TILE + 8, 24


def add_outer_is_correct(device: torch.device, dtype: torch.dtype, total_type: torch.dtype) -> bool:
    """Return whether sums are right: for groups with no row, one row, and many rows; rows of no group must not contribute."""
    order, ends, rows_of_groups = _rows()
    x, y, expected = _integers(len(order), HEIGHT), _integers(len(order), WIDTH), _integers(len(GROUP_SIZES), HEIGHT, WIDTH)
    x[order[-1]] = y[order[-2]] = torch.nan
    actual = expected.to(device, total_type, copy=True)
    add_outer(actual, x.to(device, dtype), y.to(device, dtype), order.to(device), ends.to(device))
    for total, rows in zip(expected, rows_of_groups, strict=True):
        total += x[rows].t() @ y[rows]
    return torch.equal(actual.cpu().double(), expected)


def multiply_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products are right, for contiguous and transposed weights; weights of empty groups must not be read."""
    order, ends, rows_of_groups = _rows()
    x, weight = _integers(len(order), HEIGHT), _integers(len(GROUP_SIZES), HEIGHT, WIDTH)
    expected = torch.zeros(len(order), WIDTH).double()
    x[order[-1]] = weight[0] = weight[3] = torch.nan
    for matrix, rows in zip(weight, rows_of_groups, strict=True):
        expected[rows] = x[rows] @ matrix
    contiguous = weight.to(device, dtype)
    transposed = contiguous.transpose(1, 2).contiguous().transpose(1, 2)
    results = [multiply(x.to(device, dtype), layout, order.to(device), ends.to(device)) for layout in (contiguous, transposed)]
    return all(torch.equal(actual.cpu().double(), expected) for actual in results)


def _rows() -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return test data: a random row order, the end of each group in it (sizes: `GROUP_SIZES`), and the rows of each group."""
    order = torch.randperm(sum(GROUP_SIZES) + UNGROUPED_ROWS, generator=torch.Generator().manual_seed(0))
    return order, torch.tensor(GROUP_SIZES).cumsum(0).to(torch.int32), order[: sum(GROUP_SIZES)].split(list(GROUP_SIZES))


def _integers(*shape: int) -> Tensor:
    """Return a float64 tensor of -1, 0 and 1, so that every dtype holds the sums of their products exactly."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(sum(shape))).double()
