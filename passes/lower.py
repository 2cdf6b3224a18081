"""Who runs a loop's body?

Eager bodies run as they are. For Inductor a body is cut at everything that belongs to the runtime (kernels of attention, writes
to buffers, sums, random draws) and at what has as many keys as the chunk sees, because that length changes from chunk to chunk;
what lies between has the chunk's shape only and is compiled, once for all layers and chunks that share it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.inductor import uses_inductor
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.options import Options
from streamfx.runtime.compiled import CompiledBody, Step


@dataclass(frozen=True)
class Lower:
    name: ClassVar[str] = "lower"
    options: Options

    def apply(self, facts: Facts) -> Facts:
        if not uses_inductor(self.options, facts.joint.graph):
            return facts
        program: Program = facts.program
        for loop in program.loops:
            placeholders = [node.name for node in loop.spec.body.graph.find_nodes(op="placeholder")]
            loop.compiled = CompiledBody(split(loop.spec.body), placeholders)
        return replace(facts, program=program)


def split(body: fx.GraphModule) -> tuple[Step, ...]:
    """The body as steps in order: compiled segments, and single operators of the runtime.

    An operator belongs to the first segment in which all its operands are there, so that a segment is as long as it can be.
    """
    level: dict[fx.Node, int] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            level[node] = 0
        elif node.op == "call_function":
            level[node] = max((_ready_at(source, level) for source in node.all_input_nodes), default=0)
    steps: list[Step] = []
    for number in range(1 + max(level.values(), default=0)):
        nodes = [node for node, own in level.items() if own == number and node.op == "call_function"]
        compiled = [node for node in nodes if is_compiled(node)]
        if compiled:
            steps.append(_segment(compiled, body))
        steps.extend(Step.single(node) for node in nodes if not is_compiled(node))
    return (*steps, Step.result(body.graph.output_node()))


def is_compiled(node: fx.Node) -> bool:
    """Whether Inductor may have an operator; a part of a tuple goes where its operator goes."""
    producer = node.args[0] if node.target is operator.getitem else node
    assert isinstance(producer, fx.Node)
    return isinstance(producer.target, torch._ops.OpOverload) and not producer.meta.get("has_keys", False)


def _ready_at(source: fx.Node, level: dict[fx.Node, int]) -> int:
    """The first segment that can use a value: the runtime's operators run after the segment of their own level."""
    is_runtime = source.op == "call_function" and not is_compiled(source)
    return level[source] + is_runtime


def _segment(nodes: list[fx.Node], body: fx.GraphModule) -> Step:
    inside = set(nodes)
    inputs = [source for node in nodes for source in node.all_input_nodes if source not in inside]
    inputs = list(dict.fromkeys(inputs))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    outputs = [node for node in outputs if not _is_tuple(node)]
    graph = fx.Graph()
    copies = {source: graph.placeholder(source.name) for source in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in outputs))
    return Step.segment(fx.GraphModule(torch.nn.Module(), graph), inputs, outputs)


def _is_tuple(node: fx.Node) -> bool:
    return any(user.target is operator.getitem for user in node.users)
