"""What a mask that depends on data costs: one of ones, and that of packed documents."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import MIB, Rows, Settings
from benchmarks.turns import in_turns

FEEDS = {"one document": "tokens", "all-ones mask": "all-ones mask", "8 packed documents": "packed documents"}


def masks(settings: Settings) -> Rows:
    """The same tokens without a mask, with an `attention_mask` of ones, and as eight documents (`position_ids` start anew).

    Ratios are to the first row of the same way: medians over rounds of the ratio within a round.
    """
    lengths = settings.lengths or ((1024,) if settings.quick else (4096, 8192))
    rounds = settings.rounds or (2 if settings.quick else 5)
    ways = settings.chosen(("streambp, eager bodies",) if settings.quick else ("streambp",))
    return [row for length in lengths for way in ways for row in _rows(settings, way, length, rounds)]


def _rows(settings: Settings, way: str, length: int, rounds: int) -> Rows:
    spec: dict[str, Any] = {"way": way, "length": length, "sizes": settings.sizes, **settings.place}
    found = in_turns({label: {**spec, "feed": feed} for label, feed in FEEDS.items()}, rounds, settings)
    reference = found["one document"]
    return [
        {
            "tokens": label,
            "way": way,
            "T": length,
            "s / step": outcome.median("seconds"),
            "of one document": outcome.over(reference, "seconds"),
            "processor s": outcome.median("cpu_seconds"),
            "of its": outcome.over(reference, "cpu_seconds"),
            "peak MiB": outcome.median("peak_bytes") / MIB,
            "loss": outcome.later[-1]["loss"],
        }
        if outcome.later
        else {"tokens": label, "way": way, "T": length, "why not": outcome.why_not}
        for label, outcome in found.items()
    ]
