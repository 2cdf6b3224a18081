"""Move operators with large results after the layers of another model, to the first use of these results.

A step may run two models one after the other and use the last values of both together:

    logits = head(hidden); others = teacher(ids); kl(logits, others)    logits [b t v] is alive at all cuts of the teacher
    others = teacher(ids); logits = head(hidden); kl(logits, others)    hidden [b t d] is

A connected group of operators between two attentions (a *segment* of the forward graph) moves to the first use of its results
if no attention depends on it, and if that use comes after a later attention. The group is split where the fewest bytes are
alive, and only its second part moves. If this point is the end of the group (a sum, a number per token), nothing moves.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from torch import fx

from streamfx.passes.ops.traits import is_expensive


def sink_operators(
    nodes: Sequence[fx.Node], attention_starts: Sequence[int], bytes_of: Callable[[fx.Node], int]
) -> list[fx.Node]:
    """Return the forward operators in an order in which fewer bytes are alive at attentions, where the graph is cut.

    `attention_starts`: the positions at which attentions begin. `bytes_of` returns the bytes of a sequence-shaped value (one that
    loops compute chunk by chunk), and 0 for others.
    """
    if len(attention_starts) < 2:
        return list(nodes)
    segments = [list(nodes[low:high]) for low, high in zip((0, *attention_starts), (*attention_starts, len(nodes)), strict=True)]
    segment_of = {node: bisect_right(attention_starts, i) for i, node in enumerate(nodes)}
    movable = _movable(nodes, {nodes[start] for start in attention_starts}, bytes_of)
    for segment_index in range(1, len(segments) - 1):
        for group in _groups(node for node in segments[segment_index] if node in movable):
            later_segments = {segment_of[user] for node in group for user in node.users if user in segment_of} - {segment_index}
            if not later_segments:
                continue
            target = min(later_segments)
            to_move = _part_to_move(group, segment_index, segment_of, bytes_of)
            moved = set(to_move)
            segments[segment_index] = [node for node in segments[segment_index] if node not in moved]
            uses = (i for i, node in enumerate(segments[target]) if not moved.isdisjoint(node.all_input_nodes))
            first_use = next(uses, 0)
            segments[target][first_use:first_use] = to_move
            segment_of.update(dict.fromkeys(to_move, target))
    return [node for segment in segments for node in segment]


def _movable(nodes: Sequence[fx.Node], attentions: set[fx.Node], bytes_of: Callable[[fx.Node], int]) -> set[fx.Node]:
    """Return the sequence-shaped values, and their descendants, on which no attention depends.

    `attentions`: the first operator of each attention. `bytes_of` is positive for sequence-shaped values, else 0.
    """
    needed_by_attention = set(attentions)
    for node in reversed(nodes):
        if not needed_by_attention.isdisjoint(node.users):
            needed_by_attention.add(node)
    movable: set[fx.Node] = set()
    for node in nodes:
        is_element = node.target is operator.getitem
        has_rows = bool(bytes_of(node)) or any(bytes_of(user) for user in node.users if user.target is operator.getitem)
        if node not in needed_by_attention and ((has_rows and not is_element) or not movable.isdisjoint(node.all_input_nodes)):
            movable.add(node)
    return movable


def _groups(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return the connected components of these nodes, each in order; an operand connects with its user."""
    groups: list[list[fx.Node]] = []
    for node in nodes:
        sources = set(node.all_input_nodes)
        connected = [group for group in groups if not sources.isdisjoint(group)]
        groups = [group for group in groups if sources.isdisjoint(group)]
        groups.append([*(item for group in connected for item in group), node])
    return groups


def _part_to_move(
    group: Sequence[fx.Node], segment_index: int, segment_of: dict[fx.Node, int], bytes_of: Callable[[fx.Node], int]
) -> list[fx.Node]:
    """Return the second part of a group, after the point at which the fewest bytes are alive; it may be empty.

    Of equal points, take the one after the most products (matmuls), then the first. `segment_index` is the group's segment,
    `segment_of` has the segment of each node.
    """
    products_before = [0, *accumulate(is_expensive(node) for node in group)]

    def bytes_waiting(index: int) -> float:
        """Return the bytes alive across later attentions if only `group[index:]` moves; infinite if that splits a tuple."""
        before, after = set(group[:index]), set(group[index:])
        if any(node.target is operator.getitem and node.args[0] in before for node in after):
            return float("inf")
        crossing = sum(bytes_of(node) for node in before if any(user not in before for user in node.users))
        operands_read = {source for node in after for source in node.all_input_nodes} - set(group)
        return crossing + sum(bytes_of(node) for node in operands_read if not _is_read_later(node, segment_index, segment_of))

    split_index = min(range(len(group) + 1), key=lambda index: (bytes_waiting(index), -products_before[index], index))
    return list(group[split_index:])


def _is_read_later(node: fx.Node, segment_index: int, segment_of: dict[fx.Node, int]) -> bool:
    """Return whether a later segment reads a value, so that it is alive until then in any case."""
    return any(segment_of.get(user, segment_index) > segment_index for user in node.users)
