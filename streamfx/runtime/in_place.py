"""Sums and products of large gradients, computed in place over an operand that has no further reader.

The passes write these functions into host programs and loop bodies if they have proved that nothing else reads the operand.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.torch_private import FakeTensor, retains_graph


def add_in_place(total: Tensor, part: Tensor) -> Tensor:
    """Return total + part, computed in place in `total`."""
    return total.add_(part)


def scale_in_place(value: Tensor, factor: Any) -> Tensor:
    """Return value * factor, computed in place in `value`."""
    return value.mul_(factor)


def scale_saved_in_place(saved: Tensor, factor: Any) -> Tensor:
    """Return saved * factor, computed in place in `saved`, a value that the forward graph saved for the backward graph.

    If the backward graph may run a second time (`retain_graph=True`), the saved value must stay: then return a new tensor.
    """
    if retains_graph() and not isinstance(saved, FakeTensor):
        return saved * factor
    return saved.mul_(factor)


OVERWRITES_FIRST = (add_in_place, scale_in_place, scale_saved_in_place)  # the result may alias the first operand
