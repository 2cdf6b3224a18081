"""Tables of numbers that determine how values are distributed over loops.

A table has one entry per value of a *region* (all loops of a stage in one direction), in graph order; operands are indices into
the table. Equal layers have equal tables, so each *placement* (the loop of each value) is computed once for all of them
(`loop_distribution.py`). A placement may depend on its table only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from torch import fx

from streamfx.ir.access import Layout, OperandAccess
from streamfx.ir.facts import NOT_IN_LOOPS, Role, StorageClass
from streamfx.ir.joint import is_tensor, num_elements
from streamfx.ir.span import Span
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_expensive, producer_of


class Access(NamedTuple):
    """An operand that an operator in a loop reads.

    `operand`: its index in the table.
    `in_same_loop`: the rows that are read are ready in the iteration that computes the operand's rows of the same chunk.
    `is_stored`: the operand must be stored in full, because no loop can recompute the rows that are read.
    `is_stored_before`: it must be stored unless the same loop computes it.
    """

    operand: int
    in_same_loop: bool
    is_stored: bool
    is_stored_before: bool


class RegionValue(NamedTuple):
    """A value that a region computes.

    `needs`: the operands, if its operator runs in a loop; `sources`: the operands, if it runs between loops.
    `siblings`: all results of its operator, including this value, if the operator has several and runs in a loop.
    """

    storage_class: StorageClass
    needs: tuple[Access, ...]
    sources: tuple[int, ...]
    siblings: tuple[int, ...]
    is_expensive: bool

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop computes the value chunk by chunk, or as a sum over chunks."""
        return self.storage_class not in NOT_IN_LOOPS


Table: TypeAlias = "tuple[RegionValue, ...]"


class Bytes(NamedTuple):
    """The bytes of each value of a table: of its traced shape, and of all rows as a loop stores them."""

    traced: tuple[int, ...]
    full: tuple[int, ...]


def table_of(nodes: Sequence[fx.Node], available: Callable[[fx.Node], bool], layout: Layout, reverse: bool) -> Table:
    """Return the table of these tensors, for loops in forward order, or in `reverse`.

    Values for which `available` returns True exist before the loops: they have no entry, and are omitted as operands.
    """
    index = {node: i for i, node in enumerate(nodes)}
    return tuple(_table_entry(node, index, available, layout, reverse) for node in nodes)


def bytes_of(nodes: Sequence[fx.Node], table: Table, layout: Layout) -> Bytes:
    """Return the bytes of each value: as traced, and of all rows (e.g. all keys). 0 for values that no loop computes."""
    sizes = [node.meta[VALUE].element_size() if value.is_in_loop else 0 for node, value in zip(nodes, table, strict=True)]
    elements, shapes = layout.axes.table.num_elements, layout.axes.shapes
    traced = [num_elements(node) * size if size else 0 for node, size in zip(nodes, sizes, strict=True)]
    full = [elements(shapes[node]) * size if size else 0 for node, size in zip(nodes, sizes, strict=True)]
    return Bytes(tuple(traced), tuple(full))


def is_loop_value(node: fx.Node, layout: Layout) -> bool:
    """Return whether a loop computes a value chunk by chunk, or as a sum over chunks."""
    return layout.access.storage_class(node) not in NOT_IN_LOOPS


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of the operator that computes a value; for an element of a tuple, those of its producer."""
    return [source for source in producer_of(node).all_input_nodes if is_tensor(source)]


def _table_entry(
    node: fx.Node, index: dict[fx.Node, int], available: Callable[[fx.Node], bool], layout: Layout, reverse: bool
) -> RegionValue:
    """Return the table entry of a value; `index` has the position of each value in the table.

    `layout` has the rows that each operator reads; `available` values have no entry.
    """
    storage_class, producer = layout.access.storage_class(node), producer_of(node)
    if storage_class in NOT_IN_LOOPS:
        sources = (_table_index(source, index, available) for source in tensor_inputs(node))
        return RegionValue(storage_class, (), tuple(i for i in sources if i is not None), (), is_expensive(node))
    needs = [  # an element of a tuple has the needs of its operator
        _operand_access(operand, access, layout, reverse)
        for access in layout.operand_accesses(producer)
        if (operand := _table_index(access.operand, index, available)) is not None
    ]
    siblings = () if producer is node else tuple(index[user] for user in producer.users if user in index)
    return RegionValue(storage_class, tuple(needs), (), siblings, is_expensive(node))


def _table_index(node: fx.Node, index: dict[fx.Node, int], available: Callable[[fx.Node], bool]) -> int | None:
    """Return the table index of a value; None if it exists before the loops. Raise `KeyError` for another value without one."""
    return None if node not in index and available(node) else index[node]


def _operand_access(operand: int, need: OperandAccess, layout: Layout, reverse: bool) -> Access:
    """Return the table entry of a read: `need` has the rows of an operand that an operator in a loop reads.

    `operand` is the operand's table index. Values between loops exist before the loop starts.
    """
    storage_class = layout.access.storage_class(need.operand)
    is_own_rows = storage_class is StorageClass.ROWS and need.is_own_rows  # most operands: the rest agrees, but is slower
    if is_own_rows or storage_class in NOT_IN_LOOPS:
        return Access(operand, in_same_loop=True, is_stored=False, is_stored_before=False)
    is_stored = Role.WHOLE in need.roles or storage_class is StorageClass.SUM
    is_stored_before = (
        storage_class is not StorageClass.PAIR
        and not is_stored
        and (storage_class is StorageClass.KEYSUM or need.selector is not None)
    )
    return Access(operand, is_ready_in_same_loop(need, layout, reverse), is_stored, is_stored_before)


def is_ready_in_same_loop(need: OperandAccess, layout: Layout, reverse: bool) -> bool:
    """Return whether the rows that an operator reads are ready in the loop that computes the operand, for the same chunk.

    The chunk's own rows are; the keys of earlier chunks are in a forward loop; all rows or complete sums are not.
    """
    storage_class = layout.access.storage_class(need.operand)
    roles = need.roles
    if storage_class is StorageClass.PAIR:
        return Role.WHOLE not in roles
    if storage_class is StorageClass.SUM or len(roles) != 1 or Role.WHOLE in roles:
        return False
    if storage_class is StorageClass.KEYSUM:
        span = layout.span(producer_of(need.operand))
        return Role.ROWS in roles and need.selector is None and _is_ready(span, not reverse)
    return _is_ready(layout.distance(need.placement, need.selector), reverse)


def _is_ready(span: Span, reverse: bool) -> bool:
    """Return whether the rows [start + low, end + high) belong to this chunk [start, end) or to chunks that ran before it.

    None for a bound of the span: no limit. In reverse, the last chunk runs first.
    """
    return (span.low is not None and span.low >= 0) if reverse else (span.high is not None and span.high <= 0)
