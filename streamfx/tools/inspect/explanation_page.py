"""The content of an explanation's HTML report."""

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
from streamfx.tools.report.text import headline, in_flops, is_traced_in_part, share_text, verdict_of
from streamfx.tools.report.timeline import Timeline
from streamfx.tools.report.verdict import StepCost, gains

COUNTED = "activations and gradients, without parameters and inputs"


def page_of(title: str, summary: Mapping[str, Any], timeline: Timeline) -> Page:
    """Build the page of a summary."""
    ours, *others = (StepCost(course.way, course.peak_bytes, course.flops) for course in timeline.courses)
    stages = summary["stages"]
    return Page(
        title=title,
        subtitle=headline(summary),
        verdict=sentence(verdict_of(summary)),
        gains=gains(ours, others) if others and not is_traced_in_part(summary) else None,
        figures=tuple(_figures(summary, ours, others, place_of_peak(timeline.ours, stages))),
        timeline=timeline,
        stages=stage_rows(stages, summary["flops"], summary["sequence"]),
        whole=fallback_rows(stages, matters=True),
        small=fallback_rows(stages, matters=False),
        tables=tuple(_tables(summary, timeline)),
        options=summary["options"],
        notes=tuple(_notes(summary)),
    )


def _figures(summary: Mapping[str, Any], ours: StepCost, others: list[StepCost], at_peak: str) -> Iterator[Figure]:
    """Yield the figures at the top of the page: peaks, compute and sequence length."""
    yield Figure("Peak", format_bytes(ours.peak_bytes), f"{at_peak}; {COUNTED}")
    for other in others:
        yield baseline_figure(other, ours)
    yield Figure("Compute", in_flops(summary["flops"]), share_text(summary))
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(summary["sequence"]) if length is not None)
    if lengths:
        yield Figure("Sequence length", lengths)


def _tables(summary: Mapping[str, Any], timeline: Timeline) -> Iterator[Table]:
    """Yield the tables of baselines and of communication, if there are any."""
    if timeline.others:
        yield ways_table(timeline)
    if summary["wire"] is not None:
        yield wire_table_of(summary["wire"])


def _notes(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each note: no checkpointing baseline, graph breaks, incomplete trace."""
    if summary["not_checkpointed"]:
        yield NOT_CHECKPOINTED, sentence(summary["not_checkpointed"])
    for item in summary["break_reasons"]:
        given_up = (
            "The rest of this function is not traced: it runs in eager mode and is not in this report."
            if item["given_up"]
            else ""
        )
        yield f"Graph break: {item['reason']}", "\n".join(filter(None, (item["where"], given_up, item["do"])))
    if summary["stopped"]:
        yield "The call could not be traced to its end", f"Later operators are not shown: {summary['stopped']}"
