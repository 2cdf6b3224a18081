"""Registry of declared operators with a state (linear attention, state-space models), and of their backward operators.

They are registered by name, since their package may be missing. A declaration (`Stateful`) says which arguments and results
are rows of the sequence, states and gradients, so that a loop can pass the state from chunk to chunk.
"""

from __future__ import annotations

from typing import Any

from streamfx.ir.scan_schema import Stateful
from streamfx.torch_private import OpOverload

STATEFUL: dict[str, Stateful] = {}
BACKWARDS: dict[str, Stateful] = {}


def declare(declared: Stateful) -> None:
    """Register an operator with a state, and its backward operator, by name."""
    forward_name, backward_name = declared.operators
    STATEFUL[forward_name] = declared
    BACKWARDS[backward_name] = declared


def is_declared(target: Any) -> bool:
    """Return whether an operator is the forward or backward operator of a declared operator with a state."""
    return isinstance(target, OpOverload) and (target.name() in STATEFUL or target.name() in BACKWARDS)
