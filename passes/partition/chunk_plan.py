"""Choose each stage's chunk size and the forward values that it keeps.

A value is *kept* if the forward graph stores it for backward, which would otherwise recompute it; *offloaded* if it waits in
host memory meanwhile; *dropped* if it is a stage's output that is not stored. Without options, a stage keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_parameter, is_tensor
from streamfx.ir.stage_plan import ChunkSize, StagePlan
from streamfx.node_meta import MUTATED, VALUE
from streamfx.options import Options, min_save_level
from streamfx.passes.partition.checkpoint_policy import kept_values
from streamfx.passes.partition.chunk_sizes import chunk_sizes, model_bytes
from streamfx.passes.partition.interloop_values import InterloopValues

MAX_KEPT_SHARE = (
    0.5  # of the bytes of the model and its gradients: without a budget, kept values that save time take up to this share
)


@dataclass(frozen=True)
class ChunkPlan:
    """The pass. `chunk_sizes` may have the chunk sizes if they were computed before from the same facts and options."""

    name: ClassVar[str] = "chunk_plan"
    options: Options
    chunk_sizes: tuple[ChunkSize, ...] | None = None

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the plan: chunk sizes, and values to keep, drop, offload and recompute.

        Also set `lengths`: the largest dynamic sizes for which the choice of kept values holds.
        """
        interloop = InterloopValues(facts)
        kept = self.choose_kept(facts, interloop)
        plan = StagePlan(
            chunk_sizes=chunk_sizes(facts, self.options) if self.chunk_sizes is None else self.chunk_sizes,
            kept=kept,
            low_precision_sums=self.low_precision_sums(facts),
            dropped=self.find_dropped(facts),
            offloaded=self.choose_offloaded(facts, interloop),
            recomputed=interloop.recomputed_values(facts.stages, kept),
        )
        lengths = self.lengths(plan.kept, facts)
        return replace(facts, found_plan=plan, lengths=lengths or facts.lengths)

    def low_precision_sums(self, facts: Facts) -> frozenset[fx.Node]:
        """Return the nodes that loops add up over chunks in their own dtype, not in float32, if the option `accumulate` says so.

        These are gradients; sums of the forward graph are always rounded once, as in eager.
        """
        if self.options.accumulate == "float32":
            return frozenset()
        return frozenset(facts.joint.nodes) - facts.joint.forward

    def lengths(self, kept: Sequence[Sequence[fx.Node]], facts: Facts) -> Lengths | None:
        """Return the largest dynamic sizes for which the kept values are small compared to the model.

        None if there are no dynamic sizes, or if the choice does not depend on them.
        """
        current_lengths = Lengths.of_current_call(facts.joint.graph)
        if not current_lengths or not any(kept) or self.options.save != "auto" or self.options.offload == "attention":
            return None
        return current_lengths.longest_valid(
            lambda longer: are_small(kept, facts), 1 + 1 / (4 * max(1, *current_lengths.numbers.values()))
        )

    def choose_kept(self, facts: Facts, interloop: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the values that each stage keeps.

        If `save` is "auto", these are the offloaded values, and without a budget also attention results if they are small.
        With collectives, size does not decide: ranks may have sequences of different lengths, but must gather the same
        values at the same time.
        """
        if self.options.save != "auto":
            return self._kept_at(self.options.save, facts, interloop)
        attention_results = self._kept_at("attention", facts, interloop)
        min_level = min_save_level(self.options.offload)
        may_keep_more = facts.collectives is None and self.options.memory_budget is None
        if min_level == "attention" or (may_keep_more and are_small(attention_results, facts)):
            return attention_results
        return self._kept_at(min_level, facts, interloop)

    def _kept_at(self, level: str, facts: Facts, interloop: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the values that each stage keeps at a level of the option `save` ("inputs", "attention", ...).

        From "attention" on, they include values computed between loops that backward reads.
        """
        kept = tuple(kept_values(stage, facts, level) for stage in facts.stages)
        if level == "inputs":
            return kept
        extra = interloop.recomputed_and_read(facts.stages, kept)
        return tuple((*nodes, *extra_nodes) for nodes, extra_nodes in zip(kept, extra, strict=True))

    def choose_offloaded(self, facts: Facts, interloop: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the values that wait on the host if they are kept: sequence-shaped values at cuts, and the values that
        `save` keeps at the level that `offload` names. Graph outputs stay on the device. Inputs of the graph are at a cut, too:
        if each layer is a separate graph (FSDP2), they are the residual stream, which nothing but autograd keeps.
        """
        if self.options.offload == "none":
            return ()
        outputs = set(facts.joint.outputs)
        kept = self._kept_at(self.options.offload, facts, interloop)
        rows_at_cuts = [
            tuple(node for node in stage.outputs if facts.access.storage_class(node) is StorageClass.ROWS)
            for stage in facts.stages
        ]
        rows_at_cuts[:1] = [(*inputs_with_rows(facts), *stage_rows) for stage_rows in rows_at_cuts[:1]]
        return tuple(
            tuple(node for node in (*stage_rows, *stage_kept) if node not in outputs)
            for stage_rows, stage_kept in zip(rows_at_cuts, kept, strict=True)
        )

    def find_dropped(self, facts: Facts) -> tuple[tuple[fx.Node, ...], ...]:
        """Return, for each stage, the outputs that are not stored, so that backward recomputes them from an earlier cut.

        With `keep_every=3`, every third cut is stored. Outputs that more than the next stage reads are always stored. An empty
        tuple if all cuts are stored, or if there are no gradients.
        """
        every = 1 if self.options.keep_every == "auto" else self.options.keep_every
        stages = facts.stages
        if every == 1 or not any(is_tensor(node) for node in facts.joint.gradients if isinstance(node, fx.Node)):
            return ()
        has_kept_cut = [(i + 1) % every == 0 or i == len(stages) - 1 for i in range(len(stages))]
        return tuple(
            ()
            if has_kept_cut[stage_index]
            else tuple(node for node in stage.outputs if _is_read_by_next_stage_only(node, stage_index, facts))
            for stage_index, stage in enumerate(stages)
        )


def inputs_with_rows(facts: Facts) -> tuple[fx.Node, ...]:
    """Return the sequence-shaped inputs with a gradient that are contiguous, and neither parameters nor mutated."""
    return tuple(
        primal
        for _, primal, _ in facts.joint.trained
        if facts.access.storage_class(primal) in (StorageClass.ROWS, StorageClass.WHOLE)
        and primal not in facts.axes.static
        and not is_parameter(primal)
        and not primal.meta.get(MUTATED, False)
        and primal.meta[VALUE].is_contiguous()
    )


def are_small(kept: Sequence[Sequence[fx.Node]], facts: Facts) -> bool:
    """Return whether the values kept by all stages take at most half of the bytes of inputs (the model) and gradients.

    False if there are no gradients, because then nothing should be kept.
    """
    has_gradients = any(isinstance(node, fx.Node) for node in facts.joint.gradients)
    kept_bytes = sum(bytes_like(node.meta[VALUE]) for nodes in kept for node in nodes)
    return has_gradients and kept_bytes <= MAX_KEPT_SHARE * model_bytes(facts)


def _is_read_by_next_stage_only(node: fx.Node, stage_index: int, facts: Facts) -> bool:
    """Return whether an output of a stage has rows (loops compute it chunk by chunk) and only this stage and the next read it.

    A graph output or a gradient of the graph, which the caller reads, is excluded.
    """
    stage, following = facts.stages[stage_index : stage_index + 2]
    in_both_stages = {*stage.forward, *stage.backward, *following.forward, *following.backward}
    return (
        facts.access.storage_class(node) is StorageClass.ROWS
        and node not in facts.joint.outputs
        and node not in facts.joint.gradients
        and node not in stage.gradients
        and all(user in in_both_stages for user in node.users)
    )
