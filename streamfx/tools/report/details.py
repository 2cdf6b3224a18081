"""Collect the details of a stage: its loops, the keys its attention sees, and the values it saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from streamfx.cost.memory import LoopCost, bytes_like
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor
from streamfx.ir.program import Program
from streamfx.ir.span import Span
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop
from streamfx.tools.report.listing import shape_text
from streamfx.torch_private.lines import source_line


@dataclass(frozen=True)
class LoopReport:
    """A loop of a stage: its graph (forward or backward), its chunks, the rows of each, and their total FLOPs and launches."""

    name: str
    half: str
    chunks: int
    rows: int
    flops: int
    launches: int


@dataclass(frozen=True)
class SavedReport:
    """A value that the forward graph saves for the backward graph, and the source line that it comes from."""

    value: str
    shape: str
    bytes: int
    where: str


def loop_reports(loops: Iterable[Loop], program: Program, costs: Mapping[str, LoopCost]) -> tuple[LoopReport, ...]:
    """Return the reports of loops, each with its graph and cost."""
    forward = {name for name, _ in program.forward.named_children()}
    return tuple(_loop_report(loop, loop.spec.name in forward, costs[loop.spec.name]) for loop in loops)


def _loop_report(loop: Loop, is_forward: bool, cost: LoopCost) -> LoopReport:
    half = "forward" if is_forward else "backward"
    return LoopReport(loop.spec.name, half, cost.chunks, cost.rows, cost.flops, cost.work.launches)


def saved_reports(stage: Stage, facts: Facts) -> tuple[SavedReport, ...]:
    """Return the saved values of a stage, the largest first."""
    ids_of_values = {id(node.meta[VALUE]) for node in (*stage.forward, *stage.backward) if is_tensor(node)}
    saved = [node for node in known(facts.program).saved if id(node.meta.get(VALUE)) in ids_of_values]
    return tuple(sorted(map(_saved_report, saved), key=lambda item: -item.bytes))


def _saved_report(node: fx.Node) -> SavedReport:
    """Return name, dtype, shape, bytes and source line of a saved value."""
    value = node.meta[VALUE]
    kind = str(value.dtype).removeprefix("torch.")
    where = next(filter(None, map(source_line, (node, *node.all_input_nodes))), "")
    return SavedReport(node.name, f"{kind} {shape_text(value)}", bytes_like(value), where)


def bounds_of(span: Span | None) -> list[int | None] | None:
    """Return [low, high] if a chunk of rows [s, e) sees keys [s + low, e + high).

    A bound is None if the span is unbounded on that side; the result is None if the attention sees all keys.
    """
    return None if span is None else [span.low, span.high]
