"""Which leaves of an associative scan get a gradient? As autograd has it: those that a result with a gradient is made of.

A leaf that no such result is made of has none at all, where zeros would be another thing: an optimizer decays a weight whose
gradient is zeros, and leaves one alone that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx

from streamfx.node_meta import VALUE
from streamfx.torch_private import no_modes
from streamfx.torch_private.autograd import recorded_inside_operators

Pattern: TypeAlias = (
    "tuple[frozenset[int], ...]"  # of each leaf: the leaves of rows, and behind these what is given, it is made of
)


@dataclass(frozen=True)
class Reach:
    """Of each result of a function on two rows: which leaves of the left one, the right one, and what is given, it is made of."""

    left: Pattern
    right: Pattern
    given: Pattern

    def reached(self, present: Sequence[int], length: int) -> frozenset[int]:
        """Leaves, and behind them what is given, that get a gradient where results do whose numbers are `present`."""
        found = self._scanned(tuple(frozenset({leaf}) for leaf in range(len(self.left))), length)
        return frozenset[int]().union(*(found[number] for number in present))

    def _scanned(self, rows: Pattern, length: int) -> Pattern:
        """What the rows of a scan are made of, any of them: a tree of pairs, see `trees.py`."""
        if length < 2:
            return rows
        odds = self._scanned(self._combined(rows, rows), length // 2)
        parts = [rows, odds, *([self._combined(odds, rows)] if length > 2 else [])]
        return tuple(frozenset[int]().union(*own) for own in zip(*parts, strict=True))

    def _combined(self, left: Pattern, right: Pattern) -> Pattern:
        leaves = len(self.left)
        return tuple(
            frozenset[int]().union(
                *(left[leaf] for leaf in self.left[result]),
                *(right[leaf] for leaf in self.right[result]),
                {leaves + number for number in self.given[result]},
            )
            for result in range(leaves)
        )


def reach_of(graph: fx.Graph, function: Callable[..., Sequence[Tensor]], given: int) -> Reach:
    """Of a function on two rows; of all leaves, where it does not run on values without numbers."""
    inputs = [node.meta[VALUE] for node in graph.find_nodes(op="placeholder")]
    leaves = (len(inputs) - given) // 2
    try:
        made = _made_of(function, inputs)
    except Exception:  # operators say in many ways that they do not run on such values
        made = [frozenset(range(len(inputs)))] * leaves
    behind = [range(leaves), range(leaves, 2 * leaves), range(2 * leaves, len(inputs))]
    parts = [tuple(frozenset(place - own.start for place in each if place in own) for each in made) for own in behind]
    return Reach(*parts)


def _made_of(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[frozenset[int]]:
    """Of each result, the inputs that autograd would hand a gradient."""
    with no_modes(), recorded_inside_operators():
        values = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in inputs]
        followed = [place for place, value in enumerate(values) if value.is_floating_point() or value.is_complex()]
        for place in followed:
            values[place].requires_grad_()
        return [frozenset(place for place in followed if _is_made_of(result, values[place])) for result in function(*values)]


def _is_made_of(result: Tensor, value: Tensor) -> bool:
    if result is value:
        return True
    if not result.requires_grad:
        return False
    total = result.abs().sum() if result.is_complex() else result.sum()
    return torch.autograd.grad(total, value, retain_graph=True, allow_unused=True)[0] is not None
