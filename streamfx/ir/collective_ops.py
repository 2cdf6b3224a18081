"""Collectives: the argument that names the process group, and the weight collectives removed from a joint graph.

Sharded weights are gathered, and their gradients are summed over ranks. Loops over chunks must not repeat such collectives,
so a pass removes them from the joint graph, and another one inserts them around the loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.subgraph import Subgraph
from streamfx.node_meta import VALUE

GROUPS = ("group", "group_name")  # argument names of the process group


def find_group(arguments: Mapping[str, Any]) -> Any:
    """Return the process group among a collective's named arguments; None if it has no group (a wait)."""
    return next((arguments[name] for name in GROUPS if arguments.get(name) is not None), None)


@dataclass(frozen=True)
class Gather:
    """The subgraph that gathers the full weight from a rank's shard.

    `keep_full` is the user's choice: if True, the backward graph gets the full weight; if False, it gathers it again;
    None if unspecified.
    """

    subgraph: Subgraph
    keep_full: bool | None = None

    @property
    def shard(self) -> Any:
        """The fake value of the shard."""
        return self.subgraph.source.meta[VALUE]


@dataclass(frozen=True)
class Collectives:
    """The collectives removed from a joint graph.

    `gathers`: by primal, the gather of its full weight. `reductions`: by index of a gradient, the subgraph that sums it over
    ranks.
    """

    gathers: Mapping[fx.Node, Gather]
    reductions: Mapping[int, Subgraph]
