"""Place copies to and from the host in a host program.

A *region* is the loops of a stage in one direction. A copy overlaps with the loops of one region, and the wait comes after
them. So the device holds the offloaded values of at most two regions: those that the current region reads or computes, and
those that are being copied for its neighbor.

    forward                                      backward
    x1 = region 1                                x2 = wait_for_copy(x2)
    held = to_host(x1)                           x1 = from_host(held)
    x2 = region 2 (x1)                           ... = region of stage 2 (x2)
    held = free_after_copy(held, x1)             x1 = wait_for_copy(x1)
    x3 = region 3 (x2)                           ... = region of stage 1 (x1)

If several backward regions read a value, it is refetched after regions that do not read it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from streamfx.dialect.offload import from_host, to_host
from streamfx.node_meta import REGION
from streamfx.runtime.offload import free_after_copy, wait_for_copy


class _Regions:
    """The regions of a host program (the loops of a stage in one direction), in order, and the index of each node's region.

    The result of a loop belongs to the loop's region; any other node without a region belongs to the region of the next node
    with one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Record the region of each node (`region_index`) and the first node of each region."""
        self.graph, self.position = graph, {node: i for i, node in enumerate(graph.nodes)}
        region_ids = dict.fromkeys(node.meta[REGION] for node in graph.nodes if REGION in node.meta)
        index_of_region = {region: i for i, region in enumerate(region_ids)}
        self.region_index: dict[fx.Node, int] = {}
        current = len(index_of_region) - 1
        for node in reversed(graph.nodes):
            self.region_index[node] = current = index_of_region.get(node.meta.get(REGION), current)
        self._first_nodes: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.target is operator.getitem:
                self.region_index[node] = self.region_index[node.args[0]]
            if node.op != "placeholder":
                self._first_nodes.setdefault(self.region_index[node], node)

    def first_node(self, region_index: int) -> fx.Node:
        """Return the first node of a region, or the root, which follows the last node, if there is no such region."""
        return self._first_nodes.get(region_index, self.graph._root)

    def last_of(self, *nodes: fx.Node) -> fx.Node:
        """Return the last of these nodes in graph order; the root counts as the end."""
        return max(nodes, key=lambda node: self.position.get(node, len(self.position)))


def copy_to_host(graph: fx.Graph, values: Mapping[fx.Node, dict[str, Any]]) -> dict[fx.Node, fx.Node]:
    """Insert a copy to host memory of each value of a forward graph, which has no output yet. Return {value: node of its copy}.

    `values` maps each value to the `meta` of its copy. The copy starts when the value exists; the value is freed after its last
    use, and not before the end of the next region, so that the copy overlaps with that region.
    """
    regions, inputs = _Regions(graph), graph.find_nodes(op="placeholder")
    after_last_use = {value: regions.last_of(value, *value.users).next for value in values}
    free_before = {
        value: regions.last_of(regions.first_node(regions.region_index[value] + 2), node)
        for value, node in after_last_use.items()
    }
    copies: dict[fx.Node, fx.Node] = {}
    for value, meta in values.items():
        with graph.inserting_after(inputs[-1] if value.op == "placeholder" else value):
            start = graph.call_function(to_host, (value,))
        with graph.inserting_before(free_before[value]):
            copies[value] = graph.call_function(free_after_copy, (start, value))
        start.meta, copies[value].meta = dict(meta), dict(meta)
    return copies


def fetch_in_time(graph: fx.Graph) -> None:
    """Move each fetch of an offloaded value (`from_host`, then `wait_for_copy`) of a backward graph earlier, in place.

    The copy starts in the region before its first user's region, and the wait comes right before that user. If much later
    regions read the value as well, it is refetched for them.
    """
    regions, groups = _Regions(graph), list[tuple[fx.Node, list[fx.Node]]]()
    for node in graph.find_nodes(op="call_function", target=wait_for_copy):
        groups += [(node, users) for users in _groups_of_users(node.users, regions)]
    for node, users in sorted(groups, key=lambda group: regions.region_index[group[1][0]]):
        (traced_start,) = node.all_input_nodes
        with graph.inserting_before(regions.first_node(max(regions.region_index[users[0]] - 1, 0))):
            start = graph.call_function(from_host, traced_start.args)
        with graph.inserting_before(users[0]):
            wait = graph.call_function(wait_for_copy, (start,))
        start.meta, wait.meta = dict(traced_start.meta), dict(node.meta)
        for user in users:
            user.replace_input_with(node, wait)
    for node in dict.fromkeys(node for node, _ in groups):
        (traced_start,) = node.all_input_nodes
        graph.erase_node(node)
        graph.erase_node(traced_start)


def _groups_of_users(users: Iterable[fx.Node], regions: _Regions) -> Iterator[list[fx.Node]]:
    """Yield groups of a value's users; between two groups are at least two regions, in which it is freed and refetched."""
    group: list[fx.Node] = []
    for user in sorted(users, key=regions.position.__getitem__):
        if group and regions.region_index[user] > regions.region_index[group[-1]] + 2:
            yield group
            group = []
        group.append(user)
    if group:
        yield group
