"""The MLP alone, as mini-sequence training measures it."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import Rows, Settings
from benchmarks.turns import compared, in_turns

WAYS = ("eager", "checkpointing", "mini-sequences", "inductor", "streambp")
PARTS = 8


def mlp(settings: Settings) -> Rows:
    """A gated MLP, width 1,024 to 4,096, between hidden states and the mean square of its results; gradients of all.

    Mini-sequences: eight parts of the rows, each checkpointed.
    """
    lengths = settings.lengths or ((2048,) if settings.quick else (4096, 16_384))
    rounds = settings.rounds or (1 if settings.quick else 3)
    sizes = {"width": 256, "inner": 1024, "parts": PARTS} if settings.quick else {"width": 1024, "inner": 4096, "parts": PARTS}
    rows: Rows = []
    for length in lengths:
        spec: dict[str, Any] = {"workload": "mlp", "length": length, "sizes": sizes, **settings.place}
        found = in_turns({way: {"way": way, **spec} for way in settings.chosen(WAYS)}, rounds, settings)
        rows += compared(found, next(iter(found)), {"T": length})
    return rows
