"""Find unrolled loops that carry a state from row to row.

A loop over rows that was traced operator by operator is identified by its reads and writes: it reads rows of values with T
rows (`x[:, t]`), and concatenates T rows. Each operator between them belongs to the last row on which it depends, or, in
the backward graph, to the first row from which its cotangents come. All of them become one operator, which processes its
rows in sequence (`streamfx/ir/recurrence.py`). Steps may differ from row to row. No row may depend on a later one, and the
state that crosses from row to row must be smaller than the rows (it may be empty).

A *family* is all operators on rows of values with T rows; its connected components are the loops. An *interval* is the part of
the sequence from which a loop's rows come, as `x[:, 8:16]`: two loops with equal T may run over two intervals.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import JointGraph, bound_arguments, connected_components, joint_graph
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.sizes import shape_of
from streamfx.ir.writer import GraphWriter
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.axes import sequence_axes
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.rules.views import MAX_SINGLE_ROWS
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.carry import NoRecurrenceError
from streamfx.passes.scan.rerolling import reroll, sort_topologically, unrolled_name
from streamfx.passes.scan.row_access import ConcatAccess, RowAccesses, find_row_accesses
from streamfx.passes.scan.row_ranges import SourceRows, sequence_start_and_block
from streamfx.passes.scan.schedule import LoopPart, RecurrencePair, UnrolledLoop, plan_recurrence
from streamfx.passes.scan.strip_mine import restore_unused_blocks, stack_sliced_blocks

aten = torch.ops.aten


@dataclass(frozen=True)
class Recurrences:
    name: ClassVar[str] = "recurrences"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with each unrolled loop over rows replaced by one recurrence operator per graph, in place.

        Blocks of rows are first rewritten to rows of a block dimension; those that no loop uses are restored.
        """
        joint = facts.joint
        writer = GraphWriter(joint.graph)
        blocks = stack_sliced_blocks(joint, writer)
        if not _may_have_loops(joint.graph):
            return facts
        rows = find_row_accesses(joint.graph)
        joint = joint_graph(joint.graph, len(joint.primals), len(joint.outputs))
        self._roll(facts, joint, rows)
        restore_unused_blocks(blocks, joint.graph, writer)
        sort_topologically(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))

    def _roll(self, facts: Facts, joint: JointGraph, rows: RowAccesses) -> None:
        """Replace unrolled loops by recurrence operators, in place, except loops that fell back in an earlier attempt.

        `rows`: the nodes that select rows, and the stacks of rows. A loop reads as many rows as it stacks.
        """
        lengths = {len(concat.values) for concat in rows.concats} & {row.length for row in rows.reads.values()}
        if not lengths:
            return
        axes = sequence_axes(joint)
        families = [family for length in sorted(lengths) for family in _families_of_length(joint, rows, length, axes)]
        planned_nodes: set[fx.Node] = set()
        plans = [plan for family in families for plan in family.plans(axes, families, planned_nodes)]
        replacements: dict[fx.Node, fx.Node] = {}
        for plan in plans:
            if not any(call is not None and unrolled_name(call) in facts.fallbacks for call in (plan.forward, plan.backward)):
                reroll(plan, joint.graph, replacements)


def _may_have_loops(graph: fx.Graph) -> bool:
    """Return whether a graph assembles a value of rows, or adds gradients of more single rows than may stay in loops."""
    padded_rows = {bound_arguments(node)["index"] for node in graph.nodes if node.target is aten.select_backward.default}
    return len(padded_rows) > MAX_SINGLE_ROWS or any(
        is_kind(node, Kind.STACK) or node.target is aten.select_scatter.default for node in graph.nodes
    )


def _families_of_length(joint: JointGraph, rows: RowAccesses, length: int, axes: AxisFacts) -> list[_Family]:
    """Return a family for each interval of the sequence with `length` rows, the first interval first.

    Two intervals may differ in their first row, or in how many rows of the sequence a row covers: 8 blocks of 4 rows, then 8
    single rows. Each family gets the reads of all intervals, because it counts its steps over all of them before it drops the
    others. A read whose interval is unknown belongs to each family; `_drop_other_intervals` decides by the rows it is combined
    with.
    """
    reads = {node: sequence_start_and_block(row, axes) for node, row in rows.reads.items() if row.length == length}
    intervals: list[SourceRows | None] = [*sorted({interval for interval in reads.values() if interval is not None})] or [None]
    index_of = {interval: index for index, interval in enumerate(intervals)}
    return [
        _Family(joint, rows, length, {node: index_of.get(interval, index) for node, interval in reads.items()}, index)
        for index in index_of.values()
    ]


