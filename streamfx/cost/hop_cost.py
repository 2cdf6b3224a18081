"""Stand-ins for higher-order operators, and for operators that read a number from data, while costs are predicted.

Fake tensors have no values, so `cond` cannot choose a branch and `while_loop` cannot end. A stand-in returns results with
the traced shapes, and counts about the same work: that of the most expensive branch, or of the loop body once per row, or
once if the number of iterations is unknown.
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

READS_SCALAR = torch.ops.aten._local_scalar_dense.default
RANDOM_STATE_BYTES = 5056  # of the CPU generator; other devices have smaller states


def with_stand_ins(module: fx.GraphModule, meter: Meter, create_like: Callable[[Any], Any]) -> fx.GraphModule:
    """Return a copy of the module whose higher-order operators and `.item()` calls are replaced by stand-ins.

    Stand-ins add the operators' work to `meter`; `create_like(fake)` allocates their results.
    """
    if not any(isinstance(node.target, HigherOrderOperator) or node.target is READS_SCALAR for node in module.graph.nodes):
        return fx.GraphModule(module, module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            node.target = _operator_stand_in(node, module, meter, create_like)
        elif node.target is READS_SCALAR:
            node.target = _scalar_stand_in(node.meta[VALUE])
    return fx.GraphModule(module, graph)


def _scalar_stand_in(value: Any) -> Callable[..., Any]:
    """Return a stand-in for `.item()`: it returns the number of the trace, or 1 if the trace had none."""
    hint = value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
    return lambda *_: 1 if hint is None else hint


def _operator_stand_in(
    node: fx.Node, module: fx.GraphModule, meter: Meter, create_like: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a function that adds the work of a higher-order operator and returns results like the traced ones."""
    if VALUE not in node.meta and (operator_index := _operator_index(node)) is not None:
        return _run_with_state(node, operator_index)
    value, work = node.meta.get(VALUE), work_of(node, module)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        """Count the work, and return new tensors like the traced results."""
        meter.work = meter.work.plus(Work(flops=work))
        return tree_map(lambda item: create_like(item) if isinstance(item, Tensor) else item, value)

    return stand_in


def _run_with_state(node: fx.Node, operator_index: int) -> Callable[..., Any]:
    """Return a stand-in for a partitioner's operator that runs another operator and saves, or restores, the random state.

    The partitioner inserts it so that the forward and the backward graph draw the same numbers. The stand-in runs only the
    inner operator.
    """
    saves_state = node.target is SAVES_RANDOM_STATE

    def run(*args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        """Return the inner operator's result; if the operator saves the state, return (an uninitialized state, the result)."""
        result = args[operator_index](*args[operator_index + 1 :], **kwargs)
        return (torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8), result) if saves_state else result

    return run


def _operator_index(node: fx.Node) -> int | None:
    """Return the index of the argument that is an operator; None if there is none."""
    return next((i for i, argument in enumerate(node.args) if isinstance(argument, OpOverload)), None)


def work_of(node: fx.Node, module: fx.GraphModule) -> int:
    """Return the FLOPs of an operator whose arguments include another operator, or functions that the module holds."""
    operator_index = _operator_index(node)
    if operator_index is not None:
        results = tree_leaves(node.meta.get(VALUE))
        return flops_of_call(
            node.args[operator_index], node.args[operator_index + 1 :], node.kwargs, results[-1] if results else None
        )
    functions = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    work = max((_work_of_graph(item) for item in functions if isinstance(item, fx.GraphModule)), default=0)
    return work * (_rows(node) if node.target is SCAN else 1)


def _rows(node: fx.Node) -> int:
    """Return how many rows a scan iterates over: the size of dimension 0 of the scanned operands; 1 if there are none."""
    rows = [source.meta[VALUE].shape[0] for source in tree_leaves(node.args[2]) if isinstance(source, fx.Node)]
    return size_hint(rows[0]) if rows else 1


def _work_of_graph(module: fx.GraphModule) -> int:
    """Return the FLOPs of a graph, including those of nested higher-order operators."""
    nested_calls = (node for node in module.graph.nodes if isinstance(node.target, HigherOrderOperator))
    return flops_of_graph(module.graph) + sum(work_of(node, module) for node in nested_calls)
