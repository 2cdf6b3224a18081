"""Sizes that change from chunk to chunk: what two chunks of different length tell about those of any length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """Lists of numbers of which each is slope * n + offset, n being the number at position `at`; None: a single list."""

    slopes: Numbers
    offsets: Numbers
    at: int | None

    def member(self, numbers: Numbers) -> int | None:
        """The n of a list; None if the list is no member, and 0 for that of a family without n."""
        n = 0 if self.at is None else numbers[self.at]
        same = all(slope * n + offset == own for slope, offset, own in zip(self.slopes, self.offsets, numbers, strict=True))
        return n if same else None


def single(numbers: Numbers) -> Family:
    return Family((0,) * len(numbers), numbers, None)


def family_of(first: Numbers, second: Numbers) -> Family | None:
    """The family that both lists belong to.

    >>> family_of((2, 128, 256), (2, 116, 232))
    Family(slopes=(0, 1, 2), offsets=(2, 0, 0), at=1)
    >>> family_of((128, 7), (116, 4)), family_of((1, 8), (2, 4))
    (Family(slopes=(4, 1), offsets=(100, 0), at=1), None)
    """
    steps = [a - b for a, b in zip(first, second, strict=True)]
    varying = [i for i, step in enumerate(steps) if step]
    at = min(varying, key=lambda i: abs(steps[i]), default=None)
    if at is None:
        return single(first)
    if any(steps[i] % steps[at] for i in varying) or min(first[at], second[at]) < 2:
        return None
    slopes = tuple(step // steps[at] for step in steps)
    return Family(slopes, tuple(a - slope * first[at] for a, slope in zip(first, slopes, strict=True)), at)


def layout_of(inputs: Sequence[Any]) -> tuple[Hashable, Numbers]:
    """What has to be equal for code to be shared, and the numbers of sizes and strides, which may belong to a family.

    The stride of a dimension of size 1 says nothing; it is taken as if the tensor were contiguous there.
    """
    kinds: list[Hashable] = []
    numbers: list[int] = []
    for value in inputs:
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.device, value.dim()))
            numbers += value.shape
            numbers += strides_of(value)
        else:
            kinds.append("number")
            numbers.append(value)
    return tuple(kinds), tuple(numbers)


def packed(value: Any) -> Any:
    """A chunk's rows of several sequences put side by side: their layout then does not depend on how long these are."""
    if not isinstance(value, Tensor) or value.dim() < 2 + value.is_floating_point() or value.is_contiguous():
        return value
    return value.contiguous() if value.stride(0) and value[0].is_contiguous() else value


def strides_of(value: Tensor) -> list[int]:
    strides = list(value.stride())
    following = 1
    for dim in range(value.dim() - 1, -1, -1):
        if value.shape[dim] == 1:
            strides[dim] = following
        following = strides[dim] * value.shape[dim]
    return strides
