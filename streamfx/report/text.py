"""The report of `streamfx.explain`, made of its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from streamfx.budget import in_bytes
from streamfx.report.names import joint_name, unnumbered
from streamfx.report.verdict import CHECKPOINTING, EAGER, Taken, gains, verdict, why_nothing_streams
from streamfx.report.wire_text import wire_table, wire_totals

Stage = Mapping[str, Any]
NOT_ALL = "not compared with other ways: part of the step is not traced, runs in eager, and is missing from these figures"
COUNTED = "memory for activations and gradients"
NOT_TRAINED = "nothing is trained in this call, so nothing is kept for a backward pass"
IN_PART = 0.995  # of FLOPs; where less is in loops, it is not said that everything streams
HEADER = ("stage", "attention", "rows per chunk", "loops", "saved", "FLOPs")


def report_text(summary: Mapping[str, Any]) -> str:
    """The report, a page at most for a model of equal layers."""
    return "\n".join(line.rstrip() for line in _lines(summary))


def _lines(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"streamfx: {verdict_of(summary)}"
    yield f"  {headline(summary)}"
    yield from _totals(summary)
    yield ""
    yield from stage_lines(summary["stages"], summary["flops"])
    yield from wire_table(summary["stages"], summary["wire"])
    yield from _breaks(summary)


def stage_lines(stages: Sequence[Stage], flops: int) -> Iterator[str]:
    """A table of stages, and what runs whole, with reasons."""
    yield from _table(stages, flops)
    for stage in stages:
        if stage["reasons"]:
            yield ""
            yield f"{stage['name']} runs whole:"
            yield from (f"  {reason}" for reason in stage["reasons"])
        for reason in stage["also_whole"]:
            yield f"{stage['name']}: a small operator runs whole: {reason}"


def verdict_of(summary: Mapping[str, Any]) -> str:
    """Whether the backend pays for this call."""
    if is_traced_in_part(summary):
        return NOT_ALL
    others = [Taken(EAGER, summary["baseline_peak_bytes"], summary["baseline_flops"])]
    if summary["checkpointing_peak_bytes"] is not None:
        others.insert(0, Taken(CHECKPOINTING, summary["checkpointing_peak_bytes"], summary["checkpointing_flops"]))
    ours = Taken("streambp", summary["peak_bytes"], summary["flops"])
    why_whole = why_nothing_streams(summary["stages"])
    if not summary["trains"] and why_whole is None and not gains(ours, others):
        return f"{NOT_TRAINED}: {in_bytes(ours.peak_bytes)} at the peak, {in_bytes(others[0].peak_bytes)} in {others[0].way}"
    return verdict(ours, others, why_whole, counted=COUNTED)


def is_traced_in_part(summary: Mapping[str, Any]) -> bool:
    """Whether some of the call runs in eager, and is in the figures of other ways alone."""
    return bool(summary["stopped"]) or any(item["given_up"] for item in summary["break_reasons"])


def how_many_stream(kinds: Sequence[str], share: float, traced: str = "") -> str:
    """Of stages, and of FLOPs: `share` of them are in loops.

    >>> how_many_stream(["streamed", "whole"], 0.5), how_many_stream(["streamed"], 1.0, "traced ")
    ('1 of 2 stages run whole', 'every traced stage streams')
    >>> how_many_stream(["streamed"], 0.25), how_many_stream([], 1.0)
    ('every stage streams in part: 25.0 % of the FLOPs are in loops', 'nothing streams')
    """
    if not kinds:
        return "nothing streams"
    whole = kinds.count("whole")
    if whole:
        return f"{whole} of {len(kinds)} {traced}stages run whole"
    every = f"every {traced}stage streams"
    return every if share >= IN_PART else f"{every} in part: {100 * share:.1f} % of the FLOPs are in loops"


def headline(summary: Mapping[str, Any]) -> str:
    traced = "traced " if is_traced_in_part(summary) else ""
    streams = how_many_stream([stage["kind"] for stage in summary["stages"]], summary["streamed_flops_share"], traced)
    lengths = " and ".join(str(length) for length in dict.fromkeys(summary["sequence"]) if length is not None)
    rows = f", {lengths} rows" if lengths else ""
    graphs = f"{counted(summary['graphs'], 'graph')}, {counted(summary['graph_breaks'], 'graph break')}{rows}"
    truncated = sum(len(stage["truncated"]) for stage in summary["stages"])
    return f"{streams}; {graphs}{how_far_back(summary['options']['adjoints'], truncated)}"


def how_far_back(reach: int | str, truncated: int) -> str:
    """
    >>> how_far_back("exact", 0), how_far_back(64, 0)
    ('', '; adjoints=64: no recurrence is truncated, gradients are exact')
    >>> how_far_back(64, 2)
    "; adjoints=64: gradients are not eager's, those of 2 recurrences reach back 64 rows, rounded up to chunks"
    """
    if reach == "exact":
        return ""
    if not truncated:
        return f"; adjoints={reach}: no recurrence is truncated, gradients are exact"
    return (
        f"; adjoints={reach}: gradients are not eager's, those of {counted(truncated, 'recurrence')} reach back "
        f"{counted(int(reach), 'row')}, rounded up to chunks"
    )


def _totals(summary: Mapping[str, Any]) -> Iterator[str]:
    peak, baseline = summary["peak_bytes"], summary["baseline_peak_bytes"]
    checkpointing = summary["checkpointing_peak_bytes"]
    flops, before = summary["flops"], summary["baseline_flops"]
    ratio = f" ({flops / before:.2f} times)" if before else ""
    yield f"  memory   {in_bytes(peak)} at the peak for activations and gradients"
    checkpointed = f", {in_bytes(checkpointing)} with every layer checkpointed" if checkpointing is not None else ""
    yield f"           {in_bytes(baseline)} in eager{checkpointed}"
    if summary["not_checkpointed"]:
        yield f"           not compared with gradient checkpointing: {summary['not_checkpointed']}"
    yield f"  compute  {in_flops(flops)}, {100 * summary['streamed_flops_share']:.1f} % of it in loops over chunks"
    yield f"           {in_flops(before)} in eager{ratio}"
    yield from wire_totals(summary["wire"])


def _table(stages: Sequence[Stage], flops: int) -> Iterator[str]:
    rows = [HEADER, *(_row(list(run), flops) for _, run in groupby(stages, key=_alike))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "   ".join(cells)


def _alike(stage: Stage) -> tuple[Any, ...]:
    """Stages that share a line of the table: equal but for a number in the name."""
    keys = ("graph", "kind", "chunk_size", "loops", "saved_bytes", "flops")
    return unnumbered(stage["name"]), tuple(stage["attention"]), *(stage[key] for key in keys)


def _row(run: list[Stage], flops: int) -> tuple[str, ...]:
    stage, name = run[0], joint_name([stage["name"] for stage in run])
    share = 100 * sum(stage["flops"] for stage in run) / flops if flops else 0.0
    saved = in_bytes(stage["saved_bytes"])
    return (
        name + (" (whole)" if stage["kind"] == "whole" else ""),
        ", ".join(stage["attention"]) or "-",
        str(stage["chunk_size"] or "-"),
        str(stage["loops"]),
        saved if len(run) == 1 else f"{len(run)} x {saved}",
        f"{share:.1f} %",
    )


def _breaks(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["break_reasons"]:
        yield ""
        yield "graph breaks: each piece that is traced streams by itself, and what crosses from one to the next is kept whole"
        for item in summary["break_reasons"]:
            yield f"  {item['reason']}"
            yield f"    {item['where']}"
            if item["given_up"]:
                yield "    the rest of this function is not traced: it runs in eager, and is not in this report"
            if item["do"]:
                yield f"    {item['do']}"
    if summary["stopped"]:
        yield ""
        yield f"the call could not be followed to its end without data, so what comes later is not shown: {summary['stopped']}"


def counted(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'' if number == 1 else 's'}"


def in_flops(number: int) -> str:
    for unit, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}FLOP"
    return f"{number} FLOP"


def in_seconds(number: float) -> str:
    """
    >>> in_seconds(0.0042), in_seconds(12.3), in_seconds(720)
    ('4.2 ms', '12.3 s', '12.0 min')
    """
    if number < 1:
        return f"{1000 * number:.1f} ms" if number >= 0.001 or not number else f"{1e6 * number:.0f} us"
    return f"{number:.1f} s" if number < 180 else f"{number / 60:.1f} min"
