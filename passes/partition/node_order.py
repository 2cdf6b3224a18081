"""Reorder forward and backward operators before the graph is cut into stages, so that few bytes are alive at the cuts.

The traced order is one of many topological orders: it may compute a value long before its first use. Each function returns
the same nodes in another topological order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.joint import is_tensor
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_expensive, only_moves_elements, producer_of
from streamfx.torch_private.graph_nodes import operands_of


def move_elements_after_producers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each element of a tuple (`getitem`) right after the operator that returns the tuple.

    Otherwise a cut could separate them. For example, the trace extracts a recurrence's final state at its end if the state is
    only returned.
    """
    sort_key: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        sort_key[node] = sort_key.get(producer_of(node), position)
    return sorted(sort_key, key=sort_key.__getitem__)


def move_before_first_use(nodes: Sequence[fx.Node], tangents: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the backward nodes, with each node that depends on no tangent right before its first use.

    Such a node reads forward values only, perhaps those of an early layer, whose gradients run last. But the trace may have
    it before all gradients, where its result would be alive during the backward graphs of all later layers.
    """
    dependent = set(tangents)
    for node in nodes:
        if not dependent.isdisjoint(operands_of(node)):
            dependent.add(node)
    return move_before_use(nodes, set(nodes) - dependent)


def move_before_use(nodes: Sequence[fx.Node], moved: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each of the `moved` operators right before its first user; without users it stays in place."""
    position = {node: i for i, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node in moved:
            position[node] = min((position[user] for user in node.users if user in position), default=position[node])
    return sorted(nodes, key=lambda node: (position[node], node not in moved))


def move_last_stage_first(nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], last_stage: int) -> list[fx.Node]:
    """Return the backward operators with those of the last stage first, so that a cut can separate them from the others.

    `stage_of` maps forward values to the index of their stage. If a model is called twice, the trace has all layers of one
    call before the head of the other. Operators are moved after those of the last stage in four cases:
    - products whose result no operator combines with values of the last stage, and operators that depend on them. But a
      product that shrinks a dependent value of the last stage stays: else the gradient of the logits would be stored;
    - operators that read a forward value of an earlier stage, and operators that depend on them;
    - operators used only by moved operators that do not depend on the last stage;
    - operators used only by moved operators that reshape their operand or write it into zeros: else the gradient of a
      final state, with zeros for all other rows, would be stored.
    """
    last = {node for node, stage in stage_of.items() if stage == last_stage}
    earlier = stage_of.keys() - last
    used_by_last: set[fx.Node] = set()  # operators that read values of the last stage, and their ancestors
    dependent: set[fx.Node] = set()  # these, and their descendants
    moved_back: set[fx.Node] = set()
    for node in reversed(nodes):
        if not last.isdisjoint(operands_of(node)) or not used_by_last.isdisjoint(node.users):
            used_by_last.add(node)
    for node in nodes:
        operands = operands_of(node)
        if node in used_by_last or not dependent.isdisjoint(operands):
            dependent.add(node)
        is_moved_product = is_expensive(node) and node not in used_by_last and not _shrinks_largest_operand(node, dependent)
        if is_moved_product or not earlier.isdisjoint(operands) or not moved_back.isdisjoint(operands):
            moved_back.add(node)
    reshaped: set[fx.Node] = set()
    for node in reversed(nodes):
        is_reshaped = only_moves_elements(node) or is_kind(node, Kind.EMBED) or node not in dependent
        if is_reshaped and node not in moved_back and moved_back.issuperset(node.users):
            reshaped.add(node)
            moved_back.add(node)
    return move_before_use(sorted(nodes, key=moved_back.__contains__), reshaped)


def _shrinks_largest_operand(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Return whether a product's result has fewer bytes than its largest operand among the values `dependent`."""
    largest = max((bytes_like(source.meta.get(VALUE)) for source in node.all_input_nodes if source in dependent), default=0)
    return is_tensor(node) and bytes_like(node.meta[VALUE]) < largest
