"""Collectives on weights, which no loop is to contain: what was taken off a joint graph, to be put back around its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.stretch import Stretch


@dataclass(frozen=True)
class Gather:
    """How the whole of a weight is made of a rank's shard, which is what the graph is given.

    `keeps` is what the author of the code has said of the whole weight: that the backward half is to find it kept, or that it
    gathers again; None where nothing was said.
    """

    stretch: Stretch
    keeps: bool | None = None

    @property
    def shard(self) -> Any:
        """The fake value of the shard."""
        return self.stretch.source.meta["val"]


@dataclass(frozen=True)
class Collectives:
    """By primal how it is gathered; by the position of a gradient what its sum over the ranks is made by."""

    gathers: Mapping[fx.Node, Gather]
    reductions: Mapping[int, Stretch]
