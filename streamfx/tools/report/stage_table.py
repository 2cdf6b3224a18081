"""Report each stage: whether it streams, which keys its attention sees, and in which loops it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from streamfx.cost.flops import flops_of_graph, is_fused_attention
from streamfx.cost.memory import LoopCost, bytes_like
from streamfx.ir.facts import Facts, Role, known
from streamfx.ir.joint import is_tensor
from streamfx.ir.program import Program
from streamfx.ir.span import Span
from streamfx.ir.stage import Stage
from streamfx.node_meta import SPLIT_FROM, VALUE
from streamfx.passes.ops.rules.attention import M
from streamfx.runtime.loop import Loop
from streamfx.runtime.probes import LoopOrigin
from streamfx.tools.report.communication import Wire, as_plain, sent_by_program, sum_traffic, total_of
from streamfx.tools.report.fallback_reasons import Obstacle, is_from_ranks, obstacles, why_no_stages
from streamfx.tools.report.listing import shape_text
from streamfx.torch_private.lines import source_line


@dataclass(frozen=True)
class StageReport:
    """The report of one stage of one graph.

    `reasons` explain why the stage is not chunked; `also_whole` lists unchunked operators too small to matter. `wire` is its
    communication by graph and kind, or None if it sends nothing. `spans` are the key bounds of each attention, `runs` the loops,
    `saved` the values counted in `saved_bytes`, `obstacles` the source of the reasons. `truncated` lists recurrences whose
    gradients an option truncates to few rows.
    """

    graph: int
    name: str
    reasons: tuple[str, ...]
    attention: tuple[str, ...]
    chunk_size: int
    loops: int
    saved_bytes: int
    flops: int
    source: tuple[str, ...]
    also_whole: tuple[str, ...] = ()
    wire: dict[str, dict[str, dict[str, int]]] | None = None
    spans: tuple[list[int | None] | None, ...] = ()
    runs: tuple[LoopReport, ...] = ()
    saved: tuple[SavedReport, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    truncated: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "whole" if self.reasons else "streamed"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        items = {key: list(item) if isinstance(item, tuple) else item for key, item in asdict(self).items()}
        return {"kind": self.kind, "reason": "; ".join(self.reasons) or None, **items}


def stage_reports(facts: Facts, graph: int, costs: Mapping[str, LoopCost]) -> list[StageReport]:
    """Return the reports of all stages that have work along the sequence."""
    if facts.program is None:
        return [_unchunked_graph(facts, graph)] if computes(facts) else []
    view = _ReportBuilder(facts, graph, costs)
    return [report for stage in facts.stages if (report := view.report(stage)) is not None]


def computes(facts: Facts) -> bool:
    """Return whether a graph does more than build positions, masks and tables, which a graph break may isolate.

    A model's table that is indexed by positions has neither a product nor a gradient.
    """
    if facts.found_axes is None:
        return True
    works = facts.joint.tangents or flops_of_graph(facts.joint.graph)
    return bool(works) and not facts.axes.static.issuperset(facts.joint.nodes)


def _unchunked_graph(facts: Facts, graph: int) -> StageReport:
    """Return the report of a graph without stages, with the reason."""
    nodes = [node for node in facts.joint.nodes if node in facts.joint.forward]
    return StageReport(graph, f"graph {graph}", (why_no_stages(facts),), (), 0, 0, 0, 0, source_lines(nodes))


@dataclass
class _ReportBuilder:
    """Builds the reports of the stages of one graph."""

    facts: Facts
    graph: int
    costs: Mapping[str, LoopCost]
    obstacles_by_node: dict[fx.Node, Obstacle] = field(init=False)
    traffic_by_loop: dict[str, Wire] = field(init=False)

    def __post_init__(self) -> None:
        """Find the unchunked operators, and the traffic of each loop."""
        self.obstacles_by_node = obstacles(self.facts)
        self.traffic_by_loop = sent_by_program(known(self.facts.program), len(self.facts.joint.outputs), self.costs).by_loop

    def report(self, stage: Stage) -> StageReport | None:
        """Return the report of a stage, or None if it has neither loops nor unchunked operators."""
        loops, saved = loops_of(stage, self.facts), saved_reports(stage, self.facts)
        unchunked = [self.obstacles_by_node[node] for node in (*stage.forward, *stage.backward) if node in self.obstacles_by_node]
        if not loops and not unchunked:
            return None
        # Without loops, the stage has nothing else to report.
        unchunked = unchunked if loops else [replace(item, matters=True) for item in unchunked]
        costs = [self.costs[loop.spec.name] for loop in loops]
        attention = attention_kinds(stage, self.facts)
        return StageReport(
            graph=self.graph,
            name=stage.name,
            reasons=_distinct_texts(item for item in unchunked if item.matters),
            attention=tuple(kind for kind, _ in attention),
            chunk_size=max((cost.rows for cost in costs), default=0),
            loops=len(loops),
            saved_bytes=sum(value.bytes for value in saved),
            flops=sum(cost.flops for cost in costs),
            source=source_lines(stage.forward),
            also_whole=_distinct_texts(item for item in unchunked if not item.matters),
            wire=self._communication(loops),
            spans=tuple(bounds_of(span) for _, span in attention),
            runs=loop_reports(loops, known(self.facts.program), self.costs),
            saved=saved,
            obstacles=tuple(unchunked),
            truncated=tuple(node.name for node in stage.backward if self._is_truncated(node, costs)),
        )

    def _is_truncated(self, node: fx.Node, costs: Iterable[LoopCost]) -> bool:
        """Return whether the gradients of a recurrence reach back over fewer chunks than there are."""
        if node not in self.facts.truncations:
            return False
        rows = self.facts.truncations[node].num_rows
        return any(cost.chunks - 1 > -(-(rows - 1) // max(cost.rows, 1)) for cost in costs)

    def _communication(self, loops: Iterable[Loop]) -> dict[str, dict[str, dict[str, int]]] | None:
        """Return the communication of the loops, or None if they send nothing."""
        wire = sum_traffic(self.traffic_by_loop[loop.spec.name] for loop in loops if loop.spec.name in self.traffic_by_loop)
        return as_plain(wire) if total_of(wire).calls else None


def _distinct_texts(items: Iterable[Obstacle]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(item) for item in items))


def loops_of(stage: Stage, facts: Facts) -> list[Loop]:
    """Return the loops that compute the values of a stage, forward and backward."""
    names = {node.name for node in (*stage.forward, *stage.backward)}
    return [loop for loop in known(facts.program).loops if loop.spec.labels and loop.spec.labels[0] in names]


def place_loops(facts: Facts) -> None:
    """Set the stage and the graph (forward or backward) of each loop, for measurements."""
    program = facts.program
    if program is None:
        return
    stage_of = {node.name: stage.name for stage in facts.stages for node in (*stage.forward, *stage.backward)}
    forward = {name for name, _ in program.forward.named_children()}
    for loop in program.loops:
        stage = next((stage_of[label] for label in loop.spec.labels if label in stage_of), "between stages")
        loop.origin = LoopOrigin(stage, "forward" if loop.spec.name in forward else "backward")


def attention_kinds(stage: Stage, facts: Facts) -> list[tuple[str, Span | None]]:
    """Return the kind and the key span of each attention of the forward graph.

    The kind is "whole" if the attention is not chunked, or "all ranks' rows" if it is not chunked because ranks exchange its
    operands. Groups of heads count as one attention. Keys outside the sequence, or gathered from it, are visible to every chunk.
    """
    spans, verdicts = facts.key_spans.spans, facts.key_spans.span_kinds
    kinds: dict[Any, tuple[str, Span | None]] = {}
    for node in stage.forward:
        if node in verdicts:
            kinds.setdefault(id(spans[node]), (verdicts[node], spans[node]))
        elif is_fused_attention(node.target) and facts.access.roles.get(node, {}).get(M) is Role.ROWS:
            kinds[node] = "all keys", None
        elif is_fused_attention(node.target) or (node in facts.access.reasons and _is_over_row_pairs(node, facts)):
            kinds[node.meta.get(SPLIT_FROM, node)] = ("all ranks' rows" if is_from_ranks(node, facts) else "whole"), None
    return list(kinds.values())


def _is_over_row_pairs(node: fx.Node, facts: Facts) -> bool:
    """Return whether an operator normalizes a value over query and key positions, as attention does."""
    signature = facts.axes.signatures.get(node)
    if signature is None or not signature.full_labels or not is_tensor(node):
        return False
    return len(facts.axes.sequence_dims(facts.axes.shapes[node])) == 2


def source_lines(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return the distinct source lines of a user's code that the operators come from."""
    return tuple(dict.fromkeys(line for node in nodes if (line := source_line(node))))


# -- loops and saved values


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
