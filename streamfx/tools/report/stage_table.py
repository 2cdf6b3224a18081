"""Report each stage: whether it streams, which keys its attention sees, and in which loops it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from streamfx.cost.flops import attention_flops, flops_of_call, flops_of_graph, has_flops, is_fused_attention, visible_pairs
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import LoopCost, bytes_like
from streamfx.ir.facts import Facts, Role, known
from streamfx.ir.joint import bound_arguments, is_tensor
from streamfx.ir.program import Program
from streamfx.ir.span import Span
from streamfx.ir.stage import Stage
from streamfx.node_meta import SPLIT_FROM, VALUE
from streamfx.passes.ops.rules.attention import M
from streamfx.passes.partition.stage_names import parts_of_stage
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
    communication by graph and kind, or None if it sends nothing. `spans`, one per attention, are [low, high] if a chunk of rows
    [s, e) sees keys [s + low, e + high), with None for no bound, or None if it sees all keys. `runs` are the loops, `saved` the
    values counted in `saved_bytes`, `obstacles` the source of the reasons. `truncated` lists recurrences whose gradients an
    option truncates to few rows. `launches` are the kernels that its loops launch in a step, unless a compiler fuses them.
    `parts` are the modules of its layer, such as attention and MLP.
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
    launches: int = 0
    parts: tuple[PartReport, ...] = ()

    @property
    def kind(self) -> str:
        return "whole" if self.reasons else "streamed"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        items = {key: list(item) if isinstance(item, tuple) else item for key, item in asdict(self).items()}
        return {"kind": self.kind, "reason": "; ".join(self.reasons) or None, **items}


def stage_reports(facts: Facts, graph: int, costs: Mapping[str, LoopCost]) -> list[StageReport]:
    """Return the reports of all stages that have work along the sequence; a graph without stages is one, with the reason."""
    if facts.program is None:
        source = source_lines(node for node in facts.joint.nodes if node in facts.joint.forward)
        unchunked = StageReport(graph, f"graph {graph}", (why_no_stages(facts),), (), 0, 0, 0, 0, source)
        return [unchunked] if computes(facts) else []
    traffic = sent_by_program(facts.program, len(facts.joint.outputs), costs).by_loop
    obstacle_of = obstacles(facts)
    reports = (_stage_report(stage, facts, graph, costs, obstacle_of, traffic) for stage in facts.stages)
    return [report for report in reports if report is not None]


def computes(facts: Facts) -> bool:
    """Return whether a graph does more than build positions, masks and tables, which a graph break may isolate.

    A model's table that is indexed by positions has neither a product nor a gradient.
    """
    if facts.found_axes is None:
        return True
    works = facts.joint.tangents or flops_of_graph(facts.joint.graph)
    return bool(works) and not facts.axes.static.issuperset(facts.joint.nodes)


def _stage_report(
    stage: Stage,
    facts: Facts,
    graph: int,
    costs_by_loop: Mapping[str, LoopCost],
    obstacle_of: Mapping[fx.Node, Obstacle],
    traffic_by_loop: Mapping[str, Wire],
) -> StageReport | None:
    """Return the report of a stage, or None if it has neither loops nor unchunked operators."""
    loops, saved = loops_of(stage, facts), saved_reports(stage, facts)
    unchunked = [obstacle_of[node] for node in (*stage.forward, *stage.backward) if node in obstacle_of]
    if not loops and not unchunked:
        return None
    # Without loops, the stage has nothing else to report.
    unchunked = unchunked if loops else [replace(item, matters=True) for item in unchunked]
    costs = [costs_by_loop[loop.spec.name] for loop in loops]
    attention = attention_kinds(stage, facts)
    wire = sum_traffic(traffic_by_loop[loop.spec.name] for loop in loops if loop.spec.name in traffic_by_loop)

    def is_truncated(node: fx.Node) -> bool:
        """Return whether the gradients of a recurrence reach back over fewer chunks than there are."""
        rows = facts.truncations[node].num_rows
        return any(cost.chunks - 1 > -(-(rows - 1) // max(cost.rows, 1)) for cost in costs)

    return StageReport(
        graph=graph,
        name=stage.name,
        reasons=_distinct_texts(item for item in unchunked if item.matters),
        attention=tuple(kind for kind, _ in attention),
        chunk_size=max((cost.rows for cost in costs), default=0),
        loops=len(loops),
        saved_bytes=sum(value.bytes for value in saved),
        flops=sum(cost.flops for cost in costs),
        source=source_lines(stage.forward),
        also_whole=_distinct_texts(item for item in unchunked if not item.matters),
        wire=as_plain(wire) if total_of(wire).calls else None,
        spans=tuple(None if span is None else [span.low, span.high] for _, span in attention),
        runs=loop_reports(loops, known(facts.program), costs_by_loop),
        saved=saved,
        obstacles=tuple(unchunked),
        truncated=tuple(node.name for node in stage.backward if node in facts.truncations and is_truncated(node)),
        launches=sum(cost.work.launches for cost in costs),
        parts=part_reports(stage, facts, saved),
    )


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
    """A value that the forward graph saves for the backward graph: the source line and the part of the layer it comes from."""

    value: str
    shape: str
    bytes: int
    where: str
    part: str = ""


@dataclass(frozen=True)
class PartReport:
    """A module of a stage's layer, such as its attention: the FLOPs of its forward pass, and the bytes of its saved values."""

    name: str
    flops: int
    saved_bytes: int


