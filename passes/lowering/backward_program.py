"""Build the backward host program, and decide which forward values it gets from the forward program.

The backward program begins with placeholders for saved values: tensors, states of scans, dynamic sizes, objects. It is built
after the forward program, which returns these values.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.dialect.offload import from_host
from streamfx.ir.access import Layout
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_object, is_size, is_tensor
from streamfx.node_meta import EXCLUSIVE, JOINT, MUTATED, STACK_TRACE, VALUE
from streamfx.passes.lowering.copies import copy_to_host, fetch_in_time
from streamfx.passes.lowering.donated_bodies import find_view_base, is_owned_here
from streamfx.passes.lowering.host_program import HostProgramBuilder
from streamfx.passes.lowering.output_aliasing import clone_if_mutated
from streamfx.passes.ops.traits import is_dequantizer, is_expensive, is_random, producer_of
from streamfx.runtime.offload import wait_for_copy
from streamfx.torch_private.graph_nodes import add_placeholder, operands_of


class BackwardBuilder(HostProgramBuilder):
    """Builds the backward host program. Forward values that it needs are saved, or recomputed if that is cheap.

    `forward` is the builder of the forward program, `order` has the position of each node in the joint graph.
    """

    def __init__(self, facts: Facts, layout: Layout, order: dict[fx.Node, int], forward: HostProgramBuilder) -> None:
        """Add the tangents as placeholders; `saved`, `symbol_values` and `objects` map forward values to placeholders."""
        super().__init__(layout, order, facts.plan)
        self.joint, self.forward = facts.joint, forward
        self.saved: dict[fx.Node, fx.Node] = {}
        self.offloaded = {node for nodes in self.plan.offloaded for node in nodes}
        self.symbol_values: dict[sympy.Symbol, fx.Node] = {}
        self.objects: dict[fx.Node, fx.Node] = {}
        self.tangents: list[fx.Node] = []
        for node in self.joint.tangents:
            placeholder = self.graph.placeholder(node.name)
            placeholder.meta = dict(node.meta)
            self.env[node] = placeholder
            self.tangents.append(placeholder)

    def has(self, node: fx.Node) -> bool:
        """Return whether a value exists in this program, or the forward program can save it."""
        return node in self.env or self._is_saved(node)

    def _is_saved(self, node: fx.Node) -> bool:
        """Return whether the forward program can save a value for this program."""
        if not self.forward.has(node) or not is_tensor(node):
            return False
        return not self.plan.is_dropped(node) and node not in self._recomputed

    def value(self, node: fx.Node) -> fx.Node | None:
        """Return the node of a value, adding a placeholder if the forward program can save it; None if it cannot.

        For an offloaded value, the placeholder is its copy on the host, and the node the value fetched from it.
        """
        if node not in self.env and self._is_saved(node):
            if node in self.offloaded:
                self.env[node] = self._fetched(node)
            else:
                self.env[node] = self.saved[node] = self._placeholder(node.name, dict(node.meta))
        if node not in self.env and is_object(node):
            self.env[node] = self.objects[node] = self._placeholder(node.name, dict(node.meta))
        return self.env.get(node)

    def _fetched(self, node: fx.Node) -> fx.Node:
        """Return a value that was offloaded to the host; `fetch_in_time` later moves its copy to an earlier point."""
        host_copy = self.saved[node] = self._placeholder(f"{node.name}_held", {VALUE: self._on_host(node)})
        fetched = self.graph.call_function(from_host, (host_copy, node.meta[VALUE].device))
        waited = self.graph.call_function(wait_for_copy, (fetched,))
        fetched.meta, waited.meta = dict(node.meta), dict(node.meta)
        return waited

    def _on_host(self, node: fx.Node) -> Any:
        """Return a fake copy of a value on the CPU."""
        with torch.no_grad():
            return torch.empty_like(node.meta[VALUE], device="cpu")

    def nodes_to_save(self) -> list[fx.Node]:
        """Return the forward node to save for each value that this program reads.

        The node is the host copy if the value is offloaded, a device copy if the caller may write to the value after the
        forward program, otherwise the value itself.
        """
        forward_nodes = {node: self.forward.env[node] for node in self.saved}
        meta = {
            forward_nodes[node]: {VALUE: self._on_host(node), JOINT: node.name, STACK_TRACE: node.meta.get(STACK_TRACE)}
            for node in self.saved
            if node in self.offloaded
        }
        host_copies = copy_to_host(self.forward.graph, meta)
        return [
            host_copies[value] if node in self.offloaded else clone_if_mutated(value) for node, value in forward_nodes.items()
        ]

    def states_of(self, node: fx.Node) -> fx.Node | None:
        """Return a scan's states, adding a placeholder if a forward loop has stored them; else None."""
        if node not in self.states and node in self.forward.states:
            self.states[node] = self._placeholder(f"{node.name}_states", dict(self.forward.states[node].meta))
            self.chunks_of_states[node] = self.forward.chunks_of_states[node]
        return self.states.get(node)

    def symbol(self, symbol: sympy.Symbol) -> Any:
        """Return a placeholder for the value of a symbol that the forward program passes on."""
        if symbol not in self.symbol_values:
            value = self.forward.symbol(symbol)
            self.symbol_values[symbol] = self._placeholder(symbol.name, {VALUE: value.meta[VALUE]})
        return self.symbol_values[symbol]

    def _placeholder(self, name: str, meta: dict[str, Any]) -> fx.Node:
        """Add a placeholder at the start of the graph; `finish` puts placeholders in order."""
        with self.graph.inserting_before(next(iter(self.graph.nodes), None) or self.graph._root):
            placeholder = add_placeholder(self.graph, name)
        placeholder.meta = meta
        return placeholder

    @cached_property
    def _recomputed(self) -> frozenset[fx.Node]:
        """The constants, and views, casts and unpackings of parameters: recomputing them is cheaper than saving them."""
        recomputed = set(self.joint.graph.find_nodes(op="get_attr"))
        for node in self.joint.nodes:
            sources = operands_of(producer_of(node))
            if self._is_cheap_outside(node) and all(
                _is_unchanged_input(item) or is_size(item) or item in recomputed for item in sources
            ):
                recomputed.add(node)
        return frozenset(recomputed)

    def _is_cheap_outside(self, node: fx.Node) -> bool:
        """Return whether an operator outside loops computes a value, deterministically and without a matrix product."""
        producer = producer_of(node)
        return (
            is_tensor(node)
            and self.layout.access.storage_class(node) is StorageClass.OUTSIDE
            and (producer in self.layout.axes.signatures or is_dequantizer(producer))
            and not is_expensive(node)
            and not is_random(producer)
        )

    def finish(self, gradients: tuple[Any, ...]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Close the graph with these results, and put its placeholders in order: sizes, saved tensors, states, objects, tangents.

        Return the nodes that the forward program must save: (tensors, objects followed by sizes), as AOTAutograd expects.
        """
        self.graph.output(gradients)
        fetch_in_time(self.graph)
        previous: fx.Node | None = None
        tensors = *self.saved.values(), *self.states.values()
        for placeholder in (*self.symbol_values.values(), *tensors, *self.objects.values(), *self.tangents):
            if previous is None:
                next(iter(self.graph.nodes)).prepend(placeholder)
            else:
                previous.append(placeholder)
            previous = placeholder
        times_saved = Counter(self.forward.env[node] for node in self.saved)
        for node, placeholder in self.saved.items():
            is_saved_once = times_saved[self.forward.env[node]] == 1
            placeholder.meta[EXCLUSIVE] = is_saved_once and self._is_used_here_only(node)
        saved = self.nodes_to_save() + [self.forward.states[node] for node in self.states]
        objects = [self.forward.env[node] for node in self.objects]
        return saved, objects + [self.forward.symbol(symbol) for symbol in self.symbol_values]

    def _is_used_here_only(self, node: fx.Node) -> bool:
        """Return whether a saved value is a loop's result that the forward program passes to this program only."""
        value = self.forward.env[node]
        is_private = node not in self.joint.outputs and not value.users
        return is_private and is_owned_here(find_view_base(value), self.forward.module)


def _is_unchanged_input(node: fx.Node) -> bool:
    """Return whether a node is an input whose values are unchanged when the backward graph runs."""
    return node.op == "placeholder" and not node.meta.get(MUTATED, False)
