"""Plan how an unrolled loop runs in chunks of its rows.

Values that cross from row to row get slots of the carry; operands and results get axis labels. If a loop does not
fit, `NoRecurrenceError` gives the reason and the loop stays unrolled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import is_size, is_tensor
from streamfx.ir.recurrence import (
    CarrySlot,
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
from streamfx.passes.scan.row_access import ConcatAccess, RowAccess
from streamfx.runtime.outer import COPYING_VIEWS

MOST_FINALS = 24  # limit on results of single rows


class NoRecurrenceError(Exception):
    """The reason why an unrolled loop cannot run in chunks."""


@dataclass(frozen=True)
class UnrolledLoop:
    """The operators of an unrolled loop, forward and backward, with the rows that they read and concatenate."""

    length: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    forward_joins: tuple[ConcatAccess, ...]
    backward_joins: tuple[ConcatAccess, ...]
    forward_reads: Mapping[fx.Node, RowAccess]
    backward_reads: Mapping[fx.Node, RowAccess]
    step: Mapping[fx.Node, int]
    order: Mapping[fx.Node, int]


@dataclass(frozen=True)
class RecurrenceCall:
    """One recurrence operator to be inserted: its plan, its operands, and the nodes that its results replace."""

    plan: RecurrencePlan
    operands: tuple[fx.Node, ...]
    joins: tuple[ConcatAccess, ...]
    finals: tuple[fx.Node, ...]


@dataclass(frozen=True)
class RecurrencePair:
    """The forward and backward recurrence operators of a loop; either may be missing."""

    forward: RecurrenceCall | None
    backward: RecurrenceCall | None
    inside: frozenset[fx.Node]  # the loop's operators, and those that concatenate its rows


def plan_recurrence(pair: UnrolledLoop, axes: AxisFacts, nodes: list[fx.Node]) -> RecurrencePair:
    """Return the recurrence operators of an unrolled loop; raise `NoRecurrenceError` if it cannot run in chunks."""
    for half in filter(None, (pair.forward, pair.backward)):
        _check_order(frozenset(half), nodes[pair.order[half[0]] : pair.order[half[-1]] + 1])
    return _Planner(pair, axes).plan_recurrence()


def _check_order(inside: frozenset[fx.Node], nodes: list[fx.Node]) -> None:
    """Check that no operator of the loop depends on results of the loop through operators outside of it."""
    after: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if node not in inside:
            after.update([node] if any(source in inside or source in after for source in sources) else ())
        elif any(source in after for source in sources):
            raise NoRecurrenceError("it needs what follows from its own results")


class _Planner:
    """Numbers the values of an unrolled loop, and translates its operators to steps with a carry."""

    def __init__(self, pair: UnrolledLoop, axes: AxisFacts) -> None:
        """ValueId the values of the loop, its operators and the rows that it reads."""
        self.pair, self.axes = pair, axes
        self.values = {*pair.forward, *pair.backward, *pair.forward_reads, *pair.backward_reads}
        self.forward_values = {*pair.forward, *pair.forward_reads}  # values of the forward graph
        numbers = count()
        self.number: dict[fx.Node, ValueId] = defaultdict(lambda: next(numbers))
        self.concat_nodes = {join.node for join in (*pair.forward_joins, *pair.backward_joins)}

    def plan_recurrence(self) -> RecurrencePair:
        """Check the loop, and return its forward and backward recurrence operators."""
        pair = self.pair
        self._check()
        uses = self._steps_using(pair.forward, pair.forward_joins), self._steps_using(pair.backward, pair.backward_joins)
        forward_lifetimes, backward_lifetimes = self._lifetimes(*uses)
        dtype = _carry_type([*forward_lifetimes, *backward_lifetimes])
        forward_steps = self._steps(pair.forward, pair.forward_reads, pair.forward_joins, forward_lifetimes, dtype, reverse=False)
        backward_steps = self._steps(
            pair.backward, pair.backward_reads, pair.backward_joins, backward_lifetimes, dtype, reverse=True
        )
        if not pair.forward and not backward_steps.carry_size:
            raise NoRecurrenceError("nothing crosses from row to row, and the forward half has them as they are")
        name = "recurrence"
        forward = self._recurrence_call(name, forward_steps, None, pair.forward_joins, pair.forward) if pair.forward else None
        backward = None
        if pair.backward:
            recomputed = forward_steps if pair.forward or pair.forward_reads else None
            backward = self._recurrence_call(f"{name}_backward", backward_steps, recomputed, pair.backward_joins, pair.backward)
        self._check_size(forward or backward, max(forward_steps.carry_size, backward_steps.carry_size))
        return RecurrencePair(forward, backward, frozenset(self.values | self.concat_nodes))

    def _check(self) -> None:
        """Raise an error for dynamic sizes, operators that read strides, or rows that are not read one by one."""
        for node in (*self.pair.forward, *self.pair.backward):
            if any(is_size(source) for source in node.all_input_nodes) or not _has_static_sizes(node):
                raise NoRecurrenceError(f"{node.name} has sizes that change from call to call")
            if node.target in READS_LAYOUT:
                raise NoRecurrenceError(f"{node.name} reads the memory layout of a computed value")
        if 4 * sum(map(self._depends_on_sequence, self._inputs_of_one_step())) > self.pair.length:
            raise NoRecurrenceError("steps read other rows than those that are taken out one by one")

    def _inputs_of_one_step(self) -> list[fx.Node]:
        """Return outside values used by a single step, except for the first and last step, which use states and
        gradients.
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

    def _check_size(self, half: RecurrenceCall | None, carry_size: int) -> None:
        """Raise an error if the carry is larger than the rows, or grows from step to step."""
        assert half is not None
        if carry_size > sum(value.meta[VALUE].numel() for value in (*half.operands, *(join.node for join in half.joins))):
            raise NoRecurrenceError("as much crosses from row to row as the rows hold")
        sizes = [sum(slot.stop - slot.start for slot in slots) for slots in half.plan.steps.crossing]
        quarter = self.pair.length // 4
        if quarter > 1 and 2 * max(sizes[quarter], sizes[-1 - quarter]) > 3 * max(min(sizes[quarter], sizes[-1 - quarter]), 1):
            raise NoRecurrenceError("what crosses from row to row grows with the rows")

    # -- uses

    def _steps_using(self, nodes: Iterable[fx.Node], joins: Iterable[ConcatAccess]) -> dict[fx.Node, list[int]]:
        """Return the steps at which each value is used, by operators and as a row of a concatenation."""
        steps_of: dict[fx.Node, list[int]] = defaultdict(list)
        for node in nodes:
            for source in node.all_input_nodes:
                if source in self.values:
                    steps_of[source].append(self.pair.step[node])
        for join in joins:
            for step, item in enumerate(join.values):
                if item in self.values:
                    steps_of[item].append(step)
        return steps_of

    def _lifetimes(
        self, forward: Mapping[fx.Node, list[int]], backward: Mapping[fx.Node, list[int]]
    ) -> tuple[dict[fx.Node, tuple[int, int]], dict[fx.Node, tuple[int, int]]]:
        """Return the first and last boundary between steps that each value crosses: left to right, and right to left."""
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
        joins: tuple[ConcatAccess, ...],
        lifetimes: Mapping[fx.Node, tuple[int, int]],
        dtype: torch.dtype,
        reverse: bool,
    ) -> Steps:
        """Return the instructions of each step, the carry between steps, and the results of one graph."""
        steps: list[list[Instruction]] = [[] for _ in range(self.pair.length)]
        for node, row in reads.items():
            steps[row.step].append(RowRead(self.number[node], self.number[row.source], row.dim, row.step))
        for node in nodes:
            steps[self.pair.step[node]].append(self._operation(node))
        results = tuple(self._concat_result(join) for join in joins)
        finals = tuple(self._single_step_result(node) for node in self._values_used_outside(nodes))
        crossing = _assign_carry_slots(lifetimes, self.number, self.pair.length, reverse)
        kept = {slot.value for slots in crossing for slot in slots} | {final.value for final in finals}
        kept |= {number for join in results for number in join.values}
        dead_after = _dead_values(steps, kept, reverse)
        return Steps(tuple(map(tuple, steps)), crossing, results, finals, dtype, reverse, dead_after)

    def _operation(self, node: fx.Node) -> Operation:
        """Return an operator as an instruction whose operands are value numbers."""

        def numbered(item: fx.Node) -> Any:
            return StepValue(self.number[item])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), numbered)
        return Operation(self.number[node], COPYING_VIEWS.get(node.target, node.target), args, dict(kwargs))

    def _concat_result(self, join: ConcatAccess) -> ConcatResult:
        """Return a concatenation of rows as a result that lists the value number of each row."""
        value = join.node.meta[VALUE]
        numbers = tuple(self.number[item] for item in join.values)
        return ConcatResult(numbers, join.dim, tuple(value.shape), value.dtype)

    def _values_used_outside(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Return values that are used outside of the loop, other than through concatenated rows."""
        return tuple(node for node in nodes if any(self._is_outside(user) for user in node.users))

    def _is_outside(self, user: fx.Node) -> bool:
        """Return whether a user is neither in the loop nor a concatenation of its rows."""
        return user not in self.values and user not in self.concat_nodes

    def _single_step_result(self, node: fx.Node) -> SingleStepResult:
        """Return a value of a single step as a result of the loop."""
        if not is_tensor(node) or node.meta[VALUE].dtype == torch.bool:
            raise NoRecurrenceError(f"{node.name} is no number")
        value = node.meta[VALUE]
        return SingleStepResult(self.number[node], self.pair.step[node], tuple(value.shape), value.dtype)

    # -- operands and results

    def _recurrence_call(
        self, name: str, steps: Steps, recomputed: Steps | None, joins: tuple[ConcatAccess, ...], nodes: tuple[fx.Node, ...]
    ) -> RecurrenceCall:
        """Return the recurrence operator of one graph; `recomputed` has the forward steps that a backward graph reruns."""
        rows: dict[fx.Node, int] = {}
        inputs: dict[fx.Node, None] = {}
        reads = (self.pair.forward_reads, self.pair.backward_reads) if recomputed is not None else None
        for row in (r for part in (reads or (self._reads_of(steps),)) for r in part.values()):
            if rows.setdefault(row.source, row.dim) != row.dim:
                raise NoRecurrenceError(f"{row.source.name} is read along two dimensions")
        everything = (*(self.pair.forward if recomputed is not None else ()), *nodes)
        for source in (source for node in everything for source in node.all_input_nodes):
            if source not in self.values:
                inputs[source] = None
        for item in (item for join in joins for item in join.values):
            if item not in self.values:
                inputs[item] = None
        if not rows or not all(is_tensor(value) for value in inputs):
            raise NoRecurrenceError("it reads no rows, or something else than tensors")
        operands = [(value, True) for value in rows] + [(value, False) for value in inputs]
        finals = self._values_used_outside(nodes)
        if len(finals) > MOST_FINALS:
            raise NoRecurrenceError(f"{len(finals)} values of single rows are used elsewhere")
        plan = RecurrencePlan(
            name,
            self.pair.length,
            steps,
            recomputed,
            tuple(self._operand(value, has_rows) for value, has_rows in operands),
            {self._operand(value, has_rows=True): dim for value, dim in rows.items()},
            {self._operand(value, has_rows=False): self.number[value] for value in inputs},
            self._axis_labels([(value, rows[value] if has_rows else None) for value, has_rows in operands], joins, finals),
        )
        return RecurrenceCall(plan, tuple(value for value, _ in operands), joins, finals)

    def _reads_of(self, steps: Steps) -> Mapping[fx.Node, RowAccess]:
        """Return the rows that the steps read: those of the backward graph if the steps run in reverse."""
        return self.pair.backward_reads if steps.reverse else self.pair.forward_reads

    def _operand(self, value: fx.Node, has_rows: bool) -> ValueId:
        """Return the operand number. A value that is read by rows and also used in full becomes two operands."""
        return self.number[value] if has_rows else -1 - self.number[value]

    def _axis_labels(
        self, operands: list[tuple[fx.Node, int | None]], joins: tuple[ConcatAccess, ...], finals: tuple[fx.Node, ...]
    ) -> RecurrenceAxes:
        """Assign axis labels: dimensions with the same axis in the unrolled loop get the same label."""
        letters: dict[Dim, int] = {}

        def labels_of(value: fx.Node, row_dim: int | None) -> LetterShape:
            dims = [self.axes.table.resolve(dim) for dim in self.axes.shapes[value]]
            labels = [(letters.setdefault(dim, 1 + len(letters)),) if dim and i != row_dim else () for i, dim in enumerate(dims)]
            return tuple((0,) if i == row_dim else dim for i, dim in enumerate(labels))

        shapes = tuple(labels_of(value, row_dim) for value, row_dim in operands)
        results = (*(labels_of(join.node, join.dim) for join in joins), *(labels_of(final, None) for final in finals))
        return RecurrenceAxes(shapes, results, 0)


def _has_static_sizes(node: fx.Node) -> bool:
    """Return whether all sizes of a node's results are integers."""
    values = node.meta.get(VALUE)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)


