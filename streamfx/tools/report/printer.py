"""Print the product of each pass, for `TORCH_LOGS="+streamfx"`, golden files, and people."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_names import AxisNames
from streamfx.ir.facts import Facts, Role
from streamfx.ir.joint import is_tensor, tensor_operands
from streamfx.ir.signature import LabelShape
from streamfx.ir.stage import Stage
from streamfx.ir.subgraph import Subgraph
from streamfx.kernels.mask_programs import MaskProgram
from streamfx.log import log, pass_log, report_unknown_passes, selected_passes
from streamfx.node_meta import VALUE
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.tools.report.listing import (
    ListingContext,
    call_text,
    chunk_text,
    dtype_text,
    outer_lines,
    program_lines,
    shape_text,
)
from streamfx.torch_private import trace_artifact
from streamfx.torch_private.lines import source_line

Lines = Iterator[str]


def text_of(facts: Facts, product: str) -> str:
    """Return the text of a pass's product, by product name."""
    return "\n".join(line.rstrip() for line in PRODUCTS[product](facts)) + "\n"


# -- canonicalize, recurrences, axes: the graph with the shape of each value


def _sized_graph_lines(facts: Facts) -> Lines:
    """Yield the joint graph with the dtype and shape of each value."""
    yield from _graph_lines(facts, _sizes_text)


def _recurrence_lines(facts: Facts) -> Lines:
    """Yield the joint graph if a loop over rows was unrolled."""
    if any(isinstance(node.target, Recurrence) for node in facts.joint.nodes):
        yield from _sized_graph_lines(facts)
    else:
        yield "no loop over rows was unrolled"


def _axis_lines(facts: Facts) -> Lines:
    """Yield the joint graph with the axes of each value, and the operators without axes."""
    axes, labels = facts.axes, AxisNames(facts.joint, facts.axes)
    if axes.sequence is None:
        yield "no sequence"
    yield f"axes {labels.legend()}"
    yield from _graph_lines(facts, lambda node: " ".join(labels.shape(shape) for shape in _result_shapes(node, facts)))
    for node, reason in axes.missing_rules.items():
        yield f"unknown {node.name}: {reason}"


def _result_shapes(node: fx.Node, facts: Facts) -> Sequence[Any]:
    """Return the shape of a tensor node, or of each result of an operator with several."""
    if is_tensor(node):
        return (facts.axes.shapes[node],)
    return facts.axes.results.get(node, ())


def _sizes_text(node: fx.Node) -> str:
    """Return dtype and shape of the tensors that a node computes."""
    values = node.meta.get(VALUE)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return ", ".join(f"{dtype_text(value.dtype)}{shape_text(value)}" for value in values if isinstance(value, torch.Tensor))


def _graph_lines(facts: Facts, describe: Callable[[fx.Node], str]) -> Lines:
    """Yield inputs, forward and backward nodes, outputs and gradients; `describe` comments each node."""
    joint = facts.joint
    yield "inputs"
    for node in joint.sources:
        yield f"  {node.name}  # {describe(node)}" if is_tensor(node) else f"  {node.name}"
    halves = {
        "forward": [n for n in joint.nodes if n in joint.forward],
        "backward": [n for n in joint.nodes if n not in joint.forward],
    }
    for half, nodes in halves.items():
        yield half
        for node in nodes:
            description = describe(node)
            yield f"  {node.name} = {call_text(node)}" + (f"  # {description}" if description else "")
    yield f"outputs {_names_text(joint.outputs)}"
    if joint.gradients:
        yield f"gradients {_names_text(joint.gradients)}"


def _names_text(values: Sequence[Any]) -> str:
    """Return the names of nodes, and other values as they are, separated by commas."""
    return ", ".join(value.name if isinstance(value, fx.Node) else str(value) for value in values)


# -- access: the rows that each operator needs, and the storage class of its result


