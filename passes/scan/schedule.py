"""Plan how an unrolled loop runs in chunks of its rows.

Values that cross from row to row get slots of the carry; operands and results get axis labels. If a loop cannot run in
chunks, `NoRecurrenceError` has the reason, and the loop stays unrolled.
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
from streamfx.ir.signature import LetterShape
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import READS_LAYOUT
from streamfx.passes.scan.carry import NoRecurrenceError, assign_carry_slots, carry_type, dead_values
from streamfx.passes.scan.row_access import ConcatAccess, RowAccess
from streamfx.runtime.outer import COPYING_VIEWS

MAX_SINGLE_ROW_RESULTS = 24  # per loop: more results of single rows are not supported


@dataclass(frozen=True)
class UnrolledLoop:
    """The operators of an unrolled loop, forward and backward, with the rows that they read and concatenate.

    `step` has the step of each operator and row, `order` the position of each node in the graph.
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
    """One recurrence operator to be inserted: its plan, its operands, and the nodes that its results replace."""

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


def plan_recurrence(pair: UnrolledLoop, axes: AxisFacts, nodes: list[fx.Node]) -> RecurrencePair:
    """Return the recurrence operators of an unrolled loop; raise `NoRecurrenceError` if it cannot run in chunks."""
    for operators in filter(None, (pair.forward, pair.backward)):
        _check_order(frozenset(operators), nodes[pair.order[operators[0]] : pair.order[operators[-1]] + 1])
    return _Planner(pair, axes).plan_recurrence()


def _check_order(inside: frozenset[fx.Node], nodes: list[fx.Node]) -> None:
    """Raise an error if an operator of the loop depends on results of the loop through operators outside it."""
    after: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if node not in inside:
            after.update([node] if any(source in inside or source in after for source in sources) else ())
        elif any(source in after for source in sources):
            raise NoRecurrenceError("it depends on its own results through operators outside the loop")


