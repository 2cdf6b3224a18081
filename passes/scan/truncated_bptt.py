"""Find the carried values that the option `adjoints=64` truncates: gradients of states, which reach back 64 rows only.

A recurrence of the backward graph carries, from the last row to the first: gradients of states, sums to which each row
adds a term (a weight's gradient), and values of the forward graph. Only gradients of states, and values computed from
them, are truncated. (Adjoint sharding, section 4.3: `streamfx/runtime/truncated.py`.)

    state = tanh(state @ weight + x)        carried: d(state), d(weight)        truncated: d(state)

A carried value is a sum if its only use, transitively, is as an addend, until it is returned. An *adjoint interval* is the
interval (start, stop) of the carry's elements that holds one gradient of a state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.errors import OptionError
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import descendants
from streamfx.ir.recurrence import CarryIntervals, Instruction, Operation, RowRead, Steps, StepValue, Truncation, ValueId
from streamfx.options import Options
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.scan.carry import value_ids_in
from streamfx.runtime.associative import AssociativeBackward
from streamfx.runtime.chunked_recurrences import Recurrence, UnrolledRecurrence
from streamfx.runtime.custom_scan import StatefulRecurrence, StepLoop
from streamfx.torch_private.lines import source_line

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class TruncatedBPTT:
    """The pass: finds the parts of each backward recurrence's carry that the option `adjoints` truncates."""

    options: Options
    name: ClassVar[str] = "truncated_bptt"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with `truncations`: for each backward recurrence, which parts of its carry to truncate.

        The same facts with `adjoints="exact"`, without a sequence, or if the sequence has no more rows than gradients of
        states may reach back. Raise `OptionError` if ranks exchange such gradients.
        """
        rows, sequence = self.options.adjoints, facts.axes.sequence
        if rows == "exact" or sequence is None:
            return facts
        depends_on_tangents = descendants(facts.joint.tangents, facts.joint.nodes)
        truncations: dict[fx.Node, Truncation] = {}
        for node in facts.joint.nodes:
            run, storage_classes = node.target, facts.access.storage_classes.get(node, ())
            if (
                isinstance(run, Recurrence)
                and run.reverse
                and node not in facts.joint.forward
                and StorageClass.ROWS in storage_classes
            ):
                intervals = find_adjoint_intervals(run, [source in depends_on_tangents for source in node.args])
                if any(intervals):
                    truncations[node] = Truncation(rows, intervals)
        _check_exchanged_states(facts, rows, depends_on_tangents, truncations)
        if sequence.length in range(rows + 1):
            return facts
        for node in truncations:
            _check_bypassed_steps(node, rows, depends_on_tangents)
        return replace(facts, truncations=truncations)


def _check_exchanged_states(
    facts: Facts, rows: int, depends_on_tangents: Collection[fx.Node], truncated: Collection[fx.Node]
) -> None:
    """Raise `OptionError` if ranks exchange gradients of states: these depend on all rows of another rank, however many.

    A collective exchanges one if its operands depend on gradients with rows, neither its operands nor its results have rows,
    and a recurrence in `truncated` depends on it. `rows`: the value of `adjoints`.
    """
    nodes = facts.joint.nodes
    after_gradients_of_rows = descendants(
        [node for node in nodes if node in depends_on_tangents and _has_rows(node, facts)], nodes
    )
    for node in nodes:
        if is_collective(node) and node in after_gradients_of_rows and node not in facts.joint.forward:
            exchanged = (node, *node.all_input_nodes, *node.users)
            has_rows = any(_has_rows(value, facts) for value in exchanged)
            if not has_rows and not descendants([node], nodes).isdisjoint(truncated):
                raise OptionError(
                    f"adjoints={rows} cannot limit gradients of states that ranks pass to each other",
                    found=f"{node.target} of a gradient that depends on all rows of another rank",
                    where=source_line(node),
                    do="give adjoints='exact', or pass state.detach() to other ranks: then each rank truncates its own gradients",
                )


def _check_bypassed_steps(node: fx.Node, rows: int, depends_on_tangents: Collection[fx.Node]) -> None:
    """Raise `OptionError` if gradients of an unrolled loop's results reach earlier rows, but not through its carry.

    Such a result depends on the state only by operators whose gradients need no value of the step:

        total = total + state; ... loss(total)      backward: d(total) is one operand of all steps

    An operand without rows that depends on tangents is a gradient of a result of one step (or computed from it). If a step before
    the last one uses it, other than as a term of a sum of gradients, then the result may be of a later step.
    """
    if not isinstance(node.target, UnrolledRecurrence):
        return
    plan = node.target.plan
    shared = zip(plan.shared, node.args[len(plan.rows) :], strict=True)
    gradients = {value_id for value_id, source in shared if source in depends_on_tangents}
    sums = _accumulated_sums(plan.steps)
    for item in (item for step in plan.steps.steps[:-1] for item in step):
        if item.result_id not in sums and not gradients.isdisjoint(_values_used(item)):
            raise OptionError(
                f"adjoints={rows} cannot limit the gradient of a state, or of a sum of states, that passes to all rows at once",
                found=f"{node.target} gets the gradient of a value after the loop, and uses it before its last row",
                where=source_line(node),
                do="give adjoints='exact', write the loop as torch's scan, or stack the states and sum them after the loop",
            )


def _has_rows(node: fx.Node, facts: Facts) -> bool:
    """Return whether a value has a sequence dimension."""
    shape = facts.axes.shapes.get(node)
    return shape is not None and bool(facts.axes.sequence_dims(shape))


@singledispatch
def find_adjoint_intervals(run: Recurrence, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the intervals (start, stop) of a backward recurrence's carry that hold gradients of states.

    One list of intervals per boundary between rows; a single list applies to all boundaries. This default for other
    recurrences: none. `depends_on_tangents`: for each operand, whether it depends on a tangent.
    """
    return [()]