def _access_role_lines(facts: Facts) -> Lines:
    """Yield each operator with the rows that it needs and the storage class of its results."""
    labels = AxisNames(facts.joint, facts.axes)
    yield "t: the chunk's rows, s: the keys they see, T: all rows"
    for node in facts.joint.nodes:
        if node.target is operator.getitem or node not in facts.access.storage_classes:
            continue
        storage = ", ".join(storage_class.name.lower() for storage_class in facts.access.storage_classes[node])
        yield f"  {storage:<9} {node.name} = {_roles_text(node, facts, labels)}"
    for node, reason in facts.access.reasons.items():
        yield f"fallback {node.name}: {reason}"


def _roles_text(node: fx.Node, facts: Facts, labels: AxisNames) -> str:
    """Return the call with the rows that it needs of each operand, and the shape of its result for a chunk."""
    signature, roles = facts.axes.signatures.get(node), facts.access.roles.get(node, {})
    if signature is None:
        return f"{_operator_name(node)}(?)"

    def shape_text(value: Any, notation: LabelShape) -> str:
        dim_roles = {i: roles[label] for i, dim in enumerate(notation) for label in dim if label in roles}
        return labels.shape(value, dim_roles if roles else dict.fromkeys(range(len(notation)), Role.WHOLE))

    operands = zip(tensor_operands(node), signature.operands, strict=True)
    operands_text = ", ".join(
        f"{operand.name} {shape_text(facts.axes.shapes[operand], notation)}" for operand, notation in operands
    )
    results = zip(facts.axes.results[node], signature.results, strict=False)
    return f"{_operator_name(node)}({operands_text}) -> {', '.join(shape_text(value, notation) for value, notation in results)}"


def _operator_name(node: fx.Node) -> str:
    return call_text(node).split("(", 1)[0]


# -- key_spans


def _key_span_lines(facts: Facts) -> Lines:
    """Yield each group of connected operators with keys (attention, softmax, mask), and the span that they share."""
    groups: dict[int, list[fx.Node]] = {}
    for node, span in facts.key_spans.spans.items():
        groups.setdefault(id(span), []).append(node)
    for nodes in groups.values():
        exact = ", exactly the keys that its mask shows" if any(node in facts.key_spans.exact_masks for node in nodes) else ""
        kind = facts.key_spans.span_kinds.get(nodes[0], "computed from positions only")
        yield f"{kind}: rows [s, e) see keys {facts.key_spans.spans[nodes[0]]}{exact}"
        yield f"  {', '.join(node.name for node in nodes)}"
    if not groups:
        yield "no attention"


# -- stages


def _stage_lines(facts: Facts) -> Lines:
    """Yield all stages: operators, inputs, outputs and gradients."""
    labels = AxisNames(facts.joint, facts.axes)
    for index in range(len(facts.stages)):
        yield from _lines_of_stage(index, facts, labels)


def _loss_gradient_lines(facts: Facts) -> Lines:
    """Yield the last stage if the forward loop also computes its gradient."""
    stages = facts.stages
    if stages[-1].gradient_in_forward:
        yield from _lines_of_stage(len(stages) - 1, facts, AxisNames(facts.joint, facts.axes))
    else:
        yield "the gradient of the last stage is computed in the backward pass"


def _lines_of_stage(index: int, facts: Facts, labels: AxisNames) -> Lines:
    """Yield the operators, inputs, outputs and gradients of the stage with this index."""
    stages, axes = facts.stages, facts.axes
    stage = stages[index]

    def values_text(nodes: Sequence[fx.Node]) -> str:
        return ", ".join(f"{node.name} {labels.shape(axes.shapes[node])}" for node in nodes if is_tensor(node)) or "none"

    stage_nodes = {*stage.forward, *stage.backward}
    inputs = [source for node in stage.forward for source in node.all_input_nodes if source not in stage_nodes]
    inputs = [node for node in dict.fromkeys(inputs) if node.op != "placeholder" and node not in axes.static]
    yield f"stage {index + 1} of {len(stages)}   {stage.name}   {first_line(stage)}".rstrip()
    yield f"  forward    {_nodes_text(stage.forward)}"
    yield f"  backward   {_nodes_text(stage.backward)}{', run in the forward loop' if stage.gradient_in_forward else ''}"
    yield f"  in         {values_text(inputs)}"
    yield f"  out        {values_text(stage.outputs)}"
    yield f"  gradients  {values_text(stage.gradients)}"


