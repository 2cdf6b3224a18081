"""Attention between two exchanges of ranks, a group of heads at a time (Untied Ulysses).

    wait(all_to_all(q)) -> attention -> wait(all_to_all(out))
        ->  for each group of heads:  wait(all_to_all(q[heads])) -> attention -> wait(all_to_all(out)), and all of them joined

An exchange moves parts of its first dimension, attention mixes no two heads: a head is computed from itself, and from the head of
keys that it shares with others. So of all rows there is one group of heads at a time, and what ranks send of the others waits as
the loops in front of the exchange have left it, or has arrived where the loops behind it take it. How many groups there are
follows from the numbers of heads alone, so that all ranks send the same. Gradients of keys that several groups share are added up
in single precision, or better.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import drop_unused, node_argument, shape_of_node
from streamfx.ir.sizes import Size, product, size_of
from streamfx.ir.writer import GraphWriter
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.node_meta import LAYOUTS, PART_OF, VALUE
from streamfx.passes.ops.collectives import is_wait
from streamfx.passes.rewrite.pattern import results_in_use
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
EXCHANGE = "_c10d_functional::all_to_all_single"
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
HEADS = 1  # the dimension of heads, of what attention is given and gives
GROUPS = 4  # with more of them little is left to gain: what waits to be sent takes more than what a group takes


@dataclass(frozen=True)
class ExchangePath:
    """Operators between rows of a rank, which are sent, and all rows of some heads, in order; the dimension of heads of what
    each is given.
    """

    steps: tuple[fx.Node, ...]
    dims: tuple[int, ...]
    end: int

    @property
    def source(self) -> fx.Node:
        return node_argument(self.steps[0])

    @property
    def last(self) -> fx.Node:
        return self.steps[-1]


@dataclass(frozen=True)
class Gradient:
    """A call of attention's backward: the way of its gradient, those of what it makes, by number, and what takes these out."""

    node: fx.Node
    given: ExchangePath
    made: Mapping[int, ExchangePath]


@dataclass(frozen=True)
class ExchangedAttention:
    """Attention with the ways of queries, keys and values, that of its result, and its gradient."""

    node: fx.Node
    given: tuple[ExchangePath, ExchangePath, ExchangePath]
    made: ExchangePath
    gradients: tuple[Gradient, ...]


def heads_in_groups(graph: fx.Graph) -> None:
    """Rewrite a graph in place."""
    found = [exchanged for node in graph.nodes if node.target is ATTENTION and (exchanged := _exchanged(node)) is not None]
    for exchanged in found:
        if (count := _groups(exchanged)) > 1:
            _rewrite(exchanged, count, GraphWriter(graph))
    if found:
        drop_unused(graph)


# -- what it is found by


def _exchanged(node: fx.Node) -> ExchangedAttention | None:
    """Attention all of whose operands come from exchanges, and all of whose results go into some; nobody else reads any."""
    results = results_in_use(node) or {}
    backwards = [user for user in _users(results.get(0, ())) if user.target is ATTENTION_BACKWARD]
    if not _takes_any_head(node) or len(results.get(0, ())) != 1 or set(results) > {0, 1}:
        return None
    if not _users(results.get(1, ())) <= set(backwards) or any(_called(other) != _called(node) for other in backwards):
        return None
    operands = [node_argument(node, i) for i in range(3)]
    readers = {node, *backwards}
    given = [_way_to(operand, readers) for operand in operands]
    made = _way_from(results[0][0], {*backwards})
    gradients = [_gradient(other, operands, results) for other in dict.fromkeys(backwards)]
    if None in given or made is None or None in gradients:
        return None
    return ExchangedAttention(node, tuple(given), made, tuple(gradients))  # type: ignore[arg-type]


def _gradient(node: fx.Node, operands: Sequence[fx.Node], results: Mapping[int, Sequence[fx.Node]]) -> Gradient | None:
    own = [node_argument(node, i) for i in range(6)]
    taken, given = results_in_use(node), _way_to(own[0], {node})
    is_its = own[1:4] == list(operands) and own[4] in results.get(0, ()) and own[5] in results.get(1, ())
    if not is_its or given is None or taken is None or any(len(parts) != 1 for parts in taken.values()):
        return None
    made = {number: _way_from(parts[0], set()) for number, parts in taken.items()}
    return None if None in made.values() else Gradient(node, given, made)  # type: ignore[arg-type]


