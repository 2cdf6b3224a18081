"""Replace PyTorch's `scan` by a recurrence over rows: its carry and its direction are known.

A `scan` calls a step function once per row (along dimension 0): (carry, row of each scanned operand, shared operands) ->
(next carry, one row of each output). A recurrence is one operator that a loop runs chunk by chunk, with the carry from
chunk to chunk. Values that a step computes only from operands shared by all rows are loop-invariant: they are computed once
and expanded to all rows. The backward of a scan is a scan that reads such values: PyTorch stacks one copy of a weight per
row if the steps need it.
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
from streamfx.ir.operator_table import returns_view
from streamfx.ir.scan_schema import Stateful, forward_plan
from streamfx.ir.structural_hash import structure
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import GRAPH, VALUE
from streamfx.passes.ops.traits import READS_LAYOUT, before_copies, is_random
from streamfx.passes.rewrite.pattern import REST, getitems_by_index, op, rewrite_rule
from streamfx.runtime.custom_scan import StatefulRecurrence, StepLoop
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.torch_private import SCAN, OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class ScanStep:
    """The graph of one step, which maps (carry, a row of each scanned operand, shared operands) to (next carry, output rows).

    `num_carried` is the number of values in the carry.
    """

    graph: fx.Graph
    num_carried: int

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

    def rearrange(self, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> ScanStep:
        """Return a copy of the step with its placeholders in the order `inputs`, and with the given results; drop unused nodes.

        `inputs` and `results` are nodes of this step.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*inputs, *self.operators):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[result] for result in results))
        graph.eliminate_dead_code()
        return ScanStep(graph, self.num_carried)

    def with_views(self) -> ScanStep:
        """Return a copy of the step with views instead of copies of views: `t_copy` becomes `t`.

        This is correct because nothing writes to the values of a step.
        """
        step = self.rearrange(self.inputs, self.results)
        for node in step.operators:
            view_operator = _find_view_operator(node.target)
            node.target = COPYING_VIEWS.get(view_operator, view_operator)
        return step


@dataclass(frozen=True)
class ScanOperator:
    """A call of `scan`: initial carry, scanned rows, and shared operands."""

    step: ScanStep
    initial_carry: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """Return all operands: carry, scanned rows, shared operands."""
        return (*self.initial_carry, *self.rows, *self.shared)


@rewrite_rule(SCAN)
def scan_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """scan(step, carry, rows, shared) -> recurrence(carry, rows, shared), in reverse if the rows were flipped"""
    call, getitems = _match_scan(node), getitems_by_index(node)
    if call is None or getitems is None:
        return None
    outputs = [index for index in getitems if index >= call.step.num_carried]  # the results after the final carry
    new_results = _emit_without_steps(call, outputs, writer)
    remaining = [index for index in getitems if index not in new_results]
    if remaining:
        new_results |= _emit_recurrence(_with_shared_operands(call), remaining, writer)
    return {old_getitem: new_results[index] for index, old_getitems in getitems.items() for old_getitem in old_getitems}


@rewrite_rule(op(aten.flip.default, "rows", [0]))
def remove_flip_of_expand(node: fx.Node, writer: GraphWriter, rows: fx.Node) -> fx.Node | None:
    """flip(expand(x)) -> expand(x), if one row is repeated"""
    return rows if _repeated_row(rows) is not None else None


# -- reading a call


def _match_scan(node: fx.Node) -> ScanOperator | None:
    """Return a `scan` call as initial carry, scanned rows, shared operands and step. In the step, copies of views are views.

    Return None if the step has side effects, random draws or layout-dependent operators, if operands are not tensors or do
    not match its inputs, or if the step's results have no static shape.
    """
    function, *operand_lists = node.args
    module = function.meta.get(GRAPH) if isinstance(function, fx.Node) else None
    carry, rows, shared = (tuple(operands) for operands in operand_lists)  # type: ignore[arg-type]
    if module is None or not rows or not all(isinstance(item, fx.Node) and is_tensor(item) for item in (*carry, *rows, *shared)):
        return None
    step = ScanStep(module.graph, len(carry))
    is_pure = len(step.inputs) == len((*carry, *rows, *shared)) and all(map(is_pure_operator, step.operators))
    return ScanOperator(step.with_views(), carry, rows, shared) if is_pure and all(map(_has_shape, step.results)) else None


