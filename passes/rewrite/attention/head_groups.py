"""Run attention between two all-to-all exchanges for one group of heads at a time (Untied Ulysses).

    wait(all_to_all(q)) -> attention -> wait(all_to_all(out))
        ->  for each group of heads:  wait(all_to_all(q[heads])) -> attention -> wait(all_to_all(out)), all concatenated

In this scheme (Ulysses), a rank holds some rows of all heads. An exchange (all-to-all) sends them, and then the rank has
all rows of some heads for attention. A second exchange returns the results. An exchange splits its first dimension, and
attention never mixes heads: a head depends on its own queries and on the key head that it shares. So only one group of
heads has the full sequence at a time. The other groups exist as shards: not yet sent, as the loops before the exchange have
stored them, or already returned for the loops after it. The number of groups depends on the numbers of heads only, so all
ranks send the same. Gradients of keys that several groups share are summed in float32 or a wider dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import erase_unused, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.sizes import Size, product, size_of
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import SPLIT_FROM, TRACED_STRIDES, VALUE
from streamfx.passes.ops.collectives import is_wait
from streamfx.passes.rewrite.pattern import getitems_by_index
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
EXCHANGE = "_c10d_functional::all_to_all_single"
HEADS = 1  # the dimension of heads in attention's operands and results
MAX_GROUPS = 4  # more groups save little memory, because the shards of the other groups are then larger than one group


@dataclass(frozen=True)
class ExchangePath:
    """The operators (`steps`) between a rank's rows, which are sent, and all rows of some heads, in order.

    `dims` has the dimension of heads of each step's operand; `result_dim` is the dimension of heads of the last result.
    """

    steps: tuple[fx.Node, ...]
    dims: tuple[int, ...]
    result_dim: int

    @property
    def source(self) -> fx.Node:
        """Return the operand of the first step."""
        return node_argument(self.steps[0])

    @property
    def last(self) -> fx.Node:
        """Return the last step: the value at the end of the path."""
        return self.steps[-1]


@dataclass(frozen=True)
class Gradient:
    """A backward call of attention: the path of its incoming gradient, and the paths of its results.

    The keys of `outputs` are result indices: 0, 1 and 2 for the gradients of queries, keys and values.
    """

    node: fx.Node
    inputs: ExchangePath
    outputs: Mapping[int, ExchangePath]


@dataclass(frozen=True)
class ExchangedAttention:
    """Attention with the paths of its queries, keys and values, the path of its result, and its backward calls."""

    node: fx.Node
    inputs: tuple[ExchangePath, ExchangePath, ExchangePath]
    outputs: ExchangePath
    gradients: tuple[Gradient, ...]


def split_heads_into_groups(graph: fx.Graph) -> None:
    """Split each attention whose operands come from exchanges, and whose result goes into one, into groups of heads, in place.

    Each group is then sent, computed and returned separately.
    """
    matches = [
        exchanged for node in graph.nodes if node.target is ATTENTION and (exchanged := _match_exchanged(node)) is not None
    ]
    for exchanged in matches:
        if (num_groups := _choose_num_groups(exchanged)) > 1:
            _rewrite(exchanged, num_groups, GraphWriter(graph))
    if matches:
        erase_unused(graph)


# -- matching


def _match_exchanged(node: fx.Node) -> ExchangedAttention | None:
    """Match an attention whose operands come from exchanges and whose result goes into one, in forward and backward.

    Return None if anything else reads these values, or if the heads cannot be split into groups.
    """
    results = getitems_by_index(node) or {}  # 0: the result, 1: the log-sum-exp, which only the backward may read
    backwards = [user for user in _users_of(results.get(0, ())) if user.target is ATTENTION_BACKWARD]
    if not _can_split_heads(node) or len(results.get(0, ())) != 1 or set(results) > {0, 1}:
        return None
    if not _users_of(results.get(1, ())) <= set(backwards) or any(_options(backward) != _options(node) for backward in backwards):
        return None
    operands = [node_argument(node, i) for i in range(3)]
    readers = {node, *backwards}
    input_paths = [_match_path_to(operand, readers) for operand in operands]
    result_path = _match_path_from(results[0][0], {*backwards})
    gradients = [_match_gradient(backward, operands, results) for backward in dict.fromkeys(backwards)]
    if None in input_paths or result_path is None or None in gradients:
        return None
    return ExchangedAttention(node, tuple(input_paths), result_path, tuple(gradients))  # type: ignore[arg-type]


def _match_gradient(node: fx.Node, operands: Sequence[fx.Node], results: Mapping[int, Sequence[fx.Node]]) -> Gradient | None:
    """Match a backward call of attention if its incoming gradient comes from an exchange and its results go into exchanges.

    `operands` are the forward call's query, key and value; `results` has its `getitem` nodes by result index. Return None
    if the backward call does not read these, or if nothing matches.
    """
    cotangent, *backward_operands, out, lse = (node_argument(node, i) for i in range(6))
    gradients_by_index, cotangent_path = getitems_by_index(node), _match_path_to(cotangent, {node})
    is_of_this_call = backward_operands == list(operands) and out in results.get(0, ()) and lse in results.get(1, ())
    if (
        not is_of_this_call
        or cotangent_path is None
        or gradients_by_index is None
        or any(len(getitems) != 1 for getitems in gradients_by_index.values())
    ):
        return None
    paths = {index: _match_path_from(getitems[0], set()) for index, getitems in gradients_by_index.items()}
    return None if None in paths.values() else Gradient(node, cotangent_path, paths)  # type: ignore[arg-type]


def _can_split_heads(node: fx.Node) -> bool:
    """Return whether the numbers of heads are static, keys and values have equally many, and no mask is given.

    Attention with a mask is not split into groups, because it runs in a loop over chunks.
    """
    query, key, value = (shape_of_node(node_argument(node, i)) for i in range(3))
    are_known = isinstance(query[HEADS], int) and isinstance(key[HEADS], int)
    return are_known and key[HEADS] == value[HEADS] and node.kwargs.get("attn_mask") is None


def _options(node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments of an attention call."""
    return dict(node.kwargs)


