"""Find the dimensions of a program's result that are rows: row i depends only on row i of a source tensor.

A dimension of a result *follows* a dimension of the source if index i of the result depends only on index i of the source. If the
source is hidden [b t d], logits [b t v] = linear(hidden, weight) follow (0, 1, None). Each rule returns this tuple for the result
of a node, given `followed`, the tuples of earlier nodes that depend on the source; an empty tuple, or no rule, says that no
dimension follows. Then the result is computed at once, not in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import fx

from streamfx.lazy.op_kinds import OpKind, op_kind
from streamfx.lazy.values import example, is_dense

Follows: TypeAlias = "tuple[int | None, ...]"
FollowsByNode: TypeAlias = "Mapping[fx.Node, Follows]"


def rows_of_program(source: fx.Node, recomputed: tuple[fx.Node, ...]) -> Follows:
    """Return, for each dimension of the last of the `recomputed` nodes, the dimension of `source` that it follows, or None."""
    followed: dict[fx.Node, Follows] = {source: tuple(range(example(source).dim()))}  # for nodes that depend on the source
    for node in recomputed:
        if not followed.keys().isdisjoint(node.all_input_nodes):
            followed[node] = _follows(node, followed) if is_dense(node) else ()
    return _dims_followed(recomputed[-1], followed)


def _follows(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Return, for each dimension of a node's result, the dimension of the source that it follows, or None, by the node's rule.

    A result follows a dimension only if all operands that depend on the source have a dimension that follows it.
    """
    rule = RULES.get(op_kind(node))  # type: ignore[arg-type]
    follows = rule(node, followed) if rule is not None else ()
    rank = example(node).dim()
    dims_of_all_operands = set.intersection(*(set(followed[operand]) for operand in node.all_input_nodes if operand in followed))
    return tuple(dim if dim in dims_of_all_operands else None for dim in follows) if len(follows) == rank else (None,) * rank


def _dims_followed(node: object, followed: FollowsByNode) -> Follows:
    """Return, for each dimension of an operand, the dimension of the source that it follows.

    None for each if it does not depend on the source; empty if it is not a tensor.
    """
    if isinstance(node, fx.Node) and is_dense(node):
        return followed.get(node, (None,) * example(node).dim())
    return ()


def _pointwise(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for operands that broadcast, aligned at the last dimension.

    A dimension follows if all operands with a size other than 1 there follow the same dimension.
    """
    rank = example(node).dim()
    aligned: list[set[int | None]] = [set() for _ in range(rank)]
    for operand in filter(is_dense, node.all_input_nodes):
        shape, follows = example(operand).shape, _dims_followed(operand, followed)
        for result_dim, (size, dim) in enumerate(zip(shape, follows, strict=True), rank - len(shape)):
            if not (isinstance(size, int) and size == 1):
                aligned[result_dim].add(dim)
    return tuple(dims.pop() if len(dims) == 1 else None for dims in aligned)


def _first_operand(node: fx.Node) -> object:
    return node.args[0] if node.args else node.kwargs.get("input")


def _same(node: fx.Node, followed: FollowsByNode) -> Follows:
    return _dims_followed(_first_operand(node), followed)


def _index(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for indexing: x[:, 0:, ...] follows as x does if every slice is full; otherwise no dimension follows."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    full = all(item is Ellipsis or item in (slice(None), slice(0, None), slice(0, None, 1)) for item in index)
    return _dims_followed(node.args[0], followed) if full else ()


def _softmax(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for softmax: all dimensions follow as in the operand, except the normalized one."""
    follows = list(_dims_followed(_first_operand(node), followed))
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(dim, int) or not follows:
        return ()
    follows[dim] = None
    return tuple(follows)


def _reduction(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for sums and means over one or several dimensions, which do not follow; the others do. `keepdim` or not.

    Without a dimension argument, everything is summed, and nothing follows.
    """
    follows = _dims_followed(_first_operand(node), followed)
    dim_argument = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = dim_argument if isinstance(dim_argument, (tuple, list)) else (dim_argument,)
    if not follows or not dims or not all(type(dim) is int for dim in dims):
        return ()
    summed = {dim % len(follows) for dim in dims}
    is_kept = example(node).dim() == len(follows)
    return tuple(None if index in summed else dim for index, dim in enumerate(follows) if is_kept or index not in summed)


def _norm(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for norms over the last dimensions, given by their shape: the others follow, if no weight depends on the source."""
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
    if not isinstance(shape, (tuple, list)) or not shape or not _only_first_has_rows(node, followed):
        return ()
    return (*_dims_followed(_first_operand(node), followed)[: -len(shape)], *(None for _ in shape))


def _linear(node: fx.Node, followed: FollowsByNode) -> Follows:
    """Rule for x [..., k] times a weight [k, n]: all but the last dimension follow, if the weight does not."""
    if len(node.args) < 2 or not is_dense(node.args[1]) or example(node.args[1]).dim() != 2:
        return ()
    return (*_dims_followed(node.args[0], followed)[:-1], None) if _only_first_has_rows(node, followed) else ()


def _only_first_has_rows(node: fx.Node, followed: FollowsByNode) -> bool:
    """Return whether no operand except the first follows a dimension of the source, and the first is an operand only once."""
    first = _first_operand(node)
    weights = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, fx.Node) and item is not first]
    is_repeated = sum(item is first for item in (*node.args, *node.kwargs.values())) > 1
    return not is_repeated and all(dim is None for weight in weights for dim in _dims_followed(weight, followed))


RULES: dict[OpKind, Callable[[fx.Node, FollowsByNode], Follows]] = {
    OpKind.POINTWISE: _pointwise,
    OpKind.SAME: _same,
    OpKind.INDEX: _index,
    OpKind.SOFTMAX: _softmax,
    OpKind.NORM: _norm,
    OpKind.REDUCTION: _reduction,
    OpKind.LINEAR: _linear,
}
