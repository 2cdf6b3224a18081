"""Reports in HTML: complete, well formed, harmless whatever names they show, and readable in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.budget import in_bytes
from streamfx.tools.cli import main
from streamfx.tools.report.chart import beside_chart, colour_of, stacked_chart
from streamfx.tools.report.html import SIDE, html_of, stairs_of
from streamfx.tools.report.page import SpanFigure
from tests.support.pages import Read, in_browser, picture_of, size_and_content
from tests.support.small import Mixing, tokens
from tests.test_explain import Broken, TokenNorm, rows
from tests.test_timeline import Block, Small

MOST = 2 << 20  # bytes of a report
HOSTILE = "</script><script>alert('1')</script><img src=http://example.org/x onerror=\"alert(2)\">"


@pytest.fixture(scope="module")
def explanation() -> streamfx.Explanation:
    ids = tokens(2, 640)
    return streamfx.explain(Small(4), ids, ids, options={"chunk_size": 32, "loss_chunk_size": 32})


@pytest.fixture(scope="module")
def report() -> streamfx.PlanReport:
    config = pytest.importorskip("transformers").Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return streamfx.plan(config, seq=4096, options={"chunk_size": 256, "loss_chunk_size": 256})


def checked(text: str) -> Read:
    """What every report is: well formed, one file that loads nothing, not too large."""
    read = Read(text)
    assert text.startswith("<!DOCTYPE html>")
    assert len(text.encode()) < MOST
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    for name, value in read.attributes:
        assert name not in ("src", "href", "srcset", "action", "data") and not name.startswith("on"), (name, value)
        assert "url(" not in value or value.startswith("url(#")
    assert not re.search(r"https?:|@import|url\((?!#)|fetch\(|XMLHttp", read.scripts)
    return read


def test_an_explanation(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    written = explanation.to_html(tmp_path / "report.html")
    read, summary = checked(written.read_text()), explanation.summary()
    assert written == tmp_path / "report.html"
    for part in (
        "times less memory for activations and gradients than gradient checkpointing",
        f"streamfx: {in_bytes(summary['peak_bytes'])}",
        f"{in_bytes(summary['checkpointing_peak_bytes'])} at the peak",
        "every stage streams",
        "layers.0-2",
        "layers_0_backward_1",
        "test_timeline.py",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "Nothing that matters",
        "chunk_size",
    ):
        assert part in read.text, part
    data = json.loads(read.data)
    sums = [sum(column) for column in zip(*(sizes for _, sizes in data["terms"]), strict=True)]
    assert max(sums) == summary["peak_bytes"]
    assert len(sums) == len(data["seconds"])


def test_a_plan(report: streamfx.PlanReport, tmp_path: Path) -> None:
    read, summary = checked(report.to_html(tmp_path / "plan.html").read_text()), report.summary()
    assert in_bytes(summary["peak_bytes"]) in read.text
    for part in ("4,096 tokens on H100", "parameters", "model.layers.0", "Ways to run this step", "eager"):
        assert part in read.text, part


def test_a_page_says_what_the_text_says(explanation: streamfx.Explanation, report: streamfx.PlanReport) -> None:
    """Which memory it is, and why nothing is compared with checkpointing."""
    assert explanation.page.verdict.lower() == f"{str(explanation).splitlines()[0].removeprefix('streamfx: ')}.".lower()
    assert "less memory for activations and gradients than" in checked(html_of(explanation.page)).text
    assert report.page.verdict.lower() == f"{report.verdict}.".lower()
    assert not any("Not compared" in head for head, _ in (*explanation.page.notes, *report.page.notes))
    without = streamfx.explain(TokenNorm(), rows(64), options={"chunk_size": 8})
    assert "not compared with gradient checkpointing: no list of layers was found" in str(without)
    read = checked(html_of(without.page)).text
    assert "Not compared with gradient checkpointing" in read and "No list of layers was found in the model." in read


def test_a_plan_without_layers_says_why_nothing_is_compared_with_checkpoints() -> None:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        return {"x": torch.empty(batch, length, 8, device="meta")}

    found = streamfx.plan(Wide(8, 8, device="meta"), seq=256, inputs=inputs)
    assert "not compared with gradient checkpointing: no list of layers was found in the model" in str(found)
    assert ("Not compared with gradient checkpointing", "No list of layers was found in the model.") in found.page.notes
    assert streamfx.plan(Wide(8, 8, device="meta"), seq=256, inputs=inputs, baselines=False).page.notes == ()


def test_a_page_of_the_longest_length_compares_it_with_other_ways() -> None:
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=300
    )
    found = streamfx.plan(config, seq=256, max_length=True, memory="12MiB", chunk_size=64, loss_chunk_size=64)
    assert found.lengths and found.page.verdict.endswith(f" fit into 12.0 MiB; {found.verdict}.")
    (table,) = (table for table in found.page.tables if table.title == "Longest sequences that fit")
    assert [(way, tokens) for way, tokens, _ in table.rows[1:]] == [(way, f"{size:,}") for way, size in found.lengths.items()]


class Wide(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_what_runs_whole_is_told_with_what_to_write_instead() -> None:
    explanation = streamfx.explain(TokenNorm(), rows(64), options={"chunk_size": 8})
    (whole,) = explanation.page.whole
    assert whole.operators == ("aten._softmax.default", "aten._softmax_backward_data.default")
    assert "self.norm(x.softmax(dim=1))" in whole.where
    assert whole.bytes > 2 * 2 * 64 * 4 * 4
    read = checked(html_of(explanation.page))
    for part in (
        "aten._softmax.default",
        "let it run along another dimension",
        "test_explain.py",
        in_bytes(whole.bytes),
        "whole",
    ):
        assert part in read.text, part


def test_graph_breaks_and_whole_graphs_are_told() -> None:
    text = checked(html_of(streamfx.explain(Broken(), rows(9)).page)).text
    assert "Graph break" in text
    text = checked(html_of(streamfx.explain(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True)).page)).text
    assert "no dimension of this graph" in text
    assert "nothing streams, because no dimension" in text


def test_what_has_no_backward_half_or_makes_nothing() -> None:
    with torch.no_grad():
        chart = stacked_chart(streamfx.explain(Small(), tokens(1, 64), tokens(1, 64), options={"chunk_size": 16}).timeline.ours)
    assert chart.turn is None
    explanation = streamfx.explain(lambda x: x.view(-1), torch.randn(2, 3, requires_grad=True))
    assert explanation.timeline.peak_bytes == explanation.summary()["peak_bytes"]
    checked(html_of(explanation.page))


def test_names_do_no_harm(explanation: streamfx.Explanation) -> None:
    page = explanation.page
    timeline = page.timeline
    loops = (replace(timeline.ours.loops[0], name=HOSTILE),)
    terms = {HOSTILE: timeline.ours.totals}
    courses = (replace(timeline.ours, loops=loops, terms=terms, way=HOSTILE), *timeline.others)
    stages = tuple(
        replace(line, name=HOSTILE, stage={**line.stage, "source": [HOSTILE], "attention": [HOSTILE]}) for line in page.stages
    )
    hostile = replace(
        page,
        title=HOSTILE,
        subtitle=HOSTILE,
        verdict=HOSTILE,
        timeline=replace(timeline, courses=courses, clock=HOSTILE),
        stages=stages[:1],
        options={HOSTILE: HOSTILE},
        notes=((HOSTILE, HOSTILE),),
    )
    read = checked(html_of(hostile))
    assert read.tags.count("script") == 2
    assert read.text.count(HOSTILE) >= 9


class Hostile(Small):
    """A module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"<script>alert(1)</script>": Block()})  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x)
        return self.head(x).square().mean()


