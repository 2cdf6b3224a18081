"""Compute the last stage's gradient in its forward loop, together with the loss.

A gradient that is linear in the loss's tangent, a scalar, equals that scalar times the gradient for tangent one. So
the last stage's backward graph can run in its forward loop, where the logits already are, and only needs scaling
later: the head is computed once instead of twice.

    d_hidden = f(hidden, tangent)   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden = d_1 * tangent

If the loss is a function of sums over each sequence (preference losses), the scale of a row's gradient is one
number per sequence, known only after the loop. The gradient is scaled by it in the same way:

    d_hidden[b] = f(hidden[b], g[b])   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden[b] = d_1[b] * g[b]

A weight's gradient has been summed over sequences and is not homogeneous in such a number, so a trained head runs
in two passes. A single pass is always less work; it keeps the gradient of the last stage's input instead of the
input itself. Only if the last stage has to be cut differently is there one more boundary to keep: if no other plan
fits into a memory budget, this cut is given up.

This is the only rewrite of the joint graph after the analyses, because the scaled values are those that leave the
last stage. It also records the axes, storage classes and stages of the new nodes, so that no analysis runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import Facts, Role, StorageClass
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.stage import Stage
from streamfx.passes.analysis.homogeneity import Homogeneous, multiples
from streamfx.passes.ops.traits import is_product
from streamfx.passes.partition.cotangent_scaling import Scaling
from streamfx.passes.partition.loss_stage import with_loss_stage


@dataclass(frozen=True)
class LossGradient:
    """Applies the rewrite; `may_cut` says whether it may cut a separate last stage for the head."""

    name: ClassVar[str] = "loss_gradient"
    may_cut: bool = True

    def apply(self, facts: Facts) -> Facts:
        """Move the last stage's backward graph to its forward loop, for the first cut that allows it."""
        for cut in _candidate_cuts(facts, self.may_cut):
            stage = cut.stages[-1]
            if not stage.backward or not _saves_work(stage, cut):
                continue
            homogeneous = multiples(stage, cut)
            if homogeneous and _have_one_sequence_dim(homogeneous, cut):
                return _move_to_forward(cut, homogeneous)
        return facts


def _candidate_cuts(facts: Facts, may_cut: bool) -> Iterator[Facts]:
    """Yield the given stages and cuts with a separate last stage, first those with a product in the last stage."""
    stages = facts.stages
    if stages:
        with_separate_stage = (
            cut for trained_heads in (False, True) if may_cut and (cut := with_loss_stage(facts, trained_heads)) is not None
        )
        yield from (facts, *with_separate_stage) if any(map(is_product, stages[-1].forward)) else (*with_separate_stage, facts)


def _saves_work(stage: Stage, facts: Facts) -> bool:
    """Return whether the stage has no attention and runs in one loop: otherwise nothing is saved."""
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
    """Return whether each gradient and driver has at most one sequence dimension, as `Scaling` requires."""
    axes = facts.axes

    def sequence_dim_count(node: fx.Node) -> int:
        """Return the number of sequence dimensions of a value."""
        return sum(axes.sequence_atom(axes.table.resolve(dim)) is not None for dim in axes.shapes[node])

    return all(sequence_dim_count(node) <= 1 for multiple in homogeneous for node in (multiple.gradient, multiple.driver))


def _move_to_forward(facts: Facts, homogeneous: Sequence[Homogeneous]) -> Facts:
    """Replace the tangents of the last stage's backward graph by ones, and scale the gradients that leave it."""
    inside = set(facts.stages[-1].backward)
    scaling = Scaling(facts)
    ones: list[fx.Node] = []
    for driver in dict.fromkeys(multiple.driver for multiple in homogeneous):
        path = {node for multiple in homogeneous if multiple.driver is driver for node in multiple.between}
        first = next(node for node in facts.joint.graph.nodes if node in path and driver in node.all_input_nodes)
        ones += scaling.ones_like(driver, first)
        driver.replace_all_uses_with(ones[-1], delete_user_cb=path.__contains__, propagate_meta=False)
    scaled: list[list[fx.Node]] = []
    for multiple in homogeneous:
        product = scaling.product(multiple.gradient, multiple.driver, multiple.selection)
        outside = {user for user in multiple.gradient.users if user not in inside and user not in product}
        multiple.gradient.replace_all_uses_with(product[-1], delete_user_cb=outside.__contains__, propagate_meta=False)
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
    moved = {node for multiple in homogeneous for node in multiple.between}
    staying = tuple(node for node in last.backward if node not in moved)
    for group in (staying, *scaled) if stages else ():
        users = {user for node in group for user in node.users}
        number = next((i for i in reversed(range(len(stages))) if not users.isdisjoint(stages[i].backward)), len(stages) - 1)
        stages[number] = replace(stages[number], backward=(*group, *stages[number].backward))
    gradients = {node for node in facts.joint.gradients if isinstance(node, fx.Node)}
    for number, stage in enumerate(stages):
        inside, new = set(stage.backward), [node for group in (staying, *scaled) for node in group if node in stage.backward]
        leaving = [node for node in new if is_tensor(node) and (node in gradients or not inside.issuperset(node.users))]
        stages[number] = replace(stage, gradients=tuple(dict.fromkeys((*leaving, *stage.gradients))))
    last = replace(
        last,
        backward=(*ones, *(node for node in last.backward if node in moved)),
        gradients=tuple(multiple.gradient for multiple in homogeneous),
        gradient_in_forward=True,
    )
    return (*stages, last)