def _users_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the users of all given nodes."""
    return {user for node in nodes for user in node.users}


def _match_path_to(node: fx.Node, readers: set[fx.Node]) -> ExchangePath | None:
    """Return the path from the value that an exchange sends to an operand of attention (`node`), walking backwards.

    Return None if there is no exchange, if a value on the path has another reader, or if the exchange splits the heads, its
    first dimension. `readers` may read the operand itself.
    """
    steps, dims = list[fx.Node](), list[int]()
    dim = HEADS
    while set(node.users) <= readers and node.op == "call_function":
        operand_dim = _dim_before(node, dim)
        if operand_dim is None:
            return None
        steps.insert(0, node)
        dims.insert(0, operand_dim)
        if _is_exchange(node):
            return ExchangePath(tuple(steps), tuple(dims), HEADS) if operand_dim else None
        dim = operand_dim
        readers = {node}
        node = node_argument(node)
    return None


def _match_path_from(node: fx.Node, backwards: set[fx.Node]) -> ExchangePath | None:
    """Return the path from a result of attention (`node`) to the value that an exchange returns, walking forwards.

    The last step is the exchange's wait. Return None if there is no exchange, if a value on the path has another reader, or
    if the exchange splits the heads, its first dimension. `backwards` may read the result itself.
    """
    steps, dims = list[fx.Node](), list[int]()
    dim = HEADS
    is_sent = False
    while not (is_sent and is_wait(steps[-1])):
        users = [user for user in node.users if user not in backwards]
        if len(users) != 1 or users[0].args[:1] != (node,):
            return None
        (user,) = users
        result_dim = _dim_after(user, dim)
        if result_dim is None or (_is_exchange(user) and (is_sent or not dim)):
            return None
        is_sent |= _is_exchange(user)
        steps.append(user)
        dims.append(dim)
        dim = result_dim
        node = user
        backwards = set()
    return ExchangePath(tuple(steps), tuple(dims), dim)


def _is_exchange(node: fx.Node) -> bool:
    """Return whether a node is an all-to-all exchange."""
    return isinstance(node.target, OpOverload) and node.target.name() == EXCHANGE


def _dim_before(node: fx.Node, dim: int) -> int | None:
    """Return the operand's dimension that is dimension `dim` of the result of a view, copy or exchange; None if not known."""
    if node.target is aten.permute.default:
        return _permuted_dims(node)[dim]
    if is_kind(node, Kind.RESHAPE):
        return _match_dim(shape_of_node(node), dim, shape_of_node(node_argument(node)))
    return dim if is_kind(node, Kind.ALIAS, Kind.COPY) or is_wait(node) or _is_exchange(node) else None


