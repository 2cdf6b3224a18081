"""Align the dimensions of a gradient with those of its cotangent scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import Shape


@dataclass(frozen=True)
class Alignment:
    """A gradient reshaped so that each dimension of its scale is a separate dimension: [(b t) d] and [b] give [b t
    d].

    `dims` lists all dimensions in order, grouped by the gradient's dimensions. `places` maps each to the index of the
    scale's dimension, or None.
    """

    dims: tuple[tuple[Dim, ...], ...]
    places: tuple[int | None, ...]

    @property
    def shape(self) -> Shape:
        return tuple(dim for dims in self.dims for dim in dims)

    @property
    def is_split(self) -> bool:
        return any(len(dims) > 1 for dims in self.dims)


def aligned(driver: Shape, gradient: Shape) -> Alignment | None:
    """Align a gradient with its cotangent scale, whose dimensions must occur once and in order; None if they do not.

    Dimensions must be resolved; dimensions of size one have no axes.
    """
    wide = {dim[0]: (i, dim) for i, dim in enumerate(driver) if dim}
    held = {atom for dim in driver for atom in dim}
    dims: list[tuple[Dim, ...]] = []
    places: list[int | None] = []
    for dim_atoms in gradient:
        parts: list[tuple[int | None, Dim]] = []
        at = 0
        while at < len(dim_atoms):
            place, dim = wide.get(dim_atoms[at], (None, dim_atoms[at : at + 1]))
            if dim_atoms[at : at + len(dim)] != dim or (place is None and not held.isdisjoint(dim)):
                return None
            if place is None and parts and parts[-1][0] is None:
                parts[-1] = None, (*parts[-1][1], *dim)
            else:
                parts.append((place, dim))
            at += len(dim)
        parts = parts or [(None, ())]
        dims.append(tuple(dim for _, dim in parts))
        places += [place for place, _ in parts]
    matched = [place for place in places if place is not None]
    unknown = sum(place is None for group in parted(places, dims) if len(group) > 1 for place in group)
    has_sizes = unknown <= 1 and sum(len(group) > 1 for group in dims) <= 1  # a view can infer one size only
    return Alignment(tuple(dims), tuple(places)) if matched == sorted(place for place, _ in wide.values()) and has_sizes else None


def parted(places: Sequence[int | None], dims: Sequence[Sequence[Dim]]) -> list[list[int | None]]:
    """Group the places by dimension."""
    remaining = iter(places)
    return [[next(remaining) for _ in group] for group in dims]