def is_pure_operator(node: fx.Node) -> bool:
    """Return whether a step's operator depends on its operands' elements only, not on their strides or a random state.

    It must not write to its operands either. Operators of other packages are not known.
    """
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


def _find_view_operator(target: Any) -> Any:
    """Return the view operator that an operator copies, such as `t` for `t_copy`; any other operator itself."""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_copy"):
        return target
    view_operator = getattr(getattr(aten, target._opname.removesuffix("_copy"), None), target._overloadname, None)
    return view_operator if isinstance(view_operator, OpOverload) and returns_view(view_operator) else target


# -- results without steps


def _emit_without_steps(call: ScanOperator, indices: Sequence[int], writer: GraphWriter) -> dict[int, fx.Node]:
    """Emit the outputs of a scan that need no recurrence; return them by result index.

    They are an operand's rows, which the step returns unchanged, or loop-invariant: one row, expanded to all rows. `indices`
    are the results to consider, which are outputs and not final carries.
    """
    outputs: dict[int, fx.Node] = {}
    num_carried = len(call.initial_carry)
    num_varying = num_carried + len(call.rows)  # inputs that differ from step to step
    operands = dict(zip(call.step.inputs, call.operands, strict=True))
    varying = descendants(call.step.inputs[:num_varying], call.step.operators)
    for index in indices:
        value = before_copies(call.step.results[index])
        if value in call.step.inputs[num_carried:num_varying]:
            outputs[index] = operands[value]
        elif value not in varying:
            row = writer.call(aten.unsqueeze.default, _emit_loop_invariant(value, operands, writer), 0)
            length = size_arguments(call.rows[0], writer)[0]
            outputs[index] = writer.call(aten.expand.default, row, [length, *(-1 for _ in shape_of_node(value))])
    return outputs


def _emit_loop_invariant(value: fx.Node, emitted: dict[fx.Node, fx.Node], writer: GraphWriter) -> fx.Node:
    """Emit a loop-invariant value of a step, and the values from which it is computed, before the scan; return the node.

    `emitted` maps nodes of the step to nodes before the scan, and gets the new ones; at first, it has the step's inputs.
    """
    if value not in emitted:
        for source in value.all_input_nodes:
            _emit_loop_invariant(source, emitted, writer)
        args, kwargs = fx.node.map_arg((value.args, value.kwargs), emitted.__getitem__)
        emitted[value] = writer.call(value.target, *args, **kwargs)
    return emitted[value]


# -- operands shared by all rows


def _with_shared_operands(call: ScanOperator) -> ScanOperator:
    """Return the call with shared operands x in place of scanned operands expand(x), whose rows are all equal.

    The step gets its inputs in the new order: carry, scanned rows, shared operands. If all scanned operands are expanded,
    the call is returned unchanged, because the number of rows is read from one of them.
    """
    start = len(call.initial_carry)
    stop = start + len(call.rows)
    inputs = call.step.inputs
    rows_by_input = dict(zip(inputs[start:stop], call.rows, strict=True))
    repeated_by_input = {placeholder: _repeated_row(rows) for placeholder, rows in rows_by_input.items()}
    if None not in repeated_by_input.values():
        return call
    varying_inputs = [placeholder for placeholder in repeated_by_input if repeated_by_input[placeholder] is None]
    repeated_inputs = [placeholder for placeholder in repeated_by_input if repeated_by_input[placeholder] is not None]
    new_order = [*inputs[:start], *varying_inputs, *inputs[stop:], *repeated_inputs]
    shared = (*call.shared, *(repeated_by_input[placeholder] for placeholder in repeated_inputs))
    return ScanOperator(
        call.step.rearrange(new_order, call.step.results),
        call.initial_carry,
        tuple(rows_by_input[placeholder] for placeholder in varying_inputs),
        shared,  # type: ignore[arg-type]
    )


