"""Does a step fit into the memory budget by far? Told from Dynamo's graph, before anything is traced or differentiated.

A short sequence has nothing to gain, and must not wait for an analysis that only finds that out. So this errs on one side: what
is not surely far below the budget is traced, and its memory simulated (`budget_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.budget import bytes_of
from streamfx.cost.memory import bytes_like
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private.symbolic_sizes import size_hint

TIMES = 8  # what an operator is given and gives, so often: what autograd saves of it, its gradients, and its work are less
WIDEST = 8  # bytes of a number, where attention is worked out for all pairs of rows and keys
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
LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)  # they keep what each of many steps makes


def fits_by_far(graph: fx.Graph, inputs: Sequence[Any], budget: int | float | str) -> Lengths | None:
    """The longest lengths for which a step of Dynamo's graph surely fits, empty if its sizes never change; None if unknown."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {value.device for value in tensors}
    if len(devices) != 1 or bytes_at_most(graph) is None:
        return None
    trained = sum(value.nbytes for value in tensors if value.requires_grad)

    def fits(lengths: Lengths) -> bool:
        held = sum(map(bytes_like, tensors))
        left = bytes_of(budget, next(iter(devices)), held, trained) - held - trained
        return (bytes_at_most(graph) or 0) <= left

    now = Lengths.now(graph)
    return now.furthest_beyond(fits) if fits(now) else None


def bytes_at_most(graph: fx.Graph) -> int | None:
    """Bytes that activations and their gradients surely stay below, whoever runs a step of the graph; None where nobody knows."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    return TIMES * sum(map(_bytes_at, nodes)) if all(map(_is_plain, nodes)) else None


def _is_plain(node: fx.Node) -> bool:
    """Whether an operator is one of torch's own that works on what it is given, and no program in itself: no nested graph, no
    function or operator of the user's, no layer that runs over steps. What it makes must be of a size that is known.
    """
    if any(isinstance(size, torch.SymInt) and size.node.hint is None for value in _values(node) for size in _sizes(value)):
        return False
    if node.op == "call_method":
        return isinstance(node.target, str) and hasattr(Tensor, node.target)
    if node.target is torch.einsum:  # of three operands, what is between may be larger than all of them
        return len(node.all_input_nodes) <= 2
    return node.op == "call_function" and getattr(node.target, "__module__", None) in MODULES and node.target not in LAYERS


def _bytes_at(node: fx.Node) -> int:
    """Bytes of what an operator is given and gives; of attention, those of all pairs of rows and keys too."""
    values = [*(_values(source) for source in node.all_input_nodes), _values(node)]
    found = sum(bytes_like(value) for own in values for value in own)
    return found + (_pairs(node) if node.target is ATTENTION else 0)


def _pairs(node: fx.Node) -> int:
    given: dict[str, Any] = dict(zip(("query", "key"), node.args, strict=False)) | node.kwargs
    query, key = (next(_values(given[name])) for name in ("query", "key"))
    return WIDEST * math.prod(size_hint(size) for size in (*query.shape[:-1], key.shape[-2]))


def _values(node: fx.Node) -> Iterator[Any]:
    """What stands for an operator's results in Dynamo's graph: one tensor, or several."""
    value = node.meta.get(EXAMPLE_VALUE)
    yield from value if isinstance(value, (tuple, list)) else (value,)


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, Tensor) else (value,)
