"""What each operator does with its axes: one table, a file per operator family."""

from streamfx.passes.operators.rules import (
    attention,
    convolution,
    experts,
    factories,
    indexing,
    loss,
    matmul,
    over_ranks,
    packed,
    pointwise,
    recurrences,
    reductions,
    relative_shifts,
    scans,
    stateful_packages,
    views,
)
from streamfx.passes.operators.rules.decompositions import DECOMPOSITIONS
from streamfx.passes.operators.rules.registry import RULES, Call, rule, rule_for, signatures

__all__ = [
    "DECOMPOSITIONS",
    "RULES",
    "Call",
    "attention",
    "convolution",
    "experts",
    "factories",
    "indexing",
    "loss",
    "matmul",
    "over_ranks",
    "packed",
    "pointwise",
    "recurrences",
    "reductions",
    "relative_shifts",
    "rule",
    "rule_for",
    "scans",
    "signatures",
    "stateful_packages",
    "views",
]
