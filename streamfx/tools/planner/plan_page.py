"""The content of a plan's HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.report.page import (
    NOT_CHECKPOINTED,
    Figure,
    Page,
    Table,
    baseline_figure,
    fallback_rows,
    place_of_peak,
    sentence,
    stage_rows,
    ways_table,
    wire_table_of,
)
from streamfx.tools.report.text import in_flops, in_seconds
from streamfx.tools.report.timeline import Timeline
from streamfx.tools.report.verdict import StepCost, gains, ratio, times


def page_of_plan(summary: Mapping[str, Any], timeline: Timeline, counted: str, divided: str) -> Page:
    """Build the page of a plan's summary. `counted` names the values that its bytes include, `divided` the parallelism."""
    ours, *others = (StepCost(course.way, course.peak_bytes, course.flops) for course in timeline.courses)
    memory = "" if summary["memory"] is None else f", {format_bytes(summary['memory'])} of memory"
    return Page(
        title=summary["model"],
        subtitle=f"A step of {summary['batch']} x {summary['length']:,} tokens on {summary['device']}{divided}{memory}",
        verdict=sentence(_search_result(summary) or summary["verdict"]),
        gains=gains(ours, others) if others else None,
        figures=tuple(_figures(summary, ours, others, counted, place_of_peak(timeline.ours, summary["stages"]))),
        timeline=timeline,
        stages=stage_rows(summary["stages"], summary["flops"], summary["sequence"]),
        whole=fallback_rows(summary["stages"], matters=True),
        small=fallback_rows(summary["stages"], matters=False),
        tables=tuple(_tables(summary, timeline)),
        options=summary["options"],
        notes=tuple(_notes(summary)),
    )


def _notes(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each note: no checkpointing baseline, incomplete trace."""
    if summary["not_checkpointed"]:
        yield NOT_CHECKPOINTED, sentence(summary["not_checkpointed"])
    if summary["stopped"]:
        yield "The call could not be traced to its end", summary["stopped"]


def _search_result(summary: Mapping[str, Any]) -> str:
    """Return the result of a search, or an empty string if there was none."""
    if summary["max_length"] is not None:
        fits = f"{summary['max_length']:,} tokens fit into {format_bytes(summary['memory'])}"
        return f"{fits}; {summary['verdict']}" if summary["lengths"] else fits
    if summary["max_batch"] is not None:
        return f"a batch of {summary['max_batch']:,} fits into {format_bytes(summary['memory'])}"
    return ""


def _figures(summary: Mapping[str, Any], ours: StepCost, others: list[StepCost], counted: str, at_peak: str) -> Iterator[Figure]:
    """Yield the figures at the top of the page: peaks, compute and time."""
    fits = {None: "", True: " It fits.", False: " It does not fit."}[summary["fits"]]
    yield Figure("Peak", format_bytes(ours.peak_bytes), f"{at_peak}; {counted}.{fits}")
    for other in others:
        yield baseline_figure(other, ours)
    yield Figure("Compute", in_flops(summary["flops"]))
    yield Figure("Time of a step", in_seconds(summary["seconds"]), f"predicted for {summary['device']}")


def _tables(summary: Mapping[str, Any], timeline: Timeline) -> Iterator[Table]:
    """Yield the tables of baselines, lengths, communication, host memory and choices that apply."""
    if timeline.others:
        yield ways_table(timeline)
    if summary["lengths"]:
        rows = [("streambp", f"{summary['max_length']:,}", "")]
        for way, length in summary["lengths"].items():
            rows.append((way, f"{length:,}", times(ratio(summary["max_length"], length)) if length else "fits at no length"))
        yield Table("Longest sequences that fit", ("", "tokens", "ratio"), tuple(rows))
    if summary["wire"] is not None:
        yield wire_table_of(summary["wire"])
    if summary["host"] is not None:
        host = summary["host"]
        rows_ = (
            ("of this device", format_bytes(host["bytes"])),
            (f"of {host['devices']} devices", format_bytes(host["bytes_of_all"])),
        )
        yield Table("Offloaded to the host until the backward pass", ("", "bytes"), rows_)
    if summary["choices"]:
        tried = tuple(_choice_row(choice) for choice in summary["choices"])
        yield Table("Candidates in order", ("", "work of a chunk", "peak"), tried, "The first that fits the budget runs.")


def _choice_row(choice: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a row of a tried choice: its name, the work of a chunk, and its peak."""
    work = choice["chunk_work_bytes"]
    return choice["choice"], "as given" if work is None else format_bytes(work), format_bytes(choice["peak_bytes"])
