"""What each operator does with its axes: one table, a file per operator family."""

from streamfx.passes.rules import attention, factories, indexing, loss, matmul, pointwise, reductions, views
from streamfx.passes.rules.registry import RULES, Call, rule, rule_for, signatures

__all__ = [
    "RULES",
    "Call",
    "attention",
    "factories",
    "indexing",
    "loss",
    "matmul",
    "pointwise",
    "reductions",
    "rule",
    "rule_for",
    "signatures",
    "views",
]