def _repeated_row(rows: fx.Node) -> fx.Node | None:
    """Return x if the rows are expand(unsqueeze(x, 0)), else None."""
    match = op(aten.expand.default, op(aten.unsqueeze.default, "x", 0), REST).match(rows)
    return match["x"] if match is not None and shape_of_node(match["x"]) == shape_of_node(rows)[1:] else None


# -- writing the recurrence


def _emit_recurrence(call: ScanOperator, indices: Sequence[int], writer: GraphWriter) -> dict[int, fx.Node]:
    """Emit a recurrence that runs the steps; return its results that have these indices in the `scan`, by index.

    Results below `num_carried` are final carries, the others outputs. If a scanned operand is flipped, the recurrence runs
    from the last row to the first, on operands that are not flipped, and the outputs are flipped.
    """
    num_carried = call.step.num_carried
    outputs = [i for i in indices if i >= num_carried]
    reverse = any(_is_flipped(rows) for rows in call.rows)
    results = [*call.step.results[:num_carried], *(call.step.results[index] for index in outputs)]
    rows = tuple(_emit_flip(item, writer) if reverse else item for item in call.rows)
    call = ScanOperator(call.step.rearrange(call.step.inputs, results), call.initial_carry, rows, call.shared)
    declared = _declare(call, reverse)
    values = {name: node.meta[VALUE] for name, node in zip(declared.argument_names, call.operands, strict=True)}
    used = [*(i for i in indices if i < num_carried), *range(num_carried, len(results))]
    plan, fake_results = writer.run_on_fakes(forward_plan, declared, values, used)
    scanned = writer.insert_call(tuple(fake_results[i] for i in used), StatefulRecurrence(plan), *call.operands)
    getitems = {index: writer.call(operator.getitem, scanned, i) for i, index in enumerate(sorted(indices))}
    return {index: _emit_flip(value, writer) if reverse and index >= num_carried else value for index, value in getitems.items()}


def _declare(call: ScanOperator, reverse: bool) -> Stateful:
    """Return the declaration of a scan as an operator with a state: each carry component is a state."""
    step, num_carried = call.step, call.step.num_carried
    carry, rows, shared = (
        tuple(f"{kind}_{i}" for i in range(len(operands)))
        for kind, operands in (("carry", call.initial_carry), ("rows", call.rows), ("shared", call.shared))
    )
    row_types = [(tuple(result.meta[VALUE].shape), result.meta[VALUE].dtype) for result in step.results[num_carried:]]
    combine = fx.GraphModule(torch.nn.Module(), step.graph).forward
    function = StepLoop(combine, (carry, rows, shared), row_types, reverse)
    return Stateful(
        name=f"scan_{blake2s(repr(structure(step.graph)).encode(), digest_size=4).hexdigest()}",
        operators=("", ""),
        forward=function,
        backward=function,
        argument_names=(*carry, *rows, *shared),
        backward_argument_names=(),
        rows=dict.fromkeys(rows, 0),
        results=(*(None for _ in carry), *(0 for _ in row_types)),
        states={name: i for i, name in enumerate(carry)},
        cotangents={},
        gradients=(),
        reverse=reverse,
        is_kernel=False,
    )


def _is_flipped(rows: fx.Node) -> bool:
    """Return whether a value is flip(rows, [0])."""
    return op(aten.flip.default, ..., [0]).match(rows) is not None


def _emit_flip(rows: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit flip(rows, [0]); if the rows are flip(x, [0]) already, return x."""
    return node_argument(rows) if _is_flipped(rows) else writer.call(aten.flip.default, rows, [0])
