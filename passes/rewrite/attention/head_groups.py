"""Run attention between two all-to-all exchanges for one group of heads at a time (Untied Ulysses).

    wait(all_to_all(q)) -> attention -> wait(all_to_all(out))
        ->  for each group of heads:  wait(all_to_all(q[heads])) -> attention -> wait(all_to_all(out)), all concatenated

An exchange splits its first dimension, and attention never mixes heads: a head depends on its own queries and on the key
head that it shares. So only one group of heads has the full sequence at a time. The other groups exist as shards: not yet
sent, as the loops before the exchange have stored them, or already returned for the loops after it. The number of groups
depends on the numbers of heads only, so all ranks send the same. Gradients of keys that several groups share are summed
in float32 or a wider dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import erase_unused, node_argument, shape_of_node
from streamfx.ir.sizes import Size, product, size_of
from streamfx.ir.writer import GraphWriter
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.node_meta import SPLIT_FROM, TRACED_STRIDES, VALUE
from streamfx.passes.ops.collectives import is_wait
from streamfx.passes.ops.traits import COPIES
from streamfx.passes.rewrite.pattern import getitems_by_index
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
EXCHANGE = "_c10d_functional::all_to_all_single"
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
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
    """A backward call of attention: the path of its incoming gradient, and the paths of its results by position."""

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
    """Split attention between exchanges into groups of heads, in place."""
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
    """Match attention if its operands come from exchanges, its results go into exchanges, and nothing else reads these values."""
    results = getitems_by_index(node) or {}
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
    """Match a backward call of attention if its gradient comes from an exchange and its results go into exchanges."""
    arguments = [node_argument(node, i) for i in range(6)]  # gradient, query, key, value, result, log-sum-exp
    results_by_position, gradient_path = getitems_by_index(node), _match_path_to(arguments[0], {node})
    is_of_this_call = (
        arguments[1:4] == list(operands) and arguments[4] in results.get(0, ()) and arguments[5] in results.get(1, ())
    )
    if (
        not is_of_this_call
        or gradient_path is None
        or results_by_position is None
        or any(len(getitems) != 1 for getitems in results_by_position.values())
    ):
        return None
    result_paths = {position: _match_path_from(getitems[0], set()) for position, getitems in results_by_position.items()}
    return None if None in result_paths.values() else Gradient(node, gradient_path, result_paths)  # type: ignore[arg-type]


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
    """Return the path from the sent value to an operand of attention; None if a value on it has more than one reader.

    `readers` may read the operand itself.
    """
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


def _match_path_from(node: fx.Node, backwards: set[fx.Node]) -> ExchangePath | None:
    """Return the path from a result of attention to the received value; None if a value on it has more than one reader.

    `backwards` may read the result itself.
    """
    steps, dims, dim, is_sent = list[fx.Node](), list[int](), HEADS, False
    while not (is_sent and is_wait(steps[-1])):
        users = [user for user in node.users if user not in backwards]
        if len(users) != 1 or users[0].args[:1] != (node,):
            return None
        after = _dim_after(users[0], dim)
        if after is None or (_is_exchange(users[0]) and (is_sent or not dim)):
            return None
        is_sent |= _is_exchange(users[0])
        steps, dims, dim, node, backwards = [*steps, users[0]], [*dims, dim], after, users[0], set()
    return ExchangePath(tuple(steps), tuple(dims), dim)


def _is_exchange(node: fx.Node) -> bool:
    """Return whether a node is an all-to-all exchange."""
    return isinstance(node.target, OpOverload) and node.target.name() == EXCHANGE


def _dim_before(node: fx.Node, dim: int) -> int | None:
    """Return the operand's dimension that corresponds to a dimension of an operator's result; None if it is not known."""
    if node.target is aten.permute.default:
        return _permuted_dims(node)[dim]
    if node.target in VIEWS:
        return _match_dim(shape_of_node(node), dim, shape_of_node(node_argument(node)))
    return dim if node.target in COPIES or is_wait(node) or _is_exchange(node) else None


def _dim_after(node: fx.Node, dim: int) -> int | None:
    """Return the result's dimension that corresponds to a dimension of an operator's operand; None if it is not known."""
    if node.target is aten.permute.default:
        return _permuted_dims(node).index(dim)
    if node.target in VIEWS:
        return _match_dim(shape_of_node(node_argument(node)), dim, shape_of_node(node))
    return dim if node.target in COPIES or is_wait(node) or _is_exchange(node) else None


def _permuted_dims(node: fx.Node) -> list[int]:
    """Return the dimensions of a permutation, as nonnegative numbers."""
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _match_dim(shape: Sequence[Size], dim: int, other_shape: Sequence[Size]) -> int | None:
    """Return the dimension of another view with equal size and as many elements after it; None if there is none.

    Several dimensions match only if the size is one: then take the last, because a single head is never split.
    """
    trailing = product(shape[dim + 1 :])
    candidates = [i for i, size in enumerate(other_shape) if size == shape[dim] and product(other_shape[i + 1 :]) == trailing]
    return candidates[-1] if candidates else None


# -- groups


def _choose_num_groups(exchanged: ExchangedAttention) -> int:
    """Return the number of groups of heads, at most `MAX_GROUPS` if possible.

    Groups have equally many heads, and each has complete key heads or shares one key head with other groups.
    """
    heads, keys = (int(shape_of_node(path.last)[HEADS]) for path in exchanged.inputs[:2])
    counts = [n for n in range(2, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    return max((n for n in counts if n <= MAX_GROUPS), default=min(counts, default=1))


def _rewrite(exchanged: ExchangedAttention, num_groups: int, writer: GraphWriter) -> None:
    """Emit one attention call per group of heads, replace the received result, and rewrite the backward calls."""
    query, *key_value_paths = exchanged.inputs
    key_groups = min(num_groups, int(shape_of_node(key_value_paths[0].last)[HEADS]))
    writer.before(exchanged.node)
    operands_by_group, results, received = list[list[fx.Node]](), list[fx.Node](), list[fx.Node]()
    for group in range(num_groups):
        keys_and_values = (
            operands_by_group[-1][1:]
            if group * key_groups % num_groups
            else [_emit_group(path, group * key_groups // num_groups, key_groups, writer) for path in key_value_paths]
        )
        operands_by_group.append([_emit_group(query, group, num_groups, writer), *keys_and_values])
        results.append(writer.call(ATTENTION, *operands_by_group[-1], **_options(exchanged.node)))
        results[-1].meta[SPLIT_FROM] = exchanged.node.name
        received.append(_apply_path(exchanged.outputs, _getitem(results[-1], 0, writer), num_groups, writer))
    _concat_groups(exchanged.outputs, received, writer)
    for gradient in exchanged.gradients:
        _rewrite_gradient(gradient, operands_by_group, results, key_groups, writer.before(gradient.node))


def _rewrite_gradient(
    gradient: Gradient,
    operands_by_group: Sequence[Sequence[fx.Node]],
    results: Sequence[fx.Node],
    key_groups: int,
    writer: GraphWriter,
) -> None:
    """Emit one backward call per group of heads, add up the gradients of shared key heads, and replace the received gradients."""
    num_groups = len(operands_by_group)
    received: dict[int, list[fx.Node]] = {position: [] for position in gradient.outputs}
    running_sums = dict[int, fx.Node]()
    for group, (operands, result) in enumerate(zip(operands_by_group, results, strict=True)):
        out, lse = (_getitem(result, position, writer) for position in (0, 1))
        group_cotangent = _emit_group(gradient.inputs, group, num_groups, writer)
        gradients = writer.call(ATTENTION_BACKWARD, group_cotangent, *operands, out, lse, **_options(gradient.node))
        completes_key_group = (group + 1) * key_groups % num_groups == 0
        for position, path in gradient.outputs.items():
            group_gradient = _getitem(gradients, position, writer)
            if position and num_groups > key_groups:
                group_gradient = running_sums[position] = _add_in_float32(
                    running_sums.pop(position, None), group_gradient, writer
                )
                group_gradient = (
                    writer.call(aten._to_copy.default, group_gradient, dtype=gradients.meta[VALUE][position].dtype)
                    if completes_key_group
                    else group_gradient
                )
                if completes_key_group:
                    del running_sums[position]
            if position == 0 or completes_key_group:
                received[position].append(_apply_path(path, group_gradient, num_groups if position == 0 else key_groups, writer))
    for position, path in gradient.outputs.items():
        _concat_groups(path, received[position], writer)


def _add_in_float32(total: fx.Node | None, part: fx.Node, writer: GraphWriter) -> fx.Node:
    """Add a gradient to a running sum in float32 or wider; without a sum, return the gradient in that dtype."""
    if total is not None:
        return writer.call(aten.add.Tensor, total, part)
    wide_dtype = torch.promote_types(part.meta[VALUE].dtype, torch.float32)
    return writer.call(aten._to_copy.default, part, dtype=wide_dtype)


def _getitem(node: fx.Node, index: int, writer: GraphWriter) -> fx.Node:
    """Emit one result of an operator."""
    return writer.call(operator.getitem, node, index)


def _emit_group(path: ExchangePath, group: int, num_groups: int, writer: GraphWriter) -> fx.Node:
    """Emit the path's operators for one group of heads: slice the sent value, and exchange the slice."""
    if num_groups == 1:
        return path.last
    size = int(shape_of_node(path.source)[path.dims[0]]) // num_groups
    heads = writer.call(aten.slice.Tensor, path.source, path.dims[0], group * size, (group + 1) * size)
    return _apply_path(path, heads, num_groups, writer)


