"""The contents of a report as plain figures, which the templates draw: of an explanation, and of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamfx.budget import format_bytes
from streamfx.options import Options
from streamfx.tools.report.as_python.stage_code import StageCode
from streamfx.tools.report.stage_titles import StageRow, names_together, stage_rows
from streamfx.tools.report.text import (
    headline,
    in_flops,
    in_seconds,
    is_traced_in_part,
    obstacles_of,
    share_text,
    traffic_notes,
    verdict_of,
)
from streamfx.tools.report.timeline import MemoryTimeline, Timeline
from streamfx.tools.report.verdict import CHECKPOINTING, StepCost, gains, ratio, times

Stage = Mapping[str, Any]
COUNTED = "activations and gradients, without parameters and inputs"
GIVEN_UP = "The rest of this function is not traced: it runs in eager mode and is not in this report."


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
    is_code: bool = False  # the other columns are code: left-aligned, and wrapped


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
class Point:
    """A plan, or a baseline: its time and its peak."""

    name: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Frontier:
    """Plans for other budgets, the smallest peak first, with the baselines, and their table."""

    plans: tuple[Point, ...]
    others: tuple[Point, ...]
    table: Table


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
    notes: tuple[tuple[str, str], ...]
    frontier: Frontier | None = None
    code: Callable[[], Sequence[StageCode]] = tuple  # writes the loops of each stage; none in a plan

    @property
    def changed(self) -> frozenset[str]:
        """The names of options that differ from their defaults."""
        defaults = Options().as_dict()
        return frozenset(name for name, value in self.options.items() if defaults.get(name) != value)


def sentence(text: str) -> str:
    """Format a verdict or reason as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def place_of_peak(course: MemoryTimeline, stages: Sequence[Stage]) -> str:
    """Describe where in a step most bytes are alive, e.g. "in model.layers.3, forward pass"."""
    moment = course.seconds[course.peak] if course.seconds else 0.0
    half = "forward pass" if moment < course.backward_start else "backward pass"
    loop = next((loop.name for loop in course.loops if loop.start <= moment <= loop.end), None)
    stage = next((stage["name"] for stage in stages for run in stage["runs"] if run["name"] == loop), None)
    return f"in {stage}, {half}" if stage is not None else f"in the {half}"


def fallback_rows(stages: Sequence[Stage], matters: bool) -> tuple[FallbackRow, ...]:
    """Group the unchunked operators by source line, most bytes first."""
    groups: dict[tuple[str, str], list[tuple[str, Stage]]] = {}
    for stage in stages:
        for obstacle in obstacles_of(stage):
            if obstacle["matters"] == matters:
                groups.setdefault((obstacle["where"], obstacle["do"]), []).append((stage["name"], obstacle))
    rows = []
    for (where, do), named_obstacles in groups.items():
        operators = tuple(dict.fromkeys(obstacle["operator"] for _, obstacle in named_obstacles))
        reasons = tuple(dict.fromkeys(obstacle["found"] for _, obstacle in named_obstacles))
        size = sum(obstacle["bytes"] for _, obstacle in named_obstacles)
        names = names_together(list(dict.fromkeys(name for name, _ in named_obstacles)))
        rows.append(FallbackRow(operators, where, reasons, do, len(named_obstacles), names, size))
    return tuple(sorted(rows, key=lambda row: -row.bytes))


# -- pages


def explanation_page(title: str, summary: Mapping[str, Any], timeline: Timeline) -> Page:
    """Build the page of an explanation's summary."""
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(summary["sequence"]) if length is not None)
    return _page_of(
        summary,
        timeline,
        title=title,
        subtitle=headline(summary),
        verdict=verdict_of(summary),
        counted=COUNTED,
        figures=[
            Figure("Compute", in_flops(summary["flops"]), share_text(summary)),
            *([Figure("Sequence length", lengths)] if lengths else []),
        ],
        is_compared=not is_traced_in_part(summary),
        breaks=summary["break_reasons"],
    )