class _Planner:
    """Translates the operators of an unrolled loop to steps with a carry."""

    def __init__(self, pair: UnrolledLoop, axes: AxisFacts) -> None:
        """Assign an identifier to each value of the loop: the results of its operators, and the rows that it reads."""
        self.pair, self.axes = pair, axes
        self.values = {*pair.forward, *pair.backward, *pair.forward_reads, *pair.backward_reads}
        self.forward_values = {*pair.forward, *pair.forward_reads}  # values of the forward graph
        ids = count()
        self.value_ids: dict[fx.Node, ValueId] = defaultdict(lambda: next(ids))
        self.concat_nodes = {concat.node for concat in (*pair.forward_concats, *pair.backward_concats)}

    def plan_recurrence(self) -> RecurrencePair:
        """Check the loop, and return its forward and backward recurrence operators."""
        pair = self.pair
        self._check()
        uses = self._steps_using(pair.forward, pair.forward_concats), self._steps_using(pair.backward, pair.backward_concats)
        forward_lifetimes, backward_lifetimes = self._lifetimes(*uses)
        dtype = carry_type([*forward_lifetimes, *backward_lifetimes])
        forward_steps = self._steps(
            pair.forward, pair.forward_reads, pair.forward_concats, forward_lifetimes, dtype, reverse=False
        )
        backward_steps = self._steps(
            pair.backward, pair.backward_reads, pair.backward_concats, backward_lifetimes, dtype, reverse=True
        )
        if not pair.forward and not backward_steps.carry_size:
            raise NoRecurrenceError("no value crosses from row to row, and the forward graph has no such loop")
        name = "recurrence"
        forward = self._recurrence_call(name, forward_steps, None, pair.forward_concats, pair.forward) if pair.forward else None
        backward = None
        if pair.backward:
            recomputed = forward_steps if pair.forward or pair.forward_reads else None
            backward = self._recurrence_call(f"{name}_backward", backward_steps, recomputed, pair.backward_concats, pair.backward)
        self._check_size(forward or backward, max(forward_steps.carry_size, backward_steps.carry_size))
        return RecurrencePair(forward, backward, frozenset(self.values | self.concat_nodes))

    def _check(self) -> None:
        """Raise an error for dynamic sizes, operators that read strides, or rows that are not read one by one."""
        for node in (*self.pair.forward, *self.pair.backward):
            if any(is_size(source) for source in node.all_input_nodes) or not _has_static_sizes(node):
                raise NoRecurrenceError(f"{node.name} has dynamic sizes")
            if node.target in READS_LAYOUT:
                raise NoRecurrenceError(f"{node.name} reads the memory layout of a computed value")
        if 4 * sum(map(self._depends_on_sequence, self._inputs_of_one_step())) > self.pair.length:
            raise NoRecurrenceError("steps read rows other than those that are selected one by one")

    def _inputs_of_one_step(self) -> list[fx.Node]:
        """Return values from outside that a single step uses, except the first and the last step: these use initial
        states and gradients of final states.
        """
        steps: dict[fx.Node, set[int]] = defaultdict(set)
        for node in (*self.pair.forward, *self.pair.backward):
            for source in node.all_input_nodes:
                if source not in self.values:
                    steps[source].add(self.pair.step[node])
        return [source for source, steps_of in steps.items() if len(steps_of) == 1 and 0 < min(steps_of) < self.pair.length - 1]

    def _depends_on_sequence(self, value: fx.Node) -> bool:
        """Return whether a value depends on rows of the sequence."""
        todo, seen = [value], set[fx.Node]()
        while todo:
            node = todo.pop()
            if any(self.axes.sequence_atom(dim) is not None for dim in self.axes.shapes.get(node, ())):
                return True
            todo += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
        return False

    def _check_size(self, call: RecurrenceCall | None, carry_size: int) -> None:
        """Raise an error if the carry is larger than the rows, or grows from step to step."""
        assert call is not None
        if carry_size > sum(value.meta[VALUE].numel() for value in (*call.operands, *(concat.node for concat in call.concats))):
            raise NoRecurrenceError("the carry is larger than the rows")
        sizes = [sum(slot.stop - slot.start for slot in slots) for slots in call.plan.steps.crossing]
        quarter = self.pair.length // 4
        if quarter > 1 and 2 * max(sizes[quarter], sizes[-1 - quarter]) > 3 * max(min(sizes[quarter], sizes[-1 - quarter]), 1):
            raise NoRecurrenceError("the carry grows from row to row")

    # -- uses

    def _steps_using(self, nodes: Iterable[fx.Node], concats: Iterable[ConcatAccess]) -> dict[fx.Node, list[int]]:
        """Return the steps at which each value is used, by operators and as a row of a concatenation."""
        steps_of: dict[fx.Node, list[int]] = defaultdict(list)
        for node in nodes:
            for source in node.all_input_nodes:
                if source in self.values:
                    steps_of[source].append(self.pair.step[node])
        for concat in concats:
            for step, item in enumerate(concat.values):
                if item in self.values:
                    steps_of[item].append(step)
        return steps_of

    def _lifetimes(
        self, forward: Mapping[fx.Node, list[int]], backward: Mapping[fx.Node, list[int]]
    ) -> tuple[dict[fx.Node, tuple[int, int]], dict[fx.Node, tuple[int, int]]]:
        """Return the first and last boundary between steps that each value crosses, for the forward and the backward loop.

        Boundary b lies before step b. Raise an error if a value is needed by a step that runs before its own.
        """
        forward_lifetimes, backward_lifetimes = {}, {}
        step = self.pair.step
        for value in sorted(self.values, key=self.pair.order.__getitem__):
            defined_at = step[value]
            if value in self.forward_values:
                if any(use < defined_at for use in forward.get(value, ())):
                    raise NoRecurrenceError(f"an earlier row needs {value.name}")
                last = max((*forward.get(value, ()), *backward.get(value, ())), default=defined_at)
                if last > defined_at:
                    forward_lifetimes[value] = defined_at + 1, last
            elif any(use > defined_at for use in backward.get(value, ())):
                raise NoRecurrenceError(f"a later row needs {value.name}")
            first = min(backward.get(value, ()), default=defined_at)
            if first < defined_at:
                backward_lifetimes[value] = first + 1, defined_at
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
        """Return the instructions of each step, the carry between steps, and the results of one graph."""
        steps: list[list[Instruction]] = [[] for _ in range(self.pair.length)]
        for node, row in reads.items():
            steps[row.step].append(RowRead(self.value_ids[node], self.value_ids[row.source], row.dim, row.step))
        for node in nodes:
            steps[self.pair.step[node]].append(self._operation(node))
        results = tuple(self._concat_result(concat) for concat in concats)
        single_row_results = tuple(self._single_step_result(node) for node in self._values_used_outside(nodes))
        crossing = assign_carry_slots(lifetimes, self.value_ids, self.pair.length, reverse)
        live_values = {slot.value for slots in crossing for slot in slots} | {result.value for result in single_row_results}
        live_values |= {value_id for concat in results for value_id in concat.values}
        dead_after = dead_values(steps, live_values, reverse)
        return Steps(tuple(map(tuple, steps)), crossing, results, single_row_results, dtype, reverse, dead_after)

    def _operation(self, node: fx.Node) -> Operation:
        """Return an operator as an instruction on values of the steps."""

        def as_value(item: fx.Node) -> Any:
            return StepValue(self.value_ids[item])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), as_value)
        return Operation(self.value_ids[node], COPYING_VIEWS.get(node.target, node.target), args, dict(kwargs))

    def _concat_result(self, concat: ConcatAccess) -> ConcatResult:
        """Return a concatenation of rows as a result of the loop."""
        value = concat.node.meta[VALUE]
        ids = tuple(self.value_ids[item] for item in concat.values)
        return ConcatResult(ids, concat.dim, tuple(value.shape), value.dtype)

    def _values_used_outside(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Return the values that operators outside the loop use directly, not through concatenated rows."""
        return tuple(node for node in nodes if any(self._is_outside(user) for user in node.users))

    def _is_outside(self, user: fx.Node) -> bool:
        """Return whether a user is neither in the loop nor a concatenation of its rows."""
        return user not in self.values and user not in self.concat_nodes

    def _single_step_result(self, node: fx.Node) -> SingleStepResult:
        """Return a value of a single step as a result of the loop."""
        if not is_tensor(node) or node.meta[VALUE].dtype == torch.bool:
            raise NoRecurrenceError(f"{node.name} is not a numeric tensor")
        value = node.meta[VALUE]
        return SingleStepResult(self.value_ids[node], self.pair.step[node], tuple(value.shape), value.dtype)

    # -- operands and results

    def _recurrence_call(
        self, name: str, steps: Steps, recomputed: Steps | None, concats: tuple[ConcatAccess, ...], nodes: tuple[fx.Node, ...]
    ) -> RecurrenceCall:
        """Return the recurrence operator of one graph; `recomputed` has the forward steps that a backward graph recomputes."""
        rows: dict[fx.Node, int] = {}
        inputs: dict[fx.Node, None] = {}
        reads = (self.pair.forward_reads, self.pair.backward_reads) if recomputed is not None else None
        for row in (r for part in (reads or (self._reads_of(steps),)) for r in part.values()):
            if rows.setdefault(row.source, row.dim) != row.dim:
                raise NoRecurrenceError(f"{row.source.name} is read along two dimensions")
        operators = (*(self.pair.forward if recomputed is not None else ()), *nodes)
        for source in (source for node in operators for source in node.all_input_nodes):
            if source not in self.values:
                inputs[source] = None
        for item in (item for concat in concats for item in concat.values):
            if item not in self.values:
                inputs[item] = None
        if not rows or not all(is_tensor(value) for value in inputs):
            raise NoRecurrenceError("it reads no rows, or values that are not tensors")
        operands = [(value, True) for value in rows] + [(value, False) for value in inputs]
        single_row_results = self._values_used_outside(nodes)
        if len(single_row_results) > MAX_SINGLE_ROW_RESULTS:
            raise NoRecurrenceError(f"{len(single_row_results)} values of single rows are used elsewhere")
        plan = RecurrencePlan(
            name,
            self.pair.length,
            steps,
            recomputed,
            tuple(self._operand(value, has_rows) for value, has_rows in operands),
            {self._operand(value, has_rows=True): dim for value, dim in rows.items()},
            {self._operand(value, has_rows=False): self.value_ids[value] for value in inputs},
            self._axis_labels(
                [(value, rows[value] if has_rows else None) for value, has_rows in operands], concats, single_row_results
            ),
        )
        return RecurrenceCall(plan, tuple(value for value, _ in operands), concats, single_row_results)

    def _reads_of(self, steps: Steps) -> Mapping[fx.Node, RowAccess]:
        """Return the rows that the steps read: the backward graph's rows if the steps run in reverse."""
        return self.pair.backward_reads if steps.reverse else self.pair.forward_reads

    def _operand(self, value: fx.Node, has_rows: bool) -> ValueId:
        """Return the identifier of an operand. A value that is read by rows and also used in full becomes two operands."""
        return self.value_ids[value] if has_rows else -1 - self.value_ids[value]

    def _axis_labels(
        self,
        operands: list[tuple[fx.Node, int | None]],
        concats: tuple[ConcatAccess, ...],
        single_row_results: tuple[fx.Node, ...],
    ) -> RecurrenceAxes:
        """Assign axis labels: dimensions with the same axis in the unrolled loop get the same label."""
        letters: dict[Dim, int] = {}

        def labels_of(value: fx.Node, row_dim: int | None) -> LetterShape:
            dims = [self.axes.table.resolve(dim) for dim in self.axes.shapes[value]]
            labels = [(letters.setdefault(dim, 1 + len(letters)),) if dim and i != row_dim else () for i, dim in enumerate(dims)]
            return tuple((0,) if i == row_dim else dim for i, dim in enumerate(labels))

        shapes = tuple(labels_of(value, row_dim) for value, row_dim in operands)
        results = (
            *(labels_of(concat.node, concat.dim) for concat in concats),
            *(labels_of(result, None) for result in single_row_results),
        )
        return RecurrenceAxes(shapes, results, 0)


def _has_static_sizes(node: fx.Node) -> bool:
    """Return whether all sizes of a node's results are integers."""
    values = node.meta.get(VALUE)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)
