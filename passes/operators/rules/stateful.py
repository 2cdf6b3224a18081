"""Operators with a state that are declared (`streamfx.register_recurrence`), and their backwards, by the operator."""

from __future__ import annotations

from typing import Any

from streamfx.ir.stateful import Stateful

STATEFUL: dict[Any, Stateful] = {}
BACKWARDS: dict[Any, Stateful] = {}
