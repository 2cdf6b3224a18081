"""A page as one file of HTML, which needs nothing else: no network, no font, no library."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from streamfx.budget import in_bytes
from streamfx.tools.report.chart import LEFT, RIGHT, WIDTH, beside_chart, colour_of, stacked_chart
from streamfx.tools.report.page import Page, SpanFigure
from streamfx.tools.report.text import in_flops
from streamfx.tools.report.timeline import StepCourse, Timeline

TEMPLATE, PICTURE = "report.html.j2", "picture.svg.j2"
MOST_READ = 1400  # moments of the data that a pointer reads
SIDE, STAIRS = 132, 12  # of a picture of rows by keys: its size, and how many chunks it shows at most


def html_of(page: Page) -> str:
    """The page as a document."""
    timeline = page.timeline
    return str(
        _environment()
        .get_template(TEMPLATE)
        .render(
            page=page,
            ours=timeline.ours,
            legend=legend_of(timeline.ours),
            stacked=stacked_chart(timeline.ours),
            beside=beside_chart(timeline) if timeline.others else None,
            width=WIDTH,
            data=data_of(timeline),
        )
    )


def picture_of(timeline: Timeline) -> str:
    """Memory over a step by every way that was followed, as one SVG."""
    return str(_environment().get_template(PICTURE).render(beside=beside_chart(timeline), width=WIDTH)).lstrip()


@cache
def _environment() -> Any:
    import jinja2  # here: few who import streamfx write reports

    folder = Path(__file__).parent / "templates"
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"bytes": in_bytes, "flops": in_flops}
    made.globals |= {"stairs_of": stairs_of, "side": SIDE}
    return made


def legend_of(course: StepCourse) -> list[tuple[int, str, str, str]]:
    """Of each term its colour, its name, its bytes at the peak and at most; what lies on top comes first."""
    terms = tuple(course.terms)
    rows = [
        (colour_of(name, terms), name, in_bytes(sizes[course.peak]), in_bytes(max(sizes))) for name, sizes in course.terms.items()
    ]
    return rows[::-1]


def data_of(timeline: Timeline) -> dict[str, Any]:
    """What a pointer over the charts reads: moments, bytes by term, and loops."""
    ours = timeline.ours.shortened(MOST_READ)
    courses = [(course.way, course.shortened(MOST_READ)) for course in timeline.courses]
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "end": ours.end,
        "widest": max(course.end for course in timeline.courses),
        "turn": ours.turn,
        "seconds": _rounded(ours.seconds, ours.end),
        "terms": [[name, sizes] for name, sizes in reversed(list(ours.terms.items()))],
        "ways": [[way, _rounded(course.seconds, course.end), course.totals, course.end] for way, course in courses],
        "loops": [[loop.name, loop.begins, loop.ends, loop.chunks, loop.drawn] for loop in ours.loops],
    }


def _rounded(seconds: tuple[float, ...], end: float) -> list[float]:
    """As exact as a dot on the screen asks for."""
    return [float(f"{value / end:.5f}") * end if end else 0.0 for value in seconds]


def stairs_of(span: SpanFigure, rows: int | None, chunk: int) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height) of rows by keys: which keys the rows of each chunk see."""
    if span.bounds is None:
        return [(0.0, 0.0, SIDE, SIDE)]
    rows = rows or max(chunk, 1)
    count = max(1, min(STAIRS, -(-rows // max(chunk, 1))))
    low, high = span.bounds
    found = []
    for number in range(count):
        begin, end = number / count, (number + 1) / count
        left = 0.0 if low is None else min(1.0, max(0.0, begin + low / rows))
        right = 1.0 if high is None else min(1.0, max(0.0, end + high / rows))
        if right > left:
            found.append((SIDE * left, SIDE * begin, SIDE * (right - left), SIDE / count))
    return found
