"""Compute the gradient of the last stage in its forward loop, together with the loss.

A gradient that is linear in the loss's tangent, a scalar, equals that scalar times the gradient for a tangent of one. So
the backward graph of the last stage can run in its forward loop, where the logits exist, and the backward loop only
scales its results: the head is computed once instead of twice.

    d_hidden = f(hidden, tangent)   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden = d_1 * tangent

If the loss is a function of sums over each sequence (preference losses), the scale is one number per sequence, which is
known only after the loop. The gradient is scaled in the same way:

    d_hidden[b] = f(hidden[b], g[b])   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden[b] = d_1[b] * g[b]

A weight's gradient is summed over sequences and not homogeneous in such a number, so a trained head is then computed
twice. Computing it once always saves work. It keeps the gradient of the last stage's input instead of the input. But if
the rewrite needs another last stage, one more boundary is kept: if no plan fits into a memory budget, the passes run
again without that (`may_cut`).

This is the only rewrite of the joint graph after the analyses: it scales the values that leave the last stage, so it needs
stages. It also records the axes, storage classes and stages of the new nodes, so that no analysis runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import Facts, Role, StorageClass
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.stage import Stage
from streamfx.passes.analysis.homogeneity import Homogeneous, homogeneous_gradients
from streamfx.passes.ops.traits import is_product
from streamfx.passes.partition.cotangent_scaling import Scaling
from streamfx.passes.partition.loss_stage import with_loss_stage


@dataclass(frozen=True)
class LossGradient:
    """The pass. If `may_cut`, it may divide the last stage into two, so that the head has a stage."""

    name: ClassVar[str] = "loss_gradient"
    may_cut: bool = True

    def apply(self, facts: Facts) -> Facts:
        """Move the last stage's backward graph to its forward loop, for the first choice of stages that allows it."""
        for candidate in _candidate_stages(facts, self.may_cut):
            stage = candidate.stages[-1]
            if not stage.backward or not _saves_work(stage, candidate):
                continue
            homogeneous = homogeneous_gradients(stage, candidate)
            if homogeneous and _have_one_sequence_dim(homogeneous, candidate):
                return _move_to_forward(candidate, homogeneous)
        return facts


def _candidate_stages(facts: Facts, may_cut: bool) -> Iterator[Facts]:
    """Yield the facts unchanged, and with a separate last stage for the head: first those with a product in the last stage."""
    stages = facts.stages
    if stages:
        with_separate_stage = (
            separated
            for trained_heads in (False, True)
            if may_cut and (separated := with_loss_stage(facts, trained_heads)) is not None
        )
        yield from (facts, *with_separate_stage) if any(map(is_product, stages[-1].forward)) else (*with_separate_stage, facts)


def _saves_work(stage: Stage, facts: Facts) -> bool:
    """Return whether the rewrite saves work: the stage has no attention, runs in one loop, and computes a sum."""
    return all(
        Role.KEYS not in facts.access.roles.get(node, {}).values()
        and facts.access.storage_classes[node][0] is not StorageClass.KEYSUM
        and not (node in stage.backward and facts.axes.is_running(node))  # its loop must run in reverse order
        for node in (*stage.forward, *stage.backward)
        if node in facts.access.storage_classes
    ) and any(
        storage_class is StorageClass.SUM
        for node in stage.forward
        for storage_class in facts.access.storage_classes.get(node, ())
    )


def _have_one_sequence_dim(homogeneous: Sequence[Homogeneous], facts: Facts) -> bool:
    """Return whether each gradient and scale has at most one sequence dimension, as `Scaling` requires."""
    axes = facts.axes

    def sequence_dim_count(node: fx.Node) -> int:
        """Return the number of sequence dimensions of a value."""
        return sum(axes.sequence_atom(axes.table.resolve(dim)) is not None for dim in axes.shapes[node])

    return all(sequence_dim_count(node) <= 1 for item in homogeneous for node in (item.gradient, item.scale))


def _move_to_forward(facts: Facts, homogeneous: Sequence[Homogeneous]) -> Facts:
    """Replace the scales of the last stage's backward graph by ones, and scale the gradients that leave it."""
    inside = set(facts.stages[-1].backward)
    scaling = Scaling(facts)
    ones: list[fx.Node] = []
    for scale in dict.fromkeys(item.scale for item in homogeneous):
        path = {node for item in homogeneous if item.scale is scale for node in item.operators}
        first = next(node for node in facts.joint.graph.nodes if node in path and scale in node.all_input_nodes)
        ones += scaling.ones_like(scale, first)
        scale.replace_all_uses_with(ones[-1], delete_user_cb=path.__contains__, propagate_meta=False)
    scaled: list[list[fx.Node]] = []
    for item in homogeneous:
        product = scaling.product(item.gradient, item.scale, item.row_mask)
        outside = {user for user in item.gradient.users if user not in inside and user not in product}
        item.gradient.replace_all_uses_with(product[-1], delete_user_cb=outside.__contains__, propagate_meta=False)
        scaled.append(product)
    gradients = outputs_of(facts.joint.graph)[len(facts.joint.outputs) :]
    joint = replace(facts.joint, gradients=gradients)
    facts = replace(facts, joint=joint, found_axes=scaling.axes, found_access=scaling.access)
    return replace(facts, found_stages=_stages_after(facts, homogeneous, ones, scaled))


def _stages_after(
    facts: Facts, homogeneous: Sequence[Homogeneous], ones: Sequence[fx.Node], scaled: Sequence[Sequence[fx.Node]]
) -> tuple[Stage, ...]:
    """Return the stages after moving each scaling product to the first backward graph that uses it."""
    *stages, last = facts.stages
    moved = {node for item in homogeneous for node in item.operators}
    remaining = tuple(node for node in last.backward if node not in moved)
    for group in (remaining, *scaled) if stages else ():
        users = {user for node in group for user in node.users}
        stage_index = next((i for i in reversed(range(len(stages))) if not users.isdisjoint(stages[i].backward)), len(stages) - 1)
        stages[stage_index] = replace(stages[stage_index], backward=(*group, *stages[stage_index].backward))
    gradients = {node for node in facts.joint.gradients if isinstance(node, fx.Node)}
    for stage_index, stage in enumerate(stages):
        inside, new = set(stage.backward), [node for group in (remaining, *scaled) for node in group if node in stage.backward]
        leaving = [node for node in new if is_tensor(node) and (node in gradients or not inside.issuperset(node.users))]
        stages[stage_index] = replace(stage, gradients=tuple(dict.fromkeys((*leaving, *stage.gradients))))
    last = replace(
        last,
        backward=(*ones, *(node for node in last.backward if node in moved)),
        gradients=tuple(item.gradient for item in homogeneous),
        gradient_in_forward=True,
    )
    return (*stages, last)
