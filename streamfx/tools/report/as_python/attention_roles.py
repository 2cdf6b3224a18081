"""Names for the operands and results of attention in a loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from streamfx.ir.program import BufferPart, LoopSpec
from streamfx.kernels import chunk_attention
from streamfx.runtime import buffers as buffer_ops
from streamfx.tools.report.as_python.operator_calls import parameters_of

ATTENTION_OPERANDS = ("query", "key", "value")
ATTENTION_RESULTS: dict[Any, tuple[str, ...]] = {
    chunk_attention.forward: ("out", "lse"),
    chunk_attention.backward: ("grad_query", "grad_key", "grad_value"),
}


@dataclass(frozen=True)
class AttentionRoles:
    """Names for operands and results of attention in a loop: of nodes, and of arguments and buffers by index."""

    nodes: dict[fx.Node, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)


def attention_roles(spec: LoopSpec) -> AttentionRoles:
    """Return which values of a loop are queries, keys, values, outputs or gradients of them."""
    roles, find = AttentionRoles(), spec.body.graph.find_nodes
    placeholders = find(op="placeholder")
    feeds, sources = dict(zip(placeholders, spec.feeds, strict=True)), dict(zip(placeholders, spec.sources, strict=True))

    def add(node: Any, role: str, buffer: Any = None) -> None:
        """Set the role of a value, of the argument from which it is sliced, and of the buffer that `buffer` slices."""
        roles.nodes.setdefault(node, role)
        if (source := sources.get(node)) is not None:
            roles.arguments.setdefault(source, f"{role}_all")
        if isinstance(feed := feeds.get(buffer), BufferPart):
            roles.buffers.setdefault(feed.buffer, f"{role}_all")

    for target, results in ATTENTION_RESULTS.items():
        for call in find(op="call_function", target=target):
            operands = dict(zip(parameters_of(target), call.args, strict=False))
            for role in ATTENTION_OPERANDS:
                operand = operands[role]
                is_appended = operand.target is buffer_ops.append
                add(operand.args[2] if is_appended else operand, role, operand.args[0] if is_appended else None)
            for user in call.users:
                adders = [adder for adder in user.users if adder.target is buffer_ops.add_rows]
                add(user, results[user.args[1]], adders[0].args[0] if adders else None)
    return roles
