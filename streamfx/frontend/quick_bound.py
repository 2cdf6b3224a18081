"""Decide from Dynamo's graph, before tracing or differentiation, whether a step is far below the memory budget.

A short sequence gains nothing from chunks, and should not wait for an analysis that finds this out. So the bound is
conservative: a graph that may come near the budget is traced, and its memory simulated (`budget_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.budget import budget_bytes
from streamfx.cost.memory import bytes_like
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private.symbolic_sizes import size_hint

SAFETY_FACTOR = 8  # multiplies operand and result bytes, to cover saved tensors, gradients and workspaces of an operator
MAX_ELEMENT_BYTES = 8  # of a score, if attention materializes all query-key pairs
ATTENTION = torch.nn.functional.scaled_dot_product_attention
MODULES = (
    "torch",
    "torch._C",
    "torch._C._nn",
    "torch._C._special",
    "torch.nn.functional",
    "torch.amp.autocast_mode",
    "_operator",
    "math",
)
RECURRENT_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)  # they save values of each step


def find_fitting_lengths(graph: fx.Graph, inputs: Sequence[Any], budget: int | float | str) -> Lengths | None:
    """Return the longest sequence lengths (values of dynamic sizes) for which a training step certainly fits the memory budget.

    Empty if no size is dynamic. None if there is no proof for this call: inputs on several devices, an operator whose memory is
    unknown, or a bound above the budget.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {value.device for value in tensors}
    if len(devices) != 1 or max_activation_bytes(graph) is None:
        return None
    gradient_bytes = sum(value.nbytes for value in tensors if value.requires_grad)

    def fits(lengths: Lengths) -> bool:
        """Return whether a step of these lengths fits: inputs, gradients of weights, and the bound on activations."""
        input_bytes = sum(map(bytes_like, tensors))
        available = budget_bytes(budget, next(iter(devices)), input_bytes, gradient_bytes) - input_bytes - gradient_bytes
        return (max_activation_bytes(graph) or 0) <= available

    traced = Lengths.of_current_call(graph)
    return traced.longest_if_longer(fits) if fits(traced) else None


def max_activation_bytes(graph: fx.Graph) -> int | None:
    """Return an upper bound on the bytes of activations and their gradients; None if the memory of an operator is unknown."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    return SAFETY_FACTOR * sum(map(_operator_bytes, nodes)) if all(map(_is_torch_operator, nodes)) else None


def _is_torch_operator(node: fx.Node) -> bool:
    """Return whether an operator is a torch function whose memory its operands and results bound.

    Excluded are results whose size depends on data, nested graphs, user functions and operators, recurrent layers, which save
    values of each step, and products of three or more operands, whose intermediate results may be larger.
    """
    if any(isinstance(size, torch.SymInt) and size.node.hint is None for value in _values(node) for size in _sizes(value)):
        return False
    if node.op == "call_method":
        return isinstance(node.target, str) and hasattr(Tensor, node.target)
    if node.target is torch.einsum:  # intermediate results of three operands may be larger than all of them
        return len(node.all_input_nodes) <= 2
    return (
        node.op == "call_function" and getattr(node.target, "__module__", None) in MODULES and node.target not in RECURRENT_LAYERS
    )


def _operator_bytes(node: fx.Node) -> int:
    """Return the bytes of an operator's operands and results; for attention, including all query-key pairs."""
    values = [*(_values(source) for source in node.all_input_nodes), _values(node)]
    total = sum(bytes_like(value) for node_values in values for value in node_values)
    return total + (_pair_bytes(node) if node.target is ATTENTION else 0)


def _pair_bytes(node: fx.Node) -> int:
    """Return the bytes of all query-key pairs of an attention, in the widest dtype.

    query [..., rows, dim], key [..., keys, dim] -> 8 * ... * rows * keys
    """
    operands: dict[str, Any] = dict(zip(("query", "key"), node.args, strict=False)) | node.kwargs
    query, key = (next(_values(operands[name])) for name in ("query", "key"))
    return MAX_ELEMENT_BYTES * math.prod(size_hint(size) for size in (*query.shape[:-1], key.shape[-2]))


def _values(node: fx.Node) -> Iterator[Any]:
    """Yield the example result that Dynamo stored for a node, or each of its results; None if it stored none."""
    value = node.meta.get(EXAMPLE_VALUE)
    yield from value if isinstance(value, (tuple, list)) else (value,)


def _sizes(value: Any) -> Sequence[Any]:
    """Return the sizes of a tensor; of any other value, such as a size, the value itself."""
    return value.shape if isinstance(value, Tensor) else (value,)