def _nodes_text(nodes: Sequence[fx.Node]) -> str:
    """Return the number of nodes, and the first and the last name."""
    return f"{len(nodes)} operators, {nodes[0].name} .. {nodes[-1].name}" if nodes else "none"


def first_line(stage: Stage) -> str:
    """`file:line` of the first line of the user's code that a stage comes from."""
    line = next((line for node in stage.forward if (line := source_line(node))), "")
    return line.split(", in ")[0].rsplit("/", 1)[-1]


# -- plan and program


def _plan_lines(facts: Facts) -> Lines:
    """Yield chunk size and saved values of each stage, and what is recomputed from the last saved input."""
    plan = facts.plan
    for index, stage in enumerate(facts.stages):
        saved = _names_text(plan.kept[index]) or "none"
        yield f"stage {index + 1} {stage.name}: {chunk_text(plan.chunk_sizes[index])}, saves besides its outputs: {saved}"
        if plan.dropped and plan.dropped[index]:
            yield f"  recomputed from the last saved boundary: {_names_text(plan.dropped[index])}"


def _budget_search_lines(facts: Facts) -> Lines:
    """Yield the memory budget, one line per simulated candidate (peak, saved values, limit on work per chunk), and the lengths
    for which the plan holds.
    """
    if facts.search_trace is None:
        yield "no memory budget"
        return
    yield f"at most {facts.search_trace.budget} bytes"
    for tried in facts.search_trace.candidates:
        limits = (
            "given chunks"
            if tried.limits is None
            else f"{tried.limits.layers} bytes of work per chunk, {tried.limits.loss} in the head"
        )
        yield f"{tried.peak} bytes with {tried.candidate}, {limits}"
    if facts.lengths:
        yield f"holds for {facts.lengths}"


def _program_lines(facts: Facts) -> Lines:
    """Yield the host programs and loops, with the axes of each value."""
    if facts.program is None:
        yield "no program: the graph runs unchunked"
        return
    labels, axes = AxisNames(facts.joint, facts.axes), facts.axes
    shapes = {node.name: labels.shape(axes.shapes[node], _roles_of_value(node, facts)) for node in _tensors(facts)}
    yield from program_lines(facts.program, _context(facts, shapes))


def _tensors(facts: Facts) -> list[fx.Node]:
    """Return the tensors of the joint graph: its sources, and then the results of its operators."""
    return [node for node in (*facts.joint.sources, *facts.joint.nodes) if is_tensor(node)]


def _context(facts: Facts, shapes: dict[str, str]) -> ListingContext:
    """Return how listings name values: by the joint graph's nodes, with the text of each value's axes from `shapes`."""
    return ListingContext(shapes, {id(node.meta[VALUE]): node.name for node in _tensors(facts)})


def _roles_of_value(node: fx.Node, facts: Facts) -> dict[int, Role]:
    """Return the role of each dimension of a value in the loop that computes it."""
    producer, result = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    signature, roles = facts.axes.signatures.get(producer), facts.access.roles.get(producer, {})  # type: ignore[arg-type]
    if signature is None:
        return {}
    return {i: roles[label] for i, dim in enumerate(signature.results[result]) for label in dim if label in roles}  # type: ignore[index]


def _truncation_lines(facts: Facts) -> Lines:
    """Yield how far the gradients of recurrences reach back."""
    for node, truncation in facts.truncations.items():
        yield f"{node.name}: gradients reach back {truncation.num_rows} rows, rounded up to chunks"
    if not facts.truncations:
        yield "gradients are exact"


def _mask_lines(facts: Facts) -> Lines:
    """Yield the masks that are evaluated once per step, and the loops that use them."""
    loops = facts.program.loops if facts.program is not None else ()
    users: dict[MaskProgram, list[str]] = {}
    for loop in loops:
        for program in loop.body.children():
            users.setdefault(program, []).append(loop.spec.name)
    for program, names in users.items():
        yield f"mask({_names_text(program.body.graph.find_nodes(op='placeholder'))}) in {', '.join(names)}"
        calls = [node for node in program.body.graph.nodes if node.op == "call_function"]
        yield from (f"  {node.name} = {call_text(node)}" for node in calls)
    if not users:
        yield "no mask depends on data alone"