def _takes_any_head(node: fx.Node) -> bool:
    """Whether heads are known numbers, as many of keys as of values. With a mask attention streams: that makes a loop of it."""
    query, key, value = (shape_of_node(node_argument(node, i)) for i in range(3))
    are_known = isinstance(query[HEADS], int) and isinstance(key[HEADS], int)
    return are_known and key[HEADS] == value[HEADS] and node.kwargs.get("attn_mask") is None


def _called(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs)


def _users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users}


def _way_to(node: fx.Node, readers: set[fx.Node]) -> ExchangePath | None:
    """From what was sent to what attention is given; nobody but the next reads any of it."""
    steps, dims, dim = list[fx.Node](), list[int](), HEADS
    while set(node.users) <= readers and node.op == "call_function":
        before = _dim_before(node, dim)
        if before is None:
            return None
        steps, dims, dim, readers = [node, *steps], [before, *dims], before, {node}
        if _is_exchange(node):
            return ExchangePath(tuple(steps), tuple(dims), HEADS) if before else None
        node = node_argument(node)
    return None


def _way_from(node: fx.Node, others: set[fx.Node]) -> ExchangePath | None:
    """From what attention makes to what has arrived; nobody but the next and these others read any of it."""
    steps, dims, dim, is_sent = list[fx.Node](), list[int](), HEADS, False
    while not (is_sent and is_wait(steps[-1])):
        users = [user for user in node.users if user not in others]
        if len(users) != 1 or users[0].args[:1] != (node,):
            return None
        after = _dim_after(users[0], dim)
        if after is None or (_is_exchange(users[0]) and (is_sent or not dim)):
            return None
        is_sent |= _is_exchange(users[0])
        steps, dims, dim, node, others = [*steps, users[0]], [*dims, dim], after, users[0], set()
    return ExchangePath(tuple(steps), tuple(dims), dim)


