"""Steps of preference optimization and of reinforcement learning: with the whole step compiled, and by TRL's trainers."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import Rows, Settings
from benchmarks.turns import compared, in_turns

STEPS = {
    "DPO, a pair of sequences": ("preferences", "dpo"),
    "GRPO, two answers": ("preferences", "grpo"),
    "TRL's DPOTrainer, a pair": ("TRL", "dpo"),
    "TRL's GRPOTrainer, two answers": ("TRL", "grpo"),
}


def objectives(settings: Settings) -> Rows:
    """One step each; ratios are to checkpointing of the same step: medians over rounds of the ratio within a round."""
    lengths = settings.lengths or ((512,) if settings.quick else (8192,))
    ways = settings.chosen(("checkpointing", "streambp, eager bodies" if settings.quick else "streambp"))
    return [row for length in lengths for label in STEPS for row in _rows(settings, label, length, ways)]


def _rows(settings: Settings, label: str, length: int, ways: tuple[str, ...]) -> Rows:
    workload, feed = STEPS[label]
    shared = {"workload": workload, "feed": feed, "length": length, "sizes": settings.sizes, **settings.place}
    specs: dict[str, dict[str, Any]] = {way: {"way": way, **shared} for way in ways}
    found = in_turns(specs, settings.rounds or 1, settings)
    return compared(found, "checkpointing" if "checkpointing" in found else ways[0], {"step": label, "T": length})
