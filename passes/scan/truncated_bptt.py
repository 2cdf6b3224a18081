"""Find the gradients of states that reach back only a limited number of rows, if requested (`adjoints=64`).

A recurrence of the backward graph carries, from last row to first: gradients of states, which later rows pass to
earlier ones; sums to which each row adds a term (a weight's gradient); and values of the forward graph. Only the
first kind is truncated. (Adjoint sharding, section 4.3: `streamfx/runtime/truncated.py`.)

    carried: d(state), d(weight) of state = tanh(state @ weight + x)      truncated: d(state), and values derived from it

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
from streamfx.passes.scan.schedule import numbers_in
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
        """Record, for each backward recurrence, the slices of its carry that are gradients of states."""
        rows, sequence = self.options.adjoints, facts.axes.sequence
        if rows == "exact" or sequence is None:
            return facts
        driven, truncations = descendants(facts.joint.tangents, facts.joint.nodes), dict[fx.Node, Truncation]()
        for node in facts.joint.nodes:
            run, storage_classes = node.target, facts.access.storage_classes.get(node, ())
            if (
                isinstance(run, Recurrence)
                and run.reverse
                and node not in facts.joint.forward
                and StorageClass.ROWS in storage_classes
            ):
                places = adjoints(run, [source in driven for source in node.args])
                if any(places):
                    truncations[node] = Truncation(rows, places)
        _refuse_states_of_other_ranks(facts, rows, driven, truncations)
        return facts if sequence.length in range(rows + 1) else replace(facts, truncations=truncations)


def _refuse_states_of_other_ranks(facts: Facts, rows: int, driven: Collection[fx.Node], truncated: Collection[fx.Node]) -> None:
    """Reject gradients of states that ranks exchange.

    Such a gradient has passed through all rows of another rank, whatever limit was requested. It depends on gradients
    of rows, has no rows itself, and reaches a truncated recurrence.
    """
    nodes = facts.joint.nodes
    after_rows = descendants([node for node in nodes if node in driven and _has_rows(node, facts)], nodes)
    for node in nodes:
        if is_collective(node) and node in after_rows and node not in facts.joint.forward:
            ends = (node, *node.all_input_nodes, *node.users)
            if not any(_has_rows(end, facts) for end in ends) and not descendants([node], nodes).isdisjoint(truncated):
                raise OptionError(
                    f"adjoints={rows} cannot say how far gradients reach back where ranks hand each other states",
                    found=f"{node.target} of a gradient that has been through all rows of another rank",
                    where=source_line(node),
                    do="give adjoints='exact', or let ranks hand over state.detach(): then each truncates its own gradients",
                )


def _has_rows(node: fx.Node, facts: Facts) -> bool:
    """Return whether a value has a sequence dimension."""
    shape = facts.axes.shapes.get(node)
    return shape is not None and bool(facts.axes.sequence_dims(shape))


@singledispatch
def adjoints(run: Recurrence, driven: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Return the slices of a carry that are gradients of states, for each number of rows; `driven` marks gradient
    operands.
    """
    return [()]


@adjoints.register
def _(run: Backward, driven: Sequence[bool]) -> Sequence[CarryIntervals]:
    """The declaration lists the carry: the gradient of each state."""
    return [[(slot.start, slot.stop) for slot in run.plan.slots]]


@adjoints.register
def _(run: AssociativeBackward, driven: Sequence[bool]) -> Sequence[CarryIntervals]:
    """The carry holds the gradients of the blocks after its rows."""
    return [[(0, None)]]


@adjoints.register
def _(run: ChunkedScan, driven: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Follow the driven operands through the step graph to a fixpoint; sums of gradients do not count."""
    graph, count = run.plan.step, len(run.plan.carry)
    inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    operators = [node for node in graph.nodes if node.op == "call_function"]
    adjoint_values = {node for node, is_driven in zip(inputs, driven, strict=True) if is_driven}
    before = -1
    while len(adjoint_values) > before:
        before = len(adjoint_values)
        adjoint_values = descendants(adjoint_values, operators)
        adjoint_values.update(
            carry_input
            for carry_input, carry_output in zip(inputs[:count], results, strict=False)
            if carry_output in adjoint_values
        )
    places = zip(slots(run.plan.carry), inputs, results, strict=False)
    return [
        [
            slot
            for slot, carry_input, carry_output in places
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


@adjoints.register
def _(run: UnrolledRecurrence, driven: Sequence[bool]) -> Sequence[CarryIntervals]:
    """Follow the driven operands through all steps; sums of gradients do not count."""
    plan, steps = run.plan, run.plan.steps
    operands = {number for number, is_driven in zip(plan.operands, driven, strict=True) if is_driven}
    adjoint_values = {value for number, value in plan.shared.items() if number in operands}
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
    """Return values whose only uses are as addends of one another, or as results after the last row."""
    uses: dict[ValueId, list[Any]] = {}
    instructions = list(_instructions(steps))
    for item in instructions:
        for number in _values_used(item):
            uses.setdefault(number, []).append(item)
    finals, joined = (
        {final.value for final in steps.single_step_results},
        {value for join in steps.concat_results for value in join.values},
    )
    sums: set[ValueId] = set()
    for item in reversed(instructions):
        users = uses.get(item.result_id, [])
        is_summed = all(
            use.result_id in sums and is_summand(use.target, use.args, use.kwargs, StepValue(item.result_id)) for use in users
        )
        if item.result_id not in joined and is_summed and (users or item.result_id in finals):
            sums.add(item.result_id)
    return sums


def is_summand(target: Any, args: Collection[Any], kwargs: Mapping[str, Any], value: Any) -> bool:
    """Return whether an operator adds something to a value, and uses it in no other way."""
    return target is ADD and not kwargs and list(args).count(value) == 1


def _values_used(item: Instruction) -> list[ValueId]:
    """Return the values of steps that an instruction uses."""
    return numbers_in((item.args, item.kwargs)) if isinstance(item, Operation) else []
