"""Format the communication of a step as text; yield nothing if the step sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.report.comm_table import COLUMNS, HALVES
from streamfx.tools.report.stage_titles import joint_name, unnumbered

Plain = Mapping[str, Any]


def wire_totals(wire: Plain | None) -> Iterator[str]:
    """Yield the bytes that a step sends, and the bytes that eager sends."""
    if wire is None:
        return
    early, whole = wire["early_reductions"], wire["whole_weights_bytes"]
    parts = [f"{format_bytes(wire['bytes'])} sent by each rank"]
    parts += [] if early is None else [f"{100 * early:.0f} % of the reductions begin before the last loop"]
    parts += [f"{format_bytes(whole)} of full weights at the peak"] if whole else []
    yield f"  wire     {', '.join(parts)}"
    eager = wire["eager"]
    yield f"           {'unknown' if eager is None else format_bytes(eager['bytes'])} in {_eager_text(eager)}"


def wire_table(stages: Sequence[Plain], wire: Plain | None) -> Iterator[str]:
    """Yield a table of calls and bytes per stage and graph, with totals for the step and for eager."""
    if wire is None:
        return
    rows: list[list[str]] = []
    communicating = [stage for stage in stages if stage["wire"] is not None]
    for _, run in groupby(communicating, key=lambda stage: (stage["graph"], unnumbered(stage["name"]), stage["wire"])):
        similar = list(run)
        rows += _graph_rows(joint_name([stage["name"] for stage in similar]), similar[0]["wire"], len(similar))
    rows += _graph_rows("the step", wire, 1)
    rows += [] if wire["eager"] is None else _graph_rows(_eager_text(wire["eager"]), wire["eager"], 1)
    columns = [i for i in range(2 + len(COLUMNS)) if i < 2 or any(row[i] != "-" for row in rows)]
    table = [["communication", "half", *(name.replace("_", " ") for name in COLUMNS)], *rows]
    widths = {i: max(len(row[i]) for row in table) for i in columns}
    yield ""
    for row in table:
        yield "  " + "   ".join(row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in columns)


def _graph_rows(name: str, wire: Plain, count: int) -> Iterator[list[str]]:
    """Yield a row for each graph that sends something; the name is in the first one only."""
    for half in HALVES:
        cells = [_cell(wire[half][column], count) for column in COLUMNS]
        if any(cell != "-" for cell in cells):
            yield [name, half, *cells]
            name = ""


def _cell(traffic: Plain, count: int) -> str:
    """Format calls and bytes, multiplied by `count`; a dash without calls."""
    each = f"{count} x " if count > 1 else ""
    return f"{each}{traffic['calls']}, {format_bytes(traffic['bytes'])}" if traffic["calls"] else "-"


def _eager_text(eager: Plain | None) -> str:
    return "eager, layers checkpointed" if eager is not None and eager["checkpointed"] else "eager"
