"""Replace PyTorch's `scan` by a recurrence over rows: its carry and its direction are known.

Values that a step computes only from operands shared by all rows are loop-invariant: they are computed once and expanded
to all rows. The backward of a scan is a scan over such results, too: PyTorch stacks one copy of a weight per row if the
steps need it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import descendants, is_tensor, node_argument, shape_of_node
from streamfx.ir.recurrence import ScanPlan, separate_axes
from streamfx.ir.structural_hash import structure
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import GRAPH, VALUE
from streamfx.passes.ops.aliasing import is_view
from streamfx.passes.ops.traits import READS_LAYOUT, is_random
from streamfx.passes.rewrite.pattern import results_in_use, rewrite_rule
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.scan import ChunkedScan
from streamfx.torch_private import SCAN, OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class ScanStep:
    """The graph of one step: (carry, one row of each scanned operand, shared operands) to (next carry, one row per
    output).
    """

    graph: fx.Graph
    carried: int

    @property
    def inputs(self) -> list[fx.Node]:
        """Return the placeholders of the step's graph."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> Sequence[fx.Node]:
        """Return the results of the step: the next carry, then one row per output."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def operators(self) -> list[fx.Node]:
        """Return the operators of the step's graph."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    def rearranged(self, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> ScanStep:
        """Return the same operators with reordered inputs and the given results."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*inputs, *self.operators):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[result] for result in results))
        graph.eliminate_dead_code()
        return ScanStep(graph, self.carried)

    def with_views(self) -> ScanStep:
        """Replace copies of views by views that copy only if needed; nothing writes to the values of a step."""
        step = self.rearranged(self.inputs, self.results)
        for node in step.operators:
            viewed = _view_of(node.target)
            node.target = COPYING_VIEWS.get(viewed, viewed)
        return step


@dataclass(frozen=True)
class ScanOperator:
    """A call of `scan`: initial carry, scanned rows, and shared operands."""

    step: ScanStep
    first: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """Return all operands: carry, scanned rows, shared operands."""
        return (*self.first, *self.rows, *self.shared)


@rewrite_rule(SCAN)
def scan_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """scan(step, first, rows, given) -> scan(first, rows, given), in reverse if the rows were flipped"""
    call, users_by_result = _read_call(node), results_in_use(node)
    if call is None or users_by_result is None:
        return None
    results = _emit_without_steps(call, [number for number in users_by_result if number >= call.step.carried], writer)
    remaining = [number for number in users_by_result if number not in results]
    if remaining:
        results |= _emit_scan(_with_shared_operands(call), remaining, writer)
    return {user: results[number] for number, users in users_by_result.items() for user in users}


@rewrite_rule(aten.flip.default)
def remove_flip_of_expand(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """flip(expand(x)) -> expand(x), if one row is repeated"""
    inner = node_argument(node)
    return inner if _flipped_dims(node) == {0} and _repeated_row(inner) is not None else None


# -- reading a call


def _read_call(node: fx.Node) -> ScanOperator | None:
    """Return the call if its step is pure (no random draws, no mutation, no dependence on layouts), else None."""
    function, *groups = node.args
    module = function.meta.get(GRAPH) if isinstance(function, fx.Node) else None
    first, rows, shared = (tuple(group) for group in groups)  # type: ignore[arg-type]
    if module is None or not rows or not all(isinstance(item, fx.Node) and is_tensor(item) for item in (*first, *rows, *shared)):
        return None
    call = ScanOperator(ScanStep(module.graph, len(first)), first, rows, shared)
    is_pure = len(call.step.inputs) == len(call.operands) and all(map(is_pure_operator, call.step.operators))
    return (
        ScanOperator(call.step.with_views(), first, rows, shared) if is_pure and all(map(_has_shape, call.step.results)) else None
    )


def is_pure_operator(node: fx.Node) -> bool:
    """Return whether a step's operator depends on its operands' elements only, not on their memory or a random state."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace in ("aten", "prims")
        and node.target not in READS_LAYOUT
        and not node.target._schema.is_mutable
        and not is_random(node)
    )


def _has_shape(result: Any) -> bool:
    """Return whether a step's result is a tensor of static shape."""
    return isinstance(result, fx.Node) and is_tensor(result) and all(isinstance(n, int) for n in result.meta[VALUE].shape)


def _view_of(target: Any) -> Any:
    """t_copy -> t"""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_copy"):
        return target
    viewed = getattr(getattr(aten, target._opname.removesuffix("_copy"), None), target._overloadname, None)
    return viewed if isinstance(viewed, OpOverload) and is_view(viewed) else target


# -- results without steps


def _emit_without_steps(call: ScanOperator, numbers: Sequence[int], writer: GraphWriter) -> dict[int, fx.Node]:
    """Return the outputs, by number, that are rows of an operand or are loop-invariant: these need no recurrence."""
    outputs: dict[int, fx.Node] = {}
    start, stop = len(call.first), len(call.first) + len(call.rows)
    operands = dict(zip(call.step.inputs, call.operands, strict=True))
    changing = descendants(call.step.inputs[:stop], call.step.operators)
    for number in numbers:
        source = _source_of_copy(call.step.results[number])
        if source in call.step.inputs[start:stop]:
            outputs[number] = operands[source]
        elif source not in changing:
            row = writer.call(aten.unsqueeze.default, _loop_invariant(source, operands, writer), 0)
            length = size_arguments(call.rows[0], writer)[0]
            outputs[number] = writer.call(aten.expand.default, row, [length, *(-1 for _ in shape_of_node(source))])
    return outputs


