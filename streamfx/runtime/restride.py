"""Values as an operator that nobody looks into has to find them: laid out in memory as traced, parts of results of any form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def laid_out(value: Any, *strides: int) -> Any:
    """The value with these strides, copied where it has others; dimensions of size one may have any."""
    if not isinstance(value, Tensor) or _has(value, strides):
        return value
    once = _without_repeats(value, strides)
    if _overlap(once.shape, strides):  # what lies in one place has one value there: no such copy can be filled
        return value
    return torch.empty_strided(once.shape, strides, dtype=once.dtype, device=once.device).copy_(once).expand(value.shape)


def part_of_memory(base: Tensor, dtype: torch.dtype, offset: int, rank: int, *where: int) -> Tensor:
    """A tensor in a value's memory, in sizes and strides (`where`), that begins so many elements behind the value.

    Autograd knows it as no view: a view of a tensor that requires gradients requires them, too, even if the code has detached it.
    """
    sizes, strides = where[:rank], where[rank:]
    if dtype == base.dtype:
        return base.as_strided(sizes, strides, base.storage_offset() + offset).detach()
    begins = base.storage_offset() * base.element_size() // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), begins, sizes, strides)


def is_marked(value: Tensor) -> bool:
    """Whether memory holds conjugates, or negatives, of a value's numbers."""
    return value.is_conj() or value.is_neg()


def unmarked(value: Any) -> Any:
    """A value whose memory holds its own numbers: compiled code reads them as they are."""
    return value.resolve_conj().resolve_neg() if isinstance(value, Tensor) and is_marked(value) else value


def placed(value: Tensor, begins: int, *strides: int) -> Tensor:
    """The value with these strides, in memory where it begins so many elements behind the beginning.

    AOTAutograd reads where a result lies, and looks there into the value that it was part of.
    """
    if (_has(value, strides) and value.storage_offset() == begins) or _overlap(_without_repeats(value, strides).shape, strides):
        return value
    return placed_together([value], [begins], [strides])[0]


def placed_together(values: Sequence[Tensor], begins: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Parts of one memory, whose numbers are those of the values; where two of them overlap, they are the same."""
    dtype, device = values[0].dtype, values[0].device
    shapes = [value.shape for value in values]
    reaches = [
        begin + sum((size - 1) * step for size, step in zip(shape, own, strict=True)) + 1
        for shape, begin, own in zip(shapes, begins, strides, strict=True)
        if 0 not in shape
    ]
    memory = torch.empty(max(reaches, default=0), dtype=dtype, device=device)
    made = [memory.as_strided(shape, own, begin).detach() for shape, begin, own in zip(shapes, begins, strides, strict=True)]
    for view, value, own in zip(made, values, strides, strict=True):
        _without_repeats(view, own).copy_(_without_repeats(value, own))
    return made


LIES_AS_TRACED = (laid_out, placed, placed_together, part_of_memory)  # what changes where a result lies, and not what it is


def _without_repeats(value: Tensor, strides: Sequence[int]) -> Tensor:
    """One of the rows that all lie in one place."""
    for dim in (dim for dim, stride in enumerate(strides) if stride == 0):
        value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value


def _has(value: Tensor, strides: Sequence[int]) -> bool:
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return value.numel() == 0 or all(size == 1 or own == wanted for size, own, wanted in pairs)


def _overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie in one place."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def strided(value: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """`as_strided`, with an offset that counts from where the value begins."""
    return value.as_strided(size, stride, value.storage_offset() + offset)


def strided_scatter(value: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """`as_strided_scatter`, with an offset that counts from where the value begins."""
    return torch.as_strided_scatter(value, source, size, stride, value.storage_offset() + offset)


def reinterpreted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a value as another type; of types of other sizes only where they lie side by side."""
    return (value if dtype.itemsize == value.dtype.itemsize else value.contiguous()).view(dtype)


def part_of(value: Any, *path: Any) -> Any:
    """A result within results."""
    for step in path:
        value = value[step]
    return value


@dataclass(frozen=True)
class RestridedOperator:
    """An operator whose name no pass knows: it runs as it was traced. What it makes lies in memory of its own."""

    target: Callable[..., Any]
    makes_view: bool

    @property
    def __name__(self) -> str:
        return f"untouched_{self.target}".replace(".", "_")

    def __repr__(self) -> str:
        return str(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.target(*args, **kwargs)
        if not self.makes_view:
            return made
        return made.clone() if isinstance(made, Tensor) else [part.clone() for part in made]