def test_a_module_with_a_hostile_name(tmp_path: Path) -> None:
    explanation = streamfx.explain(Hostile(), tokens(1, 32), tokens(1, 32), options={"chunk_size": 8})
    assert any("<script>" in line.name for line in explanation.page.stages)
    read = checked(explanation.to_html(tmp_path / "report.html").read_text())
    assert "<script>alert(1)</script>" in read.text
    assert read.tags.count("script") == 2


def test_stairs_show_which_keys_are_seen() -> None:
    causal = stairs_of(SpanFigure("causal", [None, 0]), 64, 16)
    assert [round(width / SIDE, 3) for _, _, width, _ in causal] == [0.25, 0.5, 0.75, 1.0]
    assert all(x == 0 for x, *_ in causal)
    window = stairs_of(SpanFigure("window(8)", [-8, 0]), 64, 16)
    assert [(round(64 * x / SIDE), round(64 * width / SIDE)) for x, _, width, _ in window] == [
        (0, 16),
        (8, 24),
        (24, 24),
        (40, 24),
    ]
    assert stairs_of(SpanFigure("masked", [None, None]), 64, 32) == [(0, 0, SIDE, SIDE / 2), (0, SIDE / 2, SIDE, SIDE / 2)]
    assert stairs_of(SpanFigure("whole", None), 64, 16) == [(0, 0, SIDE, SIDE)]
    assert len(stairs_of(SpanFigure("causal", [None, 0]), 1 << 20, 16)) == 12


