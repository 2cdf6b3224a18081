"""Operators with a state that are declared, and their backwards, by name: the packages that define some may be there or not."""

from __future__ import annotations

from typing import Any

from streamfx.ir.scan_schema import Stateful
from streamfx.torch_private import OpOverload

STATEFUL: dict[str, Stateful] = {}
BACKWARDS: dict[str, Stateful] = {}


def declare(declared: Stateful) -> None:
    STATEFUL[declared.operators[0]], BACKWARDS[declared.operators[1]] = declared, declared


def is_declared(target: Any) -> bool:
    """Whether something is known of an operator, or of the operator of which it is the backward."""
    return isinstance(target, OpOverload) and (target.name() in STATEFUL or target.name() in BACKWARDS)
