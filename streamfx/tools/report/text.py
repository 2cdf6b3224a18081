"""Format the summary of `streamfx.explain` as a text report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.report.communication import COLUMNS, HALVES
from streamfx.tools.report.stage_titles import grouped, joint_name, names_together, stage_rows, unnumbered
from streamfx.tools.report.verdict import CHECKPOINTING, EAGER, NOTHING, StepCost, gains, verdict, why_nothing_streams

Stage = Mapping[str, Any]
NOT_ALL = "not compared with baselines: part of the step is not traced; it runs in eager mode, outside these figures"
COUNTED = "memory for activations and gradients"
CHUNK_WORK = "intermediate values of one chunk, fewer with a smaller chunk_size"
NOT_TRAINED = "this call trains nothing, so nothing is saved for a backward pass"
IN_PART_HEADING = "{names}: these operators fall back and run between loops, the rest streams:"
MAX_LINES = 3  # source lines that a reason names
FULL_SHARE = 0.995  # share of FLOPs in loops below which a report does not claim that everything streams
HEADER = ("stage", "attention", "rows per chunk", "loops", "saved", "FLOPs")


def report_text(summary: Mapping[str, Any]) -> str:
    """Return the report: at most one page for a model of equal layers."""
    return "\n".join(line.rstrip() for line in _report_lines(summary))


def _report_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report: verdict, headline, totals, stages, communication, sequence splits and graph breaks."""
    yield f"streamfx: {verdict_of(summary)}"
    yield f"  {headline(summary)}"
    yield from _totals(summary)
    yield ""
    yield from stage_lines(summary["stages"], summary["flops"])
    if summary["wire"] is not None:
        yield ""
        yield from _traffic_table(summary["stages"], summary["wire"])
    if summary["splits"]:
        yield ""
        yield "split where another sequence begins: each part streams separately, and values between parts are saved in full"
        yield from (f"  {line}" for line in summary["splits"])
    yield from _break_lines(summary)


def stage_lines(stages: Sequence[Stage], flops: int) -> Iterator[str]:
    """Yield a table with a line per group of similar stages, then the unchunked operators with reasons."""
    cells = [
        (
            row.name + suffix_of(row.stage),
            ", ".join(row.stage["attention"]) or "-",
            str(row.stage["chunk_size"] or "-"),
            str(row.stage["loops"]),
            row.saved,
            row.share,
        )
        for row in stage_rows(stages, flops)
    ]
    yield from table_lines([HEADER, *cells])
    yield from reason_lines(stages)