def test_a_picture(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    """For a page that shows images: XML of its own, with names for its lines, and the peak that is told."""
    drawn = ElementTree.parse(explanation.to_svg(tmp_path / "picture.svg")).getroot()
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert f"streamfx: {in_bytes(explanation.timeline.peak_bytes)}" in texts
    names = [course.way for course in explanation.timeline.courses]
    assert [name for name in names if not any(text.startswith(name) for text in texts)] == []
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) == len(names) > 1


def test_charts(explanation: streamfx.Explanation) -> None:
    timeline = explanation.timeline
    chart = stacked_chart(timeline.ours)
    assert [shape.name for shape in chart.shapes] == list(timeline.ours.terms)[::-1]
    assert len({shape.colour for shape in chart.shapes}) == len(chart.shapes)
    heights = [float(number) for number in re.findall(r"V([\d.]+)", chart.shapes[0].path)]
    assert min(heights) == pytest.approx(chart.marks[0].y, abs=0.1)  # the highest shape reaches the point that is marked
    assert len(chart.blocks) == len(timeline.ours.loops)
    beside = beside_chart(timeline)
    assert [shape.name for shape in beside.shapes] == ["eager", "gradient checkpointing", "streamfx"]
    assert beside.beyond == {course.way for course in timeline.courses if course.peak_bytes > 1.5 * timeline.others[0].peak_bytes}
    assert colour_of("a", ("b", "a")) != colour_of("b", ("b", "a"))


@pytest.mark.parametrize(
    ("path", "found"), [(".", "a folder"), ("no/such/folder/report.html", "no folder")], ids=["a folder", "in no folder"]
)
def test_paths_are_refused_before_anything_is_traced(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced")

    monkeypatch.setattr("streamfx.tools.inspect.tracing._trace", never)
    for command in ("explain", "plan"):
        assert main([command, "Qwen3-4B", "--html", path]) == 1
        assert found in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(streamfx.ReportError, match=found):
        streamfx.explain(Mixing(), rows()).to_html(path)


@pytest.mark.usefixtures("no_search")
def test_commands_write_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes}))
    monkeypatch.chdir(tmp_path)
    for command in ("explain", "plan"):
        assert main([command, ".", "--seq", "64", "--html", f"{command}.html", "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["stages"]
        assert f"report written to {command}.html" in shown.err
        assert "model.layers.0" in checked((tmp_path / f"{command}.html").read_text()).text


HOVER = """<script>
const chart = document.querySelector("svg.stacked"), box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
const at = PLACE * box.width / view.width + box.left;
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: at, clientY: box.top + 9, bubbles: true }));
</script></body>"""


@pytest.mark.parametrize("made_by", ["explain", "plan"])
def test_in_a_browser(made_by: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Screenshots, wide and narrow, that show something; and a pointer at the peak reads the peak."""
    found = request.getfixturevalue({"explain": "explanation", "plan": "report"}[made_by])
    page = found.to_html(tmp_path / "report.html")
    for width, height in ((1280, 900), (500, 1100)):
        picture = picture_of(page, width, height)
        assert size_and_content(picture)[:2] == (width, height)
        assert size_and_content(picture)[2] > 0.01
    (tmp_path / "empty.html").write_text("<!DOCTYPE html><title>nothing</title>")
    assert size_and_content(picture_of(tmp_path / "empty.html", 1280, 900))[2] < 0.01  # so the figure above says something
    x = stacked_chart(found.timeline.ours).marks[0].x + 0.01
    (tmp_path / "hover.html").write_text(page.read_text().replace("</body>", HOVER.replace("PLACE", str(x))))
    shown = in_browser(tmp_path / "hover.html", "--dump-dom").stdout
    (here,) = re.findall(r'data-term="sum"[^>]*>([^<]*)<', shown)
    assert here == in_bytes(found.timeline.peak_bytes)
    (when,) = re.findall(r'class="when">([^<]*)<', shown)
    assert re.fullmatch(r"[\d.]+ (us|ms|s), (for|back)ward half", when)
