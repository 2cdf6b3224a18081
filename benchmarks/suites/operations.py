"""How many operations a step takes."""

from __future__ import annotations

from typing import Any

from benchmarks.processes import Measured
from benchmarks.settings import Rows, Settings

BASELINES = ("checkpointing", "checkpointing, reentrant")
Counts = dict[str, int]


def operations(settings: Settings) -> Rows:
    """Operations of one step; attention counts the pairs that are seen.

    Both forms of checkpointing are references: the reentrant one repeats all of a layer, the other stops a repetition when all is
    there that the backward needs.
    """
    length = settings.lengths[0] if settings.lengths else 512 if settings.quick else 2048
    counts = {way: _counted(settings, way, length) for way in (*BASELINES, "eager")}
    for way in ("streambp, inputs kept", "streambp, attention kept"):
        for chunks in (1, 8) if settings.quick else (1, 2, 8, 64):
            size = length // chunks
            counts[f"{way}, {chunks} chunks"] = _counted(settings, way, length, chunk_size=size, loss_chunk_size=size)
    return [_row(label, found, counts) for label, found in counts.items()]


def _counted(settings: Settings, way: str, length: int, **options: int) -> Counts:
    settings.tell(f"{way} {options.get('chunk_size', '')}")
    with Measured(way, length, sizes=settings.sizes, options=options) as process:
        process.ask("measured")
        return process.ask("flops")


def _row(label: str, found: Counts, counts: dict[str, Counts]) -> dict[str, Any]:
    row: dict[str, Any] = {"way": label}
    for part, name in (("attention", "attention"), ("other", "everything else")):
        row[f"{name} GFLOP"] = found[part] / 1e9
        for baseline in BASELINES:
            row[f"{name}, of {baseline}"] = found[part] / counts[baseline][part]
    return row
