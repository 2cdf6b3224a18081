"""What each operator does with its axes: one table, a file per operator family."""

from streamfx.passes.operators.rules import (
    attention,
    convolution,
    experts,
    factories,
    indexing,
    loss,
    matmul,
    packed,
    pointwise,
    recurrences,
    reductions,
    scans,
    views,
)
from streamfx.passes.operators.rules.registry import RULES, Call, rule, rule_for, signatures
from streamfx.passes.operators.rules.taken_apart import TAKEN_APART

__all__ = [
    "RULES",
    "TAKEN_APART",
    "Call",
    "attention",
    "convolution",
    "experts",
    "factories",
    "indexing",
    "loss",
    "matmul",
    "packed",
    "pointwise",
    "recurrences",
    "reductions",
    "rule",
    "rule_for",
    "scans",
    "signatures",
    "views",
]