def plan_page(summary: Mapping[str, Any], timeline: Timeline, counted: str, divided: str) -> Page:
    """Build the page of a plan's summary. `counted` names the values that its bytes include, `divided` the parallelism."""
    memory = "" if summary["memory"] is None else f", {format_bytes(summary['memory'])} of memory"
    fits = {None: "", True: " It fits.", False: " It does not fit."}[summary["fits"]]
    page = _page_of(
        summary,
        timeline,
        title=summary["model"],
        subtitle=f"A step of {summary['batch']} x {summary['length']:,} tokens on {summary['device']}{divided}{memory}",
        verdict=_search_result(summary) or summary["verdict"],
        counted=f"{counted}.{fits}",
        figures=[
            Figure("Compute", in_flops(summary["flops"])),
            Figure("Time of a step", in_seconds(summary["seconds"]), f"predicted for {summary['device']}"),
        ],
        tables=list(_plan_tables(summary)),
    )
    return replace(page, frontier=_frontier(summary)) if summary["frontier"] else page


def _page_of(
    summary: Mapping[str, Any],
    timeline: Timeline,
    *,
    title: str,
    subtitle: str,
    verdict: str,
    counted: str,
    figures: Sequence[Figure],
    tables: Sequence[Table] = (),
    is_compared: bool = True,
    breaks: Sequence[Mapping[str, Any]] = (),
) -> Page:
    """Build the page of a step.

    Args:
        summary: The summary of an explanation or of a plan; both have the keys that are used here.
        timeline: The memory of the step and of its baselines.
        title, subtitle, verdict: The texts at the top.
        counted: The values that the bytes of the peak include.
        figures, tables: The figures after the peaks, and the tables after those of baselines and communication.
        is_compared: Whether the baselines count the same work, so that a gain can be claimed.
        breaks: The graph breaks.
    """
    ours, *others = (StepCost(course.way, course.peak_bytes, course.flops) for course in timeline.courses)
    stages = summary["stages"]
    peak = Figure("Peak", format_bytes(ours.peak_bytes), f"{place_of_peak(timeline.ours, stages)}; {counted}")
    ways = ((one.way, format_bytes(one.peak_bytes), in_flops(one.flops), in_seconds(one.end)) for one in timeline.courses)
    header = ("", "peak", "compute", "predicted time")
    baseline_tables = [Table("Ways to run this step", header, tuple(ways), f"Time: {timeline.clock}.")] if others else []
    traffic_tables = [_traffic_table(summary["wire"])] if summary["wire"] is not None else []
    baseline_figures = [
        Figure(
            f"{other.way[:1].upper()}{other.way[1:]}",
            format_bytes(other.peak_bytes),
            f"at the peak, {times(ratio(other.peak_bytes, ours.peak_bytes))} the streamed peak",
        )
        for other in others
    ]
    return Page(
        title=title,
        subtitle=subtitle,
        verdict=sentence(verdict),
        gains=gains(ours, others) if others and is_compared else None,
        figures=(peak, *baseline_figures, *figures),
        timeline=timeline,
        stages=stage_rows(stages, summary["flops"], summary["sequence"]),
        whole=fallback_rows(stages, matters=True),
        small=fallback_rows(stages, matters=False),
        tables=(*baseline_tables, *traffic_tables, *tables),
        options=summary["options"],
        notes=tuple(_notes(summary, breaks)),
    )


