"""AOTAutograd's descriptions of the inputs and results of a joint graph, and its fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput  # 2.11, 2.13
from torch._subclasses.fake_tensor import FakeTensor  # 2.11, 2.13

from streamfx.node_meta import DESCRIPTION


def is_plain(graph: fx.Graph, count: int) -> bool:
    """Return whether the first `count` inputs of a joint graph are Dynamo's inputs, in order (2.11, 2.13).

    Its results must be plain results and gradients.
    """
    inputs = [node.meta.get(DESCRIPTION) for node in graph.find_nodes(op="placeholder")[:count]]
    results = graph.output_node().meta.get(DESCRIPTION)
    plain_kinds = PlainAOTOutput, GradAOTOutput, type(None)
    is_known = results is not None and all(isinstance(item, plain_kinds) for item in results)
    return is_known and all(isinstance(item, PlainAOTInput) and item.idx == i for i, item in enumerate(inputs))


def describe_plain(graph: fx.Graph, count: int, num_outputs: int) -> None:
    """Describe the inputs and gradients of a joint graph in the form that `is_plain` accepts (2.11, 2.13)."""
    inputs = graph.find_nodes(op="placeholder")[:count]
    for position, node in enumerate(inputs):
        node.meta[DESCRIPTION] = PlainAOTInput(position)
    output = graph.output_node()
    results: Any = output.args[0]
    gradients = zip(inputs, results[num_outputs:], strict=True)
    described = [GradAOTOutput(node.meta[DESCRIPTION]) if isinstance(gradient, fx.Node) else None for node, gradient in gradients]
    output.meta[DESCRIPTION] = [*output.meta[DESCRIPTION][:num_outputs], *described]


def fake_twin(value: FakeTensor) -> FakeTensor:
    """Create another fake tensor with the layout of `value` (2.11, 2.13)."""
    with torch._C._DisableTorchDispatch():
        meta_tensor = torch.Tensor._make_subclass(torch.Tensor, value, value.requires_grad)
    return FakeTensor(value.fake_mode, meta_tensor, value.device)
