"""Collectives: which argument names their ranks; those on weights, which no loop is to contain, taken off a joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.subgraph import Subgraph
from streamfx.node_meta import VALUE

GROUPS = ("group", "group_name")  # what operators call the ranks that run them together


def group_among(arguments: Mapping[str, Any]) -> Any:
    """Which of a collective's arguments, by name, is the group of its ranks; None where none is (a wait)."""
    return next((arguments[name] for name in GROUPS if arguments.get(name) is not None), None)


@dataclass(frozen=True)
class Gather:
    """How the whole of a weight is made of a rank's shard, which is what the graph is given.

    `keeps` is what the author of the code has said of the whole weight: that the backward half is to find it kept, or that it
    gathers again; None where nothing was said.
    """

    stretch: Subgraph
    keeps: bool | None = None

    @property
    def shard(self) -> Any:
        """The fake value of the shard."""
        return self.stretch.source.meta[VALUE]


@dataclass(frozen=True)
class Collectives:
    """By primal how it is gathered; by the position of a gradient what its sum over the ranks is made by."""

    gathers: Mapping[fx.Node, Gather]
    reductions: Mapping[int, Subgraph]