def reason_lines(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield each distinct reason once, with the stages and source lines to which it applies."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}  # stage and source line of equal reasons of one kind
    for stage in stages:
        for obstacle in obstacles_of(stage):
            kind = extent(stage) if obstacle["matters"] else "small"
            groups.setdefault((kind, obstacle["found"], obstacle["do"]), []).append((stage["name"], obstacle["where"]))
    texts_of_small_operators: dict[str, list[str]] = {}
    texts_by_heading: dict[str, list[str]] = {}
    for (kind, found, do), items in groups.items():
        names = names_together(list(dict.fromkeys(name for name, _ in items)))
        where = _source_lines_text(list(dict.fromkeys(line for _, line in items if line)))
        text = ": ".join(filter(None, (f"{found}{where}", do)))
        if kind == "small":
            texts_of_small_operators.setdefault(names, []).append(text)
        else:
            heading = f"{names} runs unchunked:" if kind == "whole" else IN_PART_HEADING.format(names=names)
            texts_by_heading.setdefault(heading, []).append(text)
    for heading, texts in texts_by_heading.items():
        yield ""
        yield heading
        yield from (f"  {text}" for text in texts)
    for names, texts in texts_of_small_operators.items():
        yield from (f"{names}: a small operator falls back: {text}" for text in texts)


def obstacles_of(stage: Stage) -> Sequence[Mapping[str, Any]]:
    """Return the unchunked operators of a stage; if the graph has no stages, return the reason instead."""
    if stage["obstacles"]:
        return list(stage["obstacles"])
    empty = {"operator": "", "where": "", "do": "", "matters": True, "bytes": 0}
    return [{**empty, "found": reason} for reason in stage["reasons"]]


def _source_lines_text(lines: Sequence[str]) -> str:
    """Format source lines, with a count of those left out.

    >>> _source_lines_text(["a.py:1: x"]), _source_lines_text(["a.py:1: x", "a.py:2: y", "a.py:3: z", "a.py:4: w"])
    (' (a.py:1: x)', ' (a.py:1: x; a.py:2: y; and 2 more lines)')
    """
    if not lines:
        return ""
    shown = lines if len(lines) <= MAX_LINES else lines[: MAX_LINES - 1]
    omitted_text = f"; and {counted(len(lines) - len(shown), 'more line')}" if len(shown) < len(lines) else ""
    return f" ({'; '.join(shown)}{omitted_text})"


def verdict_of(summary: Mapping[str, Any]) -> str:
    """Compare this call's memory and FLOPs with its baselines in one sentence."""
    if is_traced_in_part(summary):
        return NOT_ALL
    others = [StepCost(EAGER, summary["baseline_peak_bytes"], summary["baseline_flops"])]
    if summary["checkpointing_peak_bytes"] is not None:
        others.insert(0, StepCost(CHECKPOINTING, summary["checkpointing_peak_bytes"], summary["checkpointing_flops"]))
    ours = StepCost("streambp", summary["peak_bytes"], summary["flops"])
    why_unchunked = why_nothing_streams(summary["stages"])
    if not summary["trains"] and why_unchunked is None and not gains(ours, others):
        return (
            f"{NOT_TRAINED}: {format_bytes(ours.peak_bytes)} at the peak, {format_bytes(others[0].peak_bytes)} in {others[0].way}"
        )
    return verdict(ours, others, why_unchunked, counted=COUNTED)


def is_traced_in_part(summary: Mapping[str, Any]) -> bool:
    """Return whether part of the call runs in eager, and is counted only for the baselines."""
    return bool(summary["stopped"]) or any(graph_break["given_up"] for graph_break in summary["break_reasons"])


def extent(stage: Stage) -> str:
    """Classify how much of a stage streams.

    >>> [extent({"loops": loops, "reasons": reasons}) for loops, reasons in ((2, []), (2, ["no rule"]), (0, ["no rule"]))]
    ['streamed', 'in part', 'whole']
    """
    if not stage["loops"]:
        return "whole"
    return "in part" if stage["reasons"] else "streamed"


def how_many_stream(extents: Sequence[str], share: float | None, traced: str = "") -> str:
    """Describe how many stages stream; `share` is the share of FLOPs in loops, if known.

    >>> how_many_stream(["streamed", "whole"], 0.5), how_many_stream(["streamed"], 1.0, "traced ")
    ('1 of 2 stages run unchunked', 'every traced stage streams')
    >>> how_many_stream(["streamed"], 0.25), how_many_stream([], 1.0)
    ('every stage streams in part: 25.0 % of the FLOPs are in loops', 'nothing streams')
    >>> how_many_stream(["streamed", "in part"], 1.0), how_many_stream(["whole", "in part"], 0.5)
    ('every stage streams, 1 of 2 except for some operators', '1 of 2 stages run unchunked, 1 streams except for some operators')
    """
    if all(extent == "whole" for extent in extents):
        return NOTHING
    whole_count, part_count = extents.count("whole"), extents.count("in part")
    if whole_count:
        others = f", {part_count} stream{'s' if part_count == 1 else ''} except for some operators" if part_count else ""
        return f"{whole_count} of {len(extents)} {traced}stages run unchunked{others}"
    streams = f"every {traced}stage streams"
    if share is not None and share < FULL_SHARE:
        streams += f" in part: {in_percent(share)} of the FLOPs are in loops"
    return f"{streams}, {part_count} of {len(extents)} except for some operators" if part_count else streams


def share_text(summary: Mapping[str, Any]) -> str:
    """Describe the share of the FLOPs in loops."""
    share = summary["streamed_flops_share"]
    if share is None:
        return "without the untraced part; the share in loops is unknown"
    of_which = "of the full call" if is_traced_in_part(summary) else "of it"
    return f"{in_percent(share)} {of_which} in loops over chunks"


def in_percent(share: float) -> str:
    """Format a share in percent; a share below 1 is never rounded to 100 %.

    >>> in_percent(0.99999), in_percent(1.0), in_percent(0.25)
    ('99.9 %', '100.0 %', '25.0 %')
    """
    return f"{min(100 * share, 99.9 if share < 1 else 100.0):.1f} %"


def streams_of(summary: Mapping[str, Any]) -> str:
    """Describe how much of a call streams."""
    traced = "traced " if is_traced_in_part(summary) else ""
    return how_many_stream(list(map(extent, summary["stages"])), summary["streamed_flops_share"], traced)


def headline(summary: Mapping[str, Any]) -> str:
    """Describe on one line how much streams, the graphs, graph breaks, rows, and truncated gradients."""
    lengths = " and ".join(str(length) for length in dict.fromkeys(summary["sequence"]) if length is not None)
    rows = f", {lengths} rows" if lengths else ""
    graphs = f"{counted(summary['graphs'], 'graph')}, {counted(summary['graph_breaks'], 'graph break')}{rows}"
    truncated = sum(len(stage["truncated"]) for stage in summary["stages"])
    return f"{streams_of(summary)}; {graphs}{truncation_text(summary['options']['adjoints'], truncated)}"


def truncation_text(reach: int | str, truncated: int) -> str:
    """Describe how far gradients of recurrences reach back.

    >>> truncation_text("exact", 0), truncation_text(64, 0)
    ('', '; adjoints=64: no recurrence is truncated, gradients are exact')
    >>> truncation_text(64, 2)
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
    """Yield peak and FLOPs, compared with the baselines, then the communication."""
    peak, baseline = summary["peak_bytes"], summary["baseline_peak_bytes"]
    checkpointing = summary["checkpointing_peak_bytes"]
    flops, baseline_flops = summary["flops"], summary["baseline_flops"]
    ratio = f" ({flops / baseline_flops:.2f} times)" if baseline_flops else ""
    yield f"  memory   {format_bytes(peak)} at the peak for activations and gradients"
    checkpointed = f", {format_bytes(checkpointing)} with every layer checkpointed" if checkpointing is not None else ""
    yield f"           {format_bytes(baseline)} in eager{checkpointed}"
    if checkpointing is not None and checkpointing < peak:
        at_peak = _peak_values(summary["at_peak"], peak)
        yield f"           more by {format_bytes(peak - checkpointing)}; most at the peak: {at_peak}"
    if summary["not_checkpointed"]:
        yield f"           not compared with gradient checkpointing: {summary['not_checkpointed']}"
    yield f"  compute  {in_flops(flops)}, {share_text(summary)}"
    yield f"           {in_flops(baseline_flops)} in eager{ratio}"
    if (wire := summary["wire"]) is not None:
        eager_bytes = "unknown" if wire["eager"] is None else format_bytes(wire["eager"]["bytes"])
        yield f"  wire     {', '.join(traffic_notes(wire))}"
        yield f"           {eager_bytes} in {_eager_text(wire['eager'])}"


def _peak_values(items: Sequence[Mapping[str, Any]], peak: int) -> str:
    """List the values that take most of the peak; if they take less than half, loops come first.

    >>> sort = {"operator": "aten.sort.stable", "where": "a.py:1: x.sort()", "bytes": 2048, "values": 2}
    >>> _peak_values([sort], 4096)
    '2.0 KiB, 2 results of aten.sort.stable (a.py:1: x.sort())'
    >>> _peak_values([sort], 5000)
    'intermediate values of one chunk, fewer with a smaller chunk_size; 2.0 KiB, 2 results of aten.sort.stable (a.py:1: x.sort())'
    """
    texts = [] if 2 * sum(item["bytes"] for item in items) >= peak else [CHUNK_WORK]
    for item in items:
        where = _source_lines_text(list(filter(None, [item["where"]])))
        texts.append(f"{format_bytes(item['bytes'])}, {counted(item['values'], 'result')} of {item['operator']}{where}")
    return "; ".join(texts)


def table_lines(rows: Sequence[Sequence[str]], left: int = 2) -> Iterator[str]:
    """Yield the lines of a table: its first `left` columns are aligned left, the others right.

    >>> print("\\n".join(table_lines([("a", "bc"), ("def", "1")], left=1)))
      a     bc
      def    1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'   '.join(cells)}".rstrip()