def _carry_type(values: Iterable[fx.Node]) -> torch.dtype:
    """Return the widest dtype of the carried values, which represents narrower numbers exactly."""
    dtypes = {value.meta[VALUE].dtype if is_tensor(value) else None for value in values}
    wide = [dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes]
    if dtypes - {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}:
        raise NoRecurrenceError("other values than numbers cross from row to row")
    mixed = {torch.bfloat16, torch.float16} <= dtypes
    return torch.float32 if mixed and wide[0] not in (torch.float64, torch.float32) else (wide or [torch.float32])[0]


def _assign_carry_slots(
    lifetimes: Mapping[fx.Node, tuple[int, int]], number: Mapping[fx.Node, ValueId], length: int, reverse: bool
) -> tuple[tuple[CarrySlot, ...], ...]:
    """Assign a slot of the carry to each value for its lifetime; slots of expired values are reused."""
    crossing: list[list[CarrySlot]] = [[] for _ in range(length + 1)]
    free: dict[int, list[int]] = defaultdict(list)
    ending: dict[int, list[CarrySlot]] = defaultdict(list)
    end = 0
    starting: dict[int, list[fx.Node]] = defaultdict(list)
    for value, (low, high) in lifetimes.items():
        starting[high if reverse else low].append(value)
    for boundary in range(length, -1, -1) if reverse else range(length + 1):
        for slot in ending.pop(boundary, ()):
            free[slot.stop - slot.start].append(slot.start)
        for value in starting[boundary]:
            shape, size = tuple(value.meta[VALUE].shape), prod(value.meta[VALUE].shape)
            if free[size]:
                start = free[size].pop()
            else:
                start, end = end, end + size
            slot = CarrySlot(number[value], start, shape, value.meta[VALUE].dtype)
            low, high = lifetimes[value]
            for crossed in range(low, high + 1):
                crossing[crossed].append(slot)
            ending[low - 1 if reverse else high + 1].append(slot)
    return tuple(map(tuple, crossing))


def _dead_values(steps: list[list[Instruction]], kept: set[ValueId], reverse: bool) -> tuple[tuple[ValueId, ...], ...]:
    """Return, for each step, the values that no later step needs."""
    last: dict[ValueId, int] = {}
    positions = range(len(steps) - 1, -1, -1) if reverse else range(len(steps))
    defined: set[ValueId] = set()
    for step in positions:
        for item in steps[step]:
            defined.add(item.result_id)
            last[item.result_id] = step
            if isinstance(item, Operation):
                last.update(dict.fromkeys(numbers_in((item.args, item.kwargs)), step))
    dead: list[list[ValueId]] = [[] for _ in steps]
    for number, step in last.items():
        if number in defined and number not in kept:
            dead[step].append(number)
    return tuple(map(tuple, dead))


def numbers_in(item: Any) -> list[ValueId]:
    """Return the values that an operator's arguments refer to."""
    if isinstance(item, StepValue):
        return [item.value_id]
    if isinstance(item, Mapping):
        return [number for part in item.values() for number in numbers_in(part)]
    return [number for part in item for number in numbers_in(part)] if isinstance(item, (tuple, list)) else []
