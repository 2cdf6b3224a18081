"""Where do collectives on weights run? What was taken off the graph (`rewrite/collectives/unshard.py`) is put around the loops.

    stage_1(t(weight))     ->    gathered = all_gather(weight)            in front of the first loop of stage 0
                                 stage_0(...)
                                 stage_1(t(wait(gathered)))

A weight is gathered one stage ahead of the loops that use it, and again where loops of another stage lie between two uses: so the
whole weights of two stages are alive. A gradient's reduction begins behind the loop that makes the gradient, and is waited for
behind the loops of the next stage: so the gradients of two stages are alive. All of this follows from the order of loops and
values alone, which is the same on all ranks: never from lengths, sizes of chunks or a budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.collective_ops import Gather
from streamfx.ir.facts import Facts
from streamfx.ir.joint import handed_over, outputs_of
from streamfx.ir.subgraph import Subgraph
from streamfx.node_meta import RUN, VALUE
from streamfx.options import Options
from streamfx.passes.ops.collectives import PUTS_TOGETHER, is_wait
from streamfx.passes.ops.traits import is_moved_elements

aten = torch.ops.aten


@dataclass(frozen=True)
class ReinsertCollectives:
    name: ClassVar[str] = "put back"
    options: Options

    def apply(self, facts: Facts) -> Facts:
        found, program = facts.collectives, facts.program
        if found is None or program is None:
            return facts
        given = zip(facts.joint.primals, program.forward.graph.find_nodes(op="placeholder"), strict=True)
        weights = {node: found.gathers[primal] for primal, node in given if primal in found.gathers}
        forward, kept = _HostGraph(program.forward), set[fx.Node]()
        if program.backward is not None:
            backward = _HostGraph(program.backward)
            saved = handed_over(program.forward.graph, program.backward.graph, len(facts.joint.outputs))
            again = {taken: weights[node] for taken, node in saved.items() if node in weights}
            kept = {node for node in again if self.keeps(again[node], backward.first_run(node))}
            for node, gather in again.items():
                if node not in kept:
                    backward.gather(node, gather)
            for position, stretch in found.reductions.items():
                backward.reduce(position, stretch)
            backward.finish()
        lasting = {saved[node] for node in kept}
        for node, gather in weights.items():
            forward.gather(node, gather, lasts=node in lasting)
        forward.finish()
        return facts

    def keeps(self, gather: Gather, first_run: int) -> bool:
        """Whether the backward half finds a whole weight kept: as asked for, else as the code says, else if it begins with it:
        between the last use and the next no other would be gathered.
        """
        asked = self.options.reshard
        if asked != "auto":
            return not asked
        return first_run == 0 if gather.keeps is None else gather.keeps


Use = tuple[fx.Node, fx.Node]  # who uses a weight, and the weight or a view of it


class _HostGraph:
    """An outer graph, with the number of the region that each of its nodes belongs to."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph, self.output = module, module.graph, module.graph.output_node()
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.run: dict[fx.Node, int] = {}
        self.behind: dict[fx.Node, int] = {}  # of the last that computes, up to a node: a view of its result may be of the next
        self.first: dict[int, fx.Node] = {}
        self.waits: dict[fx.Node, fx.Node] = {}  # the first that was put in front of a node
        at = computed = 0
        for node in self.graph.nodes:
            at = self.run[node] = max(at, node.meta.get(RUN, 0))
            if computes(node):
                self.first.setdefault(at, node)
                computed = at
            self.behind[node] = computed

    def finish(self) -> None:
        self.graph.lint()
        self.module.recompile()

    # -- weights

    def first_run(self, weight: fx.Node) -> int:
        """The first region that uses a weight."""
        return min((self.run[user] for user, _ in self._uses(weight)), default=0)

    def gather(self, shard: fx.Node, gather: Gather, lasts: bool = False) -> None:
        """Gather a weight for those who use it; where it `lasts`, the whole is handed to the backward half."""
        uses, views = self._uses(shard), _views_of(shard)
        groups = [[*uses, (self.output, shard)]] if lasts else self._without_gaps(uses)
        for group in groups:
            first = group[0][0]
            ahead = self.first.get(max(self.run[first] - 1, 0), first)
            begins = min(ahead, first, key=self.position.__getitem__)
            made = {shard: self._written(gather.stretch, shard, begins, first)}
            for user, value in group:
                user.replace_input_with(value, _view(value, made, first))
        for view in sorted(views, reverse=True):
            self.graph.erase_node(view)
        shard.meta = {**shard.meta, VALUE: gather.shard}

    def _uses(self, weight: fx.Node) -> list[Use]:
        """Who uses a weight or views of it, in order; not who saves the shard."""
        views = _views_of(weight)
        uses = [(user, value) for value in (weight, *views) for user in value.users if user not in views]
        return sorted((use for use in uses if use != (self.output, weight)), key=lambda use: self.position[use[0]])

    def _without_gaps(self, uses: Sequence[Use]) -> list[list[Use]]:
        """The uses in groups: no region of loops lies between those of one group."""
        groups: list[list[Use]] = []
        for use in uses:
            if groups and self.run[use[0]] <= self.run[groups[-1][-1][0]] + 1:
                groups[-1].append(use)
            else:
                groups.append([use])
        return groups

    # -- gradients

    def reduce(self, position: int, stretch: Subgraph) -> None:
        """Let a gradient's reduction begin once the gradient is there, and be waited for behind the next region."""
        results = list(outputs_of(self.graph))
        gradient = results[position]
        begins = next(node for node in _behind(gradient) if node is self.output or computes(node))
        ends = self.first.get(self.behind[gradient] + 2, self.output)
        results[position] = self._written(stretch, gradient, begins, ends)
        self.output.args = (tuple(results),)

    def _written(self, stretch: Subgraph, source: fx.Node, begins: fx.Node, ends: fx.Node) -> fx.Node:
        """Write what waits for nothing in front of `begins`, and of all waits there, and the rest in front of `ends`."""
        late = _waiting(stretch)
        made = stretch.written(source, lambda node: ends if node in late else self.waits.get(begins, begins))
        for node in late:
            self.waits.setdefault(ends, made[node])
        return made[stretch.end]


