"""Render a page as one HTML file that needs no network, font or library."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.report.chart import COURSE_COLOURS, WIDTH, colour_of, comparison_chart, frontier_chart, stacked_chart
from streamfx.tools.report.page import Page, Table
from streamfx.tools.report.side_by_side import comparison_of
from streamfx.tools.report.stage_titles import SpanFigure, Stage
from streamfx.tools.report.text import in_flops, in_seconds
from streamfx.tools.report.timeline import MemoryTimeline, Timeline

TEMPLATE, COMPARISON, PICTURE, TABLE = "report.html.j2", "comparison.html.j2", "picture.svg.j2", "table.html.j2"
MAX_POINTER_MOMENTS = 1400  # of the data that the page shows at the pointer
SPAN_SIZE, MAX_SPAN_CHUNKS = 132, 12  # picture of rows by keys: its size, and the number of chunks that it shows


def html_of(page: Page) -> str:
    """Return the page as an HTML document."""
    timeline = page.timeline
    colours = {course.way: index % COURSE_COLOURS for index, course in enumerate(timeline.courses)}
    colours |= {
        point.name: COURSE_COLOURS - 1 for point in (page.frontier.others if page.frontier else ()) if point.name not in colours
    }
    return str(
        _environment()
        .get_template(TEMPLATE)
        .render(
            page=page,
            codes=page.code(),
            ours=timeline.ours,
            legend=legend_of(timeline.ours),
            stacked=stacked_chart(timeline.ours),
            beside=comparison_chart(timeline) if timeline.others else None,
            frontier=frontier_chart(page.frontier, colours) if page.frontier is not None else None,
            colours=colours,
            width=WIDTH,
            data=data_of(timeline),
        )
    )


def comparison_html_of(page: Page, other: Page) -> str:
    """Return two pages side by side as an HTML document."""
    compared = comparison_of(page, other)
    chart = replace(comparison_chart(compared.timeline), backward_start=None)  # each step has its own
    contents = {"page": compared, "beside": chart, "width": WIDTH}
    return str(_environment().get_template(COMPARISON).render(contents))


def table_html(title: str, subtitle: str, table: Table) -> str:
    """Return one table as an HTML document."""
    return str(_environment().get_template(TABLE).render(page={"title": title, "subtitle": subtitle}, found=table))


def picture_of(timeline: Timeline) -> str:
    """Return memory over a step, streamed and for every traced baseline, as one SVG."""
    contents = {"beside": comparison_chart(timeline), "courses": timeline.courses, "width": WIDTH}
    return str(_environment().get_template(PICTURE).render(contents)).lstrip()


@cache
def _environment() -> Any:
    """Return the template environment; values are escaped, and undefined names raise."""
    import jinja2  # imported here because few users of streamfx write reports

    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "flops": in_flops, "seconds": in_seconds}
    environment.globals |= {"stairs_of": stairs_of, "side": SPAN_SIZE, "loop_cells": loop_cells, "part_cells": part_cells}
    return environment


def legend_of(course: MemoryTimeline) -> list[tuple[int, str, str, str]]:
    """Return color index, name, bytes at the peak and maximum bytes of each category, topmost first."""
    terms = tuple(course.terms)
    rows = [
        (colour_of(name, terms), name, format_bytes(sizes[course.peak]), format_bytes(max(sizes)))
        for name, sizes in course.terms.items()
    ]
    return rows[::-1]


def loop_cells(stage: Stage) -> list[tuple[str, ...]]:
    """Return the rows of a table of a stage's loops."""
    return [
        (run["name"], run["half"], f"{run['chunks']:,}", f"{run['rows']:,}", f"{run['launches']:,}", in_flops(run["flops"]))
        for run in stage["runs"]
    ]


def part_cells(stage: Stage) -> list[tuple[str, ...]]:
    """Return the rows of a table of the parts of a stage's layer: module, forward FLOPs and their share, and saved bytes."""
    total = sum(part["flops"] for part in stage["parts"]) or 1
    return [
        (part["name"], f"{in_flops(part['flops'])} ({part['flops'] / total:.0%})", format_bytes(part["saved_bytes"]))
        for part in stage["parts"]
    ]


def data_of(timeline: Timeline) -> dict[str, Any]:
    """Return the data that a pointer over the charts reads: moments, bytes by category, and loops."""
    ours = timeline.ours.shortened(MAX_POINTER_MOMENTS)
    courses = [(course.way, course.shortened(MAX_POINTER_MOMENTS)) for course in timeline.courses]
    return {
        "end": ours.end,
        "widest": max(course.end for course in timeline.courses),
        "turn": ours.backward_start,
        "seconds": _rounded(ours.seconds, ours.end),
        "terms": [[name, sizes] for name, sizes in reversed(list(ours.terms.items()))],
        "ways": [[way, _rounded(course.seconds, course.end), course.totals, course.end] for way, course in courses],
        "loops": [[loop.name, loop.start, loop.end, loop.chunks, loop.sampled_chunks] for loop in ours.loops],
    }


def _rounded(seconds: tuple[float, ...], end: float) -> list[float]:
    """Round moments to the resolution of the screen."""
    return [float(f"{value / end:.5f}") * end if end else 0.0 for value in seconds]


def stairs_of(span: SpanFigure, rows: int | None, chunk: int) -> list[tuple[float, float, float, float]]:
    """Return rectangles (x, y, width, height) that show which keys the rows of each chunk see."""
    if span.bounds is None:
        return [(0.0, 0.0, SPAN_SIZE, SPAN_SIZE)]
    rows = rows or max(chunk, 1)
    num_chunks = max(1, min(MAX_SPAN_CHUNKS, -(-rows // max(chunk, 1))))
    low_bound, high_bound = span.bounds
    rectangles = []
    for chunk_index in range(num_chunks):
        begin, end = chunk_index / num_chunks, (chunk_index + 1) / num_chunks
        first_key = 0.0 if low_bound is None else min(1.0, max(0.0, begin + low_bound / rows))
        last_key = 1.0 if high_bound is None else min(1.0, max(0.0, end + high_bound / rows))
        if last_key > first_key:
            rectangles.append(
                (SPAN_SIZE * first_key, SPAN_SIZE * begin, SPAN_SIZE * (last_key - first_key), SPAN_SIZE / num_chunks)
            )
    return rectangles
