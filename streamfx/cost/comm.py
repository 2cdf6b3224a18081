"""The bytes that a collective sends to other ranks, from its operator, its arguments, and its result.

In a group of n ranks, each rank sends and receives, in the ring algorithms that libraries use for large values:

    gather            (n-1)/n of the whole result
    reduce, scatter   (n-1)/n of the whole operand
    all-reduce        twice that: a scatter, and a gather of the sums
    exchange          (n-1)/n of the operand (all to all), of the value (broadcast)

Values sent between just two ranks (isend, irecv) are not counted. Ranks are assumed to fill machines of `DEVICES_PER_MACHINE`
devices, in order. A group that spans machines counts all its bytes as sent between machines (`far`), because the slowest
connection bounds a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from torch import fx

from streamfx.cost.flops import arguments_by_name
from streamfx.cost.nested_tensors import tensors_in
from streamfx.ir.collective_ops import find_group
from streamfx.node_meta import VALUE
from streamfx.torch_private import OpOverload, tree_map
from streamfx.torch_private.groups import members_of, ranks_in
from streamfx.torch_private.symbolic_sizes import size_hint

GATHERS, REDUCTIONS, EXCHANGES = KINDS = "gathers", "reductions", "exchanges"
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "streamfx")
ALL_REDUCE = "all_reduce"
KIND_BY_COLLECTIVE = {
    "all_gather_into_tensor": GATHERS,
    "reduce_scatter_tensor": REDUCTIONS,
    ALL_REDUCE: REDUCTIONS,
    "all_to_all_single": EXCHANGES,
    "shard_dim_alltoall": EXCHANGES,
    "broadcast": EXCHANGES,
}
DEVICES_PER_MACHINE = 8
SUFFIXES = ("_coalesced", "_out", "_")  # suffixes: several values in one call; into a given buffer


class CallTraffic(NamedTuple):
    """The traffic of one collective: its kind, the ranks of its group, and the bytes that each rank sends."""

    kind: str
    ranks: int
    bytes: int
    spans_machines: bool = False

    @property
    def traffic(self) -> Traffic:
        """The traffic of this one call."""
        return Traffic(1, self.bytes, self.bytes if self.spans_machines else 0)


class Traffic(NamedTuple):
    """The number of calls, and the bytes that each rank sends; of these, `far` are sent in groups that span machines."""

    calls: int = 0
    bytes: int = 0
    far: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both traffics."""
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.far + other.far)

    @property
    def halved(self) -> Traffic:
        """The same calls with half of the bytes."""
        return Traffic(self.calls, self.bytes // 2, self.far // 2)


def traffic_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> CallTraffic | None:
    """Return the traffic of an operator call; None if it sends nothing."""
    name = _collective_name(target)
    if name is None:
        return None
    arguments = arguments_by_name(target, args, kwargs)
    group = find_group(arguments)
    ranks = arguments.get("group_size") or ranks_in(group)
    kind = KIND_BY_COLLECTIVE[name]
    full_bytes = _bytes_of(result if kind == GATHERS else args[0])
    return CallTraffic(
        kind,
        ranks,
        (2 if name == ALL_REDUCE else 1) * full_bytes * (ranks - 1) // ranks,
        ranks > DEVICES_PER_MACHINE or _spans_machines(group),
    )


def traffic_of_node(node: fx.Node) -> CallTraffic | None:
    """Return the traffic of a node, from the values with which it was traced."""
    if node.op != "call_function" or _collective_name(node.target) is None:
        return None
    args, kwargs = (tree_map(_traced_value, arguments) for arguments in (tuple(node.args), dict(node.kwargs)))
    return traffic_of_call(node.target, args, kwargs, _traced_value(node))


def total_traffic(traffics: Iterable[Traffic]) -> Traffic:
    """Return the sum of all traffic."""
    return reduce(Traffic.plus, traffics, Traffic())


def _spans_machines(group: Any) -> bool:
    """Return whether the ranks of a group are on several machines."""
    members = members_of(group)
    return bool(members) and members[0] // DEVICES_PER_MACHINE != members[-1] // DEVICES_PER_MACHINE


def _collective_name(target: Any) -> str | None:
    """Return the name of a collective that is counted, without its suffix."""
    if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES:
        return None
    name = target.name().split("::")[1].split(".")[0]
    names = (name, *(name.removesuffix(suffix) for suffix in SUFFIXES))
    return next((candidate for candidate in names if candidate in KIND_BY_COLLECTIVE), None)


def _traced_value(item: Any) -> Any:
    """Return the traced value of a node; any other value unchanged."""
    return item.meta.get(VALUE) if isinstance(item, fx.Node) else item


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in nested values, at the sizes of the trace."""
    total = 0
    for value in tensors_in(values):
        num_bytes = value.element_size()
        for size in value.shape:
            num_bytes *= size_hint(size)
        total += num_bytes
    return total
