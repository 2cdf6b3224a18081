"""Find reductions over forward values (a row, a sum of rows) that the backward graph needs before its first loop.

    k = norm(x) @ w        the backward loop over blocks of rows starts with a gradient
    row = k[:, :, n]       that depends on one row of k

To compute this row, the backward graph would need another loop over the sequence, which recomputes `k` and stores values
for the next loop. The forward loop has `k`, and keeping a single row takes little memory. A reduction over rows has the storage
class SUM (a loop adds it up over chunks), a value with a row per row of the sequence the class ROWS.
"""

from __future__ import annotations

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_tensor, walk
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_expensive, is_random, producer_of
from streamfx.torch_private.graph_nodes import operands_of


def hoisted_reductions(stage_index: int, facts: Facts) -> list[fx.Node]:
    """Return the reductions (nodes of a stage's backward graph) that the stage's forward loops compute instead.

    The forward loops can compute them from forward values without further matrix products, a backward loop depends on them,
    and they have at most half of the bytes of each operand. An empty list for a loss stage that computes its gradient in its
    forward loop.
    """
    stage = facts.stages[stage_index]
    if stage.gradient_in_forward:
        return []
    forward_values = _available_values(stage, facts.stages[:stage_index])
    computable_rows = {node for node in forward_values if _has_storage_class(node, StorageClass.ROWS, facts)}
    reductions: list[fx.Node] = []
    for node in stage.backward:
        sources = [source for source in operands_of(node) if is_tensor(source) and not _needs_no_loop(source, facts)]
        if not sources or not computable_rows.issuperset(sources) or not _is_cheap_in_forward_loop(node, facts):
            continue
        if _has_storage_class(node, StorageClass.ROWS, facts):
            computable_rows.add(node)
        elif (
            _has_storage_class(node, StorageClass.SUM, facts)
            and _is_half_of_operands(node, sources)
            and _delays_backward_loop(node, stage, facts)
        ):
            reductions.append(node)
    return reductions


def _available_values(stage: Stage, earlier: tuple[Stage, ...]) -> list[fx.Node]:
    """Return the values available in a stage's forward loops: its own, and outputs of earlier stages."""
    return [*stage.forward, *(node for stage_before in earlier for node in stage_before.outputs)]


def _has_storage_class(node: fx.Node, storage_class: StorageClass, facts: Facts) -> bool:
    """Return whether a value has this storage class, and depends on data, not on positions alone."""
    return is_tensor(node) and node not in facts.axes.static and facts.access.storage_class(node) is storage_class


def _needs_no_loop(node: fx.Node, facts: Facts) -> bool:
    """Return whether a value exists before any loop: it is an input other than a tangent, or depends on positions only."""
    return node in facts.axes.static or (node.op != "call_function" and node not in facts.joint.tangents)


def _is_cheap_in_forward_loop(node: fx.Node, facts: Facts) -> bool:
    """Return whether a loop in forward order can compute a value chunk by chunk cheaply: no matrix product, draw or scan."""
    producer = producer_of(node)
    return not (is_expensive(node) or is_random(producer) or facts.axes.is_running(producer))


def _is_half_of_operands(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Return whether a value has at most half of the bytes of each of its operands `sources`."""
    return 2 * bytes_like(node.meta[VALUE]) <= min(bytes_like(source.meta[VALUE]) for source in sources)


def _delays_backward_loop(node: fx.Node, stage: Stage, facts: Facts) -> bool:
    """Return whether a loop of the stage's backward graph must wait for a value: it uses the value directly, or through
    operators between loops.
    """
    stage_nodes = set(stage.backward)
    users = walk(stage_nodes.intersection(node.users), lambda user: stage_nodes.intersection(user.users))
    return any(facts.access.is_in_loop(user) for user in users)
