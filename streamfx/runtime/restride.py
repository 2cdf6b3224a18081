"""Restore the memory layout with which an opaque operator was traced, and read items of nested results.

An opaque operator has no rule, so we know nothing of it: it may read memory by strides and offsets. It runs on the full sequence,
outside loops, on operands with the strides of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def restride(value: Any, *strides: int) -> Any:
    """Return the value with these strides, copied if its strides differ; strides of dimensions of size 1 are ignored.

    Return other values than tensors, and tensors that cannot have these strides, unchanged.
    """
    if not isinstance(value, Tensor) or _has_strides(value, strides):
        return value
    without_repeats = _without_repeats(value, strides)
    if _overlap(without_repeats.shape, strides):  # overlapping elements cannot hold different values
        return value
    return (
        torch.empty_strided(without_repeats.shape, strides, dtype=without_repeats.dtype, device=without_repeats.device)
        .copy_(without_repeats)
        .expand(value.shape)
    )


def view_of_storage(base: Tensor, dtype: torch.dtype, offset: int, rank: int, *sizes_and_strides: int) -> Tensor:
    """Return a tensor of `rank` dimensions in the storage of `base`, from `offset` elements after its first one.

    `sizes_and_strides`: `rank` sizes, then `rank` strides. Autograd does not know that it is a view, because a view of a
    tensor that requires gradients would require them too.
    """
    sizes, strides = sizes_and_strides[:rank], sizes_and_strides[rank:]
    if dtype == base.dtype:
        return base.as_strided(sizes, strides, base.storage_offset() + offset).detach()
    storage_offset = base.storage_offset() * base.element_size() // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), storage_offset, sizes, strides)


def has_lazy_bit(value: Tensor) -> bool:
    """Return whether a value is a lazy conjugate or negative, so that its memory differs from its value."""
    return value.is_conj() or value.is_neg()


def resolve_conj_and_neg(value: Any) -> Any:
    """Resolve a lazy conjugate or negative, because compiled code reads memory directly."""
    return value.resolve_conj().resolve_neg() if isinstance(value, Tensor) and has_lazy_bit(value) else value


def restride_at(value: Tensor, offset: int, *strides: int) -> Tensor:
    """Return the value with these strides and this storage offset, copied if they differ; unchanged if elements overlap.

    AOTAutograd reads the offset of a result to recreate it as a view of its base.
    """
    if (_has_strides(value, strides) and value.storage_offset() == offset) or _overlap(
        _without_repeats(value, strides).shape, strides
    ):
        return value
    return restride_together([value], [offset], [strides])[0]


def restride_together(values: Sequence[Tensor], offsets: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return copies of the values that are views of one new storage, with these offsets and strides, as in the trace.

    Where they overlap, the values must be equal.
    """
    dtype, device = values[0].dtype, values[0].device
    shapes = [value.shape for value in values]
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, value_strides, strict=True)) + 1
        for shape, offset, value_strides in zip(shapes, offsets, strides, strict=True)
        if 0 not in shape
    ]
    memory = torch.empty(max(ends, default=0), dtype=dtype, device=device)
    views = [
        memory.as_strided(shape, value_strides, offset).detach()
        for shape, offset, value_strides in zip(shapes, offsets, strides, strict=True)
    ]
    for view, value, value_strides in zip(views, values, strides, strict=True):
        _without_repeats(view, value_strides).copy_(_without_repeats(value, value_strides))
    return views


RESTRIDE_FUNCTIONS = (restride, restride_at, restride_together, view_of_storage)  # they change a value's layout only


def _without_repeats(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a view of the value with one index along each dimension whose stride is 0."""
    for dim in (dim for dim, stride in enumerate(strides) if stride == 0):
        value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value


def _has_strides(value: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a value has these strides; strides of dimensions of size 1 are ignored."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return value.numel() == 0 or all(size == 1 or stride == expected for size, stride, expected in pairs)


def _overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two elements of a tensor with these sizes and strides may share an address."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def strided(value: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Apply `as_strided` with an offset relative to the value's own storage offset."""
    return value.as_strided(size, stride, value.storage_offset() + offset)


def strided_scatter(value: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Apply `as_strided_scatter` with an offset relative to the value's own storage offset."""
    return torch.as_strided_scatter(value, source, size, stride, value.storage_offset() + offset)


def reinterpreted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bits of a value as another dtype; if the element size differs, a value that is not contiguous is copied first."""
    return (value if dtype.itemsize == value.dtype.itemsize else value.contiguous()).view(dtype)


def item_at(value: Any, *path: Any) -> Any:
    """Return an item of nested results: item_at(value, 0, "x") is value[0]["x"]."""
    for step in path:
        value = value[step]
    return value


@dataclass(frozen=True)
class RestridedOperator:
    """A function that runs an operator without a rule unchanged, outside loops.

    If the operator returns views (`makes_view`), its results are cloned, so that no value of the program shares memory with one.
    """

    target: Callable[..., Any]
    makes_view: bool

    @property
    def __name__(self) -> str:
        return f"untouched_{self.target}".replace(".", "_")

    def __repr__(self) -> str:
        return str(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator; clone its results if they are views."""
        result = self.target(*args, **kwargs)
        if not self.makes_view:
            return result
        return result.clone() if isinstance(result, Tensor) else [view.clone() for view in result]