def suffix_of(stage: Stage) -> str:
    """Return the suffix for the name of a stage that does not fully stream."""
    return "" if extent(stage) == "streamed" else f" ({extent(stage)})"


# -- communication


def traffic_notes(wire: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bytes that each rank sends in a step, the share of early reductions, and the full weights at the peak."""
    yield f"{format_bytes(wire['bytes'])} sent by each rank"
    if wire["early_reductions"] is not None:
        yield f"{100 * wire['early_reductions']:.0f} % of the reductions begin before the last loop"
    if wire["whole_weights_bytes"]:
        yield f"{format_bytes(wire['whole_weights_bytes'])} of full weights at the peak"


def _traffic_table(stages: Sequence[Stage], wire: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of calls and bytes per stage and graph, with totals for the step and for eager."""
    rows = [("communication", "half", *(name.replace("_", " ") for name in COLUMNS))]
    communicating = [stage for stage in stages if stage["wire"] is not None]
    for similar in grouped(communicating, lambda stage: (stage["graph"], unnumbered(stage["name"]), stage["wire"])):
        rows += _traffic_rows(joint_name([stage["name"] for stage in similar]), similar[0]["wire"], len(similar))
    rows += _traffic_rows("the step", wire, 1)
    rows += [] if wire["eager"] is None else _traffic_rows(_eager_text(wire["eager"]), wire["eager"], 1)
    columns = [column for i, column in enumerate(zip(*rows, strict=True)) if i < 2 or any(cell != "-" for cell in column[1:])]
    yield from table_lines(list(zip(*columns, strict=True)))


def _traffic_rows(name: str, wire: Mapping[str, Any], count: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graph that sends something, multiplied by `count`; the name is in the first row only."""
    each = f"{count} x " if count > 1 else ""
    for half in HALVES:
        columns = [wire[half][column] for column in COLUMNS]
        if any(traffic["calls"] for traffic in columns):
            texts = (f"{each}{traffic['calls']}, {format_bytes(traffic['bytes'])}" for traffic in columns)
            yield name, half, *(text if traffic["calls"] else "-" for text, traffic in zip(texts, columns, strict=True))
            name = ""


def _eager_text(eager: Mapping[str, Any] | None) -> str:
    return "eager, layers checkpointed" if eager is not None and eager["checkpointed"] else "eager"


def _break_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield each graph break with its advice, and where tracing stopped."""
    if summary["break_reasons"]:
        yield ""
        yield "graph breaks: each traced graph streams separately, and values between graphs are saved in full"
        for graph_break in summary["break_reasons"]:
            yield f"  {graph_break['reason']}"
            yield f"    {graph_break['where']}"
            if graph_break["given_up"]:
                yield "    the rest of this function is not traced: it runs in eager mode and is not in this report"
            if graph_break["do"]:
                yield f"    {graph_break['do']}"
    if summary["stopped"]:
        yield ""
        yield f"the call could not be traced to its end without data, so later operators are not shown: {summary['stopped']}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `no graphs`, `1 graph`, `2 graphs`."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def in_flops(count: int) -> str:
    """Format FLOPs with a suitable unit."""
    for unit, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}FLOP"
    return f"{count} FLOP"


def in_seconds(number: float) -> str:
    """Format seconds with a suitable unit.

    >>> in_seconds(0.0042), in_seconds(12.3), in_seconds(720)
    ('4.2 ms', '12.3 s', '12.0 min')
    """
    if number < 1:
        return f"{1000 * number:.1f} ms" if number >= 0.001 or not number else f"{1e6 * number:.0f} us"
    return f"{number:.1f} s" if number < 180 else f"{number / 60:.1f} min"
