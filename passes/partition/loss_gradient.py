"""Compute the gradient of the last stage in its forward loop, together with the loss.

A gradient that is linear in the loss's tangent, a scalar, equals that scalar times the gradient for a tangent of one. So
the backward graph of the last stage can run in its forward loop, where the logits exist, and the backward loop only
scales its results: the head is computed once instead of twice.

    d_hidden = f(hidden, tangent)   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden = d_1 * tangent

If the loss is a function of sums over each sequence (preference losses), the scale is one number per sequence, which is
known only after the loop. The gradient is scaled in the same way:

    d_hidden[b] = f(hidden[b], g[b])   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden[b] = d_1[b] * g[b]

The factor (tangent, g) is the *cotangent scale*, and a gradient that is linear in it is *homogeneous* in it.

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
        """Return the facts with the last stage's backward graph in its forward loop, for the first choice of stages that allows
        it. Return the same facts if none does.
        """
        for candidate in _candidate_stages(facts, self.may_cut):
            stage = candidate.stages[-1]
            if not stage.backward or not _saves_work(stage, candidate):
                continue
            homogeneous = homogeneous_gradients(stage, candidate)
            if homogeneous and _have_one_sequence_dim(homogeneous, candidate):
                return _move_to_forward(candidate, homogeneous)
        return facts


def _candidate_stages(facts: Facts, may_cut: bool) -> Iterator[Facts]:
    """Yield the facts with each choice of the last stage: unchanged, and (if `may_cut`) with a separate stage for the head.

    The unchanged facts come first if their last stage has a product (matmul), otherwise last.
    """
    if not facts.stages:
        return
    with_separate_stage = (
        separated
        for trained_heads in (False, True)
        if may_cut and (separated := with_loss_stage(facts, trained_heads)) is not None
    )
    has_product = any(map(is_product, facts.stages[-1].forward))
    yield from (facts, *with_separate_stage) if has_product else (*with_separate_stage, facts)


def _saves_work(stage: Stage, facts: Facts) -> bool:
    """Return whether one loop can compute the loss and its gradient: the stage has no attention, and computes a sum.

    A recurrence in its backward graph is not possible either, because its loop must run in reverse order.
    """
    access = facts.access
    fits_in_one_loop = all(
        Role.KEYS not in access.roles.get(node, {}).values()
        and access.storage_classes[node][0] is not StorageClass.KEYSUM
        and not (node in stage.backward and facts.axes.is_running(node))
        for node in (*stage.forward, *stage.backward)
        if node in access.storage_classes
    )
    return fits_in_one_loop and any(StorageClass.SUM in access.storage_classes.get(node, ()) for node in stage.forward)


def _have_one_sequence_dim(homogeneous: Sequence[Homogeneous], facts: Facts) -> bool:
    """Return whether each gradient and scale has at most one sequence dimension, as `Scaling` requires."""
    axes = facts.axes

    def sequence_dim_count(node: fx.Node) -> int:
        """Return the number of sequence dimensions of a value."""
        return sum(axes.sequence_factor(axes.table.resolve(dim)) is not None for dim in axes.shapes[node])

    return all(sequence_dim_count(node) <= 1 for item in homogeneous for node in (item.gradient, item.scale))


def _move_to_forward(facts: Facts, homogeneous: Sequence[Homogeneous]) -> Facts:
    """Replace the scales of the last stage's backward graph by ones, and multiply the gradients that leave it by them.

    `d = f(hidden, scale)` becomes `d_1 = f(hidden, 1)`, which runs in the forward loop, and `d = d_1 * scale`, which runs in
    the backward graph. Changes the joint graph in place; returns the new facts. `homogeneous` pairs each gradient that the
    stage returns with its scale and the operators between them.
    """
    in_last_stage = set(facts.stages[-1].backward)
    scaling = Scaling(facts)
    ones: list[fx.Node] = []
    for scale in dict.fromkeys(item.scale for item in homogeneous):
        path = {node for item in homogeneous if item.scale is scale for node in item.operators}
        first_user = next(node for node in facts.joint.graph.nodes if node in path and scale in node.all_input_nodes)
        ones += scaling.ones_like(scale, first_user)
        scale.replace_all_uses_with(ones[-1], delete_user_cb=path.__contains__, propagate_meta=False)
    scaling_operators: list[list[fx.Node]] = []  # per gradient; the last one is the scaled gradient
    for item in homogeneous:
        operators = scaling.product(item.gradient, item.scale, item.row_mask)
        outside = {user for user in item.gradient.users if user not in in_last_stage and user not in operators}
        item.gradient.replace_all_uses_with(operators[-1], delete_user_cb=outside.__contains__, propagate_meta=False)
        scaling_operators.append(operators)
    gradients = outputs_of(facts.joint.graph)[len(facts.joint.outputs) :]
    joint = replace(facts.joint, gradients=gradients)
    facts = replace(facts, joint=joint, found_axes=scaling.axes, found_access=scaling.access)
    return replace(facts, found_stages=_stages_after(facts, homogeneous, ones, scaling_operators))


def _stages_after(
    facts: Facts,
    homogeneous: Sequence[Homogeneous],
    ones: Sequence[fx.Node],
    scaling_operators: Sequence[Sequence[fx.Node]],
) -> tuple[Stage, ...]:
    """Return the stages after the rewrite (`_move_to_forward`).

    The last stage keeps the `ones` and the operators that now run in the forward loop. Its other operators, and those that
    scale each gradient, move to the first backward segment to run that uses them. Each stage's `gradients` are updated.
    """
    *stages, last = facts.stages
    in_forward_loop = {node for item in homogeneous for node in item.operators}
    remaining = tuple(node for node in last.backward if node not in in_forward_loop)
    moved = (remaining, *scaling_operators)
    for operators in moved if stages else ():
        users = {user for node in operators for user in node.users}
        using_stages = (index for index in reversed(range(len(stages))) if not users.isdisjoint(stages[index].backward))
        stage_index = next(using_stages, len(stages) - 1)
        stages[stage_index] = replace(stages[stage_index], backward=(*operators, *stages[stage_index].backward))
    gradients = {node for node in facts.joint.gradients if isinstance(node, fx.Node)}
    for stage_index, stage in enumerate(stages):
        inside = set(stage.backward)
        new_nodes = [node for operators in moved for node in operators if node in inside]
        leaving = [node for node in new_nodes if is_tensor(node) and (node in gradients or not inside.issuperset(node.users))]
        stages[stage_index] = replace(stage, gradients=tuple(dict.fromkeys((*leaving, *stage.gradients))))
    last = replace(
        last,
        backward=(*ones, *(node for node in last.backward if node in in_forward_loop)),
        gradients=tuple(item.gradient for item in homogeneous),
        gradient_in_forward=True,
    )
    return (*stages, last)
