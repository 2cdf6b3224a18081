"""Can the loss stage find its gradient along with the loss?

A gradient that is linear in the one number that arrives from outside (the loss's tangent) is that number times the gradient
for the number one. So the last stage's backward stretch may run right in its forward loop, where the logits already are, and
only needs scaling later: the head is computed once instead of twice.

    d_hidden = f(hidden, tangent)   ->   forward: d_1 = f(hidden, 1)    backward: d_hidden = d_1 * tangent
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.facts import AxisFacts, DemandFacts, Facts, Form, Role
from streamfx.ir.joint import JointGraph, is_tensor, tensor_operands
from streamfx.ir.signature import Letter, LetterShape, Signature
from streamfx.ir.stage import Stage, StageFacts
from streamfx.passes.building import GraphWriter
from streamfx.passes.fillers import is_zero
from streamfx.passes.linear import LINEAR_IN, MOVES_ELEMENTS

aten = torch.ops.aten


@dataclass(frozen=True)
class LossGradient:
    name: ClassVar[str] = "loss gradient"

    def apply(self, facts: Facts) -> Facts:
        stages: tuple[Stage, ...] = facts.stages.stages
        if not stages or not stages[-1].backward:
            return facts
        tangent = scalar_tangent(stages[-1], facts)
        if tangent is None or not _is_worth_it(stages[-1], facts):
            return facts
        return _moved(facts, tangent)


def scalar_tangent(stage: Stage, facts: Facts) -> fx.Node | None:
    """The only number from outside that the stage's backward stretch is driven by, if all of it is linear in that."""
    inside = set(stage.backward)
    tangents = {source for node in stage.backward for source in node.all_input_nodes if source in facts.joint.tangents}
    if len(tangents) != 1:
        return None
    (tangent,) = tangents
    value = tangent.meta["val"]
    if value.dim() != 0:
        return None
    driven = {tangent}
    for node in stage.backward:
        if any(source in driven for source in node.all_input_nodes):
            if not _is_linear(node, driven):
                return None
            driven.add(node)
    used = [node for node in stage.gradients if is_tensor(node)]
    if any(node not in driven for node in used) or any(_is_half(node) for node in driven):
        return None
    return tangent if any(user in inside for user in tangent.users) else None


def _is_half(node: fx.Node) -> bool:
    """In float16 a gradient for the number one would vanish: loss scaling is there to prevent that."""
    return is_tensor(node) and bool(node.meta["val"].dtype == torch.float16)


def _is_linear(node: fx.Node, driven: set[fx.Node]) -> bool:
    """Whether a result is linear in the driven operands, all others being fixed."""
    operands = tensor_operands(node)
    positions = [i for i, operand in enumerate(operands) if operand in driven]
    if not positions:  # a result of a tuple-valued operator
        return False
    if node.target in MOVES_ELEMENTS:
        return True
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default):
        return len(positions) == len(operands) and all(is_tensor(item) for item in node.args[:2] if isinstance(item, fx.Node))
    if node.target is aten.where.self:
        return positions == [1, 2] or (0 not in positions and _others_are_zero(operands, positions))
    if node.target is aten._to_copy.default:
        return bool(node.meta["val"].is_floating_point())
    return len(positions) == 1 and positions[0] in LINEAR_IN.get(node.target, ())


def _others_are_zero(operands: tuple[fx.Node, ...], positions: list[int]) -> bool:
    others = [operand for i, operand in enumerate(operands) if i not in (0, *positions)]
    return all(is_zero(operand) for operand in others)


def _is_worth_it(stage: Stage, facts: Facts) -> bool:
    """Only for a stage without attention, in one loop: nothing else would be saved."""
    assert facts.demand is not None
    return all(
        Role.KEYS not in facts.demand.roles.get(node, {}).values()
        and facts.demand.forms[node][0] is not Form.KEYSUM
        and not (node in stage.backward and _is_scan(node, facts))
        for node in (*stage.forward, *stage.backward)
        if node in facts.demand.forms
    ) and any(form is Form.SUM for node in stage.forward for form in facts.demand.forms.get(node, ()))


def _is_scan(node: fx.Node, facts: Facts) -> bool:
    """Whether a node asks for the direction in which its own half's loops run."""
    signature = facts.axes.signatures.get(node)  # type: ignore[union-attr]
    return signature is not None and bool(signature.scans)