def _is_exchange(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name() == EXCHANGE


def _dim_before(node: fx.Node, dim: int) -> int | None:
    """Which dimension of its operand is a dimension of an operator's result; None where that is not known."""
    if node.target is aten.permute.default:
        return _order(node)[dim]
    if node.target in VIEWS:
        return _same_dim(shape_of_node(node), dim, shape_of_node(node_argument(node)))
    return dim if node.target in SAME or is_wait(node) or _is_exchange(node) else None


def _dim_after(node: fx.Node, dim: int) -> int | None:
    if node.target is aten.permute.default:
        return _order(node).index(dim)
    if node.target in VIEWS:
        return _same_dim(shape_of_node(node_argument(node)), dim, shape_of_node(node))
    return dim if node.target in SAME or is_wait(node) or _is_exchange(node) else None


def _order(node: fx.Node) -> list[int]:
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _same_dim(shape: Sequence[Size], dim: int, other: Sequence[Size]) -> int | None:
    """The dimension of a view with another shape that has the same index: as long, and with as many elements behind it. Of a
    single head, which nobody cuts, it is the last of those.
    """
    behind = product(shape[dim + 1 :])
    found = [i for i, size in enumerate(other) if size == shape[dim] and product(other[i + 1 :]) == behind]
    return found[-1] if found else None


# -- groups


def _groups(exchanged: ExchangedAttention) -> int:
    """How many groups have as many heads, and heads of keys that are theirs alone, or share one: four or fewer, if possible."""
    heads, keys = (int(shape_of_node(way.last)[HEADS]) for way in exchanged.given[:2])
    counts = [n for n in range(2, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    return max((n for n in counts if n <= GROUPS), default=min(counts, default=1))


def _rewrite(exchanged: ExchangedAttention, count: int, writer: GraphWriter) -> None:
    query, *others = exchanged.given
    keys = min(count, int(shape_of_node(others[0].last)[HEADS]))
    writer.before(exchanged.node)
    given, results, arrived = list[list[fx.Node]](), list[fx.Node](), list[fx.Node]()
    for group in range(count):
        shared = given[-1][1:] if group * keys % count else [_sent(way, group * keys // count, keys, writer) for way in others]
        given.append([_sent(query, group, count, writer), *shared])
        results.append(writer.call(ATTENTION, *given[-1], **_called(exchanged.node)))
        results[-1].meta[PART_OF] = exchanged.node.name
        arrived.append(_followed(exchanged.made, _part(results[-1], 0, writer), count, writer))
    _joined(exchanged.made, arrived, writer)
    for gradient in exchanged.gradients:
        _rewrite_gradient(gradient, given, results, keys, writer.before(gradient.node))


def _rewrite_gradient(
    gradient: Gradient, given: Sequence[Sequence[fx.Node]], results: Sequence[fx.Node], keys: int, writer: GraphWriter
) -> None:
    count = len(given)
    arrived: dict[int, list[fx.Node]] = {number: [] for number in gradient.made}
    sums = dict[int, fx.Node]()
    for group, (own, result) in enumerate(zip(given, results, strict=True)):
        out, lse = (_part(result, number, writer) for number in (0, 1))
        sent = _sent(gradient.given, group, count, writer)
        made = writer.call(ATTENTION_BACKWARD, sent, *own, out, lse, **_called(gradient.node))
        is_last = (group + 1) * keys % count == 0
        for number, way in gradient.made.items():
            part = _part(made, number, writer)
            if number and count > keys:
                part = sums[number] = _sum(sums.pop(number, None), part, writer)
                part = writer.call(aten._to_copy.default, part, dtype=made.meta[VALUE][number].dtype) if is_last else part
                if is_last:
                    del sums[number]
            if number == 0 or is_last:
                arrived[number].append(_followed(way, part, count if number == 0 else keys, writer))
    for number, way in gradient.made.items():
        _joined(way, arrived[number], writer)


def _sum(total: fx.Node | None, part: fx.Node, writer: GraphWriter) -> fx.Node:
    if total is not None:
        return writer.call(aten.add.Tensor, total, part)
    wide = torch.promote_types(part.meta[VALUE].dtype, torch.float32)
    return writer.call(aten._to_copy.default, part, dtype=wide)


def _part(node: fx.Node, number: int, writer: GraphWriter) -> fx.Node:
    return writer.call(operator.getitem, node, number)


def _sent(way: ExchangePath, group: int, count: int, writer: GraphWriter) -> fx.Node:
    """One group of heads of what is sent, on its way."""
    if count == 1:
        return way.last
    size = int(shape_of_node(way.source)[way.dims[0]]) // count
    part = writer.call(aten.slice.Tensor, way.source, way.dims[0], group * size, (group + 1) * size)
    return _followed(way, part, count, writer)


def _followed(way: ExchangePath, node: fx.Node, count: int, writer: GraphWriter) -> fx.Node:
    """The same way with a group of heads."""
    ends = [*way.dims[1:], way.end]
    for step, end in zip(way.steps, ends, strict=True):
        arguments = list(step.args[1:])
        if step.target in VIEWS:
            sizes: Any = arguments[0]
            heads = int(shape_of_node(step)[end]) // count
            arguments[0] = [heads if dim == end else size for dim, size in enumerate(sizes)]
        target: Any = aten.reshape.default if step.target in VIEWS else step.target
        if _is_exchange(step) and not node.meta[VALUE].is_contiguous():
            node = writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        made = writer.call(target, node, *arguments, **step.kwargs)
        if LAYOUTS in step.meta:
            made.meta[LAYOUTS] = (tuple(map(size_of, node.meta[VALUE].stride())),)
        node = made
    return node


def _joined(way: ExchangePath, arrived: Sequence[fx.Node], writer: GraphWriter) -> None:
    """Let who has read all heads read those of all groups."""
    whole = arrived[0] if len(arrived) == 1 else writer.call(aten.cat.default, list(arrived), way.end)
    way.last.replace_all_uses_with(whole, propagate_meta=False)
