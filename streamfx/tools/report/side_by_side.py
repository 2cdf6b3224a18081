"""Two reports side by side: their figures in columns, and both memory curves on one scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.report.page import Page, Table
from streamfx.tools.report.stage_titles import grouped, joint_name, unnumbered
from streamfx.tools.report.text import in_flops, in_seconds
from streamfx.tools.report.timeline import MemoryTimeline, Timeline

MISSING = "-"


@dataclass(frozen=True)
class Side:
    """One of the two reports: `label` is its letter and title."""

    label: str
    subtitle: str
    verdict: str
    gains: bool | None


@dataclass(frozen=True)
class Comparison:
    """Two reports: their sides, memory timelines as courses of one timeline, and tables: `figures` come before the curves."""

    title: str
    subtitle: str
    sides: tuple[Side, Side]
    figures: tuple[Table, ...]
    timeline: Timeline
    tables: tuple[Table, ...]


def comparison_of(first: Page, second: Page) -> Comparison:
    """Compare two pages; A is the first, B the second."""
    pages = {f"{letter}: {page.title}": page for letter, page in (("A", first), ("B", second))}
    one, other = (Side(label, page.subtitle, page.verdict, page.gains) for label, page in pages.items())
    courses = tuple(replace(page.timeline.ours, way=label) for label, page in pages.items())
    clocks = dict.fromkeys(page.timeline.clock for page in pages.values())
    return Comparison(
        title=first.title if first.title == second.title else f"{first.title} and {second.title}",
        subtitle="Two reports side by side",
        sides=(one, other),
        figures=(*_options_table(first, second), Table("Figures", ("", "A", "B", "B/A"), tuple(_figures(first, second)))),
        timeline=Timeline(courses, "; ".join(clocks)),
        tables=(_categories_table(first, second), _stages_table(first, second)),
    )


def _figures(first: Page, second: Page) -> Iterator[tuple[str, ...]]:
    """Yield a row for the peak, compute and time of the streamed steps, and for the peak of each baseline."""
    ours = [page.timeline.ours for page in (first, second)]
    yield _row("peak", [one.peak_bytes for one in ours], format_bytes)
    yield _row("compute", [one.flops for one in ours], in_flops)
    yield _row("predicted time", [one.end for one in ours], in_seconds)
    peaks = [{course.way: course.peak_bytes for course in page.timeline.others} for page in (first, second)]
    for way in dict.fromkeys(way for by_way in peaks for way in by_way):
        yield _row(f"peak of {way}", [by_way.get(way) for by_way in peaks], format_bytes)


def _row(name: str, values: Sequence[Any], formatted: Callable[[Any], str]) -> tuple[str, ...]:
    """Return the cells of a figure: its name, both values, and the ratio of the second to the first."""
    first, second = values
    ratio = f"{second / first:.2f}" if first and second is not None else ""
    return name, *(MISSING if value is None else formatted(value) for value in values), ratio


def _options_table(first: Page, second: Page) -> Iterator[Table]:
    """Yield the table of the options that differ, if any do."""
    names = dict.fromkeys((*first.options, *second.options))
    rows = ((name, *(str(page.options.get(name, MISSING)) for page in (first, second))) for name in names)
    if differing := tuple(row for row in rows if row[1] != row[2]):
        yield Table("Options that differ", ("", "A", "B"), differing)


def _categories_table(first: Page, second: Page) -> Table:
    """Return the table of memory at each peak."""
    at_peak = [_bytes_at_peak(page.timeline.ours) for page in (first, second)]
    names = dict.fromkeys(name for sizes in at_peak for name in sizes)
    rows = (_row(name, [sizes.get(name, 0) for sizes in at_peak], format_bytes) for name in names)
    return Table("Memory at the peak, by category", ("", "A", "B", "B/A"), tuple(rows))


def _stages_table(first: Page, second: Page) -> Table:
    """Return the table of stages; those that differ only in a number, and are equal in each report, are one row."""
    cells = [_stage_cells(page) for page in (first, second)]
    names = dict.fromkeys(name for by_name in cells for name in by_name)
    rows = {name: tuple(cell for by_name in cells for cell in by_name.get(name, (MISSING, MISSING))) for name in names}
    groups = grouped(names, lambda name: (unnumbered(name), rows[name]))
    header = ("stage", "A: rows per chunk", "A: saved", "B: rows per chunk", "B: saved")
    return Table("Stages", header, tuple((joint_name(group), *rows[group[0]]) for group in groups), "Saved: bytes of each stage.")


def _bytes_at_peak(course: MemoryTimeline) -> Mapping[str, int]:
    """Return the bytes of each category at the peak, the largest first, without empty ones."""
    sizes = {name: column[course.peak] for name, column in course.terms.items()}
    return {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size}


def _stage_cells(page: Page) -> dict[str, tuple[str, str]]:
    """Return the rows per chunk and the saved bytes of each stage, by its name."""
    stages = (stage for row in page.stages for stage in row.every)
    return {stage["name"]: (f"{stage['chunk_size']:,}", format_bytes(stage["saved_bytes"])) for stage in stages}
