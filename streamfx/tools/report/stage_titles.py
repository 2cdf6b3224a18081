"""Combine stages whose names differ only in a number: their names, and the rows of all tables of stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import Any, TypeVar

from streamfx.budget import format_bytes

Stage = Mapping[str, Any]
Item = TypeVar("Item")
MAX_RUNS = 3  # of consecutive numbers that a name lists


def unnumbered(name: str) -> str:
    """Replace each number in a name by `#`."""
    return re.sub(r"\d+", "#", name)


def joint_name(names: Sequence[str]) -> str:
    """Combine names that differ only in numbers.

    >>> joint_name(["layers.0", "layers.1", "layers.2"]), joint_name(["h.0.attn", "h.5.attn"])
    ('layers.0-2', 'h.{0, 5}.attn')
    >>> joint_name([f"layers_{i}_forward" for i in range(0, 36, 3)])
    'layers_0-33_forward, 1 in 3'
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    columns = [sorted({int(part) for part in column}) for column in zip(*(name[1::2] for name in parts), strict=True)]
    texts = parts[0][0::2]
    if sum(len(column) > 1 for column in columns) != 1:
        ranges, note = [f"{column[0]}-{column[-1]}" if len(column) > 1 else str(column[0]) for column in columns], ""
    else:
        pairs = [_numbers_text(column) for column in columns]
        ranges, note = [text for text, _ in pairs], "".join(note for _, note in pairs)
    is_inside = texts[-1] != ""
    ranges = [f"{{{text}}}" if is_inside and ", " in text else text for text in ranges]
    return "".join(chain.from_iterable(zip_longest(texts, ranges, fillvalue=""))) + note


def _numbers_text(numbers: Sequence[int]) -> tuple[str, str]:
    """Return a text of sorted numbers, and a note that says which of its range they are.

    >>> _numbers_text([0, 1, 2]), _numbers_text([0, 5]), _numbers_text([1, 2, 3, 6])
    (('0-2', ''), ('0, 5', ''), ('1-3, 6', ''))
    >>> _numbers_text([1, 2, 4, 5, 7, 8, 10, 11, 13]), _numbers_text([0, 2, 3, 7, 9])
    (('1-13', ', 2 in 3'), ('0-9', ', 5 of 10'))
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    first, last = numbers[0], numbers[-1]
    if len(runs) <= MAX_RUNS:
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs), ""
    distances, lengths = {after[0] - run[0] for run, after in pairwise(runs)}, {len(run) for run in runs[:-1]}
    is_regular = len(distances) == len(lengths) == 1 and len(runs[-1]) <= len(runs[0])
    if is_regular:
        return f"{first}-{last}", f", {len(runs[0])} in {distances.pop()}"
    return f"{first}-{last}", f", {len(numbers)} of {last - first + 1}"


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


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> list[list[Item]]:
    """Group items with equal keys, in the order of their first items; keys may be lists or dictionaries.

    >>> grouped([1, 2, 3, 4, 5], lambda number: number % 2)
    [[1, 3, 5], [2, 4]]
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(repr(key(item)), []).append(item)
    return list(groups.values())


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
    def subtitle(self) -> str:
        """The parts of the layer, such as `self_attn, mlp`; without any, the file and line of the first operator."""
        names = [part["name"] for part in self.stage["parts"]]
        place = re.match(r"(.*?:\d+), in ", next(iter(self.stage["source"]), ""))
        return ", ".join(names) or (re.split(r"[\\/]", place[1])[-1] if place else "")

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
    """Group stages whose names differ only in numbers, and that agree in `columns`.

    `flops` are those of the whole step, `sequences` the sequence length of each graph.
    """
    rows = []
    for similar in grouped(stages, lambda stage: (unnumbered(stage["name"]), *(stage[column] for column in columns))):
        stage, count = similar[0], len(similar)
        saved = format_bytes(stage["saved_bytes"])
        share = f"{100 * sum(each['flops'] for each in similar) / flops:.1f} %" if flops else "-"
        sequence = sequences[stage["graph"]] if stage["graph"] < len(sequences) else None
        name = joint_name([each["name"] for each in similar])
        rows.append(StageRow(name, count, stage, saved if count == 1 else f"{count} x {saved}", share, sequence, similar))
    return tuple(rows)
