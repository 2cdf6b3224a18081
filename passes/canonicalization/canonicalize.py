"""What is this, in the fewest operators?

Aliases and views of the same shape disappear, equal operators become one, fillers lose their operand, and a mean over labelled
tokens becomes a sum divided by a count, so that it can be taken chunk by chunk.

    detach(x) -> x                     new_zeros(x, shape) -> full(shape, 0)
    t(t(w)) -> w                       nll_loss(mean) -> nll_loss(sum) / count
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import bound_arguments, is_size, is_tensor, joint_graph, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization.convolutions import split_backward
from streamfx.passes.canonicalization.dropped_column import drop_columns
from streamfx.passes.canonicalization.experts import PRODUCTS
from streamfx.passes.canonicalization.flex import write_out_flex
from streamfx.passes.canonicalization.fused import unify_attention
from streamfx.passes.canonicalization.grouped import undo_group_expansion
from streamfx.passes.canonicalization.identities import IDENTITIES
from streamfx.passes.canonicalization.one_hot import one_of_each, put_into_each
from streamfx.passes.canonicalization.opaque import note_layouts, number_parts
from streamfx.passes.canonicalization.permutations import undo_orders
from streamfx.passes.canonicalization.reversed_scans import reversed_scan
from streamfx.passes.canonicalization.row_numbers import rows_of_matrix
from streamfx.passes.canonicalization.scattered import rows_added_by_number, rows_by_number
from streamfx.passes.canonicalization.windows_of_rows import windows, windows_backward
from streamfx.passes.operators.fillers import fill_of
from streamfx.passes.operators.opaque import may_be_merged
from streamfx.passes.operators.rules.loss import MEAN, SUM
from streamfx.passes.operators.traits import is_random
from streamfx.runtime.rng import draw_seed

aten = torch.ops.aten
MAKES_AXES = frozenset(
    {
        aten.expand.default,
        aten.repeat.default,
        aten.slice.Tensor,
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.constant_pad_nd.default,
        aten.cat.default,
        aten.stack.default,
    }
)
Simplifier: TypeAlias = "Callable[[fx.Node, GraphWriter], fx.Node | None]"


@dataclass(frozen=True)
class Canonicalize:
    name: ClassVar[str] = "canonicalize"

    def apply(self, facts: Facts) -> Facts:
        joint = facts.joint
        note_layouts(joint.graph)
        canonicalize(joint.graph)
        _number_random_operators(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))


def canonicalize(graph: fx.Graph) -> None:
    """Simplify a graph in place; its inputs and outputs stay what they are."""
    write_out_flex(graph)
    number_parts(graph)
    _drop_unused(graph)
    writer = GraphWriter(graph)
    known: dict[Any, fx.Node] = {}
    existing = set(graph.nodes)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        simplifier = SIMPLIFIERS.get(node.target)
        replacement = simplifier(node, writer.before(node)) if simplifier is not None else None
        if replacement is None and not is_random(node) and not makes_axes(node) and may_be_merged(node):
            replacement = known.setdefault(_key(node), node)
        if replacement is not None and replacement is not node:
            _replace(node, replacement, is_new=replacement not in existing)
    unify_attention(graph)
    undo_group_expansion(graph)
    _drop_unused(graph)
    drop_columns(graph)
    undo_orders(graph, PRODUCTS)
    _drop_unused(graph)


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def makes_axes(node: fx.Node) -> bool:
    """Whether a result has dimensions that no operand has: `arange(n)` for the batch and for the sequence may look alike where
    both have n rows, but making one of them would make their axes one.
    """
    return not any(is_tensor(source) for source in node.all_input_nodes) or node.target in MAKES_AXES


def _number_random_operators(graph: fx.Graph) -> None:
    """Give the graph one seed per step, and each random operator the seed and a number of its own."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and is_random(node)]
    if not drawing:
        return
    seed = GraphWriter(graph).before(drawing[0]).call(draw_seed)
    for number, node in enumerate(drawing):
        node.meta["streamfx_draw"] = (seed, number)


