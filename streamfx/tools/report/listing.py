"""Print a rewritten program as code: host programs, and for each loop its inputs, its body and its results.

A *host program* replaces the forward or the backward graph: loops, and the few operators between them. A loop runs its *body*, a
graph, for one chunk of rows [s, e) after the other. The *joint graph* is AOTAutograd's graph of both, before the rewrite; values
are printed with their names in it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.ir.program import (
    START,
    STOP,
    Broadcast,
    BufferOutput,
    BufferPart,
    ChunkSlice,
    ConcatOutput,
    FirstRow,
    IsFirst,
    LoopSpec,
    Number,
    Program,
    RowSelection,
    Selector,
    ShiftedRows,
)
from streamfx.ir.sizes import shape_of
from streamfx.ir.span import Span
from streamfx.ir.stage_plan import AutoChunk, ChunkSize
from streamfx.node_meta import JOINT, VALUE
from streamfx.torch_private import OpOverload


@dataclass(frozen=True)
class ListingContext:
    """How to name values: `shapes` has the axes, such as `[b t d]`, of each value by its name in the joint graph.

    `names`: by the id of a fake tensor, the name of the value in the joint graph; nodes that are copied share fake tensors.
    """

    shapes: Mapping[str, str]
    names: Mapping[int, str]

    def name(self, node: fx.Node) -> str | None:
        """Return the name, in the joint graph, of the value that a node of a host program or loop body computes, or None."""
        return node.meta.get(JOINT) or self.names.get(id(node.meta.get(VALUE)))


class Scope:
    """Names for the nodes of a host program or loop body: names from the joint graph, if they are unique in it."""

    def __init__(self, graph: fx.Graph, joint: ListingContext) -> None:
        """Assign names; if several nodes have the same name in the joint graph, they keep their own names."""
        self.joint = joint
        computed_nodes = [node for node in graph.nodes if node.op != "placeholder"]
        name_counts = Counter(joint.name(node) or node.name for node in computed_nodes)
        name_counts.update(node.name for node in graph.nodes if node.op == "placeholder")
        joint_names = {node: name for node in computed_nodes if (name := joint.name(node)) and name_counts[name] == 1}
        used_names = set(joint_names.values())
        self._names = {
            node: joint_names.get(node, f"{node.name}_" if node.name in used_names else node.name) for node in graph.nodes
        }

    def name(self, node: fx.Node) -> str:
        return self._names[node]

    def line(self, node: fx.Node) -> str:
        """Return `name = operator(arguments)  # [axes]`."""
        shape = self.joint.shapes.get(self.joint.name(node) or "")
        return f"{self.name(node)} = {call_text(node, self.name)}" + (f"  # {shape}" if shape else "")

    def text(self, argument: Any) -> str:
        return argument_text(argument, self.name)


def program_lines(program: Program, joint: ListingContext) -> Iterator[str]:
    """Yield the lines of the full program: host programs, then each loop that they call."""
    yield from outer_lines(program, joint)
    for module in filter(None, (program.forward, program.backward)):
        for node in module.graph.find_nodes(op="call_module"):
            spec = getattr(module.get_submodule(str(node.target)), "spec", None)
            if isinstance(spec, LoopSpec):
                yield ""
                yield from _loop_lines(spec, node, joint)


# -- host programs


def outer_lines(program: Program, joint: ListingContext) -> Iterator[str]:
    """Yield the lines of both host programs, without loop bodies."""
    for name, host in {"forward": program.forward, "backward": program.backward}.items():
        if host is not None:
            yield from _host_lines(name, host, joint)


def _host_lines(name: str, module: fx.GraphModule, joint: ListingContext) -> Iterator[str]:
    """Yield the lines of a host program: its inputs, operators, loop calls and outputs."""
    scope = Scope(module.graph, joint)
    yield f"{name}({', '.join(scope.name(node) for node in module.graph.find_nodes(op='placeholder'))})"
    for node in module.graph.nodes:
        if node.op == "output":
            yield f"  return {scope.text(node.args[0])}"
        elif node.op == "call_module":
            expression = getattr(module.get_submodule(str(node.target)), "expression", None)
            call = f"{node.target}{scope.text(tuple(node.args))}" if expression is None else str(expression)
            results = [user for user in node.users if user.target is operator.getitem]
            results.sort(key=lambda result: result.args[1])  # type: ignore[arg-type,return-value]
            yield f"  {', '.join(map(scope.name, results)) or node.name} = {call}"
        elif node.op == "call_function" and not _is_part_of_loop(node):
            yield f"  {scope.line(node)}"


def _is_part_of_loop(node: fx.Node) -> bool:
    """Return whether a node extracts one result of a loop call; the line of the call names all its results."""
    operand = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(operand, fx.Node) and operand.op == "call_module"


# -- loops


def _loop_lines(spec: LoopSpec, call: fx.Node, joint: ListingContext) -> Iterator[str]:
    """Yield the lines of a loop: chunk size, buffers, inputs, body, and where each result is stored.

    `call`: the node of the host program that calls it; its arguments are numbers for `spec.symbols`, then tensors.
    """
    outer, scope = Scope(call.graph, joint), Scope(spec.body.graph, joint)
    tensors = call.args[len(spec.symbols) :]
    yield f"loop {spec.name}: {chunk_text(spec.chunk_size)} [s, e), {'last to first' if spec.reverse else 'first to last'}"
    for index, buffer in enumerate(spec.buffers):
        kind = f"{'zeros' if buffer.zeroed else 'empty'} {dtype_text(buffer.dtype)}{joint.shapes.get(buffer.name, '')}"
        yield f"  buffer {index} = {kind} for {buffer.name}"
    same_for_all: list[str] = []
    for node, feed, source in zip(spec.body.graph.find_nodes(op="placeholder"), spec.feeds, spec.sources, strict=True):
        source_text = "" if source is None else outer.text(tensors[source])
        if isinstance(feed, Broadcast):
            same_for_all.append(node.name if node.name == source_text else f"{node.name} = {source_text}")
        else:
            yield f"  {node.name} = {feed_text(feed, source_text)}"
    yield f"  the same for all chunks: {', '.join(same_for_all) or 'none'}"
    yield "  body"
    for node in spec.body.graph.nodes:
        if node.op in ("call_function", "call_module"):
            yield f"    {scope.line(node)}"
    results = iter(spec.body.graph.output_node().args[0])  # type: ignore[arg-type]
    operands = [outer.text(tensor) for tensor in tensors]
    for loop_output, label in zip(spec.yields, spec.labels, strict=False):
        value = label if isinstance(loop_output, BufferOutput) else scope.text(next(results))
        yield f"  {label}{'' if value == label else f' = {value}'}{yield_text(loop_output, operands)}"


def chunk_text(chunk: ChunkSize) -> str:
    """Describe the chunk size, as `chunks of 64 rows`; an automatic one depends on the sequence length at run time."""
    if isinstance(chunk, AutoChunk):
        return f"chunks sized at run time ({chunk.row_bytes} bytes per row inside, {chunk.stream_bytes} at cuts)"
    return f"chunks of {chunk} rows"


def feed_text(feed: Any, source: str) -> str:
    """Describe what a loop body gets for one of its inputs; `source` names the loop's argument, if the feed reads one."""
    match feed:
        case ChunkSlice():
            return f"{source} {_rows_text(feed.selections)}"
        case BufferPart():
            return f"buffer {feed.buffer} {_rows_text(feed.selections)}"
        case Number():
            return str(sympy.sympify(feed.value).subs({START: sympy.Symbol("s"), STOP: sympy.Symbol("e")}))
        case FirstRow():
            return "s"
        case IsFirst():
            return "whether this chunk runs first"
    return str(feed)


