"""Short sequences and small models, where nothing has to be saved: what a step and the first step cost."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import Rows, Settings
from benchmarks.turns import Outcome, in_turns

WAYS_OF_TORCH = ("eager", "checkpointing", "inductor")
OURS = ("streambp", "streambp, eager bodies", "streambp, everything fits")
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2_000}


def short(settings: Settings) -> Rows:
    """A small decoder of 4 and 24 layers at 256 and 1,024 tokens. Ways take turns; a ratio is the median over rounds of the ratio
    within a round. "Of the best" is over the faster one of eager and Inductor.
    """
    rounds = settings.rounds or (3 if settings.quick else 9)
    rows: Rows = []
    for layers in (settings.layers,) if settings.layers else (4, 24):
        for length in settings.lengths or (256, 1024):
            sizes = {**SMALL, "num_hidden_layers": layers}
            specs = {
                way: {"way": way, "length": length, "sizes": sizes, **settings.place}
                for way in settings.chosen(WAYS_OF_TORCH + OURS)
            }
            outcomes = in_turns(specs, rounds, settings, "first")
            rows += [_row(way, layers, length, outcome, outcomes) for way, outcome in outcomes.items()]
    return rows


def _row(way: str, layers: int, length: int, outcome: Outcome, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    head = {"layers": layers, "T": length, "way": way}
    if not outcome.later:
        return {**head, "why not": outcome.why_not or "no round was run"}
    reference = min(
        (outcomes[name] for name in ("eager", "inductor") if outcomes[name].later), key=lambda it: it.median("cpu_seconds")
    )
    return {
        **head,
        "first step s": outcome.first["cpu_seconds"],
        "of Inductor's": outcome.first["cpu_seconds"] / outcomes["inductor"].first["cpu_seconds"],
        "ms / step": 1000 * outcome.median("cpu_seconds"),
        "of the best": outcome.over(reference, "cpu_seconds"),
        "peak MiB": outcome.median("peak_bytes") / 2**20,
    }
