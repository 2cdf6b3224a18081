"""Place copies to and from the host in a host program.

A copy overlaps with the loops of one run (the loops of a stage in one direction), and the wait comes after them. So
the device holds the offloaded values of at most two runs: those that the current run reads or computes, and those
being copied for its neighbor.

    forward                                      backward
    x1 = run 1                                   x2 = wait_for_copy(x2)
    held = to_host(x1)                           x1 = from_host(held)
    x2 = run 2 (x1)                              ... = run of stage 2 (x2)
    held = free_after_copy(held, x1)             x1 = wait_for_copy(x1)
    x3 = run 3 (x2)                              ... = run of stage 1 (x1)

If several backward runs read a value, it is refetched after runs that do not read it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from streamfx.dialect.offload import from_host, to_host
from streamfx.node_meta import REGION
from streamfx.runtime.offload import free_after_copy, wait_for_copy


class _Runs:
    """The runs of a host program (the loops of a stage in one direction), in order, and the index of each node's run.

    The result of a loop belongs to the loop's run; any other node without a run belongs to the run of the next node
    with one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Record the run of each node (`run_index`) and the first node of each run."""
        self.graph, self.position = graph, {node: i for i, node in enumerate(graph.nodes)}
        run_ids = dict.fromkeys(node.meta[REGION] for node in graph.nodes if REGION in node.meta)
        index_of_run = {run: i for i, run in enumerate(run_ids)}
        self.run_index: dict[fx.Node, int] = {}
        current = len(index_of_run) - 1
        for node in reversed(graph.nodes):
            self.run_index[node] = current = index_of_run.get(node.meta.get(REGION), current)
        self._first_nodes: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.target is operator.getitem:
                self.run_index[node] = self.run_index[node.args[0]]
            if node.op != "placeholder":
                self._first_nodes.setdefault(self.run_index[node], node)

    def first_node(self, run_index: int) -> fx.Node:
        """Return the first node of a run, or the root, which follows the last node, if there is no such run."""
        return self._first_nodes.get(run_index, self.graph._root)

    def last_of(self, *nodes: fx.Node) -> fx.Node:
        """Return the last of these nodes in graph order; the root counts as the end."""
        return max(nodes, key=lambda node: self.position.get(node, len(self.position)))


def copy_to_host(graph: fx.Graph, values: Mapping[fx.Node, dict[str, Any]]) -> dict[fx.Node, fx.Node]:
    """Insert a copy to host memory of each value of a forward graph, which has no output yet. Return {value: node of its copy}.

    `values` maps each value to the `meta` of its copy. The copy starts when the value exists; the value is freed after its last
    use, and not before the end of the next run, so that the copy overlaps with that run.
    """
    runs = _Runs(graph)
    after_last_use = {value: runs.last_of(value, *value.users).next for value in values}
    free_before = {
        value: runs.last_of(runs.first_node(runs.run_index[value] + 2), node) for value, node in after_last_use.items()
    }
    copies: dict[fx.Node, fx.Node] = {}
    for value, meta in values.items():
        with graph.inserting_after(value):
            start = graph.call_function(to_host, (value,))
        with graph.inserting_before(free_before[value]):
            copies[value] = graph.call_function(free_after_copy, (start, value))
        start.meta, copies[value].meta = dict(meta), dict(meta)
    return copies


def fetch_in_time(graph: fx.Graph) -> None:
    """Move each fetch of an offloaded value (`from_host`, then `wait_for_copy`) of a backward graph earlier, in place.

    The copy starts in the run before its first user's run, and the wait comes right before that user. If much later runs read
    the value as well, it is refetched for them.
    """
    runs, groups = _Runs(graph), list[tuple[fx.Node, list[fx.Node]]]()
    for node in graph.find_nodes(op="call_function", target=wait_for_copy):
        groups += [(node, users) for users in _groups_of_users(node.users, runs)]
    for node, users in sorted(groups, key=lambda group: runs.run_index[group[1][0]]):
        (traced_start,) = node.all_input_nodes
        with graph.inserting_before(runs.first_node(max(runs.run_index[users[0]] - 1, 0))):
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


def _groups_of_users(users: Iterable[fx.Node], runs: _Runs) -> Iterator[list[fx.Node]]:
    """Yield groups of a value's users; between two groups are at least two runs, in which the value is freed and refetched."""
    group: list[fx.Node] = []
    for user in sorted(users, key=runs.position.__getitem__):
        if group and runs.run_index[user] > runs.run_index[group[-1]] + 2:
            yield group
            group = []
        group.append(user)
    if group:
        yield group
