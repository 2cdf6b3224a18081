"""Draw stages, loops, and the values that flow between loops as text for Mermaid and Graphviz.

A *stage* is a segment of the graph, which runs in loops over chunks of the sequence in forward and in backward. Similar stages,
such as those of equal layers, are drawn once, as one `Group` of boxes; a `StageRow` (here `line`) describes them: `line.stage`
is the first of them, `line.every` are all, `line.count` is their number. `runs` lists the loops of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from streamfx.budget import format_bytes
from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts
from streamfx.ir.joint import saved_values
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop
from streamfx.tools.report.stage_titles import StageRow, joint_name
from streamfx.tools.report.text import extent

SUFFIXES = {"streamed": "", "in part": " falls back in part", "whole": " runs unchunked"}


@dataclass(frozen=True)
class Box:
    """A loop, or equal loops of several similar stages; `half` is "forward" or "backward". A stage without loops is one box."""

    key: str
    lines: tuple[str, ...]
    half: str


@dataclass(frozen=True)
class Group:
    """Similar stages and their boxes."""

    key: str
    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Arrow:
    """The values that one box passes to another, both given by key; `saved`: from the forward to the backward graph."""

    source: str
    target: str
    label: str
    saved: bool


@dataclass(frozen=True)
class Diagram:
    """Groups of stages in order, and the traffic between their boxes; `saved` arrows lead from forward to backward graph."""

    groups: tuple[Group, ...]
    arrows: tuple[Arrow, ...]


def diagram_of(lines: Sequence[StageRow], flows: Sequence[Iterable[LoopTraffic]]) -> Diagram:
    """Return a diagram of stages, given as a report lists them, and of the bytes that loops pass to each other.

    `flows` has, for each graph, (source loop, target loop, bytes) of each transfer.
    """
    boxes: dict[tuple[int, str], Box] = {}  # by graph index and loop name
    groups = []
    for group_index, line in enumerate(lines):
        line_boxes = list(_boxes(line, f"s{group_index}"))
        kinds = f" ({', '.join(line.stage['attention'])})" if line.stage["attention"] else ""
        groups.append(Group(f"s{group_index}", f"{line.name}{SUFFIXES[extent(line.stage)]}{kinds}", tuple(line_boxes)))
        for stage in line.every if line.stage["runs"] else ():
            names = [run["name"] for run in stage["runs"]]
            boxes.update(((stage["graph"], name), box) for name, box in zip(names, line_boxes, strict=True))
    return Diagram(tuple(groups), tuple(_arrows(boxes, flows)))


def _boxes(line: StageRow, key: str) -> Iterator[Box]:
    """Yield a box per loop of similar stages, or one box if they have no loops; `key` is the start of their keys."""
    runs = line.stage["runs"]
    if not runs:
        yield Box(f"{key}_0", ("unchunked",), "forward")
    for index, run in enumerate(runs):
        name = joint_name([stage["runs"][index]["name"] for stage in line.every])
        count = f"{line.count} x " if line.count > 1 else ""
        yield Box(f"{key}_{index}", (name, f"{count}{run['chunks']:,} chunks of {run['rows']:,} rows"), run["half"])


def _arrows(boxes: dict[tuple[int, str], Box], flows: Sequence[Iterable[LoopTraffic]]) -> Iterator[Arrow]:
    """Yield one arrow per pair of boxes that exchange values, labeled with the bytes of a transfer.

    If the transfers of similar stages differ, with the largest: `up to 2 MiB`. `boxes`: by graph index and loop name; loops
    without a box are omitted.
    """
    sizes_by_ends: dict[tuple[str, str, bool], set[int]] = {}
    for graph_index, flow in enumerate(flows):
        for source_loop, target_loop, size in flow:
            source_box, target_box = boxes.get((graph_index, source_loop)), boxes.get((graph_index, target_loop))
            if source_box is not None and target_box is not None:
                ends = source_box.key, target_box.key, source_box.half != target_box.half
                sizes_by_ends.setdefault(ends, set()).add(size)
    for (source, target, saved), sizes in sizes_by_ends.items():
        label = format_bytes(max(sizes)) if len(sizes) == 1 else f"up to {format_bytes(max(sizes))}"
        yield Arrow(source, target, label, saved)


def as_mermaid(diagram: Diagram) -> str:
    """Return a Mermaid flowchart: stages (groups) as subgraphs, loops as boxes; arrows of saved values are dashed.

    >>> head = Group("a", "head", (Box("b", ("loop", "2 chunks"), "forward"),))
    >>> print(as_mermaid(Diagram((head,), (Arrow("b", "b", "1 GiB", False),))))
    flowchart TB
      subgraph a["head"]
        b["loop<br/>2 chunks"]
      end
      b -->|"1 GiB"| b
    """
    lines = ["flowchart TB"]
    for group in diagram.groups:
        boxes = [f'    {box.key}["{"<br/>".join(map(_in_mermaid, box.lines))}"]' for box in group.boxes]
        lines += [f'  subgraph {group.key}["{_in_mermaid(group.title)}"]', *boxes, "  end"]
    for arrow in diagram.arrows:
        line = "-.->" if arrow.saved else "-->"
        lines.append(f'  {arrow.source} {line}|"{_in_mermaid(arrow.label)}"| {arrow.target}')
    return "\n".join(lines)


def _in_mermaid(text: str) -> str:
    """Escape a label: characters that Mermaid, or HTML within it, would interpret become numeric references: `<` -> `#60;`."""
    return "".join(char if char.isalnum() or char in " .,:()_-+/=[]" else f"#{ord(char)};" for char in text)


def as_dot(diagram: Diagram) -> str:
    """Return a directed graph in Graphviz's DOT language: stages as clusters, loops as boxes."""
    lines = ["digraph streamfx {", '  node [shape=box, style=rounded, fontname="sans-serif", fontsize=11];']
    lines.append('  edge [fontname="sans-serif", fontsize=9];')
    for group in diagram.groups:
        labels = {box.key: "\\n".join(map(_in_dot, box.lines)) for box in group.boxes}
        boxes = [f'    {key} [label="{label}"];' for key, label in labels.items()]
        lines += [f"  subgraph cluster_{group.key} {{", f'    label="{_in_dot(group.title)}";', *boxes, "  }"]
    for arrow in diagram.arrows:
        style = ", style=dashed" if arrow.saved else ""
        lines.append(f'  {arrow.source} -> {arrow.target} [label="{_in_dot(arrow.label)}"{style}];')
    return "\n".join([*lines, "}"])


