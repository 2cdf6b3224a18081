"""The error that a pass raises if it cannot run an operator in a loop.

The passes then restart, and the operator falls back: it runs on the full sequence, between loops.
"""

from __future__ import annotations

from torch import fx

from streamfx.passes.ops.traits import producer_of


class FallbackError(Exception):
    """An operator that earlier passes planned to chunk must run on the full sequence.

    `operator_name`: its name in the joint graph; for an item of a tuple, the name of the operator that returns the tuple.
    `reason`: why it cannot be chunked, as text for the user.
    """

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name}: {reason}")
        self.operator_name, self.reason = producer_of(node).name, reason
