"""Record how opaque operators read memory before anything is rewritten: storage, strides and offsets of operands.

as_strided(slice(x, 1, 1), ...)    ->   strided(x, ..., offset)     it reads the memory of x

Rewrites preserve elements but not strides. An operator without an axis rule (*opaque*) may depend on the strides of its
operands; AOTAutograd and the user may depend on the strides of results. So both are recorded in metadata, and restored
when the graph runs. `as_strided` and its relatives read memory beyond their operand: they become operators on the value at
the start of the chain of views.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, scalar_argument, tensor_operands
from streamfx.ir.operator_table import OPERATORS, Kind, is_kind, returns_view
from streamfx.ir.sizes import Size, product, simplified, size_of
from streamfx.ir.writer import GraphWriter, offset_argument, size_arguments, stride_arguments
from streamfx.node_meta import ALIASES, RESULT_VIEWS, TRACED_STRIDES, VALUE
from streamfx.passes.ops.aliasing import MemoryPlace, OtherMemory, memories
from streamfx.passes.ops.opaque import is_opaque
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.runtime.restride import RestridedOperator, item_at, strided, strided_scatter
from streamfx.torch_private import OpOverload

aten = torch.ops.aten

# views by strides of one memory: `_unsafe_view` does not declare it, and `reshape` may copy
STRIDED_VIEWS = frozenset(filter(returns_view, OPERATORS)) - {aten.reshape.default} | {aten._unsafe_view.default}


def record_layouts(graph: fx.Graph, num_outputs: int) -> None:
    """Record in `meta` the strides of each opaque operator's operands, and of the graph's results, in place.

    The output node also gets the values whose memory each result may share (`ALIASES`), and, for the first `num_outputs`
    results, which are returned to the user, where views lie in memory (`RESULT_VIEWS`). `as_strided` operators are replaced.
    """
    writer = GraphWriter(graph)
    for node in list(graph.nodes):
        if is_kind(node, Kind.STRIDED):
            (_replace_by_view if _is_only_view(node) else _replace_by_strided_read)(node, writer.move_before(node))
    for node in graph.nodes:
        if is_opaque(node):
            strides_of_operands = (operand.meta[VALUE].stride() for operand in tensor_operands(node))
            node.meta[TRACED_STRIDES] = tuple(tuple(size_of(stride) for stride in strides) for strides in strides_of_operands)
    output = graph.output_node()
    results: Any = output.args[0]
    has_dynamic_sizes = any(_has_dynamic_size(node) for node in graph.find_nodes(op="placeholder"))
    places = [_find_memory_place(item, results[:num_outputs]) for item in results[:num_outputs]]
    views_by_base = Counter(place.base for place in places if place)
    output.meta[RESULT_VIEWS] = tuple(
        place if place and (has_dynamic_sizes or _is_observable(place.base, views_by_base)) else None for place in places
    )
    output.meta[TRACED_STRIDES] = tuple(map(_result_strides, results))
    output.meta[ALIASES] = tuple(
        frozenset(value.name for value in memories(item)) if is_tensor(item) else None for item in results
    )


def _find_memory_place(item: Any, results: Sequence[Any]) -> MemoryPlace | None:
    """Return where the result `item` lies in memory (base, offset, strides) if it is a view; else None.

    `results` are all results for the user. A base that is neither an input nor a result, such as an input that was written
    to, is an `OtherMemory`. With dynamic sizes AOTAutograd reads the result from this offset; with static sizes it builds the
    view itself.
    """
    base = _base(item) if is_tensor(item) else item
    if base is item or not is_tensor(base):
        return None
    value, base_value = item.meta[VALUE], base.meta[VALUE]
    strides, offset = tuple(size_of(stride) for stride in value.stride()), size_of(value.storage_offset())
    if base.op != "placeholder" and base not in results:
        return MemoryPlace(OtherMemory(base.name), offset, strides)
    base_id = base.name if base.op == "placeholder" else results.index(base)
    # the offset counts elements of the result, from the first element of the base
    base_offset = size_of(base_value.storage_offset()) * base_value.element_size() // value.element_size()
    return MemoryPlace(base_id, simplified(offset - base_offset), strides)


def _is_observable(base: int | str | OtherMemory, views_by_base: Mapping[Any, int]) -> bool:
    """Return whether a caller who writes into memory can observe that a result is a view of this base.

    The caller has the memory if the base is an input or a result, or if several results are views of it.
    """
    return views_by_base[base] > 1 or not isinstance(base, OtherMemory)


def reads_memory(node: fx.Node) -> bool:
    """Return whether an operator depends on the layout of its operands' memory: it reads strides, or no rule describes it."""
    if isinstance(node.target, RestridedOperator):  # streamfx restrides operands only for operators that do not read strides
        return False
    return is_kind(node, Kind.STRIDED) or (is_opaque(node) and not _makes_view(node))


def _makes_view(node: fx.Node) -> bool:
    """Return whether an operator's schema declares its result to be a view."""
    return isinstance(node.target, OpOverload) and returns_view(node.target)


def _base(node: fx.Node) -> fx.Node:
    """Return the value that `node` views, directly or through other views; the node itself if it is not a view.

    Operators' schemas declare views.
    """
    return list(view_chain(node))[-1]


