"""What a call costs if Inductor compiles it whole, with something around each layer: checkpoints, which it recomputes.

AOTAutograd's own partitioner divides the joint graph, and both graphs are followed on fake tensors. Of layers that are alike
few are traced, once more with one period more, and the difference stands for each period that is missing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table

from streamfx.cost.memory import Cost, cost_of, made_like
from streamfx.cost.repeats import Repeat
from streamfx.cost.work import Work
from streamfx.log import log
from streamfx.tools.inspect.eager import Around, accepting_real, faker_of
from streamfx.tools.inspect.layers import first_layers, layers_of
from streamfx.tools.inspect.side_effect_guard import modules_of, untouched
from streamfx.torch_private import aot_autograd, min_cut_rematerialization_partition
from streamfx.torch_private.dynamo import compiled_apart, noted_graph_breaks, quiet_tracer

SAVES_STATE = torch.ops.higher_order.run_and_save_rng_state
RESTORES_STATE = torch.ops.higher_order.run_with_rng_state
Halves = tuple[fx.GraphModule, fx.GraphModule]


def compiled_cost(model: Callable[..., Any], inputs: Mapping[str, Any], around: Around, alike: Repeat | None) -> Cost | None:
    """The cost of a call, compiled whole with something around the forward of each layer.

    Args:
        model: what is called.
        inputs: its keyword arguments.
        around: what is put around a layer's forward.
        alike: how all layers are made of few, if they are.

    Returns:
        The cost; None if the call is not one graph, or trains nothing.
    """
    try:
        if alike is None:
            return _of_layers(model, inputs, around, len(layers_of(model)))
        few, more = (_of_layers(model, inputs, around, alike.kept + extra) for extra in (0, alike.period))
        return None if few is None or more is None else _of_all(few, more, alike.copies)
    except Exception as error:
        log.info("no baseline that is compiled: %s", error)
        return None


def _of_all(few: Cost, more: Cost, copies: int) -> Cost:
    """The cost of few layers, and of so many periods more."""

    def extended(one: int, other: int) -> int:
        return one + copies * (other - one)

    forward, backward, held = (
        extended(getattr(few, key), getattr(more, key)) for key in ("forward_peak", "backward_peak", "held")
    )
    return Cost(forward, backward, held, Work(*map(extended, few.work, more.work)))


def _of_layers(model: Callable[..., Any], inputs: Mapping[str, Any], around: Around, count: int) -> Cost | None:
    found: list[tuple[Halves, int]] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Halves:
        halves = min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        found.append((halves, num_fwd_outputs))
        return halves

    backend = aot_autograd(
        fw_compiler=_stand_in, bw_compiler=_stand_in, partition_fn=partition, decompositions=select_decomp_table()
    )
    mode, faker = faker_of(model, (), inputs)
    with (
        accepting_real(mode),
        mode,
        first_layers(model, count),
        untouched(model),
        quiet_tracer(),
        noted_graph_breaks(),
        compiled_apart(backend) as keywords,
    ):
        faker.replace(modules_of(model), buffers=False)
        for layer in layers_of(model):
            layer.forward = around(layer.forward)
        _, kwargs = faker.inputs(((), dict(inputs)))
        torch.compile(model, backend=backend, **keywords)(**kwargs)
    if len(found) != 1:
        return None
    (forward, backward), num_outputs = found[0]
    return cost_of(without_states(forward), without_states(backward), num_outputs)


def without_states(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in which random operators are called as they are, where the partitioner saved and restored a generator's state.

    state, out = run_and_save_rng_state(op, x)   ->   state, out = None, op(x)
    out = run_with_rng_state(state, op, x)       ->   out = op(x)
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=SAVES_STATE):
        with graph.inserting_before(node):
            made = graph.call_function(node.args[0], node.args[1:], node.kwargs)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(made if user.args[1] == 1 else None)  # type: ignore[arg-type]
            graph.erase_node(user)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=RESTORES_STATE):
        node.target, node.args = node.args[1], node.args[2:]
    graph.lint()
    return fx.GraphModule(module, graph)


def _stand_in(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Returns what a graph would return, without running it."""
    outputs = module.graph.output_node().args[0]

    def run(*_: Any) -> list[Any]:
        values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in outputs]  # type: ignore[union-attr]
        return [made_like(value) for value in values]

    return run
