"""Find forward operators that run on the full sequence between loops, including exchanges between ranks.

    q, k, v (loop) -> all_to_all -> attention over the full sequence, some of the heads -> all_to_all -> o, MLP (loop)

Their results are as long as the sequence, in every layer. So the backward graph recomputes them stage by stage, as
checkpointing does, and keeps only the stage's inputs. It also recomputes sequence-shaped values (values with a row per row of
the sequence, which loops compute chunk by chunk) that loops store for them. An *exchange* is a collective on rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_tensor, num_elements, shape_of_node, walk
from streamfx.ir.sizes import numeric, product
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import is_collective, is_deterministic
from streamfx.passes.ops.opaque import may_be_merged
from streamfx.passes.ops.traits import producer_of


class InterloopValues:
    """The values that the forward graph computes between its loops."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.axes, self.access = facts, facts.axes, facts.access
        assert facts.axes.sequence is not None
        self.length = numeric(facts.axes.sequence.length)

    @cached_property
    def nodes(self) -> frozenset[fx.Node]:
        """Forward values, computed outside loops, that depend on sequence-shaped values through such values alone.

        A value that depends only on a loop's sums is not included.
        """
        interloop_values: set[fx.Node] = set()
        for node in self.facts.joint.nodes:
            if node in self.facts.joint.forward and is_tensor(node) and not self.access.is_in_loop(node):
                sources = producer_of(node).all_input_nodes
                depends_on_rows = any(source in interloop_values or self.facts.has_rows(source) for source in sources)
                if node not in self.axes.static and depends_on_rows:
                    interloop_values.add(node)
        return frozenset(interloop_values)

    @cached_property
    def has_exchanges(self) -> bool:
        """Whether ranks exchange rows between loops: then decisions must not depend on the sizes of one rank."""
        return any(is_collective(producer_of(node)) for node in self.nodes)

    @cached_property
    def long_values(self) -> frozenset[fx.Node]:
        """The values between loops with at least one element per row of the sequence, and all results of exchanges."""
        return frozenset(node for node in self.nodes if is_collective(producer_of(node)) or self._is_long(node))

    def storage_bytes(self, node: fx.Node) -> int:
        """Return the bytes that a value occupies in memory: a dimension with stride 0 (expanded) counts as size 1."""
        value = node.meta[VALUE]
        dims = (size for size, stride in zip(shape_of_node(node), value.stride(), strict=True) if stride != 0)
        return numeric(product(dims)) * int(value.element_size())

    @cached_property
    def attentions(self) -> frozenset[fx.Node]:
        """Results of fused attention that reads long values between loops, so that its operands are complete before it begins."""
        return frozenset(node for node in self.facts.joint.forward if self._is_attention(producer_of(node)) and is_tensor(node))

    def recomputed_values(self, stages: Sequence[Stage], kept: Sequence[Collection[fx.Node]]) -> frozenset[fx.Node]:
        """Return the values that the backward graph recomputes, stage by stage, if each stage keeps `kept` and its outputs.

        An empty set if one stage has all of them, because all would be alive at once, or if ranks exchange rows and would run
        different programs (`rank_consensus.py`).
        """
        if self.has_exchanges and self.facts.separate_reductions is not None:
            return frozenset()
        by_stage = [self._recomputed_in_stage(stage, nodes) for stage, nodes in zip(stages, kept, strict=True)]
        return frozenset(chain(*by_stage)) if sum(map(bool, by_stage)) > 1 else frozenset()

    def recomputed_and_read(self, stages: Sequence[Stage], kept: Sequence[Collection[fx.Node]]) -> list[list[fx.Node]]:
        """Return, for each stage, the recomputed values (not sequence-shaped ones) that backward operators read.

        A stage that also keeps these recomputes no value between loops.
        """
        recomputed = self.recomputed_values(stages, kept)
        return [[node for node in stage.forward if node in recomputed and self._is_read_by_backward(node)] for stage in stages]

    def _is_read_by_backward(self, node: fx.Node) -> bool:
        """Return whether a backward operator reads a value that is not sequence-shaped."""
        return not self.facts.has_rows(node) and any(user not in self.facts.joint.forward for user in node.users)

    def _recomputed_in_stage(self, stage: Stage, kept: Collection[fx.Node]) -> set[fx.Node]:
        """Return the values that the backward graph of a stage recomputes if the stage keeps `kept` and its outputs.

        These are long values and tables between loops that a second run computes equally, and their sequence-shaped
        ancestors, which loops would otherwise store for them.
        """
        if stage.gradient_in_forward:  # its backward graph runs in the forward graph
            return set()
        stage_nodes = set(stage.forward)
        not_recomputed = {*kept, *stage.outputs, *self.facts.joint.outputs}

        def is_internal(node: fx.Node) -> bool:
            """Return whether the stage neither keeps nor returns a value, and no other stage's forward graph reads it."""
            return node not in not_recomputed and all(
                user in stage_nodes for user in node.users if user in self.facts.joint.forward
            )

        candidates = (node for node in stage.forward if node in self.long_values or self._is_table(node))
        recomputed = {node for node in candidates if is_repeatable(node) and is_internal(node)}
        ancestors = self._ancestors_in_stage(recomputed & self.nodes, stage_nodes)
        return recomputed | {node for node in ancestors if self.facts.has_rows(node) and is_internal(node)}

    def _ancestors_in_stage(self, nodes: Collection[fx.Node], stage_nodes: Collection[fx.Node]) -> set[fx.Node]:
        """Return the ancestors of `nodes` that are reached through nodes of the stage alone."""

        def sources(node: fx.Node) -> list[fx.Node]:
            """Return a node's operands that are nodes of the stage."""
            return [source for source in node.all_input_nodes if source in stage_nodes]

        return set(walk((source for node in nodes for source in sources(node)), sources))

    def _is_attention(self, node: fx.Node) -> bool:
        """Return whether an operator is fused attention (its axis rule has keys) and reads a long value between loops."""
        signature = self.axes.signatures.get(node)
        return signature is not None and bool(signature.keys) and not self.long_values.isdisjoint(node.all_input_nodes)

    def _is_table(self, node: fx.Node) -> bool:
        """Return whether a value between loops depends on positions only, and has more elements than the sequence has rows."""
        is_static_between_loops = node in self.axes.static and is_tensor(node) and not self.access.is_in_loop(node)
        return is_static_between_loops and num_elements(node) > self.length

    def _is_long(self, node: fx.Node) -> bool:
        """Return whether a value has at least as many elements as the sequence has rows."""
        return num_elements(node) >= self.length


def is_repeatable(node: fx.Node) -> bool:
    """Return whether running an operator again has the same result. All ranks repeat an exchange together."""
    producer = producer_of(node)
    return is_deterministic(producer) and (is_collective(producer) or may_be_merged(producer.target))