def computes(node: fx.Node) -> bool:
    """Whether a node is one that others are placed around: a loop, or an operator that runs whole."""
    return RUN in node.meta and not _is_light(node)


def _is_light(node: fx.Node) -> bool:
    """Whether a value is made anew for each group of its users: a view, a part or a cast."""
    return is_moved_elements(node) or node.target in PUTS_TOGETHER or node.target is aten._to_copy.default


def _views_of(weight: fx.Node) -> set[fx.Node]:
    """What is made of a weight alone, and is light."""
    found, todo = {weight}, [weight]
    while todo:
        new = [user for user in todo.pop().users if user not in found and _is_view(user, found)]
        found.update(new)
        todo += new
    return found - {weight}


def _is_view(node: fx.Node, found: set[fx.Node]) -> bool:
    return node.op == "call_function" and _is_light(node) and found.issuperset(node.all_input_nodes)


def _view(value: fx.Node, made: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    """A view of a weight, made of the weight that `made` holds."""
    if value not in made:
        sources = {source: _view(source, made, before) for source in value.all_input_nodes}
        with before.graph.inserting_before(before):
            made[value] = before.graph.node_copy(value, sources.__getitem__)
    return made[value]


def _waiting(stretch: Subgraph) -> dict[fx.Node, None]:
    """The waits of a stretch and what comes after them, in order."""
    found: dict[fx.Node, None] = {}
    for node in stretch.nodes:
        if is_wait(node) or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph that stand behind one."""
    while (node := node.next).op != "root":
        yield node
