"""Axis rules: how each operator maps the axes of its operands to the axes of its results, with a file per operator family.

A rule turns one call into a `Signature` of axis labels. It knows the call's arguments and shapes and the operands'
axes, and may import `ir`, `runtime`, `kernels` and the other tables of operators.
"""

from streamfx.passes.ops.rules import (
    all_reduce,
    attention,
    convolution,
    factories,
    grouped_mm,
    indexing,
    loss,
    matmul,
    packed_weights,
    pointwise,
    recurrences,
    reductions,
    rel_shift,
    scans,
    stateful_packages,
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
    "packed_weights",
    "pointwise",
    "recurrences",
    "reductions",
    "rel_shift",
    "rule",
    "rule_for",
    "scans",
    "signatures",
    "stateful_packages",
    "views",
]
