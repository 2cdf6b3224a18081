"""The rule of all-reduce: each element depends on the same element of all ranks, so rows are kept.

`streamfx/distributed/rank_consensus.py` checks, before the first run, that all ranks run the same chunks.
"""

from __future__ import annotations

from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.passes.ops.rules.registry import RULES_BY_NAME, notation_rule

RULES_BY_NAME[ALL_REDUCE.name()] = notation_rule("... -> ...")
