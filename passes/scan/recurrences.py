"""Find unrolled loops that carry a state from row to row.

A loop over rows that was traced operator by operator is identified by its reads and writes: rows of values with T
rows go in (`x[:, t]`), and values with T rows come out. Each operator between them is assigned to the last row that
it depends on, or, in the backward graph, to the first row that its cotangents come from. Together they become one
operator whose rows run in sequence, as in a running sum: `streamfx/ir/recurrence.py`. Steps may differ from row to
row. The conditions are that no row depends on a later one, and that the state that crosses from row to row is smaller
than the rows themselves (it may be empty).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import JointGraph, joint_graph
from streamfx.ir.sizes import shape_of
from streamfx.ir.writer import GraphWriter
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.axes import sequence_axes
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.rerolling import roll, sort_topologically, unrolled_name
from streamfx.passes.scan.row_access import ConcatAccess, RowAccesses, rows_of
from streamfx.passes.scan.row_ranges import RowInterval, row_interval_of
from streamfx.passes.scan.schedule import NoRecurrenceError, RecurrencePair, UnrolledLoop, plan_recurrence
from streamfx.passes.scan.strip_mine import cut_blocks, put_back

aten = torch.ops.aten
JOINS = (aten.stack.default, aten.select_scatter.default)


@dataclass(frozen=True)
class Recurrences:
    name: ClassVar[str] = "recurrences"

    def apply(self, facts: Facts) -> Facts:
        """Reroll unrolled loops over rows into recurrence operators; restore rewritten blocks that no loop uses."""
        joint = facts.joint
        writer = GraphWriter(joint.graph)
        blocks = cut_blocks(joint, writer)
        if not any(node.target in JOINS for node in joint.graph.nodes):
            return facts
        rows = rows_of(joint.graph)
        joint = joint_graph(joint.graph, len(joint.primals), len(joint.outputs))
        self._roll(facts, joint, rows)
        put_back(blocks, joint.graph, writer)
        sort_topologically(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))

    def _roll(self, facts: Facts, joint: JointGraph, rows: RowAccesses) -> None:
        """Plan the loops of each number of rows, and replace them unless they must stay unchunked."""
        lengths = {len(join.values) for join in rows.joins} & {row.length for row in rows.reads.values()}
        if not lengths:
            return
        axes = sequence_axes(joint)
        families = [family for length in sorted(lengths) for family in _families_of_length(joint, rows, length, axes)]
        planned_nodes, replacements = set[fx.Node](), dict[fx.Node, fx.Node]()
        for plan in [plan for family in families for plan in family.plans(axes, families, planned_nodes)]:
            if not any(half is not None and unrolled_name(half) in facts.fallbacks for half in (plan.forward, plan.backward)):
                roll(plan, joint.graph, replacements)


def _families_of_length(joint: JointGraph, rows: RowAccesses, length: int, axes: AxisFacts) -> list[_Family]:
    """Return a family for each interval of the sequence with `length` rows: blocks and the rows after them may match
    in number.

    Rows at unknown positions are assigned by the rows that they are combined with.
    """
    range_of = {node: row_interval_of(row, axes) for node, row in rows.reads.items() if row.length == length}
    ranges: list[RowInterval | None] = [*sorted({interval for interval in range_of.values() if interval is not None})] or [None]
    numbers = {interval: number for number, interval in enumerate(ranges)}
    return [
        _Family(joint, rows, length, {node: numbers.get(interval, own_number) for node, interval in range_of.items()}, own_number)
        for own_number in numbers.values()
    ]


class _Family:
    """All operators on rows of values with `length` rows, in one interval of the sequence. Intervals are numbered."""

    def __init__(
        self, joint: JointGraph, rows: RowAccesses, length: int, interval_of: Mapping[fx.Node, int], interval: int
    ) -> None:
        """Assign a step to each operator; `interval_of` numbers the interval of each row read, `interval` is ours."""
        self.joint, self.length, self.interval_of, self.interval = joint, length, interval_of, interval
        self.nodes = joint.nodes
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.reads = {node: row for node, row in rows.reads.items() if node in interval_of}
        self.joins = [join for join in rows.joins if len(join.values) == length]
        self.concat_nodes = {join.node for join in self.joins}
        self.reads_of_other_intervals: set[fx.Node] = set()  # rows of other intervals
        self.step: dict[fx.Node, int] = {}
        self.component: dict[fx.Node, fx.Node] = {}
        self._forward_steps()
        self._backward_steps()
        self._drop_other_ranges()
        self.useful = dict.fromkeys(self._useful())

    def plans(self, axes: AxisFacts, families: Iterable[_Family], planned_nodes: set[fx.Node]) -> list[RecurrencePair]:
        """Return the loops that can be rerolled, of operators that are not yet in `planned_nodes`; a loop ends at another
        family's.
        """
        pairs: list[RecurrencePair] = []
        linked: set[Dim] = set()  # axes of results of loops over the sequence
        for pair in self.pairs({node for family in families for node in family.useful if node not in self.useful}):
            nodes = (*pair.forward, *pair.backward)
            if not planned_nodes.isdisjoint(nodes) or any(
                source in self.reads_of_other_intervals for node in nodes for source in node.all_input_nodes
            ):
                continue
            read_dims = [
                axes.shapes[row.source][row.dim] for row in (*pair.forward_reads.values(), *pair.backward_reads.values())
            ]
            if not any(axes.sequence_atom(dim) is not None or axes.table.resolve(dim) in linked for dim in read_dims):
                continue
            linked |= {axes.table.resolve(axes.shapes[join.node][join.dim]) for join in pair.forward_joins}
            try:
                pairs.append(plan_recurrence(pair, axes, self.nodes))
                planned_nodes.update(nodes)
            except NoRecurrenceError as reason:
                log.debug("rows of %d stay unrolled: %s", self.length, reason)
        return pairs

    def is_forward(self, node: fx.Node) -> bool:
        """Return whether a node belongs to the forward graph."""
        return node in self.joint.forward

    # -- steps

    def _step_of_read(self, node: fx.Node) -> int:
        """Return the step of a row; rows of a later interval follow all rows of an earlier one."""
        return self.interval_of[node] * self.length + self.reads[node].step

    def _reads_in_earlier_intervals(self, sources: Iterable[fx.Node], step: int) -> list[int]:
        """Return the steps of rows in earlier intervals, with which the gradient of an earlier interval's final state
        is combined.
        """
        steps = (self._step_of_read(source) for source in sources if source in self.reads)
        return [read for read in steps if read // self.length < step // self.length]

    def _drop_other_ranges(self) -> None:
        """Drop nodes of other intervals: a concatenation belongs to that of its last row, a gradient to that of its
        first.
        """
        self.reads_of_other_intervals = {node for node in self.reads if self.interval_of[node] != self.interval}
        self.reads = {node: row for node, row in self.reads.items() if node not in self.reads_of_other_intervals}
        self.joins = [join for join in self.joins if self._interval_of_concat(join) in (self.interval, None)]
        steps = ((node, divmod(step, self.length)) for node, step in self.step.items())
        self.step = {node: step for node, (interval, step) in steps if interval == self.interval}

    def _interval_of_concat(self, join: ConcatAccess) -> int | None:
        """Return the interval of a concatenation: of its last row if forward, of its first row if backward."""
        interval_of = [self.step[value] // self.length for value in join.values if value in self.step]
        return (max if self.is_forward(join.node) else min)(interval_of, default=None)

    def _forward_steps(self) -> None:
        """Assign each operator of the forward graph to the last row that it depends on, each row of a forward value
        to its step.
        """
        for node in self.nodes:
            if node in self.reads and self.is_forward(self.reads[node].source):
                self.step[node] = self._step_of_read(node)
            elif self.is_forward(node) and not self._is_boundary(node):
                steps = [self.step[source] for source in node.all_input_nodes if source in self.step]
                if steps:
                    self.step[node] = max(steps)

    def _backward_steps(self) -> None:
        """Assign each operator of the backward graph to the first row that its cotangents come from.

        An operator without cotangents belongs to the last row that needs it. Gradients of a final state are combined
        with values of the loop inside it; values computed from cotangents after the loop do not belong to it.
        """
        touching: dict[fx.Node, bool] = {}  # whether they depend on values of the loop itself
        chained: set[fx.Node] = set()
        after_loop, driven = self._after_loop(), set[fx.Node](self.joint.tangents)
        for node in self.nodes:
            if self.is_forward(node) or node in self.step or self._is_boundary(node):
                continue
            sources = node.all_input_nodes
            steps = [self.step[source] for source in sources if source in chained]
            driven.update([node] if any(source in driven for source in sources) else ())
            if node in self.reads:
                self.step[node] = self._step_of_read(node)
            elif steps:
                self.step[node] = min((min(steps), *self._reads_in_earlier_intervals(sources, min(steps))))
            elif any(source in self.step or source in touching for source in sources):
                in_loop = any((source in self.step and source not in after_loop) or touching.get(source) for source in sources)
                touching.update({node: in_loop} if in_loop or node not in driven else {})
                continue
            else:
                continue
            chained.add(node)
        for node in reversed(touching):
            steps = [self.step[user] for user in node.users if user in chained]
            if steps and len(steps) == len(node.users):
                self.step[node] = max(steps)
                chained.add(node)

    def _after_loop(self) -> set[fx.Node]:
        """Return forward values computed from a loop's states after the loop: no concatenated row depends on them."""
        useful = set(self._useful())
        after, reached = set[fx.Node](), set(useful)
        for node in self.step:
            # an operator of a step may have results besides its state
            states = after if node.target is operator.getitem else reached
            if self.is_forward(node) and node not in useful and not states.isdisjoint(node.all_input_nodes):
                after.add(node)
                reached.add(node)
        return after

    def _is_boundary(self, node: fx.Node) -> bool:
        """Return whether an operator only concatenates rows or is a collective."""
        return node in self.concat_nodes or is_collective(node)

    # -- connected components

    def pairs(self, others: Container[fx.Node] = ()) -> list[UnrolledLoop]:
        """Return the connected components of the steps' operators, forward and backward ones paired."""
        self._merge_components(self.useful)
        self._add_sums_over_steps(self.useful, others)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node in self.component:
                groups.setdefault(self._component_of(node), []).append(node)
        return self._group_halves(groups)

    def _useful(self) -> list[fx.Node]:
        """Return operators of the steps on which rows of a result depend."""
        useful = {value for join in self.joins for value in join.values}
        useful &= self.step.keys()
        for node in reversed(self.nodes):
            if node in useful and node not in self.reads:
                useful.update(s for s in node.all_input_nodes if self._is_operator_of(s, self.is_forward(node)))
        return [node for node in self.nodes if node in useful and node not in self.reads]

    def _add_sums_over_steps(self, useful: Mapping[fx.Node, None], other_family_nodes: Container[fx.Node]) -> None:
        """Add sums over steps, such as the gradient of a weight: no row depends on them, but they belong to the loop.

        Also add all operators that are traced between the steps' operators, and operators at the end that are like
        one of those.
        """
        last_position, known_kinds = dict[fx.Node, int](), set[Any]()
        for node in useful:
            last_position[self._component_of(node)] = self.order[node]
        after_loop: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.component:
                known_kinds.add((self._component_of(node), _operator_and_shape(node)))
            if node in self.component or node in self.reads or node not in self.step:
                continue
            sources, forward = node.all_input_nodes, self.is_forward(node)
            source_roots = {
                self._component_of(source)
                for source in sources
                if source in self.component and self._is_operator_of(source, forward)
            }
            is_after = node in other_family_nodes or any(source in after_loop for source in sources)
            root = source_roots.pop() if len(source_roots) == 1 and not is_after else None
            if root in last_position and (
                self.order[node] < last_position[root] or (root, _operator_and_shape(node)) in known_kinds
            ):
                self.component[node] = root
                known_kinds.add((root, _operator_and_shape(node)))
            elif source_roots or root or is_after:
                after_loop.add(node)
        for node in reversed(self.nodes):
            if node in self.step and node not in self.component and node not in self.reads and node not in after_loop:
                forward = self.is_forward(node)
                # the backward graph does not count: it saves or recomputes the values that it needs
                users = [user for user in node.users if self.is_forward(user) == forward]
                roots = {self._component_of(user) if self._is_operator_of(user, forward) else None for user in users}
                if len(roots) == 1 and None not in roots and roots <= last_position.keys():
                    self.component[node] = roots.pop()  # type: ignore[assignment]

    def _is_operator_of(self, node: fx.Node, forward: bool) -> bool:
        """Return whether a node computes in a step of the given graph: forward if `forward`, else backward."""
        return node in self.step and self.is_forward(node) == forward and node not in self.reads

    def _is_computed_in_step(self, value: fx.Node) -> bool:
        """Return whether a step computes a value, rather than selecting a row from outside."""
        return value in self.step and value not in self.reads

    def _merge_components(self, useful: Iterable[fx.Node]) -> None:
        """Merge the components of operators that read each other, and of values that one result concatenates."""
        for node in useful:
            self.component.setdefault(node, node)
            for source in node.all_input_nodes:
                if source in self.component and self._is_operator_of(source, self.is_forward(node)):
                    self.component[self._component_of(source)] = self._component_of(node)
        for join in self.joins:
            values = [value for value in join.values if value in self.component]
            for value in values[1:]:
                self.component[self._component_of(value)] = self._component_of(values[0])

    def _component_of(self, node: fx.Node) -> fx.Node:
        """Return the representative of a node's component (union-find with path halving)."""
        while (parent := self.component.get(node, node)) is not node:
            self.component[node] = self.component.get(parent, parent)
            node = parent
        return node

    def _group_halves(self, groups: dict[fx.Node, list[fx.Node]]) -> list[UnrolledLoop]:
        """Group forward components with the backward components that use their values; one of these may use two of
        the former.
        """
        group_of: dict[fx.Node, list[fx.Node]] = {root: [root] for root in groups}
        for root, nodes in groups.items():
            if not self.is_forward(nodes[0]):
                sources = dict.fromkeys(
                    s for node in nodes for s in node.all_input_nodes if self._is_operator_of(s, forward=True)
                )
                forward_roots = [
                    *dict.fromkeys(
                        self._component_of(s) for s in sources if s in self.component and self._component_of(s) in groups
                    )
                ]
                for forward_root in forward_roots or self._sharing_reads(nodes, groups):
                    if group_of[forward_root] is not group_of[root]:
                        group_of[root] += group_of[forward_root]
                        group_of |= dict.fromkeys(group_of[forward_root], group_of[root])
        joins: dict[int, list[ConcatAccess]] = defaultdict(list)
        for join in self.joins:
            first = next((value for value in join.values if value in self.component), None)
            if first is not None and self._component_of(first) in group_of:
                joins[id(group_of[self._component_of(first)])].append(join)
        pairs = []
        for roots in {id(roots): roots for roots in group_of.values()}.values():
            nodes = sorted((node for root in roots for node in groups[root]), key=self.order.__getitem__)
            pairs.append(self._unrolled_loop(nodes, joins[id(roots)]))
        return [pair for pair in pairs if not any(map(is_random, (*pair.forward, *pair.backward)))]

    def _sharing_reads(self, backward: Iterable[fx.Node], groups: Iterable[fx.Node]) -> list[fx.Node]:
        """Return a forward component whose states include rows that are needed again at another step."""
        uses = ((source, node) for node in backward for source in node.all_input_nodes if source in self.reads)
        rows = [row for row, node in uses if self.is_forward(self.reads[row].source) and self.step[row] != self.step[node]]
        readers = {
            self._component_of(user) for row in rows for user in row.users if user in self.component and self.is_forward(user)
        }
        return [root for root in groups if root in readers][:1]

    def _unrolled_loop(self, nodes: list[fx.Node], joins: list[ConcatAccess]) -> UnrolledLoop:
        """Return the unrolled loop of these operators, with the rows that it reads and concatenates."""
        inside = set(nodes)
        joins = [join for join in joins if all(value in inside for value in join.values if self._is_computed_in_step(value))]
        forward_joins = [join for join in joins if self.is_forward(join.node)]
        backward_joins = [join for join in joins if not self.is_forward(join.node)]
        reads = {s: self.reads[s] for node in nodes for s in node.all_input_nodes if s in self.reads}
        reads |= {
            value: self.reads[value] for join in (*forward_joins, *backward_joins) for value in join.values if value in self.reads
        }
        is_forward = {node: self.is_forward(self.reads[node].source) for node in reads}
        return UnrolledLoop(
            self.length,
            tuple(node for node in nodes if self.is_forward(node)),
            tuple(node for node in nodes if not self.is_forward(node)),
            tuple(forward_joins),
            tuple(backward_joins),
            {node: row for node, row in reads.items() if is_forward[node]},
            {node: row for node, row in reads.items() if not is_forward[node]},
            self.step,
            self.order,
        )


def _operator_and_shape(node: fx.Node) -> Any:
    """Return the operator and the shape of its result, to recognize like operators."""
    value = node.meta.get(VALUE)
    return node.target, shape_of(value) if isinstance(value, torch.Tensor) else None