def _replace(node: fx.Node, replacement: fx.Node, is_new: bool) -> None:
    """A result is only replaced by a new node: the caller may count on two results being two tensors."""
    if is_tensor(node) and not is_new:
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
    else:
        node.replace_all_uses_with(replacement, propagate_meta=False)


def _key(node: fx.Node) -> Any:
    """Equal for operators that compute the same; unique where that cannot be told."""

    def frozen(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return tuple(frozen(part) for part in item)
        if isinstance(item, dict):
            return tuple(sorted((key, frozen(value)) for key, value in item.items()))
        sign = math.copysign(1.0, item) if isinstance(item, float) else None
        return (type(item), item, sign)  # 1 and 1.0 and True are different arguments, and so are 0.0 and -0.0

    key = (node.target, frozen(node.args), frozen(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return id(node)
    return key


# -- simplifiers: a node and a writer in, an equal node out (None: leave it)


def _operand(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    return node.args[0]  # type: ignore[return-value]


def _same_shape(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    operand = node.args[0]
    return operand if shape_of_node(operand) == shape_of_node(node) else None  # type: ignore[arg-type,return-value]


def _copied(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """What is written over all of a value of the same shape and type."""
    over, value = node.args[:2]
    is_same = is_tensor(value) and shape_of_node(value) == shape_of_node(over) and _is_alike(value, over)  # type: ignore[arg-type]
    return value if is_same else None  # type: ignore[return-value]


def _full_slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    step = bound_arguments(node)["step"]
    return _same_shape(node, writer) if step == 1 else None


def _slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """All of a dimension, or all but the padding that was put behind it (kernels ask for aligned biases)."""
    arguments, padded = bound_arguments(node), node_argument(node)
    if padded.target is not aten.constant_pad_nd.default or arguments["start"] not in (None, 0) or arguments["step"] != 1:
        return _full_slice(node, writer)
    operand, pads = node_argument(padded), list(padded.args[1])  # type: ignore[arg-type]
    dim = arguments["dim"] % len(shape_of_node(node))
    behind = 2 * (len(shape_of_node(node)) - 1 - dim) + 1
    only_behind = all(pad == 0 for i, pad in enumerate(pads) if i != behind)
    return operand if only_behind and shape_of_node(operand) == shape_of_node(node) else _full_slice(node, writer)


def _pad_by_nothing(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    operand = _same_shape(node, writer)
    return None if operand is None or any(pad != 0 for pad in node.args[1]) else writer.call(aten.clone.default, operand)  # type: ignore[union-attr]


def _cat(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """With an empty cache in front of the first keys it is a copy, with a constant around one operand it is padding."""
    full: list[Any] = [item for item in node.args[0] if 0 not in shape_of_node(item)]  # type: ignore[union-attr,arg-type]
    if len(full) == 1 and _dtype(full[0]) == _dtype(node):
        return writer.call(aten.clone.default, full[0])
    fills = [fill_of(item) for item in full]
    computed = [i for i, fill in enumerate(fills) if fill is None]
    values = {(fill, math.copysign(1.0, fill)) for fill in fills if fill is not None}
    floating = all(_dtype(item) == _dtype(node) and _dtype(item).is_floating_point for item in full)
    rank = len(shape_of_node(node))
    dim = bound_arguments(node)["dim"] % rank if rank else 0
    if floating and len(computed) == len(full) == 2 and dim < rank - 1:
        return _row_beside(full, dim, node, writer)
    if len(computed) != 1 or len(values) != 1 or not floating:
        return None
    (i,) = computed
    before, after = (sum(item.meta["val"].shape[dim] for item in side) for side in (full[:i], full[i + 1 :]))
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    return writer.call(aten.constant_pad_nd.default, full[i], [0, 0] * (rank - 1 - dim) + [before, after], values.pop()[0])


def _row_beside(pieces: list[fx.Node], dim: int, node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """One row before or behind all but one row of another value, as token shifts have it: each padded, and one of them chosen."""
    lengths = [shape_of_node(piece)[dim] for piece in pieces]
    if sorted(length == 1 for length in lengths) != [False, True] or not all(isinstance(length, int) for length in lengths):
        return None
    i, others = lengths.index(1), [0, 0] * (len(shape_of_node(node)) - 1 - dim)
    if not _is_shift(pieces[1 - i], dim):
        return None
    shape, at = list(node.meta["val"].shape), 0 if i == 0 else lengths[0]
    rest = writer.call(aten.constant_pad_nd.default, pieces[1 - i], [*others, *((1, 0) if i == 0 else (0, 1))], 0.0)
    row = writer.call(aten.slice_backward.default, pieces[i], shape, dim, at, at + 1, 1)
    numbers = writer.call(aten.arange.default, sum(lengths), device=_device(node))
    wide = writer.call(aten.view.default, numbers, [-1] + [1] * (len(shape) - 1 - dim))
    return writer.call(aten.where.self, writer.call(aten.eq.Scalar, wide, at), row, rest)


def _is_shift(piece: fx.Node, dim: int) -> bool:
    return piece.target is aten.slice.Tensor and bound_arguments(piece)["dim"] % len(shape_of_node(piece)) == dim


def _written_over_filler(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Rows written into a constant are those rows with padding around them."""
    arguments = bound_arguments(node)
    value, dim = fill_of(node.args[0]), arguments["dim"] % len(shape_of_node(node))
    length, written = (item.meta["val"].shape[dim] for item in node.args[:2])  # type: ignore[union-attr]
    start = arguments["start"] or 0
    floating = _dtype(node).is_floating_point and _is_alike(node.args[1], node)  # type: ignore[arg-type]
    after = length - written - start if isinstance(start, int) and start >= 0 else None
    if value is None or not floating or arguments["step"] != 1 or not isinstance(after, int) or after < 0:
        return None
    others = [list(shape_of_node(item)) for item in node.args[:2]]  # type: ignore[arg-type]
    if any(shape[:dim] + shape[dim + 1 :] != others[0][:dim] + others[0][dim + 1 :] for shape in others):
        return None
    pad = [0, 0] * (len(shape_of_node(node)) - 1 - dim) + [start, after]
    return writer.call(aten.constant_pad_nd.default, node.args[1], pad, value)


def _filled(node: fx.Node, writer: GraphWriter) -> fx.Node:
    return writer.call(aten.full_like.default, *node.args)


def _double_transpose(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    inner = node.args[0]
    if isinstance(inner, fx.Node) and inner.target is aten.t.default:
        return inner.args[0]  # type: ignore[return-value]
    return None


def _filler(value: Any) -> Simplifier:
    def simplify(node: fx.Node, writer: GraphWriter) -> fx.Node:
        arguments, own = bound_arguments(node), node.meta["val"]
        fill = arguments["fill_value"] if value is None else value
        fill = bool(fill) if own.dtype == torch.bool and not is_size(fill) else fill
        return writer.call(aten.full.default, arguments["size"], fill, dtype=own.dtype, device=own.device)

    return simplify


def _mean_loss(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """(mean loss, total weight) to (summed loss / count, count)."""
    arguments = bound_arguments(node)
    if arguments["reduction"] != MEAN:
        return None
    scores, labels, weight, ignored = (arguments[name] for name in ("self", "target", "weight", "ignore_index"))
    if torch.finfo(_dtype(scores)).max < torch.finfo(torch.float32).max:  # a mean that is in range of a sum that may not be
        scores, weight = (item and writer.call(aten._to_copy.default, item, dtype=torch.float32) for item in (scores, weight))
    total = writer.call(operator.getitem, writer.call(node.target, scores, labels, weight, SUM, ignored), 0)
    count = _label_count(labels, weight, ignored, writer)
    results = (writer.call(aten.div.Tensor, total, count), count)
    for user in (user for user in list(node.users) if user.users):
        own = writer.call(aten._to_copy.default, results[user.args[1]], dtype=_dtype(user))  # type: ignore[index]
        user.replace_all_uses_with(own, propagate_meta=False)
    return None


def _loss_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """The gradient of a mean is that of a sum, divided by the total weight that the call is given."""
    arguments = bound_arguments(node)
    names = ("grad_output", "self", "target", "weight", "ignore_index", "total_weight")
    gradient, scores, labels, weight, ignored, total = (arguments[name] for name in names)
    if arguments["reduction"] != MEAN:
        return _without_total(node, arguments, writer)
    is_rounded = total.target is aten._to_copy.default and _dtype(node_argument(total)) == torch.float64
    count = node_argument(total) if is_rounded else total
    scaled = writer.call(aten._to_copy.default, writer.call(aten.div.Tensor, gradient, count), dtype=_dtype(gradient))
    return writer.call(node.target, scaled, scores, labels, weight, SUM, ignored, total)


def _without_total(node: fx.Node, arguments: Mapping[str, Any], writer: GraphWriter) -> fx.Node | None:
    """Only the gradient of a mean reads the total weight: no other has to wait until all labels are counted."""
    total: fx.Node = arguments["total_weight"]
    if total.target is not operator.getitem:
        return None
    unused = writer.call(aten.full.default, [], 1.0, dtype=_dtype(total), device=_device(total))
    return writer.call(node.target, *(unused if name == "total_weight" else value for name, value in arguments.items()))


def _label_count(labels: fx.Node, weight: fx.Node | None, ignored: int, writer: GraphWriter) -> fx.Node:
    """How many labels count, or the sum of their classes' weights."""
    counted = writer.call(aten.ne.Scalar, labels, ignored)
    if weight is None:
        return writer.call(aten.sum.default, counted, dtype=torch.float64)
    zero = writer.call(aten.full.default, [], 0, dtype=torch.int64, device=_device(labels))
    safe = writer.call(aten.where.self, counted, labels, zero)
    weights = writer.call(aten.index.Tensor, weight, [safe])
    none = writer.call(aten.full.default, [], 0.0, dtype=_dtype(weight), device=_device(labels))
    return writer.call(aten.sum.default, writer.call(aten.where.self, counted, weights, none), dtype=torch.float64)


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values are of one type, on one device."""
    return _dtype(node) == _dtype(other) and _device(node) == _device(other)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _device(node: fx.Node) -> torch.device:
    device: torch.device = node.meta["val"].device
    return device


SIMPLIFIERS: dict[Any, Simplifier] = {
    aten.convolution_backward.default: split_backward,
    aten.detach.default: _operand,
    aten.alias.default: _operand,
    aten.lift_fresh_copy.default: _operand,
    aten.view.default: _same_shape,
    aten._unsafe_view.default: _same_shape,
    aten.reshape.default: _same_shape,
    aten.expand.default: _same_shape,
    aten.copy.default: _copied,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _full_slice,
    aten.t.default: _double_transpose,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad_by_nothing,
    aten.flip.default: reversed_scan,
    aten.new_zeros.default: _filler(0),
    aten.new_ones.default: _filler(1),
    aten.new_full.default: _filler(None),
    aten.new_empty_strided.default: _filler(0),
    aten.fill.Scalar: _filled,
    aten.masked_scatter.default: rows_by_number,
    aten.masked_scatter_backward.default: rows_added_by_number,
    aten.slice_scatter.default: _written_over_filler,
    aten.new_empty.default: _filler(0),
    aten.gather.default: rows_of_matrix,
    aten.index.Tensor: one_of_each,
    aten.index_put.default: put_into_each,
    aten.unfold.default: windows,
    aten.unfold_backward.default: windows_backward,
    aten.scatter_add.default: rows_of_matrix,
    **IDENTITIES,
    aten.nll_loss_forward.default: _mean_loss,
    aten.nll_loss_backward.default: _loss_backward,
    aten.nll_loss2d_forward.default: _mean_loss,
    aten.nll_loss2d_backward.default: _loss_backward,
}
