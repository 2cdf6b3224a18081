"""What a pass raises that cannot run an operator in a loop: the operator is marked, and the passes begin again."""

from __future__ import annotations

from torch import fx

from streamfx.passes.ops.traits import producer_of


class FallbackError(Exception):
    """An operator that passes before took for one that streams has to run whole; `why` is the reason that the user is told."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.name}: {why}")
        self.name, self.why = producer_of(node).name, why
