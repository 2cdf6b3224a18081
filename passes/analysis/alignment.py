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
    driver_dims = {dim[0]: (i, dim) for i, dim in enumerate(driver) if dim}
    driver_atoms = {atom for dim in driver for atom in dim}
    dims: list[tuple[Dim, ...]] = []
    places: list[int | None] = []
    for dim_atoms in gradient:
        pieces: list[tuple[int | None, Dim]] = []
        position = 0
        while position < len(dim_atoms):
            driver_dim, dim = driver_dims.get(dim_atoms[position], (None, dim_atoms[position : position + 1]))
            if dim_atoms[position : position + len(dim)] != dim or (driver_dim is None and not driver_atoms.isdisjoint(dim)):
                return None
            if driver_dim is None and pieces and pieces[-1][0] is None:
                pieces[-1] = None, (*pieces[-1][1], *dim)
            else:
                pieces.append((driver_dim, dim))
            position += len(dim)
        pieces = pieces or [(None, ())]
        dims.append(tuple(dim for _, dim in pieces))
        places += [driver_dim for driver_dim, _ in pieces]
    matched = [driver_dim for driver_dim in places if driver_dim is not None]
    unknown = sum(driver_dim is None for group in group_places(places, dims) if len(group) > 1 for driver_dim in group)
    has_sizes = unknown <= 1 and sum(len(group) > 1 for group in dims) <= 1  # a view can infer one size only
    return (
        Alignment(tuple(dims), tuple(places))
        if matched == sorted(driver_dim for driver_dim, _ in driver_dims.values()) and has_sizes
        else None
    )


def group_places(places: Sequence[int | None], dims: Sequence[Sequence[Dim]]) -> list[list[int | None]]:
    """Group the places by dimension."""
    remaining = iter(places)
    return [[next(remaining) for _ in group] for group in dims]
