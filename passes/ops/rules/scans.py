"""Axis rules of scans, such as `cumsum`: each row depends on all rows before it (reversed: after it).

A loop over chunks in the scan's direction carries the last value from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from streamfx.dialect.scans import REVERSE_SCANS
from streamfx.ir.signature import RunningSum, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, broadcast, rule

aten = torch.ops.aten

SCAN_NAMES: dict[Any, str] = {getattr(aten, name).default: name for name in REVERSE_SCANS}
REVERSE_SCAN_NAMES: dict[Any, str] = {operator: kind for kind, operator in REVERSE_SCANS.items()}


@rule(*SCAN_NAMES, *REVERSE_SCAN_NAMES)
def scan(call: RuleCall) -> Signature:
    """Axis rule of a scan along `dim`: all axes are kept, and `dim` is a running sum, forward or reverse.

    A running sum is needed in full, unless it is along the sequence and the loop runs in the scan's direction.
    """
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    running_sum = RunningSum(reverse=call.node.target in REVERSE_SCAN_NAMES)
    return replace(broadcast(call), index={dim: running_sum} if call.shape else full_axes(dim))
