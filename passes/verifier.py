"""Check the facts after each pass, as a compiler's IR verifier does, so that a bug is reported by the pass that
causes it.

It checks that every operand is defined before its use, that the recorded shape and dtype of each result match the ones that
fake tensors give, and that facts refer to operators of this graph only.
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
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.torch_private import OpOverload, fake_mode_of
from streamfx.torch_private.symbolic_sizes import without_guards


class InconsistentFactsError(Exception):
    """The facts after a pass are inconsistent: a bug of that pass."""


@dataclass
class Verifier:
    """Checks facts after each pass. A node is checked when it is new, or if its target or arguments changed.

    `known`: the target and arguments of each node whose recorded result is right, because it was traced or checked.
    """

    known: dict[fx.Node, tuple[Any, ...]]

    @classmethod
    def of(cls, traced: fx.Graph) -> Verifier:
        """Create a verifier for the passes over a freshly traced graph."""
        return cls({node: _call(node) for node in traced.nodes})

    def check(self, name: str, facts: Facts) -> None:
        """Raise `InconsistentFactsError` if the pass called `name` left the facts inconsistent.

        Check that the graph is valid, that results of new operators are recorded right, and that facts refer to its nodes.
        """
        try:
            facts.joint.graph.lint()
        except RuntimeError as error:
            raise InconsistentFactsError(f"after {name}: {error}") from error
        wrong = [*self._wrong_results(facts.joint.graph), *_foreign_nodes(facts)]
        if wrong:
            raise InconsistentFactsError(f"after {name}: {'; '.join(wrong[:5])}")

    def _wrong_results(self, graph: fx.Graph) -> Iterator[str]:
        """Yield an error text for each new or changed call of a tensor operator whose recorded dtype or shape is wrong.

        Mark all nodes as checked (`known`). Opaque operators are trusted: they run as they were traced.
        """
        for node in graph.nodes:
            call = _call(node)
            if self.known.get(node) != call and isinstance(node.target, OpOverload) and is_tensor(node) and not is_opaque(node):
                yield from _wrong_result(node)
            self.known[node] = call


def _call(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's target and arguments; compared with an earlier result, it shows if a pass changed the node."""
    return node.target, node.args, tuple(node.kwargs.items())


def _wrong_result(node: fx.Node) -> Iterator[str]:
    """Run a node's call on fake tensors; yield an error text if dtype or shape differs from the recorded fake result.

    Views that the runtime executes as copies (`COPYING_VIEWS`) are checked as copies. Sizes that depend on data get a new
    symbol on each run: all symbols that operands do not contain compare as equal.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta[VALUE])
    mode, function = fake_mode_of([node.meta[VALUE]]), COPYING_VIEWS.get(node.target, node.target)
    operands = [value for operand in node.all_input_nodes for value in (*results_of(operand), operand.meta[VALUE])]
    known_symbols = free_symbols(size for value in operands for size in _sizes(value))
    with torch.no_grad(), mode, without_guards(mode):
        expected, actual = _format_type(node.meta[VALUE], known_symbols), _format_type(function(*args, **kwargs), known_symbols)
    if actual != expected:
        yield f"the result of {node.name} is {actual}, but {expected} is recorded"


def _format_type(value: torch.Tensor, known_symbols: set[sympy.Symbol]) -> str:
    """Format dtype and shape, for example "torch.float32 [2, s0, '?']".

    A size with a symbol outside `known_symbols` depends on data; it is "?", since its symbol differs on each run.
    """
    return f"{value.dtype} {[size if free_symbols([size]) <= known_symbols else '?' for size in shape_of(value)]}"


def _sizes(value: Any) -> tuple[Size, ...]:
    """Return the sizes of a tensor; for an integer or SymInt, that size alone; `()` for any other value."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    return (size_of(value),) if isinstance(value, (int, torch.SymInt)) else ()


def _foreign_nodes(facts: Facts) -> Iterator[str]:
    """Yield an error text for each kind of facts that refers to nodes outside the graph, such as nodes that a pass removed."""
    inside = set(facts.joint.graph.nodes)
    for name, nodes in _nodes_by_fact(facts):
        if unknown := [node.name for node in nodes if node not in inside]:
            yield f"{name} refer to {', '.join(unknown[:5])}, which the graph does not have"


def _nodes_by_fact(facts: Facts) -> Iterator[tuple[str, Iterable[fx.Node]]]:
    """Yield (name of a kind of facts, nodes that it refers to) for each analysis and plan that exists so far."""
    if facts.found_axes is not None:
        yield "axes", facts.axes.shapes
        yield "signatures", facts.axes.signatures
    if facts.found_access is not None:
        yield "storage classes", facts.access.storage_classes
        yield "roles", facts.access.roles
    if facts.found_key_spans is not None:
        yield "spans", facts.key_spans.spans
    if facts.found_stages is not None:
        yield "stages", [node for stage in facts.stages for node in (*stage.forward, *stage.backward, *stage.outputs)]
    if facts.found_plan is not None:
        yield "plans", [node for nodes in (*facts.plan.kept, *facts.plan.dropped) for node in nodes]
