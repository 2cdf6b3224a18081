"""What stands in for operators that call functions, or read a number from data, while costs are predicted: results as they were
traced, about as much work.

Fake tensors have no values, so that no `cond` can choose and no `while_loop` can end. Of branches the dearest counts, of a loop's
body one run for each row that it is given, or just one where nothing tells how often it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.cost.flops import flops_of_call, flops_of_graph
from streamfx.cost.meter import Meter
from streamfx.cost.work import Work
from streamfx.node_meta import VALUE
from streamfx.torch_private import SAVES_RANDOM_STATE, SCAN, HigherOrderOperator, OpOverload, tree_leaves, tree_map
from streamfx.torch_private.symbolic_sizes import size_hint

READS_NUMBER = torch.ops.aten._local_scalar_dense.default
RANDOM_STATE_BYTES = 5056  # of the CPU's generator; other devices' are smaller


def with_stand_ins(module: fx.GraphModule, meter: Meter, like: Callable[[Any], Any]) -> fx.GraphModule:
    """A module with stand-ins for such operators of its graph; `like` makes a tensor like a traced one."""
    if not any(isinstance(node.target, HigherOrderOperator) or node.target is READS_NUMBER for node in module.graph.nodes):
        return fx.GraphModule(module, module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            node.target = _stand_in(node, module, meter, like)
        elif node.target is READS_NUMBER:
            node.target = _number_like(node.meta[VALUE])
    return fx.GraphModule(module, graph)


def _number_like(value: Any) -> Callable[..., Any]:
    """What stands in for `.item()`: the number that was found while tracing, 1 if there was none."""
    hint = value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
    return lambda *_: 1 if hint is None else hint


def _stand_in(node: fx.Node, module: fx.GraphModule, meter: Meter, like: Callable[[Any], Any]) -> Callable[..., Any]:
    if VALUE not in node.meta and (inner := _operator_given(node)) is not None:
        return _run_with_state(node, inner)
    value, work = node.meta.get(VALUE), work_of(node, module)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        meter.work = meter.work.plus(Work(flops=work))
        return tree_map(lambda item: like(item) if isinstance(item, Tensor) else item, value)

    return stand_in


def _run_with_state(node: fx.Node, inner: int) -> Callable[..., Any]:
    """What stands in for an operator of a partitioner, which runs another one with a state of random numbers so that both halves
    draw the same: the other one alone.
    """
    saves = node.target is SAVES_RANDOM_STATE

    def run(*args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        result = args[inner](*args[inner + 1 :], **kwargs)
        return (torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8), result) if saves else result

    return run


def _operator_given(node: fx.Node) -> int | None:
    """At which argument an operator is given another operator."""
    return next((i for i, argument in enumerate(node.args) if isinstance(argument, OpOverload)), None)


def work_of(node: fx.Node, module: fx.GraphModule) -> int:
    """FLOPs of an operator that is given functions, which a module holds, or another operator."""
    inner = _operator_given(node)
    if inner is not None:
        results = tree_leaves(node.meta.get(VALUE))
        return flops_of_call(node.args[inner], node.args[inner + 1 :], node.kwargs, results[-1] if results else None)
    called = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    work = max((_work_of_graph(item) for item in called if isinstance(item, fx.GraphModule)), default=0)
    return work * (_rows(node) if node.target is SCAN else 1)


def _rows(node: fx.Node) -> int:
    """How many rows a scan goes through: those of what it is given beside its first state."""
    rows = [source.meta[VALUE].shape[0] for source in tree_leaves(node.args[2]) if isinstance(source, fx.Node)]
    return size_hint(rows[0]) if rows else 1


def _work_of_graph(module: fx.GraphModule) -> int:
    inner = (node for node in module.graph.nodes if isinstance(node.target, HigherOrderOperator))
    return flops_of_graph(module.graph) + sum(work_of(node, module) for node in inner)
