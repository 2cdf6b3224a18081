"""What the backward half takes of all rows of the forward half, and is known before any gradient: one row, or a sum of rows.

    k = norm(x) @ w        the last of many blocks hands on a gradient that is made of its own row of k, and the loop
    row = k[:, :, n]       that goes back through the other blocks begins with it

Made in the backward half such a row asks for a loop over all rows of its own, which makes `k` again and stores what the next
loop needs of it. The forward loop has `k` at hand, and a row takes little to keep.
"""

from __future__ import annotations

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_tensor
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_expensive, is_random, producer_of
from streamfx.passes.partition.value_table import NOT_IN_LOOPS


def early_sums(number: int, facts: Facts) -> list[fx.Node]:
    """Those of a stage's backward stretch that its forward loops make on the way: of rows alone, without another product.

    Only what a loop of the backward half waits for, and what is shorter by half than the rows that it is made of.
    """
    stage = facts.stages[number]
    if stage.gradient_in_forward:
        return []
    rows = {node for node in _given(stage, facts.stages[:number]) if _has_form(node, StorageClass.ROWS, facts)}
    sums: list[fx.Node] = []
    for node in stage.backward:
        sources = [source for source in node.all_input_nodes if is_tensor(source) and not _is_at_hand(source, facts)]
        if not sources or not rows.issuperset(sources) or not _is_on_the_way(node, facts):
            continue
        if _has_form(node, StorageClass.ROWS, facts):
            rows.add(node)
        elif _has_form(node, StorageClass.SUM, facts) and _is_short(node, sources) and _is_waited_for(node, stage, facts):
            sums.append(node)
    return sums


def _given(stage: Stage, earlier: tuple[Stage, ...]) -> list[fx.Node]:
    """What the forward loops of a stage make, and what they get from those before."""
    return [*stage.forward, *(node for other in earlier for node in other.outputs)]


def _has_form(node: fx.Node, form: StorageClass, facts: Facts) -> bool:
    return is_tensor(node) and node not in facts.axes.static and facts.demand.form(node) is form


def _is_at_hand(node: fx.Node, facts: Facts) -> bool:
    """Whether no loop makes a value, and no gradient: what is given, and what is made of positions."""
    return node in facts.axes.static or (node.op != "call_function" and node not in facts.joint.tangents)


def _is_on_the_way(node: fx.Node, facts: Facts) -> bool:
    """Whether a loop from the first row to the last makes a value with each chunk, and without a product."""
    producer = producer_of(node)
    return not (is_expensive(node) or is_random(producer) or facts.axes.is_running(producer))


def _is_short(node: fx.Node, sources: list[fx.Node]) -> bool:
    return 2 * bytes_like(node.meta[VALUE]) <= min(bytes_like(source.meta[VALUE]) for source in sources)


def _is_waited_for(node: fx.Node, stage: Stage, facts: Facts) -> bool:
    """Whether something in a loop of the backward stretch is made of a value, or of what is made of it between loops."""
    own, todo, seen = set(stage.backward), [node], set[fx.Node]()
    while todo:
        for user in todo.pop().users:
            if user not in own or user in seen:
                continue
            if any(form not in NOT_IN_LOOPS for form in facts.demand.forms.get(user, ())):
                return True
            seen.add(user)
            todo.append(user)
    return False
