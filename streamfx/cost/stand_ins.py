"""What stands in for operators that call functions while costs are predicted: results as they were traced, about as much work.

Fake tensors have no values, so that no `cond` can choose and no `while_loop` can end. Of branches the dearest counts, of a loop's
body one run for each row that it is given, or just one where nothing tells how often it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from streamfx.cost.flops import flops_of_call, flops_of_graph
from streamfx.cost.meter import Meter
from streamfx.cost.work import Work
from streamfx.torch_private import SCAN, HigherOrderOperator, OpOverload, tree_leaves, tree_map
from streamfx.torch_private.sizes import size_hint


def with_stand_ins(module: fx.GraphModule, meter: Meter, like: Callable[[Any], Any]) -> fx.GraphModule:
    """A module with stand-ins for the operators of its graph that call functions; `like` makes a tensor like a traced one."""
    if not any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes):
        return fx.GraphModule(module, module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            node.target = _stand_in(node, module, meter, like)
    return fx.GraphModule(module, graph)


def _stand_in(node: fx.Node, module: fx.GraphModule, meter: Meter, like: Callable[[Any], Any]) -> Callable[..., Any]:
    value, work = node.meta.get("val"), work_of(node, module)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        meter.work = meter.work.plus(Work(flops=work))
        return tree_map(lambda item: like(item) if isinstance(item, Tensor) else item, value)

    return stand_in


def work_of(node: fx.Node, module: fx.GraphModule) -> int:
    """FLOPs of an operator that is given functions, which a module holds, or another operator."""
    inner = next((i for i, argument in enumerate(node.args) if isinstance(argument, OpOverload)), None)
    if inner is not None:
        results = tree_leaves(node.meta.get("val"))
        return flops_of_call(node.args[inner], node.args[inner + 1 :], node.kwargs, results[-1] if results else None)
    called = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    work = max((_work_of_graph(item) for item in called if isinstance(item, fx.GraphModule)), default=0)
    return work * (_rows(node) if node.target is SCAN else 1)


def _rows(node: fx.Node) -> int:
    """How many rows a scan goes through: those of what it is given beside its first state."""
    rows = [source.meta["val"].shape[0] for source in tree_leaves(node.args[2]) if isinstance(source, fx.Node)]
    return size_hint(rows[0]) if rows else 1


def _work_of_graph(module: fx.GraphModule) -> int:
    inner = (node for node in module.graph.nodes if isinstance(node.target, HigherOrderOperator))
    return flops_of_graph(module.graph) + sum(work_of(node, module) for node in inner)
