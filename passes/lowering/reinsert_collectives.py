"""Insert the collectives on weights, which `rewrite/collectives/unshard.py` removed from the graph, around the loops.

    stage_1(t(weight))     ->    gathered = all_gather(weight)            before the first loop of stage 0
                                 stage_0(...)
                                 stage_1(t(wait(gathered)))

A weight is gathered one stage before the loops that use it, and regathered if loops of another stage come between two
uses, so the full weights of two stages are alive at a time. The reduction of a gradient starts after the loop that
computes it, and its wait comes after the loops of the next stage, so the gradients of two stages are alive at a time.
The placement depends only on the order of loops and values, which is the same on all ranks, and not on lengths, chunk
sizes or a budget. A *region* (counted from 0 in each host program) is all loops of a stage in one direction; a *light*
value is a view, an element of a tuple, or a cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import fx

from streamfx.ir.collective_ops import Gather
from streamfx.ir.facts import Facts
from streamfx.ir.joint import outputs_of, saved_values
from streamfx.ir.subgraph import Subgraph
from streamfx.node_meta import REGION, VALUE
from streamfx.options import Options
from streamfx.passes.ops.collectives import REASSEMBLES, is_wait
from streamfx.passes.ops.traits import only_moves_elements

aten = torch.ops.aten


@dataclass(frozen=True)
class ReinsertCollectives:
    """The pass: inserts the collectives on weights and their gradients."""

    name: ClassVar[str] = "reinsert_collectives"
    options: Options

    def apply(self, facts: Facts) -> Facts:
        """Insert gathers of weights and reductions of gradients into both host programs, in place; return the same facts."""
        removed, program = facts.collectives, facts.program
        if removed is None or program is None:
            return facts
        inputs = zip(facts.joint.primals, program.forward.graph.find_nodes(op="placeholder"), strict=True)
        weights = {node: removed.gathers[primal] for primal, node in inputs if primal in removed.gathers}
        forward, kept = _HostGraph(program.forward), set[fx.Node]()
        if program.backward is not None:
            backward = _HostGraph(program.backward)
            saved = saved_values(program.forward.graph, program.backward.graph, len(facts.joint.outputs))
            saved_weights = {placeholder: weights[node] for placeholder, node in saved.items() if node in weights}
            kept = {node for node in saved_weights if self.keep_full(saved_weights[node], backward.first_region(node))}
            for node, gather in saved_weights.items():
                if node not in kept:
                    backward.gather(node, gather)
            for gradient_index, subgraph in removed.reductions.items():
                backward.reduce(gradient_index, subgraph)
            backward.finish()
        kept_in_forward = {saved[node] for node in kept}
        for node, gather in weights.items():
            forward.gather(node, gather, is_kept=node in kept_in_forward)
        forward.finish()
        return facts

    def keep_full(self, gather: Gather, first_region: int) -> bool:
        """Return whether the full weight, rather than its shard, is saved for the backward graph, which then need not gather it.

        The option decides, then the user's code. Otherwise the weight is kept if the first region of the backward graph uses
        it (`first_region` is 0), because no other weight would be gathered between its last use in forward and that use.
        """
        option = self.options.reshard
        if option != "auto":
            return not option
        return first_region == 0 if gather.keep_full is None else gather.keep_full


class Use(NamedTuple):
    """A use of a weight: the user, and its operand, which is the weight or a view of it."""

    user: fx.Node
    operand: fx.Node


class _HostGraph:
    """A host program, with the index of the region that each of its nodes belongs to."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Record the region of each node (`region_index`), and the first loop or full-sequence operator of each region."""
        self.module, self.graph, self.output = module, module.graph, module.graph.output_node()
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.region_index: dict[fx.Node, int] = {}
        self.last_computing_region: dict[fx.Node, int] = {}  # region of the last computing node at or before a node
        self.first_computing: dict[int, fx.Node] = {}  # by region
        self.first_wait_before: dict[fx.Node, fx.Node] = {}  # the first wait, or descendant of one, inserted before a node
        region_index = last_computing_region = 0
        for node in self.graph.nodes:
            region_index = self.region_index[node] = max(region_index, node.meta.get(REGION, 0))
            if is_computing(node):
                self.first_computing.setdefault(region_index, node)
                last_computing_region = region_index
            self.last_computing_region[node] = last_computing_region

    def finish(self) -> None:
        """Check and recompile the changed host program."""
        self.graph.lint()
        self.module.recompile()

    def first_region(self, weight: fx.Node) -> int:
        """Return the index of the first region that uses a weight; 0 if none does."""
        return min((self.region_index[use.user] for use in self._uses(weight)), default=0)

    def gather(self, shard: fx.Node, gather: Gather, is_kept: bool = False) -> None:
        """Gather a weight before its uses, in place: the gather starts before the previous region, the wait precedes the use.

        `shard`: the placeholder, which becomes this rank's shard. If uses are far apart, gather once for each group of uses. If
        `is_kept`, gather once, and save the full weight for the backward graph.
        """
        uses, views = self._uses(shard), _light_views_of(shard)
        groups = [[*uses, Use(self.output, shard)]] if is_kept else self._group_uses(uses)
        for group in groups:
            first_user = group[0].user
            previous_region = self.first_computing.get(max(self.region_index[first_user] - 1, 0), first_user)
            start_before = min(previous_region, first_user, key=self.position.__getitem__)
            gathered = {shard: self._insert_subgraph(gather.subgraph, shard, start_before, first_user)}
            for user, operand in group:
                user.replace_input_with(operand, _recomputed_view(operand, gathered, first_user))
        for view in sorted(views, reverse=True):
            self.graph.erase_node(view)
        shard.meta = {**shard.meta, VALUE: gather.shard}

    def _uses(self, weight: fx.Node) -> list[Use]:
        """Return the uses of a weight and of its light views in order, except for the output that saves the shard."""
        views = _light_views_of(weight)
        uses = [Use(user, value) for value in (weight, *views) for user in value.users if user not in views]
        return sorted((use for use in uses if use != (self.output, weight)), key=lambda use: self.position[use.user])

    def _group_uses(self, uses: Sequence[Use]) -> list[list[Use]]:
        """Group the uses so that no region of loops lies between two uses of one group."""
        groups: list[list[Use]] = []
        for use in uses:
            if groups and self.region_index[use.user] <= self.region_index[groups[-1][-1].user] + 1:
                groups[-1].append(use)
            else:
                groups.append([use])
        return groups

    def reduce(self, gradient_index: int, subgraph: Subgraph) -> None:
        """Insert the reduction of a gradient (by output index), in place: it starts when the gradient is ready, before the next
        loop, and its wait comes after the next region.
        """
        results = list(outputs_of(self.graph))
        gradient = results[gradient_index]
        start_before = next(node for node in _nodes_after(gradient) if node is self.output or is_computing(node))
        wait_before = self.first_computing.get(self.last_computing_region[gradient] + 2, self.output)
        results[gradient_index] = self._insert_subgraph(subgraph, gradient, start_before, wait_before)
        self.output.args = (tuple(results),)

    def _insert_subgraph(self, subgraph: Subgraph, source: fx.Node, start_before: fx.Node, wait_before: fx.Node) -> fx.Node:
        """Insert a subgraph with `source` as its input; return its result.

        Waits and their descendants are inserted before `wait_before`. The other operators start collectives: they are inserted
        before `start_before`, and before the waits that are already there, so that a transfer starts before the host waits.
        """
        late = _waits_and_descendants(subgraph)
        start = self.first_wait_before.get(start_before, start_before)
        inserted = subgraph.insert_into(source, lambda node: wait_before if node in late else start)
        for node in late:
            self.first_wait_before.setdefault(wait_before, inserted[node])
        return inserted[subgraph.result]