def _notes(summary: Mapping[str, Any], breaks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each note: no checkpointing baseline, graph breaks, incomplete trace."""
    if summary["not_checkpointed"]:
        yield "Not compared with gradient checkpointing", sentence(summary["not_checkpointed"])
    for item in breaks:
        given_up = GIVEN_UP if item["given_up"] else ""
        yield f"Graph break: {item['reason']}", "\n".join(filter(None, (item["where"], given_up, item["do"])))
    if summary["stopped"]:
        yield "The call could not be traced to its end", f"Later operators are not shown: {summary['stopped']}"


# -- tables


def _traffic_table(wire: Mapping[str, Any]) -> Table:
    """Return a table of the bytes that each rank sends in a step, by graph and kind of collective."""
    rows = [
        (f"{half}: {kind.replace('_', ' ')}", f"{traffic['calls']:,}", format_bytes(traffic["bytes"]))
        for half in ("forward", "backward")
        for kind, traffic in wire[half].items()
        if traffic["calls"]
    ]
    if (eager := wire["eager"]) is not None:
        checkpointed = ", layers checkpointed" if eager["checkpointed"] else ""
        rows.append((f"for comparison, eager{checkpointed}", "", format_bytes(eager["bytes"])))
    return Table("Communication between ranks", ("", "calls", "bytes"), tuple(rows), f"{'. '.join(traffic_notes(wire))}.")


def _search_result(summary: Mapping[str, Any]) -> str:
    """Return the result of a plan's search, or an empty string if there was none."""
    if summary["max_length"] is not None:
        fits = f"{summary['max_length']:,} tokens fit into {format_bytes(summary['memory'])}"
        return f"{fits}; {summary['verdict']}" if summary["lengths"] else fits
    if summary["max_batch"] is not None:
        return f"a batch of {summary['max_batch']:,} fits into {format_bytes(summary['memory'])}"
    return ""


def _plan_tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of lengths, host memory and candidates that apply to a plan."""
    if lengths := summary["lengths"]:
        longest = summary["max_length"]
        ratios = {way: times(ratio(longest, length)) if length else "fits at no length" for way, length in lengths.items()}
        rows = (("streambp", f"{longest:,}", ""), *((way, f"{length:,}", ratios[way]) for way, length in lengths.items()))
        yield Table("Longest sequences that fit", ("", "tokens", "ratio"), rows)
    if (host := summary["host"]) is not None:
        all_devices = f"of {host['devices']} devices", format_bytes(host["bytes_of_all"])
        sizes = ("of this device", format_bytes(host["bytes"])), all_devices
        title = "On the host" if "by_term" in host else "Offloaded to the host until the backward pass"
        yield Table(title, ("", "bytes"), sizes)
    lines = tuple((name, text) for name, text in summary["recipe"].items() if isinstance(text, str))
    yield Table("Code and command of this step", ("", "write"), lines, is_code=True)
    if summary["choices"]:
        header, *candidates = candidate_rows(summary["choices"])
        yield Table(
            "Candidates of the budget", header, tuple(candidates), "The fastest that fits runs, with chunks as large as fit."
        )


def _frontier(summary: Mapping[str, Any]) -> Frontier:
    """Return the plans of a frontier, next to this plan and its baselines."""
    plans = (Point(plan["choice"], plan["seconds"], plan["peak_bytes"]) for plan in summary["frontier"])
    this = Point("this plan", summary["seconds"], summary["peak_bytes"])
    others = (Point(way, one["compiled_seconds"], one["peak_bytes"]) for way, one in summary["ways"].items())
    note = (
        "The fastest plan of each budget between the smallest possible and that of the fastest plan; baselines as compiled. "
        "Much slower plans are in the table only."
    )
    header, *rows = frontier_cells(summary)
    return Frontier(tuple(plans), (this, *others), Table("Memory against time", header, tuple(rows), note))


def frontier_cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the header and a row per plan of a frontier, with peak and time as a share of checkpointing's if that was traced."""
    other = summary["ways"].get(CHECKPOINTING)
    yield "plans for other budgets (--memory)", "layers' chunk", "head's", "peak", "of checkpointing", "time", "of its"
    for plan in summary["frontier"]:
        peak = f"{plan['peak_bytes'] / other['peak_bytes']:.2f}" if other else ""
        seconds = f"{plan['seconds'] / other['compiled_seconds']:.2f}" if other else ""
        size, duration = format_bytes(plan["peak_bytes"]), in_seconds(plan["seconds"])
        yield plan["choice"], *map(str, plan["rows"]), size, peak, duration, seconds


def candidate_rows(candidates: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the header and a row per choice of the budget search: its peak with the smallest chunks, and that of the plan.

    Mixtures of two choices that were not chosen are omitted.
    """
    yield "candidates in order", "smallest peak", "as planned"
    chosen = {candidate["choice"]: format_bytes(candidate["peak_bytes"]) for candidate in candidates if candidate["chosen"]}
    shown = (candidate for candidate in candidates if not candidate["is_mixed"] or candidate["choice"] in chosen)
    peaks: dict[str, int] = {}
    for candidate in shown:
        peaks[candidate["choice"]] = min(candidate["peak_bytes"], peaks.get(candidate["choice"], candidate["peak_bytes"]))
    for choice, peak in peaks.items():
        yield choice, format_bytes(peak), f"{chosen[choice]}, this plan" if choice in chosen else ""
