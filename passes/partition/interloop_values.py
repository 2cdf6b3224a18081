"""What lies between the loops of the forward half, made of rows: what runs whole, and what ranks exchange.

    q, k, v (loop) -> all_to_all -> attention of all rows, for a part of the heads -> all_to_all -> o, MLP (loop)

Its values are as long as the sequence, and each layer has its own. So the backward half makes them again, stage by stage, as
checkpointing does, and keeps what enters the stage; the rows that loops have left for them are made again with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain

from torch import fx

from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_tensor, shape_of_node
from streamfx.ir.sizes import numeric, product
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import gives_the_same_twice, is_collective
from streamfx.passes.ops.opaque import may_be_merged
from streamfx.passes.ops.traits import producer_of


class InterloopValues:
    """What runs between the loops of a graph's forward half."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.axes, self.demand = facts, facts.axes, facts.demand
        assert facts.axes.sequence is not None
        self.length = numeric(facts.axes.sequence.length)

    @cached_property
    def nodes(self) -> frozenset[fx.Node]:
        """Operators of the forward half that run whole, on rows or on what is made of rows; not on sums over rows."""
        found: set[fx.Node] = set()
        for node in self.facts.joint.nodes:
            if node in self.facts.joint.forward and is_tensor(node) and not self.is_in_loop(node):
                sources = producer_of(node).all_input_nodes
                if node not in self.axes.static and any(source in found or self._has_rows(source) for source in sources):
                    found.add(node)
        return frozenset(found)

    @cached_property
    def exchanges(self) -> bool:
        """Whether ranks exchange rows between loops: then what runs, and in which order, must not depend on a rank's sizes."""
        return any(is_collective(producer_of(node)) for node in self.nodes)

    @cached_property
    def long(self) -> frozenset[fx.Node]:
        """Values that are as long as the sequence; what is exchanged is taken for long whatever its size."""
        return frozenset(node for node in self.nodes if is_collective(producer_of(node)) or self._is_long(node))

    def bytes_of(self, node: fx.Node) -> int:
        """Bytes of memory that a long value shows: a number that is shown for many is there once."""
        value = node.meta[VALUE]
        own = (size for size, stride in zip(shape_of_node(node), value.stride(), strict=True) if stride != 0)
        return numeric(product(own)) * int(value.element_size())

    @cached_property
    def attentions(self) -> frozenset[fx.Node]:
        """Fused attention that runs whole, or whose keys are all there before its loop begins."""
        return frozenset(node for node in self.facts.joint.forward if self._is_attention(producer_of(node)) and is_tensor(node))

    def made_again(self, stages: Sequence[Stage], kept: Sequence[Collection[fx.Node]]) -> frozenset[fx.Node]:
        """What the backward half is to make again, where stages keep these values beside their outputs.

        Where a single stage has all of it nothing would be gained: it would all be there at once. Nor what ranks exchange where
        these have found that they would not run the same (`rank_consensus.py`).
        """
        if self.exchanges and self.facts.apart is not None:
            return frozenset()
        found = [self._of_stage(stage, nodes) for stage, nodes in zip(stages, kept, strict=True)]
        return frozenset(chain(*found)) if sum(map(bool, found)) > 1 else frozenset()

    def asked_for(self, stages: Sequence[Stage], kept: Sequence[Collection[fx.Node]]) -> list[list[fx.Node]]:
        """Those of them that the backward half itself takes, by stage: with these kept, nothing is made again."""
        again = self.made_again(stages, kept)
        return [[node for node in stage.forward if node in again and self._is_taken_back(node)] for stage in stages]

    def _is_taken_back(self, node: fx.Node) -> bool:
        return not self._has_rows(node) and any(user not in self.facts.joint.forward for user in node.users)

    def _of_stage(self, stage: Stage, kept: Collection[fx.Node]) -> set[fx.Node]:
        """What runs between the loops of a stage and gives the same twice, and the rows that are behind it, which loops may have
        left for other loops; masks and tables of its own, too, which are made of no rows.
        """
        if stage.gradient_in_forward:  # there is nothing left to do in the backward half
            return set()
        own, others = set(stage.forward), {*kept, *stage.outputs, *self.facts.joint.outputs}

        def is_read_here(node: fx.Node) -> bool:
            return node not in others and all(user in own for user in node.users if user in self.facts.joint.forward)

        made = (node for node in stage.forward if node in self.long or self._is_table(node))
        found = {node for node in made if is_repeatable(node) and is_read_here(node)}
        return found | {node for node in self._behind(found, own) if self._has_rows(node) and is_read_here(node)}

    def _behind(self, nodes: Collection[fx.Node], own: Collection[fx.Node]) -> set[fx.Node]:
        """What a stage makes those of its values of that are made of rows."""
        found: set[fx.Node] = set()
        todo = [node for node in nodes if node in self.nodes]
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in own and source not in found:
                    found.add(source)
                    todo.append(source)
        return found

    def _is_attention(self, node: fx.Node) -> bool:
        signature = self.axes.signatures.get(node)
        return signature is not None and bool(signature.keys) and not self.long.isdisjoint(node.all_input_nodes)

    def _is_table(self, node: fx.Node) -> bool:
        """Whether a value is made of no rows, between loops, and has several numbers per row."""
        is_made = node in self.axes.static and is_tensor(node) and not self.is_in_loop(node)
        return is_made and numeric(product(shape_of_node(node))) > self.length

    def _is_long(self, node: fx.Node) -> bool:
        return numeric(product(shape_of_node(node))) >= self.length

    def _has_rows(self, node: fx.Node) -> bool:
        return is_tensor(node) and node not in self.axes.static and self.demand.form(node) is StorageClass.ROWS

    def is_in_loop(self, node: fx.Node) -> bool:
        """Whether a value is made chunk by chunk."""
        return any(form not in (StorageClass.SCALAR, StorageClass.WHOLE) for form in self.demand.forms.get(node, ()))


def is_repeatable(node: fx.Node) -> bool:
    """Whether what makes a value gives the same if it runs again. What ranks exchange they exchange again, all of them."""
    made = producer_of(node)
    return gives_the_same_twice(made) and (is_collective(made) or may_be_merged(made))