def is_computing(node: fx.Node) -> bool:
    """Return whether a node is a loop or a full-sequence operator: collectives are placed between these."""
    return REGION in node.meta and not _is_light(node)


def _is_light(node: fx.Node) -> bool:
    """Return whether a value is recomputed for each group of its users: it is a view, an element of a tuple or a cast."""
    return only_moves_elements(node) or node.target in REASSEMBLES or node.target is aten._to_copy.default


def _light_views_of(weight: fx.Node) -> set[fx.Node]:
    """Return the light values (views, elements, casts) that are computed from a weight alone."""
    views, todo = {weight}, [weight]
    while todo:
        new = [user for user in todo.pop().users if user not in views and _is_light_view(user, views)]
        views.update(new)
        todo += new
    return views - {weight}


def _is_light_view(node: fx.Node, values: set[fx.Node]) -> bool:
    """Return whether a node is a light value that is computed from `values` alone."""
    return node.op == "call_function" and _is_light(node) and values.issuperset(node.all_input_nodes)


def _recomputed_view(value: fx.Node, gathered: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    """Return a view of a weight, recomputed from the gathered weight before a node; `gathered` caches the results."""
    if value not in gathered:
        sources = {source: _recomputed_view(source, gathered, before) for source in value.all_input_nodes}
        with before.graph.inserting_before(before):
            gathered[value] = before.graph.node_copy(value, sources.__getitem__)
    return gathered[value]


def _waits_and_descendants(subgraph: Subgraph) -> dict[fx.Node, None]:
    """Return the waits of a subgraph and their descendants, in order."""
    waiting: dict[fx.Node, None] = {}
    for node in subgraph.nodes:
        if is_wait(node) or any(source in waiting for source in node.all_input_nodes):
            waiting[node] = None
    return waiting


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of a graph that come after a node."""
    while (node := node.next).op != "root":
        yield node
