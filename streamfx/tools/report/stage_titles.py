"""Combine stages whose names differ only in a number: their names, and the rows of all tables of stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamfx.budget import format_bytes

Stage = Mapping[str, Any]


def unnumbered(name: str) -> str:
    """Replace each number in a name by `#`."""
    return re.sub(r"\d+", "#", name)


def joint_name(names: Sequence[str]) -> str:
    """Combine names, e.g. `layers.0` to `layers.3` become `layers.0-3`."""
    if len(names) == 1:
        return names[0]
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    return "".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def names_together(names: Sequence[str]) -> str:
    """List names, and count those that differ only in a number.

    >>> names_together(["layers.0", "layers.1", "head"])
    'layers.0 and 1 like it, head'
    """
    counts = Counter(unnumbered(name) for name in names)
    first_by_kind = {unnumbered(name): name for name in reversed(names)}
    return ", ".join(
        first_by_kind[kind] if count == 1 else f"{first_by_kind[kind]} and {count - 1} like it" for kind, count in counts.items()
    )


@dataclass(frozen=True)
class SpanFigure:
    """The keys that an attention sees: its kind, and bounds as in `StageReport.spans`."""

    kind: str
    bounds: Sequence[int | None] | None


@dataclass(frozen=True)
class StageRow:
    """Similar stages on one line; the details come from the first of them."""

    name: str
    count: int
    stage: Stage
    saved: str
    share: str
    sequence: int | None
    every: Sequence[Stage] = ()

    @property
    def loops_of_stages(self) -> list[tuple[str, str]]:
        """Pairs of loop and stage name for all of these stages."""
        return [(run["name"], stage["name"]) for stage in self.every for run in stage["runs"]]

    @property
    def spans(self) -> list[SpanFigure]:
        """The attentions of the stage without duplicates."""
        pairs = zip(self.stage["attention"], self.stage["spans"], strict=True)
        return list({(kind, str(bounds)): SpanFigure(kind, bounds) for kind, bounds in pairs}.values())


def stage_rows(
    stages: Sequence[Stage],
    flops: int,
    sequences: Sequence[int | None] = (),
    columns: Sequence[str] = ("graph", "kind", "attention", "chunk_size", "loops", "saved_bytes", "flops"),
) -> tuple[StageRow, ...]:
    """Group consecutive stages whose names differ only in numbers, and that agree in `columns`.

    `flops` are those of the whole step, `sequences` the sequence length of each graph.
    """
    rows = []
    for _, run in groupby(stages, key=lambda stage: (unnumbered(stage["name"]), *(stage[column] for column in columns))):
        similar = list(run)
        stage, count = similar[0], len(similar)
        saved = format_bytes(stage["saved_bytes"])
        share = f"{100 * sum(each['flops'] for each in similar) / flops:.1f} %" if flops else "-"
        sequence = sequences[stage["graph"]] if stage["graph"] < len(sequences) else None
        name = joint_name([each["name"] for each in similar])
        rows.append(StageRow(name, count, stage, saved if count == 1 else f"{count} x {saved}", share, sequence, similar))
    return tuple(rows)
