"""Sums and products of large gradients, computed in place over an operand that has no further reader."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.torch_private import FakeTensor, keeps_graph


def added(total: Tensor, part: Tensor) -> Tensor:
    """Return total + part, computed in place in `total`."""
    return total.add_(part)


def scaled(value: Tensor, factor: Any) -> Tensor:
    """Return value * factor, computed in place in `value`."""
    return value.mul_(factor)


def scaled_once(saved: Tensor, factor: Any) -> Tensor:
    """Return saved * factor, in place unless the backward graph may run a second time and read the saved value."""
    if keeps_graph() and not isinstance(saved, FakeTensor):
        return saved * factor
    return saved.mul_(factor)


OVER_FIRST = (added, scaled, scaled_once)  # the result aliases the first operand, or is in new memory
