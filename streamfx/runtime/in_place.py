"""Sums and products of large gradients, written over an operand that nobody will read again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.torch_private import FakeTensor, keeps_graph


def added(total: Tensor, part: Tensor) -> Tensor:
    """total + part, in the place of `total`."""
    return total.add_(part)


def scaled(value: Tensor, factor: Any) -> Tensor:
    """value * factor, in the place of `value`."""
    return value.mul_(factor)


def scaled_once(saved: Tensor, factor: Any) -> Tensor:
    """The same for a value that the forward half has saved: only where no second run of the backward half will ask for it."""
    if keeps_graph() and not isinstance(saved, FakeTensor):
        return saved * factor
    return saved.mul_(factor)


OVER_FIRST = (added, scaled, scaled_once)  # what they return lies where their first operand does, or in memory of its own
