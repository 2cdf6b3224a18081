"""The error of a pass that cannot run an operator in a loop: the operator is marked, and the passes restart."""

from __future__ import annotations

from torch import fx

from streamfx.passes.ops.traits import producer_of


class FallbackError(Exception):
    """An operator that earlier passes planned to chunk must run on the full sequence; `why` is the reason for the user."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.name}: {why}")
        self.name, self.why = producer_of(node).name, why
