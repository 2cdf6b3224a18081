"""Align the dimensions of a gradient with those of its *cotangent scale*.

A backward pass may run before the gradient of the loss is known: it computes gradients for a gradient of ones, and multiplies
them by the true one, the scale, later. The scale is a number, or has a number per sequence. Dimensions are tuples of axis
factors (b, t, ...), as in `[(b t) d]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import Shape


@dataclass(frozen=True)
class Alignment:
    """A gradient reshaped so that each dimension of its scale is a separate dimension: [(b t) d] and [b] give [b t d].

    `dims`: all dimensions in order, grouped by the gradient's dimensions: ((b, t), (d)). `scale_dims`: for each, the
    index of the equal dimension of the scale, or None: (0, None, None).
    """

    dims: tuple[tuple[Dim, ...], ...]
    scale_dims: tuple[int | None, ...]

    @property
    def shape(self) -> Shape:
        """All dimensions of the reshaped gradient, in order."""
        return tuple(dim for dims in self.dims for dim in dims)

    @property
    def is_split(self) -> bool:
        """Whether the gradient must be reshaped: one of its dimensions becomes several."""
        return any(len(dims) > 1 for dims in self.dims)


def align(scale: Shape, gradient: Shape) -> Alignment | None:
    """Find how to reshape a gradient so that each dimension of its cotangent scale is one of its dimensions.

    Both are given by their dimensions, tuples of axis factors, `()` of size one: align([b], [(b t) d]) is [b t d] with scale
    dimensions (0, None, None). None unless the scale's dimensions occur once and in order, and a view can split the gradient.
    """
    dims_by_factor = {dim[0]: (i, dim) for i, dim in enumerate(scale) if dim}
    scale_factors = {factor for dim in scale for factor in dim}
    dims: list[tuple[Dim, ...]] = []
    scale_dims: list[int | None] = []
    for dim_factors in gradient:
        factors: list[tuple[int | None, Dim]] = []  # (dimension of the scale or None, its axis factors)
        position = 0  # of the next axis factor in `dim_factors`
        while position < len(dim_factors):
            scale_dim, dim = dims_by_factor.get(dim_factors[position], (None, dim_factors[position : position + 1]))
            if dim_factors[position : position + len(dim)] != dim or (scale_dim is None and not scale_factors.isdisjoint(dim)):
                return None
            if scale_dim is None and factors and factors[-1][0] is None:
                factors[-1] = None, (*factors[-1][1], *dim)
            else:
                factors.append((scale_dim, dim))
            position += len(dim)
        factors = factors or [(None, ())]
        dims.append(tuple(dim for _, dim in factors))
        scale_dims += [scale_dim for scale_dim, _ in factors]
    matched = [scale_dim for scale_dim in scale_dims if scale_dim is not None]
    unknown = sum(scale_dim is None for group in group_scale_dims(scale_dims, dims) if len(group) > 1 for scale_dim in group)
    has_sizes = unknown <= 1 and sum(len(group) > 1 for group in dims) <= 1  # a view can infer one size only
    return (
        Alignment(tuple(dims), tuple(scale_dims))
        if matched == sorted(scale_dim for scale_dim, _ in dims_by_factor.values()) and has_sizes
        else None
    )


def group_scale_dims(scale_dims: Sequence[int | None], dims: Sequence[Sequence[Dim]]) -> list[list[int | None]]:
    """Group a flat list with one item per dimension as `dims` groups them: (0, None, None), [[b t] [d]] -> [[0 None] [None]]."""
    remaining = iter(scale_dims)
    return [[next(remaining) for _ in group] for group in dims]
