"""Registry of declared operators with a state, and of their backward operators, by name: their package may be missing."""

from __future__ import annotations

from typing import Any

from streamfx.ir.scan_schema import Stateful
from streamfx.torch_private import OpOverload

STATEFUL: dict[str, Stateful] = {}
BACKWARDS: dict[str, Stateful] = {}


def declare(declared: Stateful) -> None:
    """Register an operator with a state, and its backward, by name."""
    STATEFUL[declared.operators[0]], BACKWARDS[declared.operators[1]] = declared, declared


def is_declared(target: Any) -> bool:
    """Return whether an operator, or the operator of which it is the backward, is declared."""
    return isinstance(target, OpOverload) and (target.name() in STATEFUL or target.name() in BACKWARDS)
