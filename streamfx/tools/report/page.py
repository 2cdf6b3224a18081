"""The contents of any report as plain figures, which the templates draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from streamfx.budget import format_bytes
from streamfx.options import Options
from streamfx.tools.report.stage_titles import group_key, joint_name, names_together
from streamfx.tools.report.text import in_flops, in_seconds, obstacles_of
from streamfx.tools.report.timeline import MemoryTimeline, Timeline
from streamfx.tools.report.verdict import StepCost, ratio, times

Stage = Mapping[str, Any]
NOT_CHECKPOINTED = "Not compared with gradient checkpointing"


@dataclass(frozen=True)
class Figure:
    """A number shown at the top of a page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A plain table: the first column is left-aligned, the others right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class SpanFigure:
    """The keys that an attention sees: its kind, and bounds as returned by `details.bounds_of`."""

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


@dataclass(frozen=True)
class FallbackRow:
    """The unchunked operators of a source line: how many, in which stages, why, full-sequence bytes, and advice."""

    operators: tuple[str, ...]
    where: str
    found: tuple[str, ...]
    do: str
    count: int
    stages: str
    bytes: int


@dataclass(frozen=True)
class Page:
    """A report: its subject, the verdict, and all figures below."""

    title: str
    subtitle: str
    verdict: str
    gains: bool | None
    figures: tuple[Figure, ...]
    timeline: Timeline
    stages: tuple[StageRow, ...]
    whole: tuple[FallbackRow, ...]
    small: tuple[FallbackRow, ...]
    tables: tuple[Table, ...]
    options: Mapping[str, Any]
    notes: tuple[tuple[str, str], ...] = field(default=())

    @property
    def changed(self) -> frozenset[str]:
        """The names of options that differ from their defaults."""
        defaults = Options().as_dict()
        return frozenset(name for name, value in self.options.items() if defaults.get(name) != value)


def sentence(text: str) -> str:
    """Format a verdict or reason as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def baseline_figure(other: StepCost, ours: StepCost) -> Figure:
    """Return the peak of a baseline and its ratio to the streamed peak."""
    name = f"{other.way[:1].upper()}{other.way[1:]}"
    return Figure(
        name, format_bytes(other.peak_bytes), f"at the peak, {times(ratio(other.peak_bytes, ours.peak_bytes))} the streamed peak"
    )


def place_of_peak(course: MemoryTimeline, stages: Sequence[Stage]) -> str:
    """Describe where in a step most bytes are alive, e.g. "in model.layers.3, forward pass"."""
    moment = course.seconds[course.peak] if course.seconds else 0.0
    half = "forward pass" if moment < course.backward_start else "backward pass"
    loop = next((loop.name for loop in course.loops if loop.start <= moment <= loop.end), None)
    stage = next((stage["name"] for stage in stages for run in stage["runs"] if run["name"] == loop), None)
    return f"in {stage}, {half}" if stage is not None else f"in the {half}"


def stage_rows(stages: Sequence[Stage], flops: int, sequences: Sequence[int | None]) -> tuple[StageRow, ...]:
    """Group consecutive stages whose names differ only in a number and whose figures are equal."""
    return tuple(_stage_row(list(run), flops, sequences) for _, run in groupby(stages, key=group_key))


def _stage_row(run: Sequence[Stage], flops: int, sequences: Sequence[int | None]) -> StageRow:
    """Return the line of similar stages: FLOPs share, saved bytes and sequence length."""
    stage, name = run[0], joint_name([stage["name"] for stage in run])
    share = f"{100 * sum(similar['flops'] for similar in run) / flops:.1f} %" if flops else "-"
    saved = format_bytes(stage["saved_bytes"])
    sequence = sequences[stage["graph"]] if stage["graph"] < len(sequences) else None
    return StageRow(name, len(run), stage, saved if len(run) == 1 else f"{len(run)} x {saved}", share, sequence, run)


def fallback_rows(stages: Sequence[Stage], matters: bool) -> tuple[FallbackRow, ...]:
    """Group the unchunked operators by source line, most bytes first."""
    groups: dict[tuple[str, str], list[tuple[str, Stage]]] = {}
    for stage in stages:
        for obstacle in obstacles_of(stage):
            if obstacle["matters"] == matters:
                groups.setdefault((obstacle["where"], obstacle["do"]), []).append((stage["name"], obstacle))
    return tuple(sorted((_fallback_row(*key, obstacles) for key, obstacles in groups.items()), key=lambda row: -row.bytes))


def _fallback_row(where: str, do: str, named_obstacles: Sequence[tuple[str, Stage]]) -> FallbackRow:
    """Return the row of the unchunked operators of one source line, given with the names of their stages."""
    operators = tuple(dict.fromkeys(obstacle["operator"] for _, obstacle in named_obstacles))
    reasons = tuple(dict.fromkeys(obstacle["found"] for _, obstacle in named_obstacles))
    size = sum(obstacle["bytes"] for _, obstacle in named_obstacles)
    stages = names_together(list(dict.fromkeys(name for name, _ in named_obstacles)))
    return FallbackRow(operators, where, reasons, do, len(named_obstacles), stages, size)


def ways_table(timeline: Timeline) -> Table:
    """Return a table of peak, compute and time for each way of running the step."""
    rows = [
        (course.way, format_bytes(course.peak_bytes), in_flops(course.flops), in_seconds(course.end))
        for course in timeline.courses
    ]
    return Table("Ways to run this step", ("", "peak", "compute", "predicted time"), tuple(rows), f"Time: {timeline.clock}.")


def wire_table_of(wire: Mapping[str, Any]) -> Table:
    """Return a table of the bytes that each rank sends in a step, by graph and kind of collective."""
    rows = []
    for half in ("forward", "backward"):
        for kind, traffic in wire[half].items():
            if traffic["calls"]:
                rows.append((f"{half}: {kind.replace('_', ' ')}", f"{traffic['calls']:,}", format_bytes(traffic["bytes"])))
    eager = wire.get("eager")
    if eager is not None:
        checkpointed = ", layers checkpointed" if eager["checkpointed"] else ""
        rows.append((f"for comparison, eager{checkpointed}", "", format_bytes(eager["bytes"])))
    notes = [f"{format_bytes(wire['bytes'])} sent by each rank in a step."]
    if wire.get("early_reductions") is not None:
        notes.append(f"{100 * wire['early_reductions']:.0f} % of the reductions begin before the last loop.")
    if wire.get("whole_weights_bytes"):
        notes.append(f"{format_bytes(wire['whole_weights_bytes'])} of full weights are alive at the peak.")
    return Table("Communication between ranks", ("", "calls", "bytes"), tuple(rows), " ".join(notes))
