"""Tracing without Dynamo and AOTAutograd, for thousands of decoders: autograd gives the joint graph.

Except for metadata, it is the graph of AOTAutograd: forward and backward in ATen operators, with primals (parameters, float
inputs) and tangents as inputs. Outputs and gradients of each chunk size are compared with eager.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import proxy_tensor

from streamfx.frontend.mask_buffers import watched_inputs
from streamfx.ir.facts import known
from streamfx.options import resolve_options
from streamfx.passes.ops.rules import DECOMPOSITIONS
from tests.support.exactness import (
    NOISE,
    Recorded,
    Recorder,
    Reduce,
    Report,
    assert_small,
    call,
    leaves,
    relative_error,
    scalar_of,
    value_errors,
)

SMALL_SINKS = 1e-6


def compare_directly(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    chunk_size: int,
    loss_chunk_size: int,
    also: Iterable[int],
    tolerance: float,
    reduce: Reduce = scalar_of,
    **options: Any,
) -> Report:
    """Assert that the rewritten joint graph has eager's outputs and gradients."""
    primals = [*model.parameters(), *model.buffers(), *inputs.values()]
    outputs = [item.detach() for item in leaves(call(model, inputs))]
    tangents = tangents_of(reduce, call(model, inputs))
    joint = joint_of(model, inputs)
    own = {**options, "outputs": "dense", "chunk_size": chunk_size, "loss_chunk_size": loss_chunk_size}
    recorded = Recorded(None, resolve_options(own))  # type: ignore[arg-type]
    recorded.primals, recorded.tangents = [item.detach() for item in primals], tangents
    recorded.num_inputs = len(primals)
    recorded.watched = watched_inputs(recorded.primals, [True] * (len(primals) - len(inputs)) + [False] * len(inputs))
    truth = [None if item is None else item.detach() for item in joint(primals, tangents)]
    recorded.joint = functional(traced(joint, primals, tangents))
    recorded.joint_arguments = (len(primals), len(outputs), tuple(range(len(primals) - len(inputs))))
    facts = recorded.facts_for(recorded.options)
    recorded.facts.append(facts)
    found: dict[str, float] = {}
    alignment = known(facts.axes.sequence).chunk_alignment if facts.program is not None else 1
    for rows in (None, *also) if facts.program is not None else ():
        for loop in known(facts.program).loops:
            loop.spec = replace(loop.spec, chunk_size=loop.spec.chunk_size if rows is None else -(-rows // alignment) * alignment)
        values = [_where_finite(*pair) for pair in zip(recorded.streamed_values(known(facts.program)), truth, strict=True)]
        found = value_errors(values, truth, len(outputs), max(tolerance, NOISE))
        assert_small(found, tolerance, f"chunks of {rows or chunk_size}")
        assert_small(_of_sinks(model, values[len(outputs) :], truth[len(outputs) :]), SMALL_SINKS, "sinks")
    return Report(found, Recorder(recorded.options, [recorded]))


def _where_finite(actual: Tensor | None, truth: Tensor | None) -> Tensor | None:
    """The actual value, with eager's wherever eager's is infinite or NaN."""
    comparable = actual is not None and truth is not None and actual.shape == truth.shape and truth.is_floating_point()
    return torch.where(truth.isfinite(), actual, truth) if comparable else actual  # type: ignore[union-attr, arg-type]


def _of_sinks(model: nn.Module, gradients: list[Tensor | None], truth: list[Tensor | None]) -> dict[str, float]:
    """Errors of gradients of sinks relative to themselves: they are much smaller than others, and must be precise, too."""
    own = zip(model.named_parameters(), gradients, truth, strict=False)
    return {
        name: relative_error(actual, wanted)
        for (name, parameter), actual, wanted in own
        if name.startswith("sink") and actual is not None and wanted is not None and parameter.dtype == torch.float64
    }


def tangents_of(reduce: Reduce, results: Any) -> list[Tensor]:
    """The gradient of the reduced result with respect to each result."""
    flat = leaves(results)
    gradients = torch.autograd.grad(reduce(results), flat, allow_unused=True)
    return [torch.zeros_like(item) if own is None else own for item, own in zip(flat, gradients, strict=True)]


def joint_of(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[list[Tensor], list[Tensor]], list[Any]]:
    """A function of primals and tangents that returns outputs, and a gradient or None per primal."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        state = dict(zip(names, primals, strict=False))
        given = dict(zip(inputs, primals[len(names) :], strict=True))
        flat = leaves(torch.func.functional_call(model, state, (), given))
        wanted = [primal for primal in primals if primal.requires_grad]
        gradients = iter(torch.autograd.grad(flat, wanted, tangents, allow_unused=True))
        return [*flat, *(next(gradients) if primal.requires_grad else None for primal in primals)]

    return joint


def functional(module: fx.GraphModule) -> fx.GraphModule:
    """Replace operators that write to a new tensor by functional ones."""
    graph = module.graph
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        packet, overload = str(node.target).removeprefix("aten.").split("_.")
        written = node.args[0]
        assert isinstance(written, fx.Node)
        assert isinstance(written.target, torch._ops.OpOverload)
        assert all(argument.alias_info is None for argument in written.target._schema.arguments), written
        node.target = getattr(getattr(torch.ops.aten, packet), overload)
        for later in [user for user in written.users if user > node]:
            later.replace_input_with(written, node)
    module.recompile()
    return module


def traced(joint: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor]) -> fx.GraphModule:
    """The graph of `joint` with values of one fake mode, as in AOTAutograd; tracing real tensors creates several modes."""
    mode = FakeTensorMode(allow_fallback_kernels=True)
    with patch.object(proxy_tensor, "FakeTensorMode", lambda **_: mode):
        return proxy_tensor.make_fx(joint, dict(DECOMPOSITIONS))(primals, tangents)
