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

from streamfx.node_meta import RUN
from streamfx.runtime.offload import free_after_copy, from_host, to_host, wait_for_copy


class _Runs:
    """The runs of a host program that compute something, numbered in order, and the run of each node.

    The result of a loop belongs to the loop's run; any other node without a run belongs to the run of the next node
    with one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Number the runs of a graph, and record the run of each node and the first node of each run."""
        self.graph, self.position = graph, {node: i for i, node in enumerate(graph.nodes)}
        index = {run: i for i, run in enumerate(dict.fromkeys(node.meta[RUN] for node in graph.nodes if RUN in node.meta))}
        self.number: dict[fx.Node, int] = {}
        at = len(index) - 1
        for node in reversed(graph.nodes):
            self.number[node] = at = index.get(node.meta.get(RUN), at)
        self._begin: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.target is operator.getitem:
                self.number[node] = self.number[node.args[0]]
            if node.op != "placeholder":
                self._begin.setdefault(self.number[node], node)

    def begin(self, run: int) -> fx.Node:
        """Return the first node of a run, or the root, which follows the last node, if there is no such run."""
        return self._begin.get(run, self.graph._root)

    def later(self, *nodes: fx.Node) -> fx.Node:
        """Return the last of these nodes in graph order; the root counts as the end."""
        return max(nodes, key=lambda node: self.position.get(node, len(self.position)))


def copy_to_host(graph: fx.Graph, values: Mapping[fx.Node, dict[str, Any]]) -> dict[fx.Node, fx.Node]:
    """Copy each value of a forward graph, which has no output yet, to the host; `values` has the `meta` of each copy."""
    runs = _Runs(graph)
    last = {value: runs.later(value, *value.users).next for value in values}
    ends = {value: runs.later(runs.begin(runs.number[value] + 2), node) for value, node in last.items()}
    copies: dict[fx.Node, fx.Node] = {}
    for value, meta in values.items():
        with graph.inserting_after(value):
            begun = graph.call_function(to_host, (value,))
        with graph.inserting_before(ends[value]):
            copies[value] = graph.call_function(free_after_copy, (begun, value))
        begun.meta, copies[value].meta = dict(meta), dict(meta)
    return copies


def fetch_in_time(graph: fx.Graph) -> None:
    """Fetch each value of a complete backward graph during the run before the run of its first user."""
    runs, groups = _Runs(graph), list[tuple[fx.Node, list[fx.Node]]]()
    for node in graph.find_nodes(op="call_function", target=wait_for_copy):
        groups += [(node, users) for users in _groups_of_users(node.users, runs)]
    for node, users in sorted(groups, key=lambda group: runs.number[group[1][0]]):
        (fetched,) = node.all_input_nodes
        with graph.inserting_before(runs.begin(max(runs.number[users[0]] - 1, 0))):
            begun = graph.call_function(from_host, fetched.args)
        with graph.inserting_before(users[0]):
            waited = graph.call_function(wait_for_copy, (begun,))
        begun.meta, waited.meta = dict(fetched.meta), dict(node.meta)
        for user in users:
            user.replace_input_with(node, waited)
    for node in dict.fromkeys(node for node, _ in groups):
        (fetched,) = node.all_input_nodes
        graph.erase_node(node)
        graph.erase_node(fetched)


def _groups_of_users(users: Iterable[fx.Node], runs: _Runs) -> Iterator[list[fx.Node]]:
    """Group the users of a value: between two groups there is time to free and refetch the value."""
    group: list[fx.Node] = []
    for user in sorted(users, key=runs.position.__getitem__):
        if group and runs.number[user] > runs.number[group[-1]] + 2:
            yield group
            group = []
        group.append(user)
    if group:
        yield group
