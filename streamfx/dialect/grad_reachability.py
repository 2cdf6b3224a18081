"""Find the leaves of an associative scan that get a gradient: the leaves on which a result with a gradient depends.

As in autograd, unreached leaves get None, not zeros: an optimizer decays a weight whose gradient is zeros, and skips
a weight that has none.

A row of the scan has several leaves, one tensor each. A function combines two rows, and may read tensors that all rows share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx

from streamfx.node_meta import VALUE
from streamfx.torch_private import no_modes
from streamfx.torch_private.autograd import autograd_inside_operators

# for each leaf of a result: the set of the indices of the leaves, or shared tensors, on which it depends
Pattern: TypeAlias = "tuple[frozenset[int], ...]"


@dataclass(frozen=True)
class Reach:
    """For each result of a function of two rows: the leaves of the left and of the right row, and the shared tensors, it reads.

    left=({0}, {0, 1}): result 0 depends on leaf 0 of the left row, result 1 on both its leaves.
    """

    left: Pattern
    right: Pattern
    shared: Pattern

    def leaves_with_gradients(self, present: Sequence[int], length: int) -> frozenset[int]:
        """Return the indices of the operands of a scan that get a gradient if the results with the indices `present` have one.

        Operands are the leaves, then the shared tensors. `length`: the number of rows.
        """
        dependencies = self._scan_dependencies(tuple(frozenset({leaf}) for leaf in range(len(self.left))), length)
        return frozenset[int]().union(*(dependencies[index] for index in present))

    def _scan_dependencies(self, rows: Pattern, length: int) -> Pattern:
        """Return, for each leaf, the operands on which at least one row of a scan of `length` rows depends.

        `rows`: the operands on which the rows before the scan depend. The scan combines pairs, then pairs of pairs
        (`prefix_scan.py`), so this recurs with half the length. Operands: leaves, then shared tensors.
        """
        if length < 2:
            return rows
        odds = self._scan_dependencies(self._pair_dependencies(rows, rows), length // 2)
        row_kinds = [rows, odds, *([self._pair_dependencies(odds, rows)] if length > 2 else [])]
        return tuple(frozenset[int]().union(*dependencies) for dependencies in zip(*row_kinds, strict=True))

    def _pair_dependencies(self, left: Pattern, right: Pattern) -> Pattern:
        """Return the operands on which the combination of two rows depends, given the operands of either row."""
        leaves = len(self.left)
        return tuple(
            frozenset[int]().union(
                *(left[leaf] for leaf in self.left[result]),
                *(right[leaf] for leaf in self.right[result]),
                {leaves + index for index in self.shared[result]},
            )
            for result in range(leaves)
        )


def reach_of(graph: fx.Graph, function: Callable[..., Sequence[Tensor]], num_shared: int) -> Reach:
    """Return the dependencies of a function of two rows and `num_shared` shared tensors; `graph` has its traced inputs.

    If it does not run on the meta device, each result depends on all leaves.
    """
    inputs = [node.meta[VALUE] for node in graph.find_nodes(op="placeholder")]
    num_leaves = (len(inputs) - num_shared) // 2
    try:
        dependencies = _dependencies(function, inputs)
    except Exception:  # operators raise various exceptions on the meta device
        dependencies = [frozenset(range(len(inputs)))] * num_leaves
    ranges = [range(num_leaves), range(num_leaves, 2 * num_leaves), range(2 * num_leaves, len(inputs))]
    by_range = [
        tuple(frozenset(index - indices.start for index in result_inputs if index in indices) for result_inputs in dependencies)
        for indices in ranges
    ]
    return Reach(*by_range)


def _dependencies(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[frozenset[int]]:
    """Return, for each result of a function, the indices of the inputs to which autograd would pass a gradient.

    The function runs on the meta device, on tensors like `inputs`.
    """
    with no_modes(), autograd_inside_operators():
        values = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in inputs]
        differentiable = [index for index, value in enumerate(values) if value.is_floating_point() or value.is_complex()]
        for index in differentiable:
            values[index].requires_grad_()
        return [
            frozenset(index for index in differentiable if _depends_on(result, values[index])) for result in function(*values)
        ]


def _depends_on(result: Tensor, value: Tensor) -> bool:
    """Return whether autograd passes a gradient from a result to a value."""
    if result is value:
        return True
    if not result.requires_grad:
        return False
    total = result.abs().sum() if result.is_complex() else result.sum()
    return torch.autograd.grad(total, value, retain_graph=True, allow_unused=True)[0] is not None
