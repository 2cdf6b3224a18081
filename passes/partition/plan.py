"""How large is a chunk, and what is kept from the forward half?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import AxisFacts, Facts, Form, known
from streamfx.ir.joint import is_tensor
from streamfx.ir.lengths import Lengths
from streamfx.ir.plan import AutoChunk, ChunkPlan, ChunkSize
from streamfx.ir.sizes import Size, numeric, product
from streamfx.ir.stage import Stage
from streamfx.options import Options
from streamfx.passes.operators.traits import is_moved_elements
from streamfx.passes.partition.saving import kept_values

SMALL = 0.5  # of the bytes of a model and its gradients: so much may be kept for speed where no budget is given
ALIVE_TOGETHER = 3  # of the values that a chunk's body makes, about one in so many is alive at its peak


@dataclass(frozen=True)
class Plan:
    name: ClassVar[str] = "plan"
    options: Options

    def apply(self, facts: Facts) -> Facts:
        plan = ChunkPlan(
            chunk_sizes=tuple(self.chunk_size(stage, facts) for stage in facts.stages),
            kept=self.kept(facts),
            narrow=self.narrow(facts),
            dropped=self.dropped(facts),
            offloaded=self.offloaded(facts),
        )
        lengths = self.lengths(plan.kept, facts)
        return replace(facts, found_plan=plan, lengths=lengths or facts.lengths)

    def narrow(self, facts: Facts) -> frozenset[fx.Node]:
        """Sums that grow in their own type where that is asked for: those of gradients. Values are rounded once, as in eager."""
        if self.options.accumulate == "float32":
            return frozenset()
        return frozenset(facts.joint.nodes) - facts.joint.forward

    def lengths(self, kept: Sequence[Sequence[fx.Node]], facts: Facts) -> Lengths | None:
        """The longest lengths for which what is kept is small, where it is kept for that; None where nothing depends on them."""
        now = Lengths.now(facts.joint.graph)
        if not now or not any(kept) or self.options.save != "auto":
            return None
        return now.furthest(lambda longer: are_small(kept, facts), 1 + 1 / (4 * max(now.numbers.values())))

    def chunk_size(self, stage: Stage, facts: Facts) -> ChunkSize:
        asked = self.options.loss_chunk_size if is_loss_stage(stage, facts) else self.options.chunk_size
        granule = known(facts.axes.sequence).granule
        if asked != "auto":
            return -(-asked // granule) * granule
        row_bytes = _row_bytes((*stage.forward, *stage.backward), facts) // ALIVE_TOGETHER
        stream_bytes = max((_row_bytes(other.outputs, facts) for other in facts.stages), key=numeric)
        return AutoChunk(row_bytes, stream_bytes, granule=granule)

    def kept(self, facts: Facts) -> tuple[tuple[fx.Node, ...], ...]:
        """What each stage keeps; where it is left open and there is no budget, results of attention while they are small."""

        def at(level: str) -> tuple[tuple[fx.Node, ...], ...]:
            return tuple(kept_values(stage, facts, level) for stage in facts.stages)

        if self.options.save != "auto":
            return at(self.options.save)
        results = at("attention")
        return results if self.options.memory_budget is None and are_small(results, facts) else at("inputs")

    def offloaded(self, facts: Facts) -> tuple[tuple[fx.Node, ...], ...]:
        """Rows at the cuts that wait on the host, those of them that are kept."""
        if self.options.offload == "none":
            return ()
        outputs = set(facts.joint.outputs)
        return tuple(
            tuple(node for node in stage.outputs if facts.demand.form(node) is Form.ROWS and node not in outputs)
            for stage in facts.stages
        )

    def dropped(self, facts: Facts) -> tuple[tuple[fx.Node, ...], ...]:
        """Values at the cuts that are not boundaries: those that nobody but the next stage asks for."""
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
    """Whether values take little memory beside the model and its gradients."""
    gradients = [node for node in facts.joint.gradients if isinstance(node, fx.Node)]
    model = sum(bytes_like(node.meta.get("val")) for node in (*facts.joint.sources, *gradients))
    return bool(gradients) and sum(bytes_like(node.meta["val"]) for nodes in kept for node in nodes) <= SMALL * model


def _is_passed_on(node: fx.Node, number: int, facts: Facts) -> bool:
    """Whether a stage's output is rows that only it and the next stage use."""
    own, following = facts.stages[number : number + 2]
    near = {*own.forward, *own.backward, *following.forward, *following.backward}
    return (
        facts.demand.form(node) is Form.ROWS
        and node not in facts.joint.outputs
        and node not in facts.joint.gradients
        and node not in own.gradients
        and all(user in near for user in node.users)
    )


def is_loss_stage(stage: Stage, facts: Facts) -> bool:
    """Whether a stage has no attention and sums over the sequence: the head and the loss."""
    forms = [form for node in stage.forward for form in facts.demand.forms.get(node, ())]
    has_keys = any(node in facts.causality.spans for node in stage.forward)
    return Form.SUM in forms and not has_keys


def _row_bytes(nodes: Iterable[fx.Node], facts: Facts) -> Size:
    """Bytes that one row of the sequence takes in all values that `nodes` make by rows; scores have all keys in a row."""
    total: Size = 0
    for node in nodes:
        if is_tensor(node) and not is_moved_elements(node) and facts.demand.form(node) in (Form.ROWS, Form.PAIR):
            total = total + _elements_of_a_row(node, facts.axes) * node.meta["val"].element_size()
    return total


def _elements_of_a_row(node: fx.Node, axes: AxisFacts) -> Size:
    table, sequence = axes.table, known(axes.sequence)
    atoms = [atom for dim in axes.shapes[node] for atom in table.resolve(dim)]
    rows = next((i for i, atom in enumerate(atoms) if atom in sequence.members), None)
    elements = product(table.size(atom) for i, atom in enumerate(atoms) if i != rows)
    block = 1 if rows is None else sequence.block(atoms[rows])
    return elements if block == 1 else -(-elements // block)
