"""Combine stages whose names differ only in a number: their names, and the rows of all tables of stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamfx.budget import format_bytes

Stage = Mapping[str, Any]


def unnumbered(name: str) -> str:
    """Replace each number in a name by `#`."""
    return re.sub(r"\d+", "#", name)


def group_key(stage: Stage) -> tuple[Any, ...]:
    """Return the key under which stages share a line: everything but a number in the name."""
    keys = ("graph", "kind", "chunk_size", "loops", "saved_bytes", "flops")
    return unnumbered(stage["name"]), tuple(stage["attention"]), *(stage[key] for key in keys)


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
    """The keys that an attention sees: its kind, and bounds as returned by `stage_table.bounds_of`."""

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
    key: Callable[[Stage], tuple[Any, ...]] = group_key,
) -> tuple[StageRow, ...]:
    """Group consecutive stages with equal keys.

    `flops` are those of the whole step, `sequences` the sequence length of each graph.
    """
    return tuple(_stage_row(list(run), flops, sequences) for _, run in groupby(stages, key=key))


def _stage_row(run: Sequence[Stage], flops: int, sequences: Sequence[int | None]) -> StageRow:
    """Return the line of similar stages: FLOPs share, saved bytes and sequence length."""
    stage, name = run[0], joint_name([stage["name"] for stage in run])
    share = f"{100 * sum(similar['flops'] for similar in run) / flops:.1f} %" if flops else "-"
    saved = format_bytes(stage["saved_bytes"])
    sequence = sequences[stage["graph"]] if stage["graph"] < len(sequences) else None
    return StageRow(name, len(run), stage, saved if len(run) == 1 else f"{len(run)} x {saved}", share, sequence, run)