def _dim_after(node: fx.Node, dim: int) -> int | None:
    """Return the result's dimension that is dimension `dim` of the operand of a view, copy or exchange; None if not known."""
    if node.target is aten.permute.default:
        return _permuted_dims(node).index(dim)
    if is_kind(node, Kind.RESHAPE):
        return _match_dim(shape_of_node(node_argument(node)), dim, shape_of_node(node))
    return dim if is_kind(node, Kind.ALIAS, Kind.COPY) or is_wait(node) or _is_exchange(node) else None


def _permuted_dims(node: fx.Node) -> list[int]:
    """Return, for each dimension of a `permute` node's result, the operand's dimension, as a nonnegative number."""
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _match_dim(shape: Sequence[Size], dim: int, other_shape: Sequence[Size]) -> int | None:
    """Return the dimension of `other_shape`, another view of the same elements, that is dimension `dim` of `shape`.

    It has equal size, and as many elements after it: dimension 1 of (2, 6, 4) is dimension 2 of (1, 2, 6, 4). Return None if
    there is none. Several dimensions match only if the size is one: then return the last, because one head is never split.
    """
    trailing = product(shape[dim + 1 :])
    candidates = [i for i, size in enumerate(other_shape) if size == shape[dim] and product(other_shape[i + 1 :]) == trailing]
    return candidates[-1] if candidates else None


# -- groups


