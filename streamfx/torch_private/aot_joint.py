"""AOTAutograd's descriptions of the inputs and results of a joint graph, and its fake values.

A description says, for example, that a result is the gradient of Dynamo's input 3. It is in `node.meta[DESCRIPTION]` of an input,
and a list in the output node. "(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput  # 2.11, 2.13
from torch._subclasses.fake_tensor import FakeTensor  # 2.11, 2.13

from streamfx.node_meta import DESCRIPTION


def has_default_descriptors(graph: fx.Graph, num_inputs: int) -> bool:
    """Return whether a joint graph has only the inputs and results that `set_default_descriptors` can describe (2.11, 2.13).

    Its first `num_inputs` inputs are Dynamo's inputs in order, and its results are Dynamo's results and gradients: no parts
    of tensor subclasses, mutated inputs or tokens. False if it has no descriptions.
    """
    inputs = [node.meta.get(DESCRIPTION) for node in graph.find_nodes(op="placeholder")[:num_inputs]]
    results = graph.output_node().meta.get(DESCRIPTION)
    default_types = PlainAOTOutput, GradAOTOutput, type(None)
    if results is None or not all(isinstance(result, default_types) for result in results):
        return False
    return all(isinstance(value, PlainAOTInput) and value.idx == i for i, value in enumerate(inputs))


def set_default_descriptors(graph: fx.Graph, num_inputs: int, num_outputs: int) -> None:
    """Set AOTAutograd's descriptions of the inputs and gradients of a joint graph, in place (2.11, 2.13).

    Its i-th input becomes Dynamo's input i. The results after the first `num_outputs` are the gradients of the inputs, in order;
    a result that is None gets no description.
    """
    inputs = graph.find_nodes(op="placeholder")[:num_inputs]
    for i, node in enumerate(inputs):
        node.meta[DESCRIPTION] = PlainAOTInput(i)
    output = graph.output_node()
    results: Any = output.args[0]
    gradients = zip(inputs, results[num_outputs:], strict=True)
    described = [GradAOTOutput(node.meta[DESCRIPTION]) if isinstance(gradient, fx.Node) else None for node, gradient in gradients]
    output.meta[DESCRIPTION] = [*output.meta[DESCRIPTION][:num_outputs], *described]


def copy_fake_tensor(value: FakeTensor) -> FakeTensor:
    """Return a fake tensor like `value` (sizes, strides, dtype, device, `requires_grad`), with another storage (2.11, 2.13)."""
    with torch._C._DisableTorchDispatch():
        meta_tensor = torch.Tensor._make_subclass(torch.Tensor, value, value.requires_grad)
    return FakeTensor(value.fake_mode, meta_tensor, value.device)