def view_chain(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a value, then the value that it views, and so on. Operators' schemas declare views, as for autograd."""
    while True:
        yield node
        producer = node_argument(node) if node.target is operator.getitem else node
        if not _makes_view(producer) or not producer.all_input_nodes:
            return
        node = producer.all_input_nodes[0]


def _has_dynamic_size(node: fx.Node) -> bool:
    """Return whether an input is a dynamic size, or a tensor with one."""
    value = node.meta.get(VALUE)
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt)
    return not all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))


def _result_strides(item: Any) -> tuple[Size, ...] | None:
    """Return the strides of a result; None if it is not a tensor, or has fewer than two dimensions: its layout is then known."""
    value = item.meta[VALUE] if is_tensor(item) else None
    return None if value is None or value.dim() < 2 else tuple(size_of(stride) for stride in value.stride())


def _is_only_view(node: fx.Node) -> bool:
    """Return whether an `as_strided` is only a view: it keeps the operand's layout, or reads a contiguous operand in order.

    PyTorch's decomposition of group norm ends with such an operator. An explicit offset must equal the operand's, and the
    memory must not be an input's: its offset may differ in later calls.
    """
    if node.target is not aten.as_strided.default:
        return False
    arguments, operand = bound_arguments(node), node_argument(node).meta[VALUE]
    new_shape, new_strides = ([scalar_argument(item) for item in arguments[name]] for name in ("size", "stride"))
    explicit_offset = arguments["storage_offset"]
    shape, strides = ([size_of(item) for item in items] for items in (operand.shape, operand.stride()))
    is_moved = explicit_offset is not None and scalar_argument(explicit_offset) != size_of(operand.storage_offset())
    if is_moved or (explicit_offset is not None and _root(node_argument(node)).op == "placeholder"):
        return False
    is_identity = (new_shape, new_strides) == (shape, strides)
    are_contiguous = new_strides == _contiguous_strides(new_shape) and strides == _contiguous_strides(shape)
    return is_identity or (are_contiguous and product(new_shape) == product(shape))


def _contiguous_strides(shape: Sequence[Size]) -> list[Size]:
    """Return the strides of a contiguous tensor of this shape: [2, 3, 4] -> [12, 4, 1]."""
    return [product(shape[dim + 1 :]) for dim in range(len(shape))]


def _replace_by_view(node: fx.Node, writer: GraphWriter) -> None:
    """Replace an `as_strided` that is only a view by a `view` of its shape, in place."""
    node.replace_all_uses_with(writer.call(aten.view.default, node_argument(node), node.args[1]), propagate_meta=False)
    writer.graph.erase_node(node)


def _replace_by_strided_read(node: fx.Node, writer: GraphWriter) -> None:
    """Replace `as_strided` or `as_strided_scatter` of a view, in place, by an operator on the value that owns the memory.

    This value, the *root*, is at the start of the chain of views; offsets are relative to it. An explicit offset counts from
    the start of an input's storage, not from the input's first element. The distance between the two may differ in later
    calls, so operators on inputs with an explicit offset are not rewritten.
    """
    operand, arguments = node_argument(node), bound_arguments(node)
    root, explicit_offset = _root(operand), arguments["storage_offset"]
    if root.op == "placeholder" and explicit_offset is not None:
        return
    root_offset, operand_offset = offset_argument(root, writer), offset_argument(operand, writer)
    offset = _emit_difference(operand_offset if explicit_offset is None else explicit_offset, root_offset, writer)
    layout = arguments["size"], arguments["stride"], offset
    if node.target is aten.as_strided.default:
        result = writer.call(strided, root, *layout)
    else:
        scattered = writer.call(strided_scatter, root, node.args[1], *layout)
        operand_layout = size_arguments(operand, writer), stride_arguments(operand, writer)
        result = writer.call(strided, scattered, *operand_layout, _emit_difference(operand_offset, root_offset, writer))
    node.replace_all_uses_with(result, propagate_meta=False)
    writer.graph.erase_node(node)


def _emit_difference(left: Any, right: Any, writer: GraphWriter) -> Any:
    """Return `left - right`: an integer, or a new node if one of them is a node (a dynamic size)."""
    return writer.call(operator.sub, left, right) if isinstance(left, fx.Node) or isinstance(right, fx.Node) else left - right


def _root(node: fx.Node) -> fx.Node:
    """Return the value before all operators in `STRIDED_VIEWS` that lead to `node`: the value that owns the memory."""
    while node.target in STRIDED_VIEWS or (node.target is operator.getitem and node_argument(node).target in STRIDED_VIEWS):
        node = node_argument(node)
    return node


@rewrite_rule(operator.getitem)
def nested_getitem_to_item_at(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """getitem(getitem(cond, 1), 0) -> item_at(cond, 1, 0)

    Also if results are in a dictionary. So one operator reads a nested result, and no value is a container.
    """
    path = list[Any]()  # the keys of the nested results, outermost first
    container = node
    while container.target is operator.getitem:
        path.insert(0, container.args[1])
        container = node_argument(container)
    return None if len(path) == 1 and isinstance(path[0], int) else writer.call(item_at, container, *path)
