"""Reports in HTML, diagrams and traces are complete, well formed, and safe for all names."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import streamfx
from streamfx.budget import format_bytes
from streamfx.tools.cli import main
from streamfx.tools.report.chart import WIDTH, colour_of, comparison_chart, frontier_chart, stacked_chart
from streamfx.tools.report.diagram import Arrow, Box, Diagram, Group, as_dot, as_mermaid
from streamfx.tools.report.html import SPAN_SIZE, html_of, stairs_of
from streamfx.tools.report.page import Frontier, Point, Table
from streamfx.tools.report.side_by_side import comparison_of
from streamfx.tools.report.stage_titles import SpanFigure, stage_rows
from tests.support.layered import Layered
from tests.support.pages import Read
from tests.support.small import Mixing, tokens
from tests.test_explain import Broken, TokenNorm, rows
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

MOST = 2 << 20  # bytes of a report
QUOTES = 'a"]; b\\" --> c[<b>#quot;\n}'
HOSTILE = "</script><script>alert('1')</script><img src=http://example.org/x onerror=\"alert(2)\">"


@pytest.fixture(scope="module")
def explanation() -> streamfx.Explanation:
    return streamfx.explain(Layered(4), tokens(2, 640), options={"chunk_size": 32, "loss_chunk_size": 32})


@pytest.fixture(scope="module")
def report() -> streamfx.PlanReport:
    return streamfx.plan(TINY, seq=4096, options={"chunk_size": 256, "loss_chunk_size": 256})


def checked(text: str) -> Read:
    """Parse a report: it must be well formed, load nothing, and be small."""
    read = Read(text)
    assert text.startswith("<!DOCTYPE html>")
    assert len(text.encode()) < MOST
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    for name, value in read.attributes:
        assert (name, value[:1]) == ("href", "#") or (
            name not in ("src", "href", "srcset", "action", "data") and not name.startswith("on")
        ), (name, value)
        assert "url(" not in value or value.startswith("url(#")
    assert not re.search(r"https?:|@import|url\((?!#)|fetch\(|XMLHttp", read.scripts)
    return read


def test_lines_of_the_model_link_to_the_code_of_the_loops_and_back(explanation: streamfx.Explanation) -> None:
    read = checked(html_of(explanation.page))
    ids = {value for name, value in read.attributes if name == "id"}
    targets = [value[1:] for name, value in read.attributes if name == "href"]
    for kind in ("line-", "code-", "code-of-"):
        assert any(target.startswith(kind) for target in targets)
    assert ids.issuperset(targets)
    layers = next(code for code in explanation.stage_codes() if len(code.stages) > 1)
    line = next(line for line in layers.user_lines if len(line.code_lines) > 1)
    assert {layers.lines[number].user_line for number in line.code_lines} == {layers.user_lines.index(line)}
    assert_shows(read, "grad_up_weight += ", line.text)


def assert_shows(read: Read, *parts: str) -> None:
    assert [part for part in parts if part not in read.text] == []


def test_an_explanation_shows_figures_stages_and_code(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    written = explanation.to_html(tmp_path / "report.html")
    read, summary = checked(written.read_text()), explanation.summary()
    assert written == tmp_path / "report.html"
    assert_shows(
        read,
        "times less memory for activations and gradients than gradient checkpointing",
        f"{format_bytes(summary['peak_bytes'])} at the peak",
        f"{format_bytes(summary['checkpointing_peak_bytes'])} at the peak",
        *("every stage streams", "layers.0-2", "layers_0_backward_1", "layered.py", "None that matters", "chunk_size"),
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    )
    data = json.loads(read.data)
    sums = [sum(column) for column in zip(*(sizes for _, sizes in data["terms"]), strict=True)]
    assert max(sums) == summary["peak_bytes"]
    assert len(sums) == len(data["seconds"])


def test_a_plan_shows_its_figures_and_other_ways(report: streamfx.PlanReport, tmp_path: Path) -> None:
    peak = format_bytes(report.summary()["peak_bytes"])
    read = checked(report.to_html(tmp_path / "plan.html").read_text())
    assert_shows(read, peak, "4,096 tokens on H100", "parameters", "model.layers.0", "Ways to run this step", "eager")
    assert_shows(read, "self_attn, mlp", "Parts of the layer")
    assert report.page.verdict.lower() == f"{report.verdict}.".lower()
    assert not any("Not compared" in head for head, _ in report.page.notes)
    assert "model.layers.0 (causal)" in report.to_mermaid() and "cluster_s0" in report.to_dot()
    trace = json.loads(report.to_perfetto(tmp_path / "trace.json").read_text())
    counters = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 1]
    assert max(sum(values.values()) for values in counters) == report.summary()["peak_bytes"]


def test_a_page_has_the_verdict_the_fallbacks_and_the_missing_comparison(explanation: streamfx.Explanation) -> None:
    assert explanation.page.verdict.lower() == f"{str(explanation).splitlines()[0].removeprefix('streamfx: ')}.".lower()
    assert not any("Not compared" in head for head, _ in explanation.page.notes)
    without = streamfx.explain(TokenNorm(), rows(64), options={"chunk_size": 8})
    assert "not compared with gradient checkpointing: no list of layers was found" in str(without)
    read, (whole,) = checked(html_of(without.page)), without.page.whole
    assert_shows(read, "Not compared with gradient checkpointing", "No list of layers was found in the model.")
    assert_shows(
        read, "aten._softmax.default", "let it run along another dimension", "test_explain.py", format_bytes(whole.bytes)
    )
    assert whole.operators == ("aten._softmax.default", "aten._softmax_backward_data.default")
    assert "self.norm(x.softmax(dim=1))" in whole.where
    assert whole.bytes > 2 * 2 * 64 * 4 * 4
    assert "falls back in part" in without.to_mermaid()


def test_reports_of_graph_breaks_of_fallbacks_and_of_graphs_without_a_backward_half() -> None:
    broken = streamfx.explain(Broken(), rows(9), options={"chunk_size": 3})
    assert_shows(checked(html_of(broken.page)), "Graph break")
    assert len(broken.diagram.groups) == len(broken.page.stages) > 1
    whole = streamfx.explain(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True))
    assert_shows(checked(html_of(whole.page)), "no dimension of this graph", "nothing streams, because no dimension")
    assert "graph 0 runs unchunked" in whole.to_dot() and not whole.diagram.arrows
    with torch.no_grad():
        forward = streamfx.explain(Layered(), tokens(1, 64), options={"chunk_size": 16})
    assert stacked_chart(forward.timeline.ours).backward_start is None
    assert re.fullmatch(r"lambda \(test_reports\.py:\d+\)", whole.page.title)
    view = streamfx.explain(lambda x: x.view(-1), torch.randn(2, 3, requires_grad=True))
    assert view.timeline.peak_bytes == view.summary()["peak_bytes"]
    checked(html_of(view.page))


def test_hostile_names_are_escaped_in_html(explanation: streamfx.Explanation) -> None:
    page, timeline = explanation.page, explanation.page.timeline
    loops = (replace(timeline.ours.loops[0], name=HOSTILE),)
    terms = {HOSTILE: timeline.ours.totals}
    courses = (replace(timeline.ours, loops=loops, terms=terms, way=HOSTILE), *timeline.others)
    line = page.stages[0]
    stage = replace(line, name=HOSTILE, stage={**line.stage, "source": [HOSTILE], "attention": [HOSTILE]})
    texts: dict[str, Any] = dict.fromkeys(("title", "subtitle", "verdict"), HOSTILE)
    more: dict[str, Any] = {"stages": (stage,), "options": {HOSTILE: HOSTILE}, "notes": ((HOSTILE, HOSTILE),)}
    read = checked(html_of(replace(page, timeline=replace(timeline, courses=courses, clock=HOSTILE), **texts, **more)))
    assert read.tags.count("script") == 2
    assert read.text.count(HOSTILE) >= 9


def test_two_reports_are_compared_in_columns(
    explanation: streamfx.Explanation, report: streamfx.PlanReport, tmp_path: Path
) -> None:
    read = checked(explanation.to_html(tmp_path / "both.html", beside=report).read_text())
    found = comparison_of(explanation.page, report.page)
    own, other = (course.peak_bytes for course in found.timeline.courses)
    assert (own, other) == (explanation.timeline.peak_bytes, report.timeline.peak_bytes)
    assert found.figures[-1].rows[0] == ("peak", format_bytes(own), format_bytes(other), f"{other / own:.2f}")
    assert found.figures[0].rows == (("chunk_size", "32", "256"), ("loss_chunk_size", "32", "256"))
    assert_shows(read, "A: Layered", f"B: {report.name}", "layers.0-2", "model.layers.0", "gradient checkpointing")
    beside: Any = "report.html"
    with pytest.raises(streamfx.ReportError, match=r"beside takes a report"):
        explanation.to_html(tmp_path / "both.html", beside=beside)


def test_a_frontier_is_drawn_with_baselines_of_its_size(explanation: streamfx.Explanation) -> None:
    plans = (
        Point("slow", 1.7, 1 << 30),
        Point("inputs kept", 0.9, 2 << 30),
        Point("attention kept", 0.5, 3 << 30),
        Point("all kept", 0.4, 8 << 30),
    )
    others = (Point("this plan", 0.6, 4 << 30), Point("eager", 0.4, 90 << 30), Point("gradient checkpointing", 0.7, 9 << 30))
    frontier = Frontier(plans, others, Table("Memory against time", ("plan",), (("inputs kept",),)))
    drawn = frontier_chart(frontier, {"this plan": 5, "gradient checkpointing": 1}, height=100)
    assert drawn.beyond == {"eager"}
    assert [mark.colour for mark in drawn.marks] == [5, 1, 0, 0, 0]
    points = [(mark.x, mark.y) for mark in drawn.marks[2:]]
    assert all(x > after and y > below for (x, y), (after, below) in pairwise(points))  # less time, more bytes
    assert all(0 < x < WIDTH and 0 < y < 100 for x, y in points)
    assert drawn.shapes[0].path == f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(f"V{y:.1f}H{x:.1f}" for x, y in points[1:])
    read = checked(html_of(replace(explanation.page, frontier=frontier)))
    assert_shows(read, "Memory against time", "plans for other budgets", "90.0 GiB, 400.0 ms", "(beyond the chart)")


def test_equal_stages_are_one_row_wherever_they_are() -> None:
    def stage(name: str, saved: int) -> dict[str, Any]:
        return {"name": name, "graph": 0, "saved_bytes": saved, "flops": 1, "runs": [], "parts": [], "source": []}

    stages = [stage(f"layers.{i}{part}", 10 + (i % 3 == 0)) for i in range(12) for part in ("", " (2)")]
    found = [(row.name, row.count, row.saved) for row in stage_rows([*stages, stage("head", 5)], 25, columns=("saved_bytes",))]
    first, second = ("layers.0-9, 1 in 3", 4, "4 x 11 bytes"), ("layers.0-9 (2), 1 in 3", 4, "4 x 11 bytes")
    assert found == [first, second, ("layers.1-11, 2 in 3", 8, "8 x 10 bytes"), *found[3:]]
    assert found[-1] == ("head", 1, "5 bytes") and len(found) == 5


def test_stairs_show_visible_keys() -> None:
    causal = stairs_of(SpanFigure("causal", [None, 0]), 64, 16)
    assert [round(width / SPAN_SIZE, 3) for _, _, width, _ in causal] == [0.25, 0.5, 0.75, 1.0]
    assert all(x == 0 for x, *_ in causal)
    window = stairs_of(SpanFigure("window(8)", [-8, 0]), 64, 16)
    assert [(round(64 * x / SPAN_SIZE), round(64 * w / SPAN_SIZE)) for x, _, w, _ in window] == [
        (0, 16),
        (8, 24),
        (24, 24),
        (40, 24),
    ]
    assert stairs_of(SpanFigure("masked", [None, None]), 64, 32) == [
        (0, 0, SPAN_SIZE, SPAN_SIZE / 2),
        (0, SPAN_SIZE / 2, SPAN_SIZE, SPAN_SIZE / 2),
    ]
    assert stairs_of(SpanFigure("whole", None), 64, 16) == [(0, 0, SPAN_SIZE, SPAN_SIZE)]
    assert len(stairs_of(SpanFigure("causal", [None, 0]), 1 << 20, 16)) == 12


def test_charts_show_all_categories_and_the_peak(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    timeline = explanation.timeline
    drawn = ElementTree.parse(explanation.to_svg(tmp_path / "picture.svg")).getroot()
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert f"streamfx: {format_bytes(timeline.peak_bytes)}" in texts
    names = [course.way for course in timeline.courses]
    assert [name for name in names if not any(text.startswith(name) for text in texts)] == []
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) == len(names) > 1
    chart = stacked_chart(timeline.ours)
    assert [shape.name for shape in chart.shapes] == list(timeline.ours.terms)[::-1]
    assert len({shape.colour for shape in chart.shapes}) == len(chart.shapes)
    heights = [float(number) for number in re.findall(r"V([\d.]+)", chart.shapes[0].path)]
    assert min(heights) == pytest.approx(chart.marks[0].y, abs=0.1)  # the highest shape reaches the marked point
    assert len(chart.blocks) == len(timeline.ours.loops)
    both = comparison_chart(timeline)
    assert [shape.name for shape in both.shapes] == ["eager", "gradient checkpointing", "streamfx"]
    assert both.beyond == {course.way for course in timeline.courses if course.peak_bytes > 1.5 * timeline.others[0].peak_bytes}
    assert colour_of("a", ("b", "a")) != colour_of("b", ("b", "a"))


@pytest.mark.parametrize(("path", "found"), [(".", "a folder"), ("no/such/folder/report.html", "no folder")])
def test_paths_are_refused_before_tracing(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(streamfx.ReportError, match=found):
        streamfx.explain(Mixing(), rows()).to_html(path)
    monkeypatch.setattr("streamfx.tools.inspect.tracing._trace", None)
    for command in ("explain", "plan"):
        assert main([command, "Qwen3-4B", "--html", path]) == 1
        assert found in capsys.readouterr().err


def test_commands_write_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", ".", "--seq", "64", "--html", "report.html", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["stages"] and "report written to report.html" in shown.err
    assert_shows(checked((tmp_path / "report.html").read_text()), "model.layers.0")


@pytest.mark.long
def test_two_plans_are_written_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "both.html"
    command = ["plan", str(tmp_path), "--seq", "512", "--no-baselines", "--chunk-size", "64", "--html", str(path), "--json"]
    assert main([*command, "--beside", "--chunk-size 128"]) == 0
    assert [plan["options"]["chunk_size"] for plan in json.loads(capsys.readouterr().out)] == [64, 128]
    assert_shows(checked(path.read_text()), "Options that differ", "chunk_size", "B: ")


# -- diagrams and traces


def test_arrows_are_the_values_between_loops(explanation: streamfx.Explanation) -> None:
    diagram = explanation.diagram
    assert [group.title for group in diagram.groups] == ["layers.0-2 (causal)", "layers.3 (causal)", "head"]
    names = {box.key: box.lines[0] for group in diagram.groups for box in group.boxes}
    arrows = {(names[arrow.source], names[arrow.target]): arrow for arrow in diagram.arrows}
    stream = 2 * 640 * 16 * 4  # bytes of a value at a cut
    forward = ["layers_0-2_forward", "layers_0-2_forward", "layers_3_forward", "head_forward"]
    for pair in pairwise(forward):
        assert arrows[pair].label == f"{stream / 1024:.1f} KiB" and not arrows[pair].saved
    assert arrows["layers_0-2_forward", "layers_3_backward_0"].saved
    assert not arrows["layers_3_backward_1", "layers_0-2_backward_1"].saved
    assert ("head_forward", "layers_3_forward") not in arrows
    assert all("20 chunks of 32 rows" in box.lines[1] for group in diagram.groups for box in group.boxes)


def test_mermaid_and_dot_have_all_loops_and_arrows(explanation: streamfx.Explanation) -> None:
    lines, arrows = explanation.to_mermaid().splitlines(), explanation.diagram.arrows
    assert lines[0] == "flowchart TB"
    boxes = {match[1] for line in lines if (match := re.fullmatch(r'    (\w+)\["[^"]*"\]', line))}
    ends = [match.groups() for line in lines if (match := re.fullmatch(r'  (\w+) -\.?->?\|"[^"]*"\| (\w+)', line))]
    assert (len(boxes), len(ends)) == (7, len(arrows)) and {end for pair in ends for end in pair} == boxes
    assert sum(line.startswith("  subgraph ") for line in lines) == lines.count("  end") == 3
    text = explanation.to_dot()
    assert text.startswith("digraph streamfx {")
    assert text.count("{") == text.count("}") == 4
    assert len(re.findall(r"^  \w+ -> \w+ \[label=", text, re.MULTILINE)) == len(arrows)
    assert text.count("style=dashed") == sum(arrow.saved for arrow in arrows) > 0


def test_labels_are_escaped_in_diagrams() -> None:
    def diagram(name: str) -> Diagram:
        return Diagram((Group("a", name, (Box("b", (name,), "forward"),)),), (Arrow("b", "b", name, False),))

    for line in as_mermaid(diagram(QUOTES)).splitlines():
        assert line.count('"') in (0, 2)
        assert not {"<b>", "\\", "}", ";"} & set(re.findall(r"<b>|[\\};]", re.sub(r"#\d+;", "", line)))
    text = as_dot(diagram(QUOTES))
    assert text.count("\n") == as_dot(diagram("")).count("\n")
    strings = re.findall(r'label="((?:\\.|[^"\\])*)"', text)
    assert len(strings) == 3
    assert {string.replace('\\"', '"').replace("\\\\", "\\") for string in strings} == {QUOTES.replace("\n", " ")}


def test_a_trace_has_all_peaks_and_loops(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    trace = json.loads(explanation.to_perfetto(tmp_path / "trace.json").read_text())
    timeline, summary = explanation.timeline, explanation.summary()
    assert "predicted seconds" in trace["otherData"]["time"]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        by_kind.setdefault(event["ph"], []).append(event)
    assert set(by_kind) == {"M", "C", "X"}
    named = {event["pid"]: event["args"]["name"] for event in by_kind["M"] if event["name"] == "process_name"}
    assert list(named.values()) == [f"{course.way} (predicted)" for course in timeline.courses]
    wanted = {1: summary["peak_bytes"], 2: summary["checkpointing_peak_bytes"], 3: summary["baseline_peak_bytes"]}
    for pid, peak in wanted.items():
        counters = [event for event in by_kind["C"] if event["pid"] == pid]
        assert max(sum(event["args"].values()) for event in counters) == peak
        moments = [event["ts"] for event in counters]
        assert moments == sorted(moments) and len(moments) > 10
    slices = [event for event in by_kind["X"] if event["tid"] == 2]
    assert [event["name"] for event in slices] == [loop.name for loop in timeline.ours.loops]
    assert all(event["ts"] >= 0 and event["ts"] + event["dur"] <= timeline.ours.end * 1e6 * 1.001 for event in slices)
    layers = [f"layers.{i}" for i in range(4)]
    assert [event["name"] for event in by_kind["X"] if event["tid"] == 1] == [*layers, "head", *layers[::-1]]
