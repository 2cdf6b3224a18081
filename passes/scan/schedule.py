"""Plan how an unrolled loop runs in chunks of its rows: translate its operators to steps of a recurrence operator.

Each operator belongs to a *step*, one per row of the sequence. Values that cross from step to step get slots of the carry (one
flat vector); operands and results get axis labels. If a loop cannot run in chunks, `NoRecurrenceError` has the reason, and
the loop stays unrolled. `ir/recurrence.py` has an example of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import is_size, is_tensor
from streamfx.ir.recurrence import (
    ROWS,
    ConcatResult,
    Instruction,
    Operation,
    RecurrenceAxes,
    RecurrencePlan,
    RowRead,
    SingleStepResult,
    Steps,
    StepValue,
    ValueId,
)
from streamfx.ir.signature import LabelShape
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import READS_LAYOUT
from streamfx.passes.scan.carry import NoRecurrenceError, assign_carry_slots, carry_type, dead_values
from streamfx.passes.scan.row_access import ConcatAccess, RowAccess
from streamfx.runtime.outer import COPYING_VIEWS

MAX_SINGLE_ROW_RESULTS = 24  # per loop: more results of single rows are not supported


@dataclass(frozen=True)
class UnrolledLoop:
    """The operators of an unrolled loop, in the forward and the backward graph, with the rows that they read and concatenate.

    `length` is the number of steps (rows); `step` has the step of each operator and of each row that is read; `order` has the
    position of each node in the graph. `..._reads` maps a node that selects a row to what it selects.
    """

    length: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    forward_concats: tuple[ConcatAccess, ...]
    backward_concats: tuple[ConcatAccess, ...]
    forward_reads: Mapping[fx.Node, RowAccess]
    backward_reads: Mapping[fx.Node, RowAccess]
    step: Mapping[fx.Node, int]
    order: Mapping[fx.Node, int]


@dataclass(frozen=True)
class RecurrenceCall:
    """One recurrence operator to be inserted: its plan, its operands, and the nodes that its results replace.

    Results are concatenations of a value per row (`concats`), and values of a single row that are used outside the loop.
    """

    plan: RecurrencePlan
    operands: tuple[fx.Node, ...]
    concats: tuple[ConcatAccess, ...]
    single_row_results: tuple[fx.Node, ...]


@dataclass(frozen=True)
class RecurrencePair:
    """The forward and backward recurrence operators of a loop; either may be missing."""

    forward: RecurrenceCall | None
    backward: RecurrenceCall | None
    inside: frozenset[fx.Node]  # the loop's operators, and the operators that concatenate its rows


def plan_recurrence(loop: UnrolledLoop, axes: AxisFacts, nodes: list[fx.Node]) -> RecurrencePair:
    """Return the forward and backward recurrence operators that replace an unrolled loop.

    `axes`: the axis of each dimension; `nodes`: the graph's nodes in order. Raise `NoRecurrenceError` if the loop cannot run
    in chunks.
    """
    for operators in filter(None, (loop.forward, loop.backward)):
        _check_order(frozenset(operators), nodes[loop.order[operators[0]] : loop.order[operators[-1]] + 1])
    return _Planner(loop, axes).plan_recurrence()


def _check_order(inside: frozenset[fx.Node], nodes: list[fx.Node]) -> None:
    """Raise `NoRecurrenceError` if an operator of the loop depends on results of the loop through operators outside it.

    One operator could not replace such a loop. `inside`: the loop's operators in the forward or backward graph; `nodes`: all
    nodes of the graph from the first of them to the last.
    """
    outside_after_loop: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if node not in inside:
            if any(source in inside or source in outside_after_loop for source in sources):
                outside_after_loop.add(node)
        elif any(source in outside_after_loop for source in sources):
            raise NoRecurrenceError("it depends on its own results through operators outside the loop")


class _Planner:
    """Translates the operators of an unrolled loop to steps with a carry."""

    def __init__(self, loop: UnrolledLoop, axes: AxisFacts) -> None:
        """Assign an identifier to each value of the loop: the results of its operators, and the rows that it reads."""
        self.loop, self.axes = loop, axes
        self.values = {*loop.forward, *loop.backward, *loop.forward_reads, *loop.backward_reads}
        self.forward_values = {*loop.forward, *loop.forward_reads}  # values of the forward graph
        ids = count()
        self.value_ids: dict[fx.Node, ValueId] = defaultdict(lambda: next(ids))
        self.concat_nodes = {concat.node for concat in (*loop.forward_concats, *loop.backward_concats)}

    def plan_recurrence(self) -> RecurrencePair:
        """Return the loop's forward and backward recurrence operators; raise `NoRecurrenceError` if it cannot run in chunks.

        Backward steps run in reverse. Before them, a chunk of the backward operator recomputes the chunk's forward steps.
        """
        loop = self.loop
        self._check()
        forward_uses = self._steps_using(loop.forward, loop.forward_concats)
        backward_uses = self._steps_using(loop.backward, loop.backward_concats)
        forward_lifetimes, backward_lifetimes = self._lifetimes(forward_uses, backward_uses)
        dtype = carry_type([*forward_lifetimes, *backward_lifetimes])
        forward_steps = self._steps(
            loop.forward, loop.forward_reads, loop.forward_concats, forward_lifetimes, dtype, reverse=False
        )
        backward_steps = self._steps(
            loop.backward, loop.backward_reads, loop.backward_concats, backward_lifetimes, dtype, reverse=True
        )
        if not loop.forward and not backward_steps.carry_size:
            raise NoRecurrenceError("no value crosses from row to row, and the forward graph has no such loop")
        name = "recurrence"
        forward = self._recurrence_call(name, forward_steps, None, loop.forward_concats, loop.forward) if loop.forward else None
        backward = None
        if loop.backward:
            recomputed = forward_steps if loop.forward or loop.forward_reads else None
            backward = self._recurrence_call(f"{name}_backward", backward_steps, recomputed, loop.backward_concats, loop.backward)
        self._check_size(forward or backward, max(forward_steps.carry_size, backward_steps.carry_size))
        return RecurrencePair(forward, backward, frozenset(self.values | self.concat_nodes))

    def _check(self) -> None:
        """Raise `NoRecurrenceError` for dynamic sizes, operators that read strides, or rows that are not read one by one.

        The last: too many steps (a quarter of them) each use a value of the sequence that no other step uses. Then the loop
        has an operand per row, which a chunk cannot slice.
        """
        for node in (*self.loop.forward, *self.loop.backward):
            if any(is_size(source) for source in node.all_input_nodes) or not _has_static_sizes(node):
                raise NoRecurrenceError(f"{node.name} has dynamic sizes")
            if node.target in READS_LAYOUT:
                raise NoRecurrenceError(f"{node.name} reads the memory layout of a computed value")
        if 4 * sum(map(self._depends_on_sequence, self._inputs_of_one_step())) > self.loop.length:
            raise NoRecurrenceError("steps read rows other than those that are selected one by one")

    def _inputs_of_one_step(self) -> list[fx.Node]:
        """Return the values from outside the loop that exactly one step uses.

        Values of the first and the last step are omitted: these use initial states and gradients of final states.
        """
        steps_using: dict[fx.Node, set[int]] = defaultdict(set)
        for node in (*self.loop.forward, *self.loop.backward):
            for source in node.all_input_nodes:
                if source not in self.values:
                    steps_using[source].add(self.loop.step[node])
        last_step = self.loop.length - 1
        return [source for source, steps in steps_using.items() if len(steps) == 1 and 0 < min(steps) < last_step]

    def _depends_on_sequence(self, value: fx.Node) -> bool:
        """Return whether a value, or one of its ancestors, has the sequence axis that chunks slice."""
        todo, seen = [value], set[fx.Node]()
        while todo:
            node = todo.pop()
            if any(self.axes.sequence_factor(dim) is not None for dim in self.axes.shapes.get(node, ())):
                return True
            todo += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
        return False

    def _check_size(self, call: RecurrenceCall | None, carry_size: int) -> None:
        """Raise `NoRecurrenceError` if chunks would not save memory: the carry is larger than all rows, or grows with each step.

        It grows if it is 1.5 times larger after a quarter of the steps than before the last quarter, or the reverse.
        `carry_size`: in elements.
        """
        assert call is not None
        if carry_size > sum(value.meta[VALUE].numel() for value in (*call.operands, *(concat.node for concat in call.concats))):
            raise NoRecurrenceError("the carry is larger than the rows")
        sizes = [sum(slot.stop - slot.start for slot in slots) for slots in call.plan.steps.crossing]  # by boundary
        quarter = self.loop.length // 4
        early, late = sizes[quarter], sizes[-1 - quarter]
        if quarter > 1 and 2 * max(early, late) > 3 * max(min(early, late), 1):
            raise NoRecurrenceError("the carry grows from row to row")

    # -- uses

    def _steps_using(self, nodes: Iterable[fx.Node], concats: Iterable[ConcatAccess]) -> dict[fx.Node, list[int]]:
        """Return, for each value of the loop, the steps that use it: as an operand of `nodes`, or as a row of `concats`."""
        steps_of: dict[fx.Node, list[int]] = defaultdict(list)
        for node in nodes:
            for source in node.all_input_nodes:
                if source in self.values:
                    steps_of[source].append(self.loop.step[node])
        for concat in concats:
            for step, item in enumerate(concat.values):
                if item in self.values:
                    steps_of[item].append(step)
        return steps_of

    def _lifetimes(
        self, forward_uses: Mapping[fx.Node, list[int]], backward_uses: Mapping[fx.Node, list[int]]
    ) -> tuple[dict[fx.Node, tuple[int, int]], dict[fx.Node, tuple[int, int]]]:
        """Return the (first, last) boundary that each carried value crosses, for the forward and for the backward loop.

        Boundary b lies before step b: a value of step 2 that step 4 uses crosses (3, 4). The backward loop runs from the last
        step to the first; it recomputes forward values, so it also carries those that an earlier step's gradient uses. Raise
        `NoRecurrenceError` if a step uses a value of its graph that a step after it (in execution order) computes.
        """
        forward_lifetimes, backward_lifetimes = {}, {}
        for value in sorted(self.values, key=self.loop.order.__getitem__):
            own_step = self.loop.step[value]
            forward_steps, backward_steps = forward_uses.get(value, ()), backward_uses.get(value, ())
            if value in self.forward_values:
                if any(step < own_step for step in forward_steps):
                    raise NoRecurrenceError(f"an earlier row needs {value.name}")
                last_use = max((*forward_steps, *backward_steps), default=own_step)
                if last_use > own_step:
                    forward_lifetimes[value] = own_step + 1, last_use
            elif any(step > own_step for step in backward_steps):
                raise NoRecurrenceError(f"a later row needs {value.name}")
            lowest_use = min(backward_steps, default=own_step)
            if lowest_use < own_step:
                backward_lifetimes[value] = lowest_use + 1, own_step
        return forward_lifetimes, backward_lifetimes

    # -- steps

    def _steps(
        self,
        nodes: tuple[fx.Node, ...],
        reads: Mapping[fx.Node, RowAccess],
        concats: tuple[ConcatAccess, ...],
        lifetimes: Mapping[fx.Node, tuple[int, int]],
        dtype: torch.dtype,
        reverse: bool,
    ) -> Steps:
        """Return the steps of the forward or (`reverse`) backward loop: instructions, carry between steps, and results.

        `nodes`, `reads`, `concats`: the loop's operators, the rows that they select, and concatenations, in that graph.
        `lifetimes`: the boundaries that each value crosses; `dtype`: of the carry.
        """
        steps: list[list[Instruction]] = [[] for _ in range(self.loop.length)]
        for node, row in reads.items():
            steps[row.step].append(RowRead(self.value_ids[node], self.value_ids[row.source], row.dim, row.step))
        for node in nodes:
            steps[self.loop.step[node]].append(self._operation(node))
        results = tuple(self._concat_result(concat) for concat in concats)
        single_row_results = tuple(self._single_step_result(node) for node in self._values_used_outside(nodes))
        crossing = assign_carry_slots(lifetimes, self.value_ids, self.loop.length, reverse)
        live_values = {slot.value for slots in crossing for slot in slots} | {result.value for result in single_row_results}
        live_values |= {value_id for concat in results for value_id in concat.values}
        dead_after = dead_values(steps, live_values, reverse)
        return Steps(tuple(map(tuple, steps)), crossing, results, single_row_results, dtype, reverse, dead_after)

    def _operation(self, node: fx.Node) -> Operation:
        """Return an operator as an instruction of its step: operands that are nodes become identifiers (`StepValue`).

        A view that may copy becomes an operator that always works (`COPYING_VIEWS`), because strides may differ in the loop.
        """

        def step_value(operand: fx.Node) -> Any:
            return StepValue(self.value_ids[operand])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), step_value)
        return Operation(self.value_ids[node], COPYING_VIEWS.get(node.target, node.target), args, dict(kwargs))

    def _concat_result(self, concat: ConcatAccess) -> ConcatResult:
        """Return a concatenation of rows as a result of the loop: the identifier of each row's value, in row order."""
        fake = concat.node.meta[VALUE]
        ids = tuple(self.value_ids[row_value] for row_value in concat.values)
        return ConcatResult(ids, concat.dim, tuple(fake.shape), fake.dtype)

    def _values_used_outside(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Return the results of `nodes` that operators outside the loop use directly, not only as rows of a concatenation."""
        return tuple(node for node in nodes if any(self._is_outside(user) for user in node.users))

    def _is_outside(self, user: fx.Node) -> bool:
        """Return whether a user is neither an operator of the loop (in either graph) nor a concatenation of its rows."""
        return user not in self.values and user not in self.concat_nodes

    def _single_step_result(self, node: fx.Node) -> SingleStepResult:
        """Return a value of one step, such as the final state, as a result of the loop.

        Raise `NoRecurrenceError` if it is not a numeric tensor: chunks add up such results, all but one adding zeros.
        """
        if not is_tensor(node) or node.meta[VALUE].dtype == torch.bool:
            raise NoRecurrenceError(f"{node.name} is not a numeric tensor")
        value = node.meta[VALUE]
        return SingleStepResult(self.value_ids[node], self.loop.step[node], tuple(value.shape), value.dtype)

    # -- operands and results

    def _recurrence_call(
        self, name: str, steps: Steps, recomputed: Steps | None, concats: tuple[ConcatAccess, ...], nodes: tuple[fx.Node, ...]
    ) -> RecurrenceCall:
        """Return the forward or backward recurrence operator, which runs `steps`.

        `nodes`, `concats`: the loop's operators and concatenations in that graph. `recomputed`: the forward steps that a
        backward operator recomputes, None for the forward operator. The operands are first the values that are read row by
        row, then values from outside the loop that are used in full. Raise `NoRecurrenceError` if it cannot be planned.
        """
        row_dims: dict[fx.Node, int] = {}  # of each value that is read row by row
        full_operands: dict[fx.Node, None] = {}  # an ordered set
        reads_forward_too = recomputed is not None
        reads = (self.loop.forward_reads, self.loop.backward_reads) if reads_forward_too else (self._reads_of(steps),)
        for row in (row for reads_of_graph in reads for row in reads_of_graph.values()):
            if row_dims.setdefault(row.source, row.dim) != row.dim:
                raise NoRecurrenceError(f"{row.source.name} is read along two dimensions")
        operators = (*(self.loop.forward if reads_forward_too else ()), *nodes)
        values_used = [source for node in operators for source in node.all_input_nodes]
        values_used += [row_value for concat in concats for row_value in concat.values]
        full_operands |= dict.fromkeys(value for value in values_used if value not in self.values)
        if not row_dims or not all(is_tensor(value) for value in full_operands):
            raise NoRecurrenceError("it reads no rows, or values that are not tensors")
        operands = [(value, True) for value in row_dims] + [(value, False) for value in full_operands]
        single_row_results = self._values_used_outside(nodes)
        if len(single_row_results) > MAX_SINGLE_ROW_RESULTS:
            raise NoRecurrenceError(f"{len(single_row_results)} values of single rows are used elsewhere")
        plan = RecurrencePlan(
            name,
            self.loop.length,
            steps,
            recomputed,
            tuple(self._operand(value, has_rows) for value, has_rows in operands),
            {self._operand(value, has_rows=True): dim for value, dim in row_dims.items()},
            {self._operand(value, has_rows=False): self.value_ids[value] for value in full_operands},
            self._axis_labels(
                [(value, row_dims[value] if has_rows else None) for value, has_rows in operands], concats, single_row_results
            ),
        )
        return RecurrenceCall(plan, tuple(value for value, _ in operands), concats, single_row_results)

    def _reads_of(self, steps: Steps) -> Mapping[fx.Node, RowAccess]:
        """Return the rows that the steps read: the backward graph's rows if the steps run in reverse."""
        return self.loop.backward_reads if steps.reverse else self.loop.forward_reads

    def _operand(self, value: fx.Node, has_rows: bool) -> ValueId:
        """Return an operand's identifier: negative if used in full, so a value read by rows and in full is two operands."""
        return self.value_ids[value] if has_rows else -1 - self.value_ids[value]

    def _axis_labels(
        self,
        operands: list[tuple[fx.Node, int | None]],
        concats: tuple[ConcatAccess, ...],
        single_row_results: tuple[fx.Node, ...],
    ) -> RecurrenceAxes:
        """Return the axis labels (integers) of each operand's and result's dimensions, as the axis rule of the operator.

        `operands`: each with its row dimension, or None. Rows get the label `ROWS`; other dimensions with the same axis in the
        unrolled loop get the same label; dimensions of size 1 get none. `x[t] * w` with x: (t, c), w: (c,) -> [(0,), (1,)],
        [(1,)].
        """
        label_of_axis: dict[Dim, int] = {}

        def labels_of(value: fx.Node, row_dim: int | None) -> LabelShape:
            """Return the labels of each dimension of one tensor: `(ROWS,)`, `(label,)`, or `()` for size 1."""
            labels: list[tuple[int, ...]] = []
            for dim_index, dim in enumerate(map(self.axes.table.resolve, self.axes.shapes[value])):
                if dim_index == row_dim:
                    labels.append((ROWS,))
                else:
                    labels.append((label_of_axis.setdefault(dim, ROWS + 1 + len(label_of_axis)),) if dim else ())
            return tuple(labels)

        operand_labels = tuple(labels_of(value, row_dim) for value, row_dim in operands)
        result_labels = (
            *(labels_of(concat.node, concat.dim) for concat in concats),
            *(labels_of(result, None) for result in single_row_results),
        )
        return RecurrenceAxes(operand_labels, result_labels, ROWS)


def _has_static_sizes(node: fx.Node) -> bool:
    """Return whether all sizes of a node's results are integers."""
    values = node.meta.get(VALUE)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)
