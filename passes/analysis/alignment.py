"""How the dimensions of a gradient hold those of what drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import Shape


@dataclass(frozen=True)
class Alignment:
    """A gradient with its driver's dimensions in dimensions of their own: [(b t) d] and [b] give [b t d].

    `dims` are all dimensions in order, those of a gradient's dimension together; `places` says which of the driver's dimensions
    each is, if it is one.
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
    """How a gradient's dimensions hold its driver's, each once and in order; None where they do not.

    Dimensions are resolved, and those of size one have no axes.
    """
    wide = {dim[0]: (i, dim) for i, dim in enumerate(driver) if dim}
    held = {atom for dim in driver for atom in dim}
    dims: list[tuple[Dim, ...]] = []
    places: list[int | None] = []
    for own in gradient:
        parts: list[tuple[int | None, Dim]] = []
        at = 0
        while at < len(own):
            place, dim = wide.get(own[at], (None, own[at : at + 1]))
            if own[at : at + len(dim)] != dim or (place is None and not held.isdisjoint(dim)):
                return None
            if place is None and parts and parts[-1][0] is None:
                parts[-1] = None, (*parts[-1][1], *dim)
            else:
                parts.append((place, dim))
            at += len(dim)
        parts = parts or [(None, ())]
        dims.append(tuple(dim for _, dim in parts))
        places += [place for place, _ in parts]
    along = [place for place in places if place is not None]
    unknown = sum(place is None for own in parted(places, dims) if len(own) > 1 for place in own)
    has_sizes = unknown <= 1 and sum(len(own) > 1 for own in dims) <= 1  # of what is left of a dimension, and of the dimension
    return Alignment(tuple(dims), tuple(places)) if along == sorted(place for place, _ in wide.values()) and has_sizes else None


def parted(places: Sequence[int | None], dims: Sequence[Sequence[Dim]]) -> list[list[int | None]]:
    """Places of dimensions, those of a dimension together."""
    remaining = iter(places)
    return [[next(remaining) for _ in own] for own in dims]
