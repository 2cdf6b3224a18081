"""Checks the product of each pass, as a compiler's verifier does: a fault is found in the pass that makes it.

Every operand is made before it is used; what an operator is said to give is what it gives when it is run on fake tensors; facts
are about operators of this graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_tensor, results_of
from streamfx.ir.sizes import Size, free_symbols, shape_of, size_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.opaque import is_opaque
from streamfx.runtime.outer import COPIES_WHERE_NEEDED
from streamfx.torch_private import OpOverload, fake_mode_of
from streamfx.torch_private.symbolic_sizes import without_guards


class BrokenProductError(Exception):
    """What a pass has made is not what it says: a fault of that pass."""


@dataclass
class Verifier:
    """`known` holds the calls whose results were right: those that tracing has made, and those that were checked."""

    known: dict[fx.Node, tuple[Any, ...]]

    @classmethod
    def of(cls, traced: fx.Graph) -> Verifier:
        """For the passes over a graph that tracing has just made."""
        return cls({node: _call(node) for node in traced.nodes})

    def check(self, name: str, facts: Facts) -> None:
        """Raises `BrokenProductError` if the pass called `name` has left something wrong."""
        try:
            facts.joint.graph.lint()
        except RuntimeError as error:
            raise BrokenProductError(f"after {name}: {error}") from error
        wrong = [*self._results(facts.joint.graph), *_strangers(facts)]
        if wrong:
            raise BrokenProductError(f"after {name}: {'; '.join(wrong[:5])}")

    def _results(self, graph: fx.Graph) -> Iterator[str]:
        for node in graph.nodes:
            call = _call(node)
            if self.known.get(node) != call and isinstance(node.target, OpOverload) and is_tensor(node) and not is_opaque(node):
                yield from _wrong_result(node)
            self.known[node] = call


def _call(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, tuple(node.kwargs.items())


def _wrong_result(node: fx.Node) -> Iterator[str]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta[VALUE])
    mode, function = fake_mode_of([node.meta[VALUE]]), COPIES_WHERE_NEEDED.get(node.target, node.target)
    operands = [value for operand in node.all_input_nodes for value in (*results_of(operand), operand.meta[VALUE])]
    given = free_symbols(size for value in operands for size in _sizes(value))
    with torch.no_grad(), mode, without_guards(mode):
        said, made = _plain(node.meta[VALUE], given), _plain(function(*args, **kwargs), given)
    if made != said:
        yield f"{node.name} gives {made}, not {said}"


def _plain(value: torch.Tensor, given: set[sympy.Symbol]) -> str:
    """Type and sizes; a size that no operand tells is one that data decide, which has another name each time."""
    return f"{value.dtype} {[size if free_symbols([size]) <= given else '?' for size in shape_of(value)]}"


def _sizes(value: Any) -> tuple[Size, ...]:
    """The sizes of a tensor, or the size that a number is."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    return (size_of(value),) if isinstance(value, (int, torch.SymInt)) else ()


def _strangers(facts: Facts) -> Iterator[str]:
    """Facts about operators that are not in the graph."""
    inside = set(facts.joint.graph.nodes)
    for name, nodes in _named(facts):
        if strange := [node.name for node in nodes if node not in inside]:
            yield f"{name} are about {', '.join(strange[:5])}, which the graph does not have"


def _named(facts: Facts) -> Iterator[tuple[str, Iterable[fx.Node]]]:
    if facts.found_axes is not None:
        yield "axes", facts.axes.shapes
        yield "signatures", facts.axes.signatures
    if facts.found_demand is not None:
        yield "forms", facts.demand.forms
        yield "roles", facts.demand.roles
    if facts.found_causality is not None:
        yield "spans", facts.causality.spans
    if facts.found_stages is not None:
        yield "stages", [node for stage in facts.stages for node in (*stage.forward, *stage.backward, *stage.outputs)]
    if facts.found_plan is not None:
        yield "plans", [node for nodes in (*facts.plan.kept, *facts.plan.dropped) for node in nodes]