def _choose_num_groups(exchanged: ExchangedAttention) -> int:
    """Return the number of groups of heads, at most `MAX_GROUPS` if possible; 1 if the heads cannot be split.

    Groups have equally many heads, and each has complete key heads or shares one key head with other groups: 8 query heads
    and 2 key heads are split into 2, 4 or 8 groups.
    """
    heads, key_heads = (int(shape_of_node(path.last)[HEADS]) for path in exchanged.inputs[:2])
    counts = [n for n in range(2, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
    return max((n for n in counts if n <= MAX_GROUPS), default=min(counts, default=1))


def _rewrite(exchanged: ExchangedAttention, num_groups: int, writer: GraphWriter) -> None:
    """Emit one attention call per group of heads, replace the received result, and rewrite the backward calls, in place.

    Keys are split into as many groups if there are enough key heads. Otherwise there is one group per key head
    (`num_key_groups`), and consecutive query groups share its keys and values, which are received once.
    """
    query, *key_value_paths = exchanged.inputs
    num_key_groups = min(num_groups, int(shape_of_node(key_value_paths[0].last)[HEADS]))
    writer.move_before(exchanged.node)
    operands_by_group = list[list[fx.Node]]()  # of each group: query, keys, values
    calls, received = list[fx.Node](), list[fx.Node]()
    for group in range(num_groups):
        shares_previous_keys = group * num_key_groups % num_groups != 0
        if shares_previous_keys:
            keys_and_values = operands_by_group[-1][1:]
        else:
            key_group = group * num_key_groups // num_groups
            keys_and_values = [_emit_group(path, key_group, num_key_groups, writer) for path in key_value_paths]
        operands_by_group.append([_emit_group(query, group, num_groups, writer), *keys_and_values])
        calls.append(writer.call(ATTENTION, *operands_by_group[-1], **_options(exchanged.node)))
        calls[-1].meta[SPLIT_FROM] = exchanged.node.name
        received.append(_emit_path(exchanged.outputs, _emit_getitem(calls[-1], 0, writer), num_groups, writer))
    _replace_end_of_path(exchanged.outputs, received, writer)
    for gradient in exchanged.gradients:
        _rewrite_gradient(gradient, operands_by_group, calls, num_key_groups, writer.move_before(gradient.node))


def _rewrite_gradient(
    gradient: Gradient,
    operands_by_group: Sequence[Sequence[fx.Node]],
    calls: Sequence[fx.Node],
    num_key_groups: int,
    writer: GraphWriter,
) -> None:
    """Emit one backward call per group of heads, add up the gradients of shared key heads, and replace the received gradients.

    `operands_by_group` has the query, keys and values of each forward call in `calls`. Each gradient is sent as soon as it
    is complete: a gradient of a query group at once, a gradient of keys or values after the last query group that shares them.
    """
    num_groups = len(operands_by_group)
    received: dict[int, list[fx.Node]] = {index: [] for index in gradient.outputs}  # by result: 0 query, 1 keys, 2 values
    running_sums = dict[int, fx.Node]()
    for group, (operands, call) in enumerate(zip(operands_by_group, calls, strict=True)):
        out, lse = (_emit_getitem(call, index, writer) for index in (0, 1))
        group_cotangent = _emit_group(gradient.inputs, group, num_groups, writer)
        gradients = writer.call(ATTENTION_BACKWARD, group_cotangent, *operands, out, lse, **_options(gradient.node))
        completes_key_group = (group + 1) * num_key_groups % num_groups == 0
        for index, path in gradient.outputs.items():
            group_gradient = _emit_getitem(gradients, index, writer)
            if index and num_groups > num_key_groups:
                group_gradient = running_sums[index] = _emit_sum_in_float32(running_sums.pop(index, None), group_gradient, writer)
                if completes_key_group:
                    dtype = gradients.meta[VALUE][index].dtype
                    group_gradient = writer.call(aten._to_copy.default, group_gradient, dtype=dtype)
                    del running_sums[index]
            if index == 0 or completes_key_group:
                received[index].append(_emit_path(path, group_gradient, num_groups if index == 0 else num_key_groups, writer))
    for index, path in gradient.outputs.items():
        _replace_end_of_path(path, received[index], writer)


def _emit_sum_in_float32(total: fx.Node | None, part: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit the sum of a running sum and a gradient, in float32 or a wider dtype; `total` is None before the first gradient."""
    if total is not None:
        return writer.call(aten.add.Tensor, total, part)
    wide_dtype = torch.promote_types(part.meta[VALUE].dtype, torch.float32)
    return writer.call(aten._to_copy.default, part, dtype=wide_dtype)


def _emit_getitem(node: fx.Node, index: int, writer: GraphWriter) -> fx.Node:
    """Emit and return the result of an operator with several results that has this index."""
    return writer.call(operator.getitem, node, index)


def _emit_group(path: ExchangePath, group: int, num_groups: int, writer: GraphWriter) -> fx.Node:
    """Emit the path to an operand of attention for one group of heads: slice the value that is sent, and exchange the slice.

    `group` is the index of the group. A single group needs no new operators: return the operand itself.
    """
    if num_groups == 1:
        return path.last
    heads_dim = path.dims[0]
    num_heads = int(shape_of_node(path.source)[heads_dim]) // num_groups
    heads = writer.rows(path.source, heads_dim, group * num_heads, (group + 1) * num_heads)
    return _emit_path(path, heads, num_groups, writer)


def _emit_path(path: ExchangePath, node: fx.Node, num_groups: int, writer: GraphWriter) -> fx.Node:
    """Emit the operators of a path for `node`, which holds one group of heads; return the value at the end of the path.

    The sizes in views are divided by the number of groups along the dimension of heads. An exchange needs a contiguous
    operand.
    """
    result_dims = [*path.dims[1:], path.result_dim]  # the dimension of heads of each step's result
    for step, head_dim in zip(path.steps, result_dims, strict=True):
        arguments = list(step.args[1:])
        if is_kind(step, Kind.RESHAPE):
            sizes: Any = arguments[0]
            heads = int(shape_of_node(step)[head_dim]) // num_groups
            arguments[0] = [heads if dim == head_dim else size for dim, size in enumerate(sizes)]
        target: Any = aten.reshape.default if is_kind(step, Kind.RESHAPE) else step.target
        if _is_exchange(step) and not node.meta[VALUE].is_contiguous():
            node = writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        result = writer.call(target, node, *arguments, **step.kwargs)
        if TRACED_STRIDES in step.meta:
            result.meta[TRACED_STRIDES] = (tuple(map(size_of, node.meta[VALUE].stride())),)
        node = result
    return node


def _replace_end_of_path(path: ExchangePath, received: Sequence[fx.Node], writer: GraphWriter) -> None:
    """Replace the last value of a path, in place, by the concatenation of the values that all groups of heads received."""
    all_heads = received[0] if len(received) == 1 else writer.call(aten.cat.default, list(received), path.result_dim)
    path.last.replace_all_uses_with(all_heads, propagate_meta=False)
