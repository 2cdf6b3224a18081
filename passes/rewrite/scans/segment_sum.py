"""Replace decaying segment sums, which `streamfx/frontend/ssd_matmul.py` recognizes, by recurrences of the sum so far.

    sums[0] = initial,  sums[c + 1] = exp(decays[c]) * sums[c] + rows[c]

State space models compute such sums as a product with a matrix of weights. The operators return sums[c] for each
row c (`decayed_sums`) or sums[c + 1] (`SUMS_AFTER`), and the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from streamfx.dialect.decayed_sums import DECAYED_SUMS, SUMS_AFTER
from streamfx.ir.scan_schema import NotStatefulError, Stateful
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import FALLBACK_REASON
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.scans.custom_scan import ScanCall, emit_recurrences, find_backwards, read_call
from streamfx.runtime.segment_sum import AFTER_ROW_SCAN, BEFORE_ROW_SCAN

POSITIVE_DECAYS = "decays that may be above zero: clamp(max=0) proves that they are not"
DECLARED: dict[Any, Stateful] = {DECAYED_SUMS: BEFORE_ROW_SCAN, SUMS_AFTER: AFTER_ROW_SCAN}


@rewrite_rule(DECAYED_SUMS, SUMS_AFTER)
def decayed_sums_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """decayed_sums(decays, rows) -> sums, last                   ->   recurrence(decays, rows) -> sums, last
    decayed_sums_backward(dsums, decays, rows) -> ddecays, drows   ->   recurrence(dsums, decays, rows) -> ddecays, drows

    Applies if no decay is above zero. Otherwise the weight of earlier rows may underflow at the start of a chunk and grow
    large after it.
    """
    declared, backwards = DECLARED[node.target], list[ScanCall]()
    try:
        call = read_call(node, declared)
        backwards += find_backwards(declared, call)
        if ValueRanges().of(call.arguments["decays"]).high > 0:
            raise NotStatefulError(POSITIVE_DECAYS)
        return emit_recurrences(declared, call, backwards, writer)
    except NotStatefulError as why:
        for call_node in (node, *(backward.node for backward in backwards)):
            call_node.meta[FALLBACK_REASON] = f"{call_node.target} with {why}"
        return None
