"""Convert scores indexed by distance to scores indexed by key: each row shifts one column further left.

    relative_shift(x [.. t w ..], first, columns) -> y [.. t columns ..]        y[i, j] = x[i, first - i + j]
    relative_shift_backward(dy, first, width) -> dx [.. t width ..]             its adjoint: zeros where y reads nothing

Rows and columns are the dimensions `dim` and `dim + 1`. If an index exceeds the width, y reads the first columns of
the next row. A slice of rows and columns of y is the same operator with another `first`.
"""

from __future__ import annotations

from torch import Tensor

from streamfx.dialect.declare import declare


def with_columns(x: Tensor, dim: int, columns: int) -> list[int]:
    """Return the shape of x with `columns` as the size of dimension `dim + 1`."""
    return [*x.shape[: dim + 1], columns, *x.shape[dim + 2 :]]


def _like(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return an uninitialized result of either operator: x with another number of columns."""
    return x.new_empty(with_columns(x, dim, columns))


RELATIVE_SHIFT = declare("relative_shift(Tensor x, int dim, SymInt first, SymInt columns) -> Tensor", _like)
RELATIVE_SHIFT_BACKWARD = declare(
    "relative_shift_backward(Tensor gradient, int dim, SymInt first, SymInt width) -> Tensor", _like
)
