"""A value reduced over ranks: each of its elements is made of the same element of all ranks, so that rows stay rows.

That the other ranks run the same chunks is not the rule's matter: they compare before they run (`streamfx/distributed/rank_consensus.py`).
"""

from __future__ import annotations

from streamfx.passes.ops.rules.registry import NAMED, notation_rule
from streamfx.runtime.collective_calls import ALL_REDUCE

NAMED[ALL_REDUCE.name()] = notation_rule("... -> ...")