def _apply_path(path: ExchangePath, node: fx.Node, num_groups: int, writer: GraphWriter) -> fx.Node:
    """Apply the operators of a path to one group of heads."""
    result_dims = [*path.dims[1:], path.result_dim]
    for step, head_dim in zip(path.steps, result_dims, strict=True):
        arguments = list(step.args[1:])
        if step.target in VIEWS:
            sizes: Any = arguments[0]
            heads = int(shape_of_node(step)[head_dim]) // num_groups
            arguments[0] = [heads if dim == head_dim else size for dim, size in enumerate(sizes)]
        target: Any = aten.reshape.default if step.target in VIEWS else step.target
        if _is_exchange(step) and not node.meta[VALUE].is_contiguous():
            node = writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        result = writer.call(target, node, *arguments, **step.kwargs)
        if TRACED_STRIDES in step.meta:
            result.meta[TRACED_STRIDES] = (tuple(map(size_of, node.meta[VALUE].stride())),)
        node = result
    return node


def _concat_groups(path: ExchangePath, received: Sequence[fx.Node], writer: GraphWriter) -> None:
    """Replace the received value of all heads by the concatenated groups."""
    all_heads = received[0] if len(received) == 1 else writer.call(aten.cat.default, list(received), path.result_dim)
    path.last.replace_all_uses_with(all_heads, propagate_meta=False)
