"""Choose each stage's chunk size and the forward values that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_tensor
from streamfx.ir.stage_plan import ChunkSize, StagePlan
from streamfx.node_meta import VALUE
from streamfx.options import Options, min_save_level
from streamfx.passes.partition.checkpoint_policy import kept_values
from streamfx.passes.partition.chunk_sizes import chunk_sizes, model_bytes
from streamfx.passes.partition.interloop_values import InterloopValues

SMALL = 0.5  # share of the bytes of the model and its gradients: without a budget, up to this much is kept for speed


@dataclass(frozen=True)
class ChunkPlan:
    """Compute chunk sizes, unless they are passed in: then they were computed from the same facts and options."""

    name: ClassVar[str] = "chunk_plan"
    options: Options
    chunk_sizes: tuple[ChunkSize, ...] | None = None

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the plan: chunk sizes, and values to keep, drop, offload and recompute."""
        between = InterloopValues(facts)
        kept = self.kept(facts, between)
        plan = StagePlan(
            chunk_sizes=chunk_sizes(facts, self.options) if self.chunk_sizes is None else self.chunk_sizes,
            kept=kept,
            low_precision_sums=self.narrow(facts),
            dropped=self.dropped(facts),
            offloaded=self.offloaded(facts, between),
            recomputed=between.recomputed_values(facts.stages, kept),
        )
        lengths = self.lengths(plan.kept, facts)
        return replace(facts, found_plan=plan, lengths=lengths or facts.lengths)

    def narrow(self, facts: Facts) -> frozenset[fx.Node]:
        """Return sums to accumulate in their own dtype, if the options ask for it: gradients only.

        Forward values are rounded once, as in eager.
        """
        if self.options.accumulate == "float32":
            return frozenset()
        return frozenset(facts.joint.nodes) - facts.joint.forward

    def lengths(self, kept: Sequence[Sequence[fx.Node]], facts: Facts) -> Lengths | None:
        """Return the longest lengths for which the kept values stay small; None if lengths do not matter."""
        now = Lengths.of_current_call(facts.joint.graph)
        if not now or not any(kept) or self.options.save != "auto" or self.options.offload == "attention":
            return None
        return now.longest_valid(lambda longer: are_small(kept, facts), 1 + 1 / (4 * max(1, *now.numbers.values())))

    def kept(self, facts: Facts, between: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the values that each stage keeps.

        If `save` is "auto", keep the offloaded values, and without a budget also attention results while they are
        small. With collectives, size does not decide: sequences may differ in length between ranks, but which
        values are gathered, and when, must not.
        """
        if self.options.save != "auto":
            return self._kept_at(self.options.save, facts, between)
        results, least = self._kept_at("attention", facts, between), min_save_level(self.options.offload)
        is_alone = facts.collectives is None
        keeps = is_alone and self.options.memory_budget is None and are_small(results, facts)
        return results if keeps or least == "attention" else self._kept_at(least, facts, between)

    def _kept_at(self, level: str, facts: Facts, between: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the values that each stage keeps at a level of `save`."""
        kept = tuple(kept_values(stage, facts, level) for stage in facts.stages)
        if level == "inputs":
            return kept
        extra = between.recomputed_and_read(facts.stages, kept)
        return tuple((*nodes, *extra_nodes) for nodes, extra_nodes in zip(kept, extra, strict=True))

    def offloaded(self, facts: Facts, between: InterloopValues) -> tuple[tuple[fx.Node, ...], ...]:
        """Return values that are offloaded to the host if they are kept: sequence-shaped values at cuts, and the
        values that the `save` level named by `offload` keeps. Graph outputs stay on the device.
        """
        if self.options.offload == "none":
            return ()
        outputs = set(facts.joint.outputs)
        kept = self._kept_at(self.options.offload, facts, between)
        rows = (
            tuple(node for node in stage.outputs if facts.access.storage_class(node) is StorageClass.ROWS)
            for stage in facts.stages
        )
        return tuple(
            tuple(node for node in (*stage_rows, *stage_kept) if node not in outputs)
            for stage_rows, stage_kept in zip(rows, kept, strict=True)
        )

    def dropped(self, facts: Facts) -> tuple[tuple[fx.Node, ...], ...]:
        """Return values at the cuts that are not boundaries and that only the next stage reads."""
        every = 1 if self.options.keep_every == "auto" else self.options.keep_every
        stages = facts.stages
        if every == 1 or not any(is_tensor(node) for node in facts.joint.gradients if isinstance(node, fx.Node)):
            return ()
        is_boundary = [(number + 1) % every == 0 for number in range(len(stages))]
        return tuple(
            () if is_last or boundary else tuple(node for node in stage.outputs if _is_passed_on(node, number, facts))
            for number, (stage, boundary) in enumerate(zip(stages, is_boundary, strict=True))
            for is_last in (number == len(stages) - 1,)
        )


def are_small(kept: Sequence[Sequence[fx.Node]], facts: Facts) -> bool:
    """Return whether the values are small compared to the model and its gradients."""
    has_gradients = any(isinstance(node, fx.Node) for node in facts.joint.gradients)
    return has_gradients and sum(bytes_like(node.meta[VALUE]) for nodes in kept for node in nodes) <= SMALL * model_bytes(facts)


def _is_passed_on(node: fx.Node, number: int, facts: Facts) -> bool:
    """Return whether only a stage and its successor use this sequence-shaped output."""
    stage, following = facts.stages[number : number + 2]
    in_both_stages = {*stage.forward, *stage.backward, *following.forward, *following.backward}
    return (
        facts.access.storage_class(node) is StorageClass.ROWS
        and node not in facts.joint.outputs
        and node not in facts.joint.gradients
        and node not in stage.gradients
        and all(user in in_both_stages for user in node.users)
    )