def part_reports(stage: Stage, facts: Facts, saved: Iterable[SavedReport]) -> tuple[PartReport, ...]:
    """Return the modules of a stage's layer that have FLOPs, in the order of the forward pass."""
    part_of, flops = parts_of_stage(stage.forward), dict[str, int]()
    for node, part in part_of.items():
        if has_flops(node.target):
            flops[part] = flops.get(part, 0) + _visible_flops(node, facts)
    sizes = {part: sum(value.bytes for value in saved if value.part == part) for part in flops}
    return tuple(PartReport(part, count, sizes[part]) for part, count in flops.items())


def _visible_flops(node: fx.Node, facts: Facts) -> int:
    """Return the FLOPs of a node; of attention, on the pairs that are visible through its mask."""
    span, length = facts.key_spans.spans.get(node), sequence_length(facts)
    if span is not None and is_fused_attention(node.target):
        operands = {name: value.meta[VALUE] for name, value in bound_arguments(node).items() if name in ("query", "key", "value")}
        return attention_flops(node.target, operands, span)
    flops = flops_of_call(node.target, node.args, node.kwargs, node)
    return flops if span is None or not length else flops * visible_pairs(length, length, span) // length**2


def loop_reports(loops: Iterable[Loop], program: Program, costs: Mapping[str, LoopCost]) -> tuple[LoopReport, ...]:
    """Return the reports of loops, each with its graph and cost."""
    forward = {name for name, _ in program.forward.named_children()}
    halves = {loop.spec.name: "forward" if loop.spec.name in forward else "backward" for loop in loops}
    runs = ((name, half, costs[name]) for name, half in halves.items())
    return tuple(LoopReport(name, half, cost.chunks, cost.rows, cost.flops, cost.work.launches) for name, half, cost in runs)


def saved_reports(stage: Stage, facts: Facts) -> tuple[SavedReport, ...]:
    """Return the saved values of a stage, the largest first."""
    part_of, reports = parts_of_stage(stage.forward), []
    part_of_value = {id(node.meta[VALUE]): part_of.get(node, "") for node in (*stage.backward, *stage.forward) if is_tensor(node)}
    for node in known(facts.program).saved:
        value: Any = node.meta.get(VALUE)
        if id(value) in part_of_value:
            kind = str(value.dtype).removeprefix("torch.")
            where = next(filter(None, map(source_line, (node, *node.all_input_nodes))), "")
            reports.append(
                SavedReport(node.name, f"{kind} {shape_text(value)}", bytes_like(value), where, part_of_value[id(value)])
            )
    return tuple(sorted(reports, key=lambda item: -item.bytes))
