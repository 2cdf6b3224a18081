"""PyTorch's `associative_scan` as one operator: each row is combined with all rows before it, by a function of two rows.

    associative_scan(rows, given, combine) -> the combined rows
    associative_scan_backward(gradients, rows, given, combine) -> the gradients of rows, then those of given

A row has several leaves: `rows` has one tensor [n, ...] for each, which holds it for all n rows. `given`: tensors that all rows
share. `combine`: the identifier of the function in `COMBINES`, because an operator cannot take a graph. The function takes the
leaves of the left row, those of the right row, and the shared tensors; it returns the leaves of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.dialect.declare import LIBRARY, declare
from streamfx.dialect.grad_reachability import Reach, reach_of
from streamfx.ir.structural_hash import structure
from streamfx.node_meta import VALUE

# -- functions that combine two rows


@dataclass(frozen=True)
class Combine:
    """A function of two rows and of `num_shared` further tensors, which all rows share; `graph` computes it for single rows."""

    graph: fx.Graph
    num_shared: int
    combine_rows: Callable[..., Sequence[Tensor]]  # (*left, *right, *shared) -> rows, for many rows at once
    reach: Reach  # which results depend on which arguments


COMBINES: dict[int, Combine] = {}  # keyed by the identifier in operators' arguments


def register_combine_graph(graph: fx.Graph, num_shared: int) -> int:
    """Register a function of two rows and `num_shared` shared tensors, and return its identifier, a hash of its operators.

    `graph` is traced on single rows. Registered is the function of many rows: `vmap` of the graph, or the graph itself if
    all its operators are pointwise. Functions share an identifier if their operators, and the dtypes and ranks of their
    arguments, are equal. Dtypes matter because integer arguments get no gradient.
    """
    values = [node.meta[VALUE] for node in graph.find_nodes(op="placeholder")]
    argument_types = [(value.dtype, value.dim()) for value in values]
    text = repr((structure(graph), argument_types, num_shared, by_element := is_pointwise_combine(graph, num_shared)))
    combine_id = int.from_bytes(blake2s(text.encode(), digest_size=7).digest(), "big")
    if combine_id not in COMBINES:
        combine_rows = fx.GraphModule(torch.nn.Module(), graph).forward
        rows = len(graph.find_nodes(op="placeholder")) - num_shared
        combine_all = (
            combine_rows if by_element else torch.vmap(combine_rows, in_dims=(*(0 for _ in range(rows)), *[None] * num_shared))
        )
        COMBINES[combine_id] = Combine(graph, num_shared, combine_all, reach_of(graph, combine_rows, num_shared))
    return combine_id


def is_pointwise_combine(graph: fx.Graph, num_shared: int) -> bool:
    """Return whether a function of two rows (`graph`, traced on single rows) may be called on many rows without `vmap`.

    This holds if every operator is pointwise and all values have the same rank, except for shared tensors, which may
    have a lower one. (Zero-dimensional values are excluded: type promotion treats them differently.)
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    row_values, rank = set(inputs[: len(inputs) - num_shared]), inputs[0].meta[VALUE].dim()
    for node in (node for node in graph.nodes if node.op == "call_function"):
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return False
        if not row_values.isdisjoint(node.all_input_nodes):
            row_values.add(node)
    ranks = {node: node.meta[VALUE].dim() for node in (*inputs, *graph.nodes) if VALUE in node.meta}
    is_fitting = all(value_rank == rank if node in row_values else value_rank <= rank for node, value_rank in ranks.items())
    return rank > 0 and is_fitting and row_values.issuperset(graph.output_node().args[0])  # type: ignore[arg-type]


# -- the operators


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the operands for the backward: the `setup_context` hook of the operator's autograd formula."""
    rows, shared, ctx.combine_id = inputs
    ctx.num_rows = len(rows)  # the number of tensors that hold rows
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*rows, *shared)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The operator's autograd formula: return the gradients of (rows, shared tensors, combine).

    `gradients`: the gradient of each result, or None. A gradient is None if no result that has a gradient depends on the
    operand, or if the operand has integers.
    """
    values, num_rows = ctx.saved_tensors, ctx.num_rows
    results = SCAN_BACKWARD(list(gradients), list(values[:num_rows]), list(values[num_rows:]), ctx.combine_id)
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    reached = COMBINES[ctx.combine_id].reach.leaves_with_gradients(present, len(values[0]))
    reached_gradients = [
        value_gradient if i in reached and (value.is_floating_point() or value.is_complex()) else None
        for i, (value_gradient, value) in enumerate(zip(results, values, strict=True))
    ]
    return reached_gradients[:num_rows], reached_gradients[num_rows:], None


def _empty_like(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.new_empty(value.shape) for value in values]


def _fake_scan(rows: Sequence[Tensor], given: Sequence[Tensor], combine: int) -> list[Tensor]:
    """Return uninitialized combined rows."""
    return _empty_like(rows)


def _fake_backward(
    gradients: Sequence[Tensor | None], rows: Sequence[Tensor], given: Sequence[Tensor], combine: int
) -> list[Tensor]:
    """Return uninitialized gradients of the rows and of the shared tensors."""
    return _empty_like([*rows, *given])


TREE_SCAN = declare("associative_scan(Tensor[] rows, Tensor[] given, int combine) -> Tensor[]", _fake_scan)
SCAN_BACKWARD = declare(
    "associative_scan_backward(Tensor?[] gradients, Tensor[] rows, Tensor[] given, int combine) -> Tensor[]", _fake_backward
)
torch.library.register_autograd("streamfx::associative_scan", _backward, setup_context=_save_operands, lib=LIBRARY)