class _Family:
    """All operators on rows of values with `length` rows, in one interval of the sequence."""

    def __init__(
        self, joint: JointGraph, rows: RowAccesses, length: int, interval_of: Mapping[fx.Node, int], interval: int
    ) -> None:
        """Assign a step to each operator, the row index in this interval; `step`, `component`, `useful` have the results.

        `interval_of` maps each node that selects a row to the index of its interval (0 is the first in the sequence);
        `interval` is the index of this family's interval.
        """
        self.joint, self.length, self.interval_of, self.interval = joint, length, interval_of, interval
        self.nodes = joint.nodes
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.reads = {node: row for node, row in rows.reads.items() if node in interval_of}
        self.concats = [concat for concat in rows.concats if len(concat.values) == length]
        self.concat_nodes = {concat.node for concat in self.concats}
        self.reads_of_other_intervals: set[fx.Node] = set()
        self.step: dict[fx.Node, int] = {}
        self.component: dict[fx.Node, fx.Node] = {}  # by operator, the first operator of its connected component
        self._forward_steps()
        self._backward_steps()
        self._drop_other_intervals()
        self.useful = dict.fromkeys(self._useful())

    def plans(self, axes: AxisFacts, families: Iterable[_Family], planned_nodes: set[fx.Node]) -> list[RecurrencePair]:
        """Return the recurrence operators of each loop that can be rerolled, and add its operators to `planned_nodes`.

        A loop is omitted if it has operators that are already planned, reads rows of another interval, reads neither rows of
        the sequence nor results of such a loop, or cannot run in chunks. `families`: all families, including this one.
        """
        plans: list[RecurrencePair] = []
        linked: set[Dim] = set()  # axes along which loops over the sequence concatenate results
        needed_by_others = {node for family in families for node in family.useful if node not in self.useful}
        for loop in self.loops(needed_by_others):
            nodes, reads = loop.operators, (*loop.forward.reads.values(), *loop.backward.reads.values())
            if not planned_nodes.isdisjoint(nodes) or any(
                source in self.reads_of_other_intervals for node in nodes for source in node.all_input_nodes
            ):
                continue
            read_dims = [axes.shapes[row.source][row.dim] for row in reads]
            if not any(axes.sequence_factor(dim) is not None or axes.table.resolve(dim) in linked for dim in read_dims):
                continue
            linked |= {axes.table.resolve(axes.shapes[concat.node][concat.dim]) for concat in loop.forward.concats}
            try:
                plans.append(plan_recurrence(loop, axes, self.nodes))
                planned_nodes.update(nodes)
            except NoRecurrenceError as reason:
                log.debug("rows of %d stay unrolled: %s", self.length, reason)
        return plans

    def is_forward(self, node: fx.Node) -> bool:
        """Return whether a node belongs to the forward graph."""
        return node in self.joint.forward

    # -- steps

    def _step_of_read(self, node: fx.Node) -> int:
        """Return the step of a selected row, counted over all intervals: row 2 of interval 1, 8 rows each -> 10."""
        return self.interval_of[node] * self.length + self.reads[node].step

    def _reads_in_earlier_intervals(self, sources: Iterable[fx.Node], step: int) -> list[int]:
        """Return the steps of those `sources` that are selected rows of intervals before the interval of `step`.

        Backward operators combine them with the gradient of an earlier interval's final state. Steps count over all intervals.
        """
        steps_of_reads = (self._step_of_read(source) for source in sources if source in self.reads)
        return [read_step for read_step in steps_of_reads if read_step // self.length < step // self.length]

    def _drop_other_intervals(self) -> None:
        """Drop the rows, concatenations and operators of other intervals, and count steps from this interval's first row."""
        self.reads_of_other_intervals = {node for node in self.reads if self.interval_of[node] != self.interval}
        self.reads = {node: row for node, row in self.reads.items() if node not in self.reads_of_other_intervals}
        self.concats = [concat for concat in self.concats if self._interval_of_concat(concat) in (self.interval, None)]
        steps = ((node, divmod(step, self.length)) for node, step in self.step.items())
        self.step = {node: step for node, (interval, step) in steps if interval == self.interval}

    def _interval_of_concat(self, concat: ConcatAccess) -> int | None:
        """Return the interval of a concatenation, the last one of its rows (backward: the first one); None if no row has one."""
        intervals = [self.step[value] // self.length for value in concat.values if value in self.step]
        return (max if self.is_forward(concat.node) else min)(intervals, default=None)

    def _forward_steps(self) -> None:
        """Set `self.step` of each forward operator: the step of the last row on which it depends. Without rows: no step."""
        for node in self.nodes:
            if node in self.reads and self.is_forward(self.reads[node].source):
                self.step[node] = self._step_of_read(node)
            elif self.is_forward(node) and not self._is_boundary(node):
                steps = [self.step[source] for source in node.all_input_nodes if source in self.step]
                if steps:
                    self.step[node] = max(steps)

    def _backward_steps(self) -> None:
        """Set `self.step` of each backward operator: the step of the first row from which its cotangents come.

        An operator that depends on values of the loop, but on no cotangent, belongs to the last step that uses it. So do
        operators that combine gradients of a final state with values of the loop. Operators that combine cotangents with
        values computed after the loop do not belong to it.
        """
        # operators whose step their users decide: whether they depend on values of the loop itself
        depends_on_loop: dict[fx.Node, bool] = {}
        has_cotangent_step: set[fx.Node] = set()
        after_loop = self._after_loop()
        depends_on_tangents = set[fx.Node](self.joint.tangents)
        for node in self.nodes:
            if self.is_forward(node) or node in self.step or self._is_boundary(node):
                continue
            sources = node.all_input_nodes
            steps = [self.step[source] for source in sources if source in has_cotangent_step]
            depends_on_tangents.update([node] if any(source in depends_on_tangents for source in sources) else ())
            if node in self.reads:
                self.step[node] = self._step_of_read(node)
            elif steps:
                self.step[node] = min((min(steps), *self._reads_in_earlier_intervals(sources, min(steps))))
            elif any(source in self.step or source in depends_on_loop for source in sources):
                in_loop = any(
                    (source in self.step and source not in after_loop) or depends_on_loop.get(source) for source in sources
                )
                depends_on_loop.update({node: in_loop} if in_loop or node not in depends_on_tangents else {})
                continue
            else:
                continue
            has_cotangent_step.add(node)
        for node in reversed(depends_on_loop):
            steps = [self.step[user] for user in node.users if user in has_cotangent_step]
            if steps and len(steps) == len(node.users):
                self.step[node] = max(steps)
                has_cotangent_step.add(node)

    def _after_loop(self) -> set[fx.Node]:
        """Return forward values that depend on loop states, but on which no stacked row depends: functions of the final state."""
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
        """Return whether an operator ends a loop: it concatenates the rows, or is a collective. It belongs to no step."""
        return node in self.concat_nodes or is_collective(node)

    # -- connected components

    def loops(self, other_family_nodes: Container[fx.Node] = ()) -> list[UnrolledLoop]:
        """Return the loops: connected components of operators that belong to a step, backward with the forward ones they use."""
        self._find_components()
        self._add_sums_over_steps(other_family_nodes)
        nodes_of_component: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node in self.component:
                nodes_of_component.setdefault(self.component[node], []).append(node)
        return self._pair_components(nodes_of_component)

    def _useful(self) -> list[fx.Node]:
        """Return the operators with a step on which concatenated rows of the same (forward or backward) graph depend."""
        useful = {value for concat in self.concats for value in concat.values}
        useful &= self.step.keys()
        for node in reversed(self.nodes):
            if node in useful and node not in self.reads:
                useful.update(s for s in node.all_input_nodes if self._is_operator_of(s, self.is_forward(node)))
        return [node for node in self.nodes if node in useful and node not in self.reads]

    def _add_sums_over_steps(self, other_family_nodes: Container[fx.Node]) -> None:
        """Add sums over steps to the loop's component, such as a weight's gradient: no concatenated row depends on them.

        These are operators that depend on one component, and come before its last operator in the graph, or equal one of
        its operators in type and shape; and operators that only operators of one component use. Operators in
        `other_family_nodes`, and those after them, are not added.
        """
        last_position = {self.component[node]: self.order[node] for node in self.useful}  # in the graph, by component
        kinds: set[Any] = set()  # (component, operator and shape)
        after_loop: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.component:
                kinds.add((self.component[node], _operator_and_shape(node)))
            if node in self.component or node in self.reads or node not in self.step:
                continue
            sources, forward = node.all_input_nodes, self.is_forward(node)
            source_roots = {self.component[s] for s in sources if s in self.component and self._is_operator_of(s, forward)}
            is_after = node in other_family_nodes or any(source in after_loop for source in sources)
            root = source_roots.pop() if len(source_roots) == 1 and not is_after else None
            if root in last_position and (self.order[node] < last_position[root] or (root, _operator_and_shape(node)) in kinds):
                self.component[node] = root
                kinds.add((root, _operator_and_shape(node)))
            elif source_roots or root or is_after:
                after_loop.add(node)
        for node in reversed(self.nodes):
            if node in self.step and node not in self.component and node not in self.reads and node not in after_loop:
                forward = self.is_forward(node)
                # uses in the other graph are ignored: the backward graph saves or recomputes the values that it needs
                users = [user for user in node.users if self.is_forward(user) == forward]
                roots = {self.component.get(user) if self._is_operator_of(user, forward) else None for user in users}
                if len(roots) == 1 and None not in roots and roots <= last_position.keys():
                    self.component[node] = roots.pop()  # type: ignore[assignment]

    def _is_operator_of(self, node: fx.Node, forward: bool) -> bool:
        """Return whether a step of the forward (`forward`) or backward graph computes a node; a selected row is not computed."""
        return node in self.step and self.is_forward(node) == forward and node not in self.reads

    def _is_computed_in_step(self, value: fx.Node) -> bool:
        """Return whether a step computes a value; a row that it selects from outside is not computed."""
        return value in self.step and value not in self.reads

    def _find_components(self) -> None:
        """Set `self.component` of each useful operator.

        Operators that read each other, and those whose values one result concatenates, are in one component.
        """
        links = [
            (source, node)
            for node in self.useful
            for source in node.all_input_nodes
            if source in self.useful and self._is_operator_of(source, self.is_forward(node))
        ]
        for concat in self.concats:
            links += pairwise(value for value in concat.values if value in self.useful)
        self.component = {node: nodes[0] for nodes in connected_components(self.useful, links) for node in nodes}

    def _pair_components(self, nodes_of_component: dict[fx.Node, list[fx.Node]]) -> list[UnrolledLoop]:
        """Return loops: a backward component with the forward components whose values it uses, or a forward component alone.

        `nodes_of_component` maps the root of each component to its operators. Loops with random operators are omitted.
        """
        links: list[tuple[fx.Node, fx.Node]] = []
        for root, nodes in nodes_of_component.items():
            if not self.is_forward(nodes[0]):
                sources = [s for node in nodes for s in node.all_input_nodes if self._is_operator_of(s, forward=True)]
                roots_used = dict.fromkeys(self.component[source] for source in sources if source in self.component)
                forward_roots = [used for used in roots_used if used in nodes_of_component]
                forward_roots = forward_roots or self._components_sharing_reads(nodes, nodes_of_component)
                links += [(root, forward_root) for forward_root in forward_roots]
        loops = [
            self._unrolled_loop(sorted((node for root in roots for node in nodes_of_component[root]), key=self.order.__getitem__))
            for roots in connected_components(nodes_of_component, links)
        ]
        return [loop for loop in loops if not any(map(is_random, loop.operators))]

    def _components_sharing_reads(self, backward: Iterable[fx.Node], roots: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the first of the components `roots`, in a list, whose forward operators read a row that the operators
        `backward` use at another step; an empty list if none does.
        """
        uses = ((source, node) for node in backward for source in node.all_input_nodes if source in self.reads)
        rows = [row for row, node in uses if self.is_forward(self.reads[row].source) and self.step[row] != self.step[node]]
        users = (user for row in rows for user in row.users)
        readers = {self.component[user] for user in users if user in self.component and self.is_forward(user)}
        return [root for root in roots if root in readers][:1]

    def _unrolled_loop(self, nodes: list[fx.Node]) -> UnrolledLoop:
        """Return the loop of these operators: with the rows that it reads, and the concatenations that no other loop computes."""
        inside = set(nodes)
        concats = [
            concat
            for concat in self.concats
            if not inside.isdisjoint(concat.values)
            and all(value in inside for value in concat.values if self._is_computed_in_step(value))
        ]
        values_used = [source for node in nodes for source in node.all_input_nodes]
        values_used += [value for concat in concats for value in concat.values]
        reads = {value: self.reads[value] for value in values_used if value in self.reads}
        forward, backward = (
            LoopPart(
                tuple(node for node in nodes if self.is_forward(node) == is_forward),
                {node: row for node, row in reads.items() if self.is_forward(row.source) == is_forward},
                tuple(concat for concat in concats if self.is_forward(concat.node) == is_forward),
            )
            for is_forward in (True, False)
        )
        return UnrolledLoop(self.length, forward, backward, self.step, self.order)


def _operator_and_shape(node: fx.Node) -> Any:
    """Return (operator, shape of its result; None if it is not a tensor), which are equal for the same operator of two steps."""
    value = node.meta.get(VALUE)
    return node.target, shape_of(value) if isinstance(value, torch.Tensor) else None
