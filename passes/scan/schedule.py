"""Plan how an unrolled loop runs in chunks of its rows: translate its operators to steps of a recurrence operator.

Each operator belongs to a *step*, one per row of the sequence. Values that cross from step to step get slots of the carry (a
vector of bytes); operands and results get axis labels. If a loop cannot run in chunks, `NoRecurrenceError` has the reason, and
the loop stays unrolled. `ir/recurrence.py` has an example of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import is_size, is_tensor, walk
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
from streamfx.passes.scan.carry import NoRecurrenceError, assign_carry_slots, dead_values
from streamfx.passes.scan.row_access import ConcatAccess, RowAccess
from streamfx.runtime.outer import COPYING_VIEWS

MAX_SINGLE_ROW_RESULTS = 24  # per loop: more results of single rows are not supported


@dataclass(frozen=True)
class LoopPart:
    """The operators of an unrolled loop in the forward or the backward graph.

    `reads`: the rows that the loop reads of values of this graph, by the node that selects the row. `concats`: the
    concatenations of the loop's rows in this graph.
    """

    operators: tuple[fx.Node, ...]
    reads: Mapping[fx.Node, RowAccess]
    concats: tuple[ConcatAccess, ...]


@dataclass(frozen=True)
class UnrolledLoop:
    """An unrolled loop: its parts in the forward and the backward graph, and the number of steps (rows).

    `step` has the step of each operator and of each row that is read; `order` has the position of each node in the graph.
    """

    length: int
    forward: LoopPart
    backward: LoopPart
    step: Mapping[fx.Node, int]
    order: Mapping[fx.Node, int]

    @property
    def operators(self) -> tuple[fx.Node, ...]:
        """The operators in both graphs."""
        return (*self.forward.operators, *self.backward.operators)


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
    for operators in filter(None, (loop.forward.operators, loop.backward.operators)):
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
        self.forward_values = {*loop.forward.operators, *loop.forward.reads}  # values of the forward graph
        self.values = {*loop.operators, *loop.forward.reads, *loop.backward.reads}
        ids = count()
        self.value_ids: dict[fx.Node, ValueId] = defaultdict(lambda: next(ids))
        self.concat_nodes = {concat.node for concat in (*loop.forward.concats, *loop.backward.concats)}

    def plan_recurrence(self) -> RecurrencePair:
        """Return the loop's forward and backward recurrence operators; raise `NoRecurrenceError` if it cannot run in chunks.

        Backward steps run in reverse. Before them, a chunk of the backward operator recomputes the chunk's forward steps.
        """
        loop, name = self.loop, "recurrence"
        self._check()
        forward_lifetimes, backward_lifetimes = self._lifetimes()
        forward_steps = self._steps(loop.forward, forward_lifetimes, reverse=False)
        backward_steps = self._steps(loop.backward, backward_lifetimes, reverse=True)
        if not loop.forward.operators and not backward_steps.carry_size:
            raise NoRecurrenceError("no value crosses from row to row, and the forward graph has no such loop")
        forward = self._recurrence_call(name, loop.forward, forward_steps, None) if loop.forward.operators else None
        backward = None
        if loop.backward.operators:
            recomputed = forward_steps if self.forward_values else None
            backward = self._recurrence_call(f"{name}_backward", loop.backward, backward_steps, recomputed)
        self._check_size(forward or backward, max((*_num_carried(forward_steps), *_num_carried(backward_steps))))
        return RecurrencePair(forward, backward, frozenset(self.values | self.concat_nodes))

    def _check(self) -> None:
        """Raise `NoRecurrenceError` for dynamic sizes, operators that read strides, or rows that are not read one by one.

        The last: too many steps (a quarter of them) each use a value of the sequence that no other step uses. Then the loop
        has an operand per row, which a chunk cannot slice.
        """
        for node in self.loop.operators:
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
        for node in self.loop.operators:
            for source in node.all_input_nodes:
                if source not in self.values:
                    steps_using[source].add(self.loop.step[node])
        last_step = self.loop.length - 1
        return [source for source, steps in steps_using.items() if len(steps) == 1 and 0 < min(steps) < last_step]

    def _depends_on_sequence(self, value: fx.Node) -> bool:
        """Return whether a value, or one of its ancestors, has the sequence axis that chunks slice."""
        nodes = walk([value], lambda node: node.all_input_nodes)
        return any(self.axes.sequence_factor(dim) is not None for node in nodes for dim in self.axes.shapes.get(node, ()))

    def _check_size(self, call: RecurrenceCall | None, num_carried: int) -> None:
        """Raise `NoRecurrenceError` if chunks would not save memory: the carry is larger than all rows, or grows with each step.

        It grows if it is 1.5 times larger after a quarter of the steps than before the last quarter, or the reverse.
        `num_carried`: the elements of the carry.
        """
        assert call is not None
        if num_carried > sum(value.meta[VALUE].numel() for value in (*call.operands, *(concat.node for concat in call.concats))):
            raise NoRecurrenceError("the carry is larger than the rows")
        sizes = _num_carried(call.plan.steps)
        quarter = self.loop.length // 4
        early, late = sizes[quarter], sizes[-1 - quarter]
        if quarter > 1 and 2 * max(early, late) > 3 * max(min(early, late), 1):
            raise NoRecurrenceError("the carry grows from row to row")

    # -- uses

    def _steps_using(self, part: LoopPart) -> dict[fx.Node, list[int]]:
        """Return, for each value of the loop, the steps of this part that use it: as an operand, or as a row of a result."""
        steps_of: dict[fx.Node, list[int]] = defaultdict(list)
        for node in part.operators:
            for source in node.all_input_nodes:
                if source in self.values:
                    steps_of[source].append(self.loop.step[node])
        for concat in part.concats:
            for step, item in enumerate(concat.values):
                if item in self.values:
                    steps_of[item].append(step)
        return steps_of

    def _lifetimes(self) -> tuple[dict[fx.Node, tuple[int, int]], dict[fx.Node, tuple[int, int]]]:
        """Return the (first, last) boundary that each carried value crosses, for the forward and for the backward loop.

        Boundary b lies before step b: a value of step 2 that step 4 uses crosses (3, 4). The backward loop runs from the last
        step to the first; it recomputes forward values, so it also carries those that an earlier step's gradient uses. Raise
        `NoRecurrenceError` if a step uses a value of its graph that a step after it (in execution order) computes.
        """
        forward_uses, backward_uses = self._steps_using(self.loop.forward), self._steps_using(self.loop.backward)
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

    def _steps(self, part: LoopPart, lifetimes: Mapping[fx.Node, tuple[int, int]], reverse: bool) -> Steps:
        """Return the steps of the forward or (`reverse`) backward part: instructions, carry between steps, and results.

        `lifetimes`: the boundaries that each value crosses.
        """
        steps: list[list[Instruction]] = [[] for _ in range(self.loop.length)]
        for node, row in part.reads.items():
            steps[row.step].append(RowRead(self.value_ids[node], self.value_ids[row.source], row.dim, row.step))
        for node in part.operators:
            steps[self.loop.step[node]].append(self._operation(node))
        results = tuple(self._concat_result(concat) for concat in part.concats)
        single_row_results = tuple(self._single_step_result(node) for node in self._values_used_outside(part.operators))
        crossing = assign_carry_slots(lifetimes, self.value_ids, self.loop.length, reverse)
        live_values = {slot.value for slots in crossing for slot in slots} | {result.value for result in single_row_results}
        live_values |= {value_id for concat in results for value_id in concat.values}
        dead_after = dead_values(steps, live_values, reverse)
        return Steps(tuple(map(tuple, steps)), crossing, results, single_row_results, reverse, dead_after)

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

    def _recurrence_call(self, name: str, part: LoopPart, steps: Steps, recomputed: Steps | None) -> RecurrenceCall:
        """Return the recurrence operator of one part of the loop, which runs `steps`.

        `recomputed`: the forward steps that a backward operator recomputes, None for the forward operator. The operands are
        first the values that are read row by row, then values from outside the loop that are used in full; a value may be
        both. Raise `NoRecurrenceError` if it cannot be planned.
        """
        parts = (part,) if recomputed is None else (self.loop.forward, self.loop.backward)
        row_dims: dict[fx.Node, int] = {}  # of each value that is read row by row
        for row in (row for each in parts for row in each.reads.values()):
            if row_dims.setdefault(row.source, row.dim) != row.dim:
                raise NoRecurrenceError(f"{row.source.name} is read along two dimensions")
        values_used = [source for each in parts for node in each.operators for source in node.all_input_nodes]
        values_used += [row_value for concat in part.concats for row_value in concat.values]
        shared = list(dict.fromkeys(value for value in values_used if value not in self.values))
        if not row_dims or not all(map(is_tensor, shared)):
            raise NoRecurrenceError("it reads no rows, or values that are not tensors")
        single_row_results = self._values_used_outside(part.operators)
        if len(single_row_results) > MAX_SINGLE_ROW_RESULTS:
            raise NoRecurrenceError(f"{len(single_row_results)} values of single rows are used elsewhere")
        operands = [*row_dims.items(), *((value, None) for value in shared)]
        plan = RecurrencePlan(
            name,
            self.loop.length,
            steps,
            recomputed,
            {self.value_ids[value]: dim for value, dim in row_dims.items()},
            tuple(self.value_ids[value] for value in shared),
            self._axis_labels(operands, part.concats, single_row_results),
        )
        return RecurrenceCall(plan, tuple(value for value, _ in operands), part.concats, single_row_results)

    def _axis_labels(
        self,
        operands: Sequence[tuple[fx.Node, int | None]],
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


def _num_carried(steps: Steps) -> list[int]:
    """Return the number of elements that cross each boundary between steps."""
    return [sum(prod(slot.shape) for slot in slots) for slots in steps.crossing]


def _has_static_sizes(node: fx.Node) -> bool:
    """Return whether all sizes of a node's results are integers."""
    values = node.meta.get(VALUE)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)
