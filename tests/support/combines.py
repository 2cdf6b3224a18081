"""Functions that combine two rows, as passes make them of traced ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from streamfx.runtime.associative import register_combine_graph
from streamfx.torch_private.vmapped import traced_on_rows


def number_of(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor, given: int = 1) -> int:
    """Return the number of a function, traced on such rows and shared operands."""
    return register_combine_graph(traced_on_rows(function, list(rows)).graph, given)


def affine(by: Tensor, plus: Tensor, by_next: Tensor, plus_next: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return by * by_next, by_next * plus + plus_next * weight
