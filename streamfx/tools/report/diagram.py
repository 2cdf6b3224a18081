"""Stages and loops as text that Mermaid and Graphviz draw: what each loop hands to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamfx.budget import in_bytes
from streamfx.tools.report.dataflow import LoopTraffic
from streamfx.tools.report.page import StageRow
from streamfx.tools.report.stage_titles import joint_name
from streamfx.tools.report.text import extent


@dataclass(frozen=True)
class Box:
    """A loop, or those that are alike of several stages; a stage without loops is one by itself."""

    key: str
    lines: tuple[str, ...]
    half: str


@dataclass(frozen=True)
class Group:
    """Stages that are alike, and their boxes."""

    key: str
    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Arrow:
    source: str
    target: str
    label: str
    saved: bool


@dataclass(frozen=True)
class Diagram:
    """Groups of stages in order, and what their boxes hand to each other; what is `saved` goes from one half to the other."""

    groups: tuple[Group, ...]
    arrows: tuple[Arrow, ...]


def diagram_of(lines: Sequence[StageRow], flows: Sequence[Iterable[LoopTraffic]]) -> Diagram:
    """`lines` are stages as a page shows them, `flows` what loops of each graph hand to each other."""
    boxes: dict[tuple[int, str], Box] = {}  # by graph, and name of the loop
    groups = []
    for number, line in enumerate(lines):
        own = list(_boxes(line, f"s{number}"))
        groups.append(Group(f"s{number}", _title(line), tuple(own)))
        for stage in line.every if line.stage["runs"] else ():
            names = [run["name"] for run in stage["runs"]]
            boxes.update(((stage["graph"], name), box) for name, box in zip(names, own, strict=True))
    return Diagram(tuple(groups), tuple(_arrows(boxes, flows)))


def _title(line: StageRow) -> str:
    kinds = ", ".join(line.stage["attention"])
    whole = {"streamed": "", "in part": " runs whole in part", "whole": " runs whole"}[extent(line.stage)]
    return f"{line.name}{whole}" + (f" ({kinds})" if kinds else "")


def _boxes(line: StageRow, key: str) -> Iterator[Box]:
    runs = line.stage["runs"]
    if not runs:
        yield Box(f"{key}_0", ("whole",), "forward")
    for number, run in enumerate(runs):
        name = joint_name([stage["runs"][number]["name"] for stage in line.every])
        count = f"{line.count} x " if line.count > 1 else ""
        yield Box(f"{key}_{number}", (name, f"{count}{run['chunks']:,} chunks of {run['rows']:,} rows"), run["half"])


def _arrows(boxes: dict[tuple[int, str], Box], flows: Sequence[Iterable[LoopTraffic]]) -> Iterator[Arrow]:
    """One for each pair of boxes; bytes are those of each time, where they are always as many."""
    found: dict[tuple[str, str, bool], set[int]] = {}
    for graph, flow in enumerate(flows):
        for source, target, size in flow:
            ends = boxes.get((graph, source)), boxes.get((graph, target))
            if ends[0] is not None and ends[1] is not None:
                found.setdefault((ends[0].key, ends[1].key, ends[0].half != ends[1].half), set()).add(size)
    for (source, target, saved), sizes in found.items():
        label = in_bytes(max(sizes)) if len(sizes) == 1 else f"up to {in_bytes(max(sizes))}"
        yield Arrow(source, target, label, saved)


def as_mermaid(diagram: Diagram) -> str:
    """A flowchart.

    >>> head = Group("a", "head", (Box("b", ("loop", "2 chunks"), "forward"),))
    >>> print(as_mermaid(Diagram((head,), (Arrow("b", "b", "1 GiB", False),))))
    flowchart TB
      subgraph a["head"]
        b["loop<br/>2 chunks"]
      end
      b -->|"1 GiB"| b
    """
    return "\n".join(_mermaid_lines(diagram))


def _mermaid_lines(diagram: Diagram) -> Iterator[str]:
    yield "flowchart TB"
    for group in diagram.groups:
        yield f'  subgraph {group.key}["{_in_mermaid(group.title)}"]'
        for box in group.boxes:
            yield f'    {box.key}["{"<br/>".join(map(_in_mermaid, box.lines))}"]'
        yield "  end"
    for arrow in diagram.arrows:
        line = "-.->" if arrow.saved else "-->"
        yield f'  {arrow.source} {line}|"{_in_mermaid(arrow.label)}"| {arrow.target}'


def _in_mermaid(text: str) -> str:
    """A label: letters that Mermaid, or HTML within it, would read otherwise, by number."""
    return "".join(letter if letter.isalnum() or letter in " .,:()_-+/=[]" else f"#{ord(letter)};" for letter in text)


def as_dot(diagram: Diagram) -> str:
    """A directed graph for Graphviz."""
    return "\n".join(_dot_lines(diagram))


def _dot_lines(diagram: Diagram) -> Iterator[str]:
    yield "digraph streamfx {"
    yield '  node [shape=box, style=rounded, fontname="sans-serif", fontsize=11];'
    yield '  edge [fontname="sans-serif", fontsize=9];'
    for group in diagram.groups:
        yield f"  subgraph cluster_{group.key} {{"
        yield f'    label="{_in_dot(group.title)}";'
        for box in group.boxes:
            label = "\\n".join(map(_in_dot, box.lines))
            yield f'    {box.key} [label="{label}"];'
        yield "  }"
    for arrow in diagram.arrows:
        style = ", style=dashed" if arrow.saved else ""
        yield f'  {arrow.source} -> {arrow.target} [label="{_in_dot(arrow.label)}"{style}];'
    yield "}"


def _in_dot(text: str) -> str:
    """A quoted string of DOT: backslashes and quotes escaped, on one line."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
