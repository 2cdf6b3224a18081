"""What each operator does with its axes: one table, a file per operator family."""

from streamfx.passes.ops.rules import (
    all_reduce,
    attention,
    convolution,
    factories,
    grouped_mm,
    indexing,
    loss,
    matmul,
    pointwise,
    recurrences,
    reductions,
    rel_shift,
    scans,
    stateful_packages,
    varlen,
    views,
)
from streamfx.passes.ops.rules.decompositions import DECOMPOSITIONS
from streamfx.passes.ops.rules.registry import RULES, RuleCall, rule, rule_for, signatures

__all__ = [
    "DECOMPOSITIONS",
    "RULES",
    "RuleCall",
    "all_reduce",
    "attention",
    "convolution",
    "factories",
    "grouped_mm",
    "indexing",
    "loss",
    "matmul",
    "pointwise",
    "recurrences",
    "reductions",
    "rel_shift",
    "rule",
    "rule_for",
    "scans",
    "signatures",
    "stateful_packages",
    "varlen",
    "views",
]
