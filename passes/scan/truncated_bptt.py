"""Which gradients of states reach back few rows alone, where that was asked for (`adjoints=64`)?

A recurrence of the backward half carries from row to row, last to first: gradients of states, which later rows hand to earlier
ones; sums to which each row adds its part (a weight's gradient); values of the forward half. The first are truncated, the others
are what they were. (Adjoint sharding, section 4.3: `streamfx/runtime/truncated.py`.)

    carried: d(state), d(weight) of state = tanh(state @ weight + x)      truncated: d(state), and what follows from it

A sum is one by how it is used: each of its uses is one summand of a plain addition that is such a sum, too, until it leaves.
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
from streamfx.ir.recurrence import Instruction, Number, Operation, Places, RowRead, Steps, StepValue, Truncation
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
class Truncations:
    options: Options
    name: ClassVar[str] = "truncations"

    def apply(self, facts: Facts) -> Facts:
        rows, sequence = self.options.adjoints, facts.axes.sequence
        if rows == "exact" or sequence is None:
            return facts
        driven, found = descendants(facts.joint.tangents, facts.joint.nodes), dict[fx.Node, Truncation]()
        for node in facts.joint.nodes:
            run, forms = node.target, facts.demand.forms.get(node, ())
            if isinstance(run, Recurrence) and run.reverse and node not in facts.joint.forward and StorageClass.ROWS in forms:
                places = adjoints(run, [source in driven for source in node.args])
                if any(places):
                    found[node] = Truncation(rows, places)
        _refuse_states_of_other_ranks(facts, rows, driven, found)
        return facts if sequence.length in range(rows + 1) else replace(facts, truncations=found)


def _refuse_states_of_other_ranks(facts: Facts, rows: int, driven: Collection[fx.Node], found: Collection[fx.Node]) -> None:
    """Gradients of states that ranks hand each other have been through all rows of another rank, however few were asked for: they
    are made of gradients of rows, have no rows themselves, and lead to what is truncated.
    """
    nodes = facts.joint.nodes
    behind_rows = descendants([node for node in nodes if node in driven and _has_rows(node, facts)], nodes)
    for node in nodes:
        if is_collective(node) and node in behind_rows and node not in facts.joint.forward:
            ends = (node, *node.all_input_nodes, *node.users)
            if not any(_has_rows(end, facts) for end in ends) and not descendants([node], nodes).isdisjoint(found):
                raise OptionError(
                    f"adjoints={rows} cannot say how far gradients reach back where ranks hand each other states",
                    found=f"{node.target} of a gradient that has been through all rows of another rank",
                    where=source_line(node),
                    do="give adjoints='exact', or let ranks hand over state.detach(): then each truncates its own gradients",
                )


def _has_rows(node: fx.Node, facts: Facts) -> bool:
    shape = facts.axes.shapes.get(node)
    return shape is not None and bool(facts.axes.sequence_dims(shape))


@singledispatch
def adjoints(run: Recurrence, driven: Sequence[bool]) -> Sequence[Places]:
    """The parts of a carry that are gradients of states, for each number of rows; `driven` says which operands are gradients."""
    return [()]


@adjoints.register
def _(run: Backward, driven: Sequence[bool]) -> Sequence[Places]:
    """It was declared what it carries: the gradient of each state."""
    return [[(slot.start, slot.stop) for slot in run.plan.slots]]


@adjoints.register
def _(run: AssociativeBackward, driven: Sequence[bool]) -> Sequence[Places]:
    """It carries the gradients of the blocks behind its rows."""
    return [[(0, None)]]


@adjoints.register
def _(run: ChunkedScan, driven: Sequence[bool]) -> Sequence[Places]:
    graph, count = run.plan.step, len(run.plan.carry)
    inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    operators = [node for node in graph.nodes if node.op == "call_function"]
    found = {place for place, is_driven in zip(inputs, driven, strict=True) if is_driven}
    before = -1
    while len(found) > before:
        before = len(found)
        found = descendants(found, operators)
        found.update(place for place, left in zip(inputs[:count], results, strict=False) if left in found)
    places = zip(slots(run.plan.carry), inputs, results, strict=False)
    return [[where for where, place, left in places if place in found and not _is_total(place, left, results)]]


def _is_total(place: fx.Node, left: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Whether a step does nothing with what is carried but add to it, and carries it on."""
    is_left_alone = list(results).count(left) == 1 and len(left.users) == 1
    return is_left_alone and (
        left is place or (set(place.users) == {left} and is_summand(left.target, left.args, left.kwargs, place))
    )


@adjoints.register
def _(run: UnrolledRecurrence, driven: Sequence[bool]) -> Sequence[Places]:
    plan, steps = run.plan, run.plan.own
    operands = {number for number, is_driven in zip(plan.operands, driven, strict=True) if is_driven}
    found = {value for number, value in plan.given.items() if number in operands}
    for item in _in_order(steps):
        if not found.isdisjoint(_sources(item)) or (isinstance(item, RowRead) and item.operand in operands):
            found.add(item.made)
    found -= _totals(steps)
    return [[(slot.start, slot.stop) for slot in crossing if slot.value in found] for crossing in steps.crossing]


def _in_order(steps: Steps) -> Iterator[Instruction]:
    for step in reversed(steps.steps) if steps.reverse else steps.steps:
        yield from step


def _totals(steps: Steps) -> set[Number]:
    """Values that are nothing but summands of one another, and of what leaves when all rows are through."""
    uses: dict[Number, list[Any]] = {}
    made = list(_in_order(steps))
    for item in made:
        for number in _sources(item):
            uses.setdefault(number, []).append(item)
    finals, joined = {final.value for final in steps.finals}, {value for join in steps.joins for value in join.values}
    found: set[Number] = set()
    for item in reversed(made):
        own = uses.get(item.made, [])
        is_summed = all(use.made in found and is_summand(use.target, use.args, use.kwargs, StepValue(item.made)) for use in own)
        if item.made not in joined and is_summed and (own or item.made in finals):
            found.add(item.made)
    return found


def is_summand(target: Any, args: Collection[Any], kwargs: Mapping[str, Any], value: Any) -> bool:
    """Whether an operator adds something to a value, and does nothing else with it."""
    return target is ADD and not kwargs and list(args).count(value) == 1


def _sources(item: Instruction) -> list[Number]:
    """The values of steps that an instruction computes with."""
    return numbers_in((item.args, item.kwargs)) if isinstance(item, Operation) else []
