"""Find the carried values that the option `adjoints=64` truncates: gradients of states, which reach back 64 rows only.

A recurrence of the backward graph carries, from the last row to the first: gradients of states, sums to which each row
adds a term (a weight's gradient), and values of the forward graph. Only gradients of states, and values computed from
them, are truncated. (Adjoint sharding, section 4.3: `streamfx/runtime/truncated.py`.)

    state = tanh(state @ weight + x)        carried: d(state), d(weight)        truncated: d(state)

A carry is a sum if its only use, transitively, is as an addend, until it is returned.
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
from streamfx.runtime.custom_scan import Backward
from streamfx.runtime.scan import ChunkedScan, slots
from streamfx.torch_private.lines import source_line

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class TruncatedBPTT:
    options: Options
    name: ClassVar[str] = "truncated_bptt"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the truncation of each backward recurrence, if the option `adjoints` limits the rows."""
        rows, sequence = self.options.adjoints, facts.axes.sequence
        if rows == "exact" or sequence is None:
            return facts
        depends_on_tangents, truncations = descendants(facts.joint.tangents, facts.joint.nodes), dict[fx.Node, Truncation]()
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
        return facts if sequence.length in range(rows + 1) else replace(facts, truncations=truncations)


def _check_exchanged_states(
    facts: Facts, rows: int, depends_on_tangents: Collection[fx.Node], truncated: Collection[fx.Node]
) -> None:
    """Raise an error if ranks exchange gradients of states, which depend on all rows of another rank.

    Such a gradient depends on gradients of rows, has no rows itself, and a truncated recurrence depends on it.
    """
    nodes = facts.joint.nodes
    after_rows = descendants([node for node in nodes if node in depends_on_tangents and _has_rows(node, facts)], nodes)
    for node in nodes:
        if is_collective(node) and node in after_rows and node not in facts.joint.forward:
            ends = (node, *node.all_input_nodes, *node.users)
            if not any(_has_rows(end, facts) for end in ends) and not descendants([node], nodes).isdisjoint(truncated):
                raise OptionError(
                    f"adjoints={rows} cannot limit gradients of states that ranks pass to each other",
                    found=f"{node.target} of a gradient that depends on all rows of another rank",
                    where=source_line(node),
                    do="give adjoints='exact', or pass state.detach() to other ranks: then each rank truncates its own gradients",
                )


def _has_rows(node: fx.Node, facts: Facts) -> bool:
    """Return whether a value has a sequence dimension."""
    shape = facts.axes.shapes.get(node)
    return shape is not None and bool(facts.axes.sequence_dims(shape))


@singledispatch
def find_adjoint_intervals(run: Recurrence, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the intervals of a carry that are gradients of states, as in `Truncation.adjoints`.

    `depends_on_tangents` says of each operand whether it depends on a tangent.
    """
    return [()]


@find_adjoint_intervals.register
def _(run: Backward, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the full carry: the gradient of each declared state."""
    return [[(slot.start, slot.stop) for slot in run.plan.slots]]


@find_adjoint_intervals.register
def _(run: AssociativeBackward, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the full carry: the gradients of the blocks after its rows."""
    return [[(0, None)]]


@find_adjoint_intervals.register
def _(run: ChunkedScan, depends_on_tangents: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the carried values that depend on tangents, by the step graph, except sums of gradients."""
    graph, count = run.plan.step, len(run.plan.carry)
    inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    operators = [node for node in graph.nodes if node.op == "call_function"]
    adjoint_values = {node for node, is_dependent in zip(inputs, depends_on_tangents, strict=True) if is_dependent}
    before = -1
    while len(adjoint_values) > before:
        before = len(adjoint_values)
        adjoint_values = descendants(adjoint_values, operators)
        adjoint_values.update(
            carry_input
            for carry_input, carry_output in zip(inputs[:count], results, strict=False)
            if carry_output in adjoint_values
        )
    intervals = zip(slots(run.plan.carry), inputs, results, strict=False)
    return [
        [
            slot
            for slot, carry_input, carry_output in intervals
            if carry_input in adjoint_values and not _is_accumulated(carry_input, carry_output, results)
        ]
    ]


def _is_accumulated(carry_input: fx.Node, carry_output: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Return whether a step only adds to a carried value and returns it."""
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
    """Return the carried values that depend on tangents, by the operators of all steps, except sums of gradients."""
    plan, steps = run.plan, run.plan.steps
    operands = {value_id for value_id, is_dependent in zip(plan.operands, depends_on_tangents, strict=True) if is_dependent}
    adjoint_values = {value for value_id, value in plan.shared.items() if value_id in operands}
    for item in _instructions(steps):
        if not adjoint_values.isdisjoint(_values_used(item)) or (isinstance(item, RowRead) and item.operand in operands):
            adjoint_values.add(item.result_id)
    adjoint_values -= _accumulated_sums(steps)
    return [[(slot.start, slot.stop) for slot in crossing if slot.value in adjoint_values] for crossing in steps.crossing]


def _instructions(steps: Steps) -> Iterator[Instruction]:
    """Yield the instructions of all steps in execution order."""
    for step in reversed(steps.steps) if steps.reverse else steps.steps:
        yield from step


def _accumulated_sums(steps: Steps) -> set[ValueId]:
    """Return the values whose only uses are as addends of each other, or as results of the loop."""
    uses: dict[ValueId, list[Any]] = {}
    instructions = list(_instructions(steps))
    for item in instructions:
        for value_id in _values_used(item):
            uses.setdefault(value_id, []).append(item)
    result_ids, concatenated = (
        {final.value for final in steps.single_step_results},
        {value for concat in steps.concat_results for value in concat.values},
    )
    sums: set[ValueId] = set()
    for item in reversed(instructions):
        users = uses.get(item.result_id, [])
        is_summed = all(
            use.result_id in sums and is_summand(use.target, use.args, use.kwargs, StepValue(item.result_id)) for use in users
        )
        if item.result_id not in concatenated and is_summed and (users or item.result_id in result_ids):
            sums.add(item.result_id)
    return sums


def is_summand(target: Any, args: Collection[Any], kwargs: Mapping[str, Any], value: Any) -> bool:
    """Return whether an operator adds a term to a value, and uses the value in no other way."""
    return target is ADD and not kwargs and list(args).count(value) == 1


def _values_used(item: Instruction) -> list[ValueId]:
    """Return the values of steps that an instruction uses."""
    return value_ids_in((item.args, item.kwargs)) if isinstance(item, Operation) else []