def _moved(facts: Facts, tangent: fx.Node) -> Facts:
    """Drive the last stage's backward stretch by one, and scale what leaves it."""
    assert facts.axes is not None and facts.demand is not None
    stage = facts.stages.stages[-1]
    inside = set(stage.backward)
    writer = GraphWriter(facts.joint.graph)
    value = tangent.meta["val"]
    one = writer.before(stage.backward[0]).call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    tangent.replace_all_uses_with(one, delete_user_cb=lambda user: user in inside, propagate_meta=False)
    after = facts.joint.graph.output_node() if len(facts.stages.stages) == 1 else facts.stages.stages[-2].backward
    point = after if isinstance(after, fx.Node) else (after[0] if after else facts.joint.graph.output_node())
    axes, demand = _Additions(facts.axes), _DemandAdditions(facts.demand)
    axes.add(one, Signature((), ((),)), {})
    demand.add(one, {}, Form.SCALAR)
    scaled = []
    for node in (n for n in stage.gradients if is_tensor(n)):
        product = writer.before(point).call(aten.mul.Tensor, node, tangent)
        node.replace_all_uses_with(
            product,
            delete_user_cb=lambda user, own=product: user not in inside and user is not own,
            propagate_meta=False,  # type: ignore[misc]
        )
        letters: LetterShape = tuple((i,) for i in range(len(facts.axes.shapes[node])))
        axes.add(product, Signature((letters, ()), (letters,)), dict(enumerate(facts.axes.shapes[node])))
        dims = facts.axes.sequence_dims(facts.axes.shapes[node])
        demand.add(product, dict.fromkeys(dims, Role.ROWS), Form.ROWS if dims else Form.SCALAR)
        scaled.append(product)
    return _facts_after(facts, axes.facts, demand.facts, one, scaled, point)


def _facts_after(
    facts: Facts, axes: AxisFacts, demand: DemandFacts, one: fx.Node, scaled: list[fx.Node], point: fx.Node
) -> Facts:
    stages: tuple[Stage, ...] = facts.stages.stages
    last = replace(stages[-1], backward=(one, *stages[-1].backward), gradient_in_forward=True)
    if len(stages) > 1:
        previous = replace(stages[-2], backward=(*scaled, *stages[-2].backward))
        gradients = {gradient for gradient in facts.joint.graph.output_node().args[0] if isinstance(gradient, fx.Node)}  # type: ignore[union-attr]
        left = tuple(node for node in scaled if node in gradients or any(u not in previous.backward for u in node.users))
        stages = (*stages[:-2], replace(previous, gradients=tuple(dict.fromkeys((*left, *previous.gradients)))), last)
    else:
        stages = (last,)
    results = facts.joint.graph.output_node().args[0]
    joint: JointGraph = replace(facts.joint, gradients=tuple(results[len(facts.joint.outputs) :]))  # type: ignore[index,arg-type]
    return replace(facts, joint=joint, axes=axes, demand=demand, stages=StageFacts(stages))


class _Additions:
    """Axis facts of new operators beside the old ones."""

    def __init__(self, facts: AxisFacts) -> None:
        self.shapes, self.results = dict(facts.shapes), dict(facts.results)
        self.signatures, self.letters = dict(facts.signatures), dict(facts.letters)
        self._old = facts

    def add(self, node: fx.Node, signature: Signature, letters: dict[Letter, tuple[int, ...]]) -> None:
        shape = tuple(tuple(atom for letter in dim for atom in letters[letter]) for dim in signature.results[0])
        self.shapes[node], self.results[node] = shape, (shape,)
        self.signatures[node], self.letters[node] = signature, letters

    @property
    def facts(self) -> AxisFacts:
        return replace(self._old, shapes=self.shapes, results=self.results, signatures=self.signatures, letters=self.letters)


class _DemandAdditions:
    def __init__(self, facts: DemandFacts) -> None:
        self.roles, self.forms = dict(facts.roles), dict(facts.forms)
        self._old = facts

    def add(self, node: fx.Node, roles: dict[Letter, Role], form: Form) -> None:
        self.roles[node], self.forms[node] = roles, (form,)

    @property
    def facts(self) -> DemandFacts:
        return replace(self._old, roles=self.roles, forms=self.forms)
