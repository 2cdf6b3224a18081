"""A training step of a whole decoder, in all ways side by side."""

from __future__ import annotations

from typing import Any

from benchmarks.settings import MIB, Rows, Settings
from benchmarks.turns import Outcome, in_turns
from benchmarks.ways import WAYS

QUICK = (
    "eager",
    "checkpointing",
    "checkpointing, loss in parts",
    "inductor",
    "streambp, eager bodies",
    "streambp, everything fits",
)
FULL = (
    "eager",
    "checkpointing",
    "checkpointing, loss in parts",
    "checkpointing, Liger loss",
    "checkpointing, CCE",
    "inductor",
    "inductor, AutoChunker",
    "inductor, activation budget 0.5",
    "inductor, activation budget 0.1",
    "streambp",
    "streambp, eager bodies",
    "streambp, inputs kept",
    "streambp, everything fits",
)


def step(settings: Settings) -> Rows:
    """A training step. All ways take turns; a ratio is the median over rounds of the ratio within a round.

    Peak memory is over the state before the step, gradients included. On a GPU the model's attention is flash attention, causal,
    so that checkpointing is checkpointing with that.
    """
    lengths = settings.lengths or ((1024,) if settings.quick else (1024, 8192))
    rounds = settings.rounds or (1 if settings.quick else 3)
    rows: Rows = []
    for length in lengths:
        specs = dict(_specs(settings, length))
        outcomes = in_turns(specs, rounds, settings)
        rows += [_row(label, length, outcome, outcomes) for label, outcome in outcomes.items()]
    return rows


def _specs(settings: Settings, length: int) -> list[tuple[str, dict[str, Any]]]:
    """Each way; streambp once for each size of chunks that was asked for."""
    specs = []
    for name in settings.chosen(QUICK if settings.quick else FULL):
        spec = {"way": name, "length": length, "sizes": settings.sizes, **settings.place}
        specs.append((name, spec))
        if WAYS[name].backend == "streambp" and "memory_budget" not in WAYS[name].options:
            for size in settings.chunk_sizes:
                specs.append((f"{name}, chunks of {size}", {**spec, "options": {"chunk_size": size, "loss_chunk_size": size}}))
    return specs


def _row(label: str, length: int, outcome: Outcome, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    if not outcome.later:
        return {"way": label, "T": length, "why not": outcome.why_not or "no round was run"}
    reference = outcomes.get("checkpointing", outcome)
    compiles = any(label.startswith(name) for name, way in WAYS.items() if way.backend)
    return {
        "way": label,
        "T": length,
        "peak MiB": outcome.median("peak_bytes") / MIB,
        "of checkpointing": outcome.over(reference, "peak_bytes"),
        "with parameters MiB": (outcome.held + outcome.median("peak_bytes")) / MIB,
        "s / step": outcome.median("seconds"),
        "of checkpointing's": outcome.over(reference, "seconds"),
        "processor s": outcome.median("cpu_seconds"),
        "of its": outcome.over(reference, "cpu_seconds"),
        "tokens / s": length / outcome.median("seconds"),
        "compilation s": max(0.0, outcome.first["seconds"] - outcome.median("seconds")) if compiles else None,
        "loss": outcome.later[-1]["loss"],
    }