def _source_of_copy(node: fx.Node) -> fx.Node:
    """Return the value that a step's result copies."""
    while node.target in (aten.clone.default, aten.detach.default, aten.alias.default):
        node = node_argument(node)
    return node


def _loop_invariant(value: fx.Node, emitted: dict[fx.Node, fx.Node], writer: GraphWriter) -> fx.Node:
    """Compute a loop-invariant value outside of the steps."""
    if value not in emitted:
        for source in value.all_input_nodes:
            _loop_invariant(source, emitted, writer)
        args, kwargs = fx.node.map_arg((value.args, value.kwargs), emitted.__getitem__)
        emitted[value] = writer.call(value.target, *args, **kwargs)
    return emitted[value]


# -- operands shared by all rows


def _with_shared_operands(call: ScanOperator) -> ScanOperator:
    """Turn scanned operands whose rows are all equal into shared operands."""
    start, stop = len(call.first), len(call.first) + len(call.rows)
    inputs = call.step.inputs
    repeated_by_input = {
        placeholder: _repeated_row(rows) for placeholder, rows in zip(inputs[start:stop], call.rows, strict=True)
    }
    if None not in repeated_by_input.values():  # the number of rows is read from the scanned operands, so one must remain
        return call
    rows_by_input = dict(zip(inputs[start:stop], call.rows, strict=True))
    varying_inputs = [placeholder for placeholder in repeated_by_input if repeated_by_input[placeholder] is None]
    repeated_inputs = [placeholder for placeholder in repeated_by_input if repeated_by_input[placeholder] is not None]
    order = [*inputs[:start], *varying_inputs, *inputs[stop:], *repeated_inputs]
    shared = (*call.shared, *(repeated_by_input[placeholder] for placeholder in repeated_inputs))
    return ScanOperator(
        call.step.rearranged(order, call.step.results),
        call.first,
        tuple(rows_by_input[placeholder] for placeholder in varying_inputs),
        shared,  # type: ignore[arg-type]
    )


def _repeated_row(rows: fx.Node) -> fx.Node | None:
    """Return x if the rows are expand(unsqueeze(x, 0)), else None."""
    if rows.target is not aten.expand.default:
        return None
    row = node_argument(rows)
    is_one = row.target is aten.unsqueeze.default and row.args[1] == 0
    value = node_argument(row) if is_one else None
    return value if value is not None and shape_of_node(value) == shape_of_node(rows)[1:] else None


# -- writing the recurrence


def _emit_scan(call: ScanOperator, numbers: Sequence[int], writer: GraphWriter) -> dict[int, fx.Node]:
    """Return the given results, computed by an operator that runs the steps."""
    carried = call.step.carried
    final_carries, outputs = [n for n in numbers if n < carried], [n for n in numbers if n >= carried]
    reverse = any(_is_flipped(rows) for rows in call.rows)
    results = [*call.step.results[:carried], *(call.step.results[number] for number in outputs)]
    rows = tuple(_flip(item, writer) if reverse else item for item in call.rows)
    call = ScanOperator(call.step.rearranged(call.step.inputs, results), call.first, rows, call.shared)
    scanned = writer.call(ChunkedScan(_scan_plan(call, tuple(final_carries), reverse)), *call.operands)
    results_by_number = {
        number: writer.call(operator.getitem, scanned, position) for position, number in enumerate((*final_carries, *outputs))
    }
    return {
        number: _flip(value, writer) if reverse and number >= carried else value for number, value in results_by_number.items()
    }


def _scan_plan(call: ScanOperator, finals: tuple[int, ...], reverse: bool) -> ScanPlan:
    """Return the plan of a scan; `finals` are the carried values whose last state is a result."""
    step, carried = call.step, call.step.carried
    result_types = [(tuple(result.meta[VALUE].shape), result.meta[VALUE].dtype) for result in step.results]
    name = f"scan_{blake2s(repr(structure(step.graph)).encode(), digest_size=4).hexdigest()}"
    combine = fx.GraphModule(torch.nn.Module(), step.graph).forward
    groups = ((call.first, None), (call.rows, 0), (call.shared, None))
    operands = [(shape_of_node(item), at) for items, at in groups for item in items]
    length = shape_of_node(call.rows[0])[0]
    outputs = [((length, *shape), 0) for shape, _ in result_types[carried:]]
    axes = separate_axes(operands, [*((result_types[number][0], None) for number in finals), *outputs])
    return ScanPlan(
        name, combine, tuple(result_types[:carried]), finals, len(call.rows), tuple(result_types[carried:]), reverse, axes
    )


def _is_flipped(rows: fx.Node) -> bool:
    """Return whether a value is rows flipped along the first dimension."""
    return rows.target is aten.flip.default and _flipped_dims(rows) == {0}


def _flip(rows: fx.Node, writer: GraphWriter) -> fx.Node:
    """Flip rows along the first dimension; return the operand if they are flipped already."""
    return node_argument(rows) if _is_flipped(rows) else writer.call(aten.flip.default, rows, [0])


def _flipped_dims(flip: fx.Node) -> set[int]:
    """Return the dimensions of a flip, as nonnegative numbers."""
    rank = max(len(shape_of_node(flip)), 1)
    dims: Any = flip.args[1]
    return {dim % rank for dim in dims}
