"""A training step of a decoder of eight layers beside its peers: what PyTorch and PyPI have to train on long sequences."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import Rows, Settings
from benchmarks.turns import compared, in_turns

WAYS = (
    "checkpointing",
    "eager",
    "checkpointing, inductor",
    "checkpointing, linear_cross_entropy",
    "checkpointing, linear_cross_entropy, tiled MLP",
    "checkpointing, Liger loss",
    "inductor, AutoChunker",
    "inductor, activation budget 0.1",
    "streambp, eager bodies",
    "streambp",
)
SIZES = {"vocab_size": 32_000, "num_hidden_layers": 8, "num_key_value_heads": 8}


def peers(settings: Settings) -> Rows:
    """A training step beside its peers, on one thread of a CPU. All ways take turns; ratios are to gradient checkpointing.

    `tiled MLP` is the algorithm of ALST and Unsloth: eight parts of the rows, each checkpointed within its layer. `the first`
    is the first step, from the call of `torch.compile` on, which waits for compiled bodies.
    """
    lengths = settings.lengths or ((1024,) if settings.quick else (4096,))
    rows: Rows = []
    for length in lengths:
        spec: dict[str, Any] = {"length": length, "sizes": {**SIZES, **settings.sizes}, **settings.place}
        found = in_turns({way: {"way": way, **spec} for way in settings.chosen(WAYS)}, settings.rounds or 2, settings)
        own = compared(found, next(iter(found)), {"T": length})
        first = {way: outcome.first.get("cpu_seconds") for way, outcome in found.items()}
        rows += [{**row, "the first": first[row["way"]]} for row in own]
    return rows
