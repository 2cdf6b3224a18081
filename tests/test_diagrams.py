"""Diagrams and traces: what loops hand to each other, in forms that other tools read."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import streamfx
from streamfx.report.diagram import Arrow, Box, Diagram, Group, as_dot, as_mermaid
from tests.support.small import tokens
from tests.test_explain import Broken, TokenNorm, rows
from tests.test_timeline import Small

HOSTILE = 'a"]; b\\" --> c[<b>#quot;\n}'


@pytest.fixture(scope="module")
def explanation() -> streamfx.Explanation:
    ids = tokens(2, 40)
    return streamfx.explain(Small(4), ids, ids, options={"chunk_size": 8, "loss_chunk_size": 8})


def test_what_loops_hand_to_each_other(explanation: streamfx.Explanation) -> None:
    diagram = explanation.diagram
    assert [group.title for group in diagram.groups] == ["layers.0-2 (causal)", "layers.3 (causal)", "head"]
    names = {box.key: box.lines[0] for group in diagram.groups for box in group.boxes}
    arrows = {(names[arrow.source], names[arrow.target]): arrow for arrow in diagram.arrows}
    stream = 2 * 40 * 16 * 4  # bytes of a value at a cut
    forward = ["layers_0-2_forward", "layers_0-2_forward", "layers_3_forward", "head_forward"]
    for pair in pairwise(forward):
        assert arrows[pair].label == f"{stream / 1024:.1f} KiB" and not arrows[pair].saved
    assert arrows["layers_0-2_forward", "layers_3_backward_0"].saved
    assert not arrows["layers_3_backward_1", "layers_0-2_backward_1"].saved
    assert ("head_forward", "layers_3_forward") not in arrows
    assert all("5 chunks of 8 rows" in box.lines[1] for group in diagram.groups for box in group.boxes)


def test_as_texts(explanation: streamfx.Explanation) -> None:
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


def test_labels_are_escaped() -> None:
    def diagram(name: str) -> Diagram:
        return Diagram((Group("a", name, (Box("b", (name,), "forward"),)),), (Arrow("b", "b", name, False),))

    for line in as_mermaid(diagram(HOSTILE)).splitlines():
        assert line.count('"') in (0, 2)
        assert not {"<b>", "\\", "}", ";"} & set(re.findall(r"<b>|[\\};]", re.sub(r"#\d+;", "", line)))
    text = as_dot(diagram(HOSTILE))
    assert text.count("\n") == as_dot(diagram("")).count("\n")
    strings = re.findall(r'label="((?:\\.|[^"\\])*)"', text)
    assert len(strings) == 3
    assert {string.replace('\\"', '"').replace("\\\\", "\\") for string in strings} == {HOSTILE.replace("\n", " ")}


def test_stages_without_loops_and_several_graphs() -> None:
    assert "runs whole" in streamfx.explain(TokenNorm(), rows(12), options={"chunk_size": 4}).to_mermaid()
    broken = streamfx.explain(Broken(), rows(9), options={"chunk_size": 3})
    assert len(broken.diagram.groups) == len(broken.page.stages) > 1
    whole = streamfx.explain(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True))
    assert "graph 0 runs whole" in whole.to_dot()
    assert not whole.diagram.arrows


def test_as_a_trace(explanation: streamfx.Explanation, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("no_search")
def test_plans_have_them_too(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Small(3)

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}

    report = streamfx.plan(model, seq=256, inputs=inputs, options={"chunk_size": 32})
    assert "layers.0-1 (causal)" in report.to_mermaid() and "cluster_s0" in report.to_dot()
    trace = json.loads(report.to_perfetto(tmp_path / "trace.json").read_text())
    peak = max(sum(event["args"].values()) for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 1)
    assert peak == report.summary()["peak_bytes"]