def _body_lines(facts: Facts) -> Lines:
    """Yield how each loop body is executed: interpreted or compiled."""
    for loop in facts.program.loops if facts.program is not None else ():
        yield f"{loop.spec.name}: {'interpreted by torch.fx' if loop.compiled is None else loop.compiled}"


# -- collectives on weights


def removed_collectives(facts: Facts) -> Iterator[str]:
    """Yield how each weight is gathered from its shard, and how each gradient is reduced to a rank's shard."""
    collectives = facts.collectives
    if collectives is None:
        yield "no collectives"
        return
    for weight, gather in collectives.gathers.items():
        yield f"weight {weight.name} {shape_text(weight.meta[VALUE])} = {_chain_text(gather.subgraph)}"
    trained = {position: primal for position, primal, _ in facts.joint.trained}
    for position, subgraph in collectives.reductions.items():
        yield f"gradient of {trained[position].name} = {_chain_text(subgraph)}"


def _host_programs(facts: Facts, placeholder: str) -> Iterator[str]:
    """Yield both host programs, or `placeholder` if the graph has no collectives on weights."""
    if facts.collectives is None:
        yield placeholder
    elif facts.program is not None:
        yield from outer_lines(facts.program, _context(facts, {}))


def _chain_text(subgraph: Subgraph) -> str:
    """Format a chain of operators as nested calls."""
    text = {subgraph.source: f"{subgraph.source.name} {shape_text(subgraph.source.meta[VALUE])}"}
    for node in subgraph.nodes:
        text[node] = call_text(node, text.__getitem__)
    return text[subgraph.result]


PRODUCTS: dict[str, Callable[[Facts], Lines]] = {
    "unshard": removed_collectives,
    "canonicalize": _sized_graph_lines,
    "recurrences": _recurrence_lines,
    "axes": _axis_lines,
    "access_roles": _access_role_lines,
    "truncated_bptt": _truncation_lines,
    "key_spans": _key_span_lines,
    "stages": _stage_lines,
    "loss_gradient": _loss_gradient_lines,
    "chunk_plan": _plan_lines,
    "build_program": _program_lines,
    "reinsert_collectives": partial(_host_programs, placeholder="no collective was removed"),
    "budget_search": _budget_search_lines,
    "buckets": partial(_host_programs, placeholder="no collectives were merged"),
    "hoist_masks": _mask_lines,
    "compile_bodies": _body_lines,
}


PACKAGES = ("rewrite", "scan", "analysis", "partition", "lowering")  # of passes


# -- logs and traces: `TORCH_LOGS="+streamfx"` writes each product to the log, `TORCH_TRACE` keeps it for tlparse


def show_product(applied_pass: Any, facts: Facts) -> None:
    """Log and trace the product of a pass; the pipeline calls this after each pass.

    If `STREAMFX_LOGS` names passes, or packages of passes such as `partition`, only their products are logged.
    """
    name, selected = applied_pass.name, selected_passes()
    if unknown := selected.difference(PRODUCTS, PACKAGES):
        report_unknown_passes(unknown)
    logger = pass_log() if selected else log
    is_selected = not selected or not selected.isdisjoint((name, package_of(applied_pass)))
    if is_selected and logger.isEnabledFor(logging.DEBUG):
        logger.debug("after %s:\n%s", name, product_text(name, facts))
    trace_artifact(f"streamfx_{name}", lambda: product_text(name, facts))


def package_of(applied_pass: Any) -> str:
    """Return the package of `passes/` in which a pass is: `partition`, for example."""
    module = type(getattr(applied_pass, "analysis", applied_pass)).__module__
    return module.removeprefix("streamfx.passes.").split(".")[0]


def product_text(product: str, facts: Facts) -> str:
    """Return the text of a product. A printing error must not abort compilation."""
    try:
        return text_of(facts, product)
    except Exception as error:
        return f"({product} could not be printed: {type(error).__name__}: {error})\n"
