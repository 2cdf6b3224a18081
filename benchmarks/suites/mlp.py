"""The MLP alone, as mini-sequence training measures it."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import MIB, Rows, Settings
from benchmarks.turns import in_turns

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
        reference = next(iter(found.values()))
        rows += [
            {
                "way": way,
                "T": length,
                "peak MiB": outcome.median("peak_bytes") / MIB,
                "of eager": outcome.over(reference, "peak_bytes"),
                "processor s": outcome.median("cpu_seconds"),
                "of eager's": outcome.over(reference, "cpu_seconds"),
                "loss": outcome.later[-1]["loss"],
            }
            if outcome.later
            else {"way": way, "T": length, "why not": outcome.why_not}
            for way, outcome in found.items()
        ]
    return rows
