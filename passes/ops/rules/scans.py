"""Rules of prefix reductions: each row depends on all rows before it, which a loop in the right direction carries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from streamfx.ir.signature import RunningSum, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, broadcast, rule
from streamfx.runtime import chunked_scans

aten, own = torch.ops.aten, torch.ops.streamfx

SCAN_NAMES: dict[Any, str] = {
    aten.cumsum.default: "cumsum",
    aten.cumprod.default: "cumprod",
    aten.logcumsumexp.default: "logcumsumexp",
}
REVERSE_SCAN_NAMES: dict[Any, str] = {getattr(own, f"reverse_{kind}").default: kind for kind in chunked_scans.SCANS}


@rule(*SCAN_NAMES, *REVERSE_SCAN_NAMES)
def scan(call: RuleCall) -> Signature:
    """The scanned dimension is needed in full, unless it is the sequence and the loop runs in the scan's direction."""
    dim = call.arguments()["dim"] % max(len(call.shape), 1)
    return replace(
        broadcast(call), index={dim: RunningSum(call.node.target in REVERSE_SCAN_NAMES)} if call.shape else full_axes(dim)
    )