@find_adjoint_intervals.register
def _(run: StatefulRecurrence, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """A declared operator's backward: its full carry, the gradient of each declared state. A `scan`: some carry components."""
    function, slots = run.plan.function, run.plan.slots
    adjoints = [True] * len(slots)
    if isinstance(function, StepLoop):
        adjoints = _scan_adjoints(function.step, depends_on_tangents, len(slots))
    return [[(slot.start, slot.stop) for slot, is_adjoint in zip(slots, adjoints, strict=True) if is_adjoint]]


@find_adjoint_intervals.register
def _(run: AssociativeBackward, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """An associative scan's backward: its full carry, the gradients of the blocks after a chunk. (0, None): all elements."""
    return [[(0, None)]]


def _scan_adjoints(graph: fx.Graph, depends_on_tangents: Sequence[bool], num_carried: int) -> list[bool]:
    """Return which carry components of a `scan` are gradients of states: those that depend on tangents, except sums.

    The step graph maps (*carry, *rows, *shared operands) to (*carry, *rows). What an output depends on, the same component
    of the next step's input also depends on; so iterate until nothing is added.
    """
    inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    carried = list(zip(inputs[:num_carried], results, strict=False))
    operators = [node for node in graph.nodes if node.op == "call_function"]
    adjoint_values = {node for node, is_dependent in zip(inputs, depends_on_tangents, strict=True) if is_dependent}
    num_before = -1
    while len(adjoint_values) > num_before:
        num_before = len(adjoint_values)
        adjoint_values = descendants(adjoint_values, operators)
        adjoint_values.update(carry_input for carry_input, carry_output in carried if carry_output in adjoint_values)
    return [
        carry_input in adjoint_values and not _is_accumulated(carry_input, carry_output, results)
        for carry_input, carry_output in carried
    ]


def _is_accumulated(carry_input: fx.Node, carry_output: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Return whether a step only adds to a carried value, or passes it unchanged, so that the carry is a sum over rows.

    `carry_input` and `carry_output` are its values before and after the step, `results` all results of the step.
    """
    has_no_other_use = list(results).count(carry_output) == 1 and len(carry_output.users) == 1
    return has_no_other_use and (
        carry_output is carry_input
        or (
            set(carry_input.users) == {carry_output}
            and is_summand(carry_output.target, carry_output.args, carry_output.kwargs, carry_input)
        )
    )


@find_adjoint_intervals.register
def _(run: UnrolledRecurrence, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """An unrolled loop: at each boundary, the carried values that depend on tangents, except sums of gradients."""
    plan, steps = run.plan, run.plan.steps
    num_rows = len(plan.rows)
    tangent_rows = {operand for operand, is_dependent in zip(plan.rows, depends_on_tangents, strict=False) if is_dependent}
    shared = zip(plan.shared, depends_on_tangents[num_rows:], strict=True)
    adjoint_values = {value_id for value_id, is_dependent in shared if is_dependent}
    for item in _instructions(steps):
        reads_tangent_row = isinstance(item, RowRead) and item.operand in tangent_rows
        if reads_tangent_row or not adjoint_values.isdisjoint(_values_used(item)):
            adjoint_values.add(item.result_id)
    adjoint_values -= _accumulated_sums(steps)
    return [[(slot.start, slot.stop) for slot in crossing if slot.value in adjoint_values] for crossing in steps.crossing]


def _instructions(steps: Steps) -> Iterator[Instruction]:
    """Yield the instructions of all steps in execution order: the last step first if the loop runs in reverse."""
    for step in reversed(steps.steps) if steps.reverse else steps.steps:
        yield from step


def _accumulated_sums(steps: Steps) -> set[ValueId]:
    """Return the partial sums of accumulations over steps: values used only as addends of other such sums, or as results.

    For s = a + b; t = s + c; return t: a, b, c, s and t. A value that is a row of a concatenated result is not a sum.
    """
    users_of: dict[ValueId, list[Any]] = {}
    instructions = list(_instructions(steps))
    for item in instructions:
        for value_id in _values_used(item):
            users_of.setdefault(value_id, []).append(item)
    returned = {final.value for final in steps.single_step_results}
    concatenated = {value for concat in steps.concat_results for value in concat.values}
    sums: set[ValueId] = set()
    for item in reversed(instructions):
        users = users_of.get(item.result_id, [])
        is_summed = all(
            user.result_id in sums and is_summand(user.target, user.args, user.kwargs, StepValue(item.result_id))
            for user in users
        )
        if item.result_id not in concatenated and is_summed and (users or item.result_id in returned):
            sums.add(item.result_id)
    return sums


def is_summand(target: Any, args: Collection[Any], kwargs: Mapping[str, Any], value: Any) -> bool:
    """Return whether a call is `add(value, other)` or `add(other, value)`, where `value` is not added to itself."""
    return target is ADD and not kwargs and list(args).count(value) == 1


def _values_used(item: Instruction) -> list[ValueId]:
    """Return the identifiers of the values that an instruction uses; none for `RowRead`, which reads an operand's row."""
    return value_ids_in((item.args, item.kwargs)) if isinstance(item, Operation) else []