def _rows_text(selections: tuple[RowSelection, ...]) -> str:
    """Describe the rows that a chunk reads along each chunked dimension, as `rows [0, e) of dim 1`."""

    def rows(selector: Selector) -> str:
        """Return the rows for the chunk [s, e): a span such as `[0, e)`, shifted rows, or its own rows."""
        if isinstance(selector, ShiftedRows):
            window = f" to {selector.by + selector.reach}" if selector.reach else ""
            return f"[s, e) shifted by {selector.by}{window}"
        return str(selector) if isinstance(selector, Span) else "[s, e)"

    return ", ".join(f"rows {rows(selector)} of dim {placement.dim}" for placement, selector in selections)


def yield_text(loop_output: Any, operands: Sequence[str]) -> str:
    """Describe where a result of a loop is stored; `operands` are the names of the call's tensors."""
    if isinstance(loop_output, ConcatOutput):
        over = "" if loop_output.reuse is None else f", over {operands[loop_output.reuse]}"
        return f", stacked along dim {loop_output.placement.dim}{over}"
    if isinstance(loop_output, BufferOutput):
        return f" = buffer {loop_output.buffer}{f' / {loop_output.count}' if loop_output.count != 1 else ''}"
    return f", {loop_output}"


# -- code fragments


Name = Callable[[fx.Node], str]


def own_name(node: fx.Node) -> str:
    return node.name


def call_text(node: fx.Node, name: Name = own_name) -> str:
    """Format an operator call as `mm(x, t)` or `x[0]`."""
    arguments = [argument_text(argument, name) for argument in node.args]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    keywords = [f"{key}={argument_text(value, name)}" for key, value in node.kwargs.items() if value is not None]
    return f"{target_text(node.target)}({', '.join([*arguments, *keywords])})"


def target_text(target: Any) -> str:
    """Return the name of an operator without the `aten` namespace, or of a function with its module."""
    if isinstance(target, OpOverload):
        namespace = "" if target.namespace == "aten" else f"{target.namespace}."
        return namespace + target.overloadpacket.__name__
    module = getattr(target, "__module__", "").rsplit(".", 1)[-1]
    name = getattr(target, "__name__", str(target))
    return name if module in ("_operator", "builtins", "math") else f"{module}.{name}"


def argument_text(argument: Any, name: Name = own_name) -> str:
    """Format an argument; `name` returns the name of a node."""
    if isinstance(argument, (list, tuple)):
        inner = ", ".join(argument_text(item, name) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    if isinstance(argument, fx.Node):
        return name(argument)
    if isinstance(argument, torch.dtype):
        return dtype_text(argument)
    return str(argument)


def dtype_text(dtype: torch.dtype) -> str:
    """
    >>> dtype_text(torch.float32), dtype_text(torch.bfloat16), dtype_text(torch.int64), dtype_text(torch.bool)
    ('f32', 'bf16', 'i64', 'bool')
    """
    text = str(dtype).removeprefix("torch.")
    return text.replace("bfloat", "bf").replace("float", "f").replace("complex", "c").replace("uint", "u").replace("int", "i")


def shape_text(value: torch.Tensor) -> str:
    """Format the shape of a tensor as `[2 8]`."""
    return f"[{' '.join(map(str, shape_of(value)))}]"
