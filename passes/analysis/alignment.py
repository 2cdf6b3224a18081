"""Align the dimensions of a gradient with those of its *cotangent scale*.

A backward pass may run before the gradient of the loss is known: it computes gradients for a gradient of ones, and multiplies
them by the true one, the scale, later. The scale is a number, or has a number per sequence. Dimensions are tuples of axis
factors (b, t, ...), as in `[(b t) d]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import DimAxes


@dataclass(frozen=True)
class Alignment:
    """A gradient reshaped so that each dimension of its scale is a separate dimension: [(b t) d] and [b] give [b t d].

    `dims`: all dimensions in order, grouped by the gradient's dimensions: ((b, t), (d)). `scale_dims`: for each, the
    index of the equal dimension of the scale, or None: (0, None, None).
    """

    dims: tuple[tuple[Dim, ...], ...]
    scale_dims: tuple[int | None, ...]

    @property
    def axes_by_dim(self) -> DimAxes:
        """The axis factors of each dimension of the reshaped gradient, in order."""
        return tuple(dim for dims in self.dims for dim in dims)

    @property
    def is_split(self) -> bool:
        """Whether the gradient must be reshaped: one of its dimensions becomes several."""
        return any(len(dims) > 1 for dims in self.dims)


def align(scale: DimAxes, gradient: DimAxes) -> Alignment | None:
    """Find how to split the dimensions of a gradient so that each dimension of its cotangent scale is one of its dimensions.

    Each argument is a tuple of dimensions, and each dimension a tuple of axis factors (`()` for size one). For the scale [b]
    and the gradient [(b t) d], return [b t d] with scale dimensions (0, None, None). Return None unless the scale's dimensions
    occur once and in order, and a view can split the gradient.
    """
    scale_dim_by_first_factor = {dim[0]: i for i, dim in enumerate(scale) if dim}
    scale_factors = {factor for dim in scale for factor in dim}
    dims: list[tuple[Dim, ...]] = []
    scale_dims: list[int | None] = []
    for gradient_dim in gradient:
        parts: list[tuple[int | None, Dim]] = []  # of this dimension: (equal dimension of the scale or None, axis factors)
        position = 0  # of the next axis factor in `gradient_dim`
        while position < len(gradient_dim):
            scale_dim = scale_dim_by_first_factor.get(gradient_dim[position])
            part = (gradient_dim[position],) if scale_dim is None else scale[scale_dim]
            if gradient_dim[position : position + len(part)] != part:
                return None
            if scale_dim is None and not scale_factors.isdisjoint(part):
                return None
            if scale_dim is None and parts and parts[-1][0] is None:
                parts[-1] = None, (*parts[-1][1], *part)  # consecutive factors that the scale lacks stay one dimension
            else:
                parts.append((scale_dim, part))
            position += len(part)
        parts = parts or [(None, ())]
        dims.append(tuple(part for _, part in parts))
        scale_dims += [scale_dim for scale_dim, _ in parts]
    in_order = [scale_dim for scale_dim in scale_dims if scale_dim is not None] == sorted(scale_dim_by_first_factor.values())
    split_dims = [group for group in group_scale_dims(scale_dims, dims) if len(group) > 1]
    num_sizes_to_infer = sum(scale_dim is None for group in split_dims for scale_dim in group)
    can_be_viewed = num_sizes_to_infer <= 1 and len(split_dims) <= 1  # a view can infer one size only
    return Alignment(tuple(dims), tuple(scale_dims)) if in_order and can_be_viewed else None


def group_scale_dims(scale_dims: Sequence[int | None], dims: Sequence[Sequence[Dim]]) -> list[list[int | None]]:
    """Group a flat list with one item per dimension as `dims` groups them: (0, None, None), [[b t] [d]] -> [[0 None] [None]]."""
    remaining = iter(scale_dims)
    return [[next(remaining) for _ in group] for group in dims]