def _in_dot(text: str) -> str:
    """Escape a DOT string: escape backslashes and quotes, and keep it on one line."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


# -- the values that flow from loop to loop


LoopTraffic = tuple[str, str, int]  # source, target, and the bytes of its results that the target reads, maybe through operators


def flow_of(facts: Facts) -> list[LoopTraffic]:
    """Return the traffic between the loops of a graph in execution order; empty if the graph has no loops."""
    program = facts.program
    if program is None:
        return []
    producers: dict[fx.Node, frozenset[str]] = {}  # the loops that a value comes from
    traffic: dict[tuple[str, str], int] = {}
    for host in filter(None, (program.forward, program.backward)):
        if host is program.backward:
            saved = saved_values(program.forward.graph, host.graph, len(facts.joint.outputs))
            producers |= {input_: producers.get(node, frozenset()) for input_, node in saved.items()}
        for node in host.graph.nodes:
            loop = host.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(loop, Loop):
                for operand in node.all_input_nodes:
                    for source in sorted(producers.get(operand, ())):  # the order of a set would differ from run to run
                        pair = source, loop.spec.name
                        traffic[pair] = traffic.get(pair, 0) + bytes_like(operand.meta.get(VALUE))
                producers[node] = frozenset([loop.spec.name])
            elif node.op != "placeholder":
                producers[node] = frozenset(name for operand in node.all_input_nodes for name in producers.get(operand, ()))
    return [(source, target, size) for (source, target), size in traffic.items()]
