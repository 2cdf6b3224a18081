"""Access patterns: the rows of each operand that an operator reads inside a loop over chunks of the sequence.

A *sequence dimension* of a value is a dimension that holds the sequence, or an axis derived from it, such as a slice. Its
*placement* says where the sequence lies in it. Its *role* is ROWS (query positions: the chunk's own rows [s, e)), KEYS (key
positions: the rows that the chunk's queries see) or WHOLE (all rows). Its *selector* says which rows exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AccessFacts, AxisFacts, DimAxes, Role, SpanFacts, StorageClass
from streamfx.ir.joint import tensor_operands
from streamfx.ir.program import Placement, RowRange, Selector, ShiftedRows
from streamfx.ir.recurrence import Truncation
from streamfx.ir.signature import AxisLabel
from streamfx.ir.sizes import Size, product
from streamfx.ir.span import Span

OWN_ROWS = Span(0, 0)


class SequenceAccess(NamedTuple):
    """How an operator reads one sequence dimension of an operand.

    `selector` says which rows are read: a `Span` [s + low, e + high) of keys, the `ShiftedRows` of a window, or None for the
    chunk's own rows.
    """

    placement: Placement
    role: Role
    selector: Selector


class OperandAccess(NamedTuple):
    """The rows of one operand that an operator reads: one `SequenceAccess` for each sequence dimension."""

    operand: fx.Node
    sequence_dims: tuple[SequenceAccess, ...]

    @property
    def roles(self) -> list[Role]:
        """The distinct roles of all sequence dimensions of the operand."""
        return list(dict.fromkeys([access.role for access in self.sequence_dims]))

    @property
    def is_own_rows(self) -> bool:
        """Whether the operand has one sequence dimension, of which the operator reads the chunk's own rows."""
        if len(self.sequence_dims) != 1:
            return False
        _, role, selector = self.sequence_dims[0]
        return role is Role.ROWS and selector is None

    @property
    def placement(self) -> Placement:
        """The placement of the operand's first sequence dimension; most operands have only one."""
        return self.sequence_dims[0].placement

    @property
    def selector(self) -> Selector:
        """The selector of the operand's first sequence dimension; most operands have only one."""
        return self.sequence_dims[0].selector


@dataclass(frozen=True)
class Layout:
    """Axes, roles, and spans combined: locate the rows of a value, and the rows that a chunk reads.

    `truncations` has the recurrences whose gradients reach back a limited number of rows. The graph and its facts must not
    change while a layout is in use, because `operand_accesses` and `placements` cache results.
    """

    axes: AxisFacts
    access: AccessFacts
    key_spans: SpanFacts
    truncations: Mapping[fx.Node, Truncation]
    _accesses: dict[tuple[fx.Node, Span | None], tuple[OperandAccess, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _placements: dict[DimAxes, tuple[Placement, ...]] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, dim: Dim) -> RowRange:
        """Return the rows of the sequence that a sequence dimension holds, as (offset, length, rows per block).

        With 40 rows in the sequence, dimension 1 of `x[:, 3:]` holds (3, 37, 1).
        """
        sequence = self.axes.sequence
        factor = self.axes.sequence_factor(dim)
        assert sequence is not None and factor is not None
        offset, length = sequence.members[factor]
        return RowRange(offset, length, sequence.block(factor))

    def placement(self, value: fx.Node, dim_index: int) -> Placement:
        """Return where sequence dimension `dim_index` of a value holds the sequence.

        A dimension is a product of axis factors: in `(b t c)`, with t the sequence, `outer` is the size of b and `inner`
        the size of c.
        """
        factors = self.axes.table.resolve(self.axes.shapes[value][dim_index])
        sequence_factor = self.axes.sequence_factor(factors)
        assert sequence_factor is not None
        factor_index = factors.index(sequence_factor)
        size = self.axes.table.size
        return Placement(
            dim=dim_index,
            rows=self.rows(factors),
            outer=product(size(factor) for factor in factors[:factor_index]),
            inner=product(size(factor) for factor in factors[factor_index + 1 :]),
        )

    def placements(self, value: fx.Node) -> tuple[Placement, ...]:
        """Return the placement of the sequence in each sequence dimension of a value. Results are cached."""
        shape = self.axes.shapes[value]
        placements = self._placements.get(shape)
        if placements is None:
            dims = self.axes.sequence_dims(shape)
            placements = self._placements[shape] = tuple(self.placement(value, dim_index) for dim_index in dims)
        return placements

    def full_shape(self, value: fx.Node) -> tuple[Size, ...]:
        """Return the sizes of all dimensions of a value, for all rows of the sequence."""
        return tuple(self.axes.table.size_of_dim(self.axes.table.resolve(dim)) for dim in self.axes.shapes[value])

    def span(self, node: fx.Node, consumer_span: Span | None = None) -> Span:
        """Return which keys an operator works on for a chunk [s, e): the span [s + low, e + high), `Span()` for all keys.

        Masks and similar query-by-key values have no span, because every consumer recomputes them for its own keys: they get
        `consumer_span`, or all keys if that is None.
        """
        return self.key_spans.spans.get(node, consumer_span or Span())

    def is_recomputed_per_consumer(self, node: fx.Node) -> bool:
        """Return whether each consumer recomputes a query-by-key value, such as a mask, for its own key positions."""
        return node in self.key_spans.recomputed_per_consumer and self.access.storage_class(node) is StorageClass.PAIR

    def operand_accesses(self, node: fx.Node, consumer_span: Span | None = None) -> tuple[OperandAccess, ...]:
        """Return the rows that an operator reads inside a loop, one `OperandAccess` per tensor operand.

        `consumer_span` matters only if the operator has no span of keys: then its consumer determines the keys. Results are
        cached.
        """
        key = (node, consumer_span if node in self._nodes_with_keys_of_consumer else None)
        accesses = self._accesses.get(key)
        if accesses is None:
            accesses = self._accesses[key] = tuple(self._accesses_of(node, consumer_span))
        return accesses

    @cached_property
    def _nodes_with_keys_of_consumer(self) -> frozenset[fx.Node]:
        """The operators that read key positions and have no span: their consumer determines them."""
        spans, roles_of = self.key_spans.spans, self.access.roles
        return frozenset(node for node, roles in roles_of.items() if Role.KEYS in roles.values() and node not in spans)

    def _accesses_of(self, node: fx.Node, consumer_span: Span | None) -> Iterator[OperandAccess]:
        """Yield the `OperandAccess` of each tensor operand; `operand_accesses` caches them.

        The operator's signature (as `m k, k n -> m n`) has the axis labels of each dimension of each operand. In a sequence
        dimension, the first label with a role decides which rows are read.
        """
        signature, roles = self.axes.signatures[node], self.access.roles.get(node, {})
        for operand, labels_of_dims in zip(tensor_operands(node), signature.operands, strict=True):
            sequence_dims: list[SequenceAccess] = []
            for placement in self.placements(operand):
                label = next(label for label in labels_of_dims[placement.dim] if label in roles)
                role = roles[label]
                has_selector = role is Role.KEYS or (role is Role.ROWS and signature.windows)
                selector = self._selector(node, label, role, consumer_span) if has_selector else None
                sequence_dims.append(SequenceAccess(placement, role, selector))
            yield OperandAccess(operand, tuple(sequence_dims))

    def _selector(self, node: fx.Node, label: AxisLabel, role: Role, consumer_span: Span | None) -> Selector:
        """Return which rows of an operand an operator reads along one axis label.

        A span for key positions. Shifted rows if a result has a window over the label: its row i reads rows i + start to
        i + start + reach (a slice, a padding, a convolution). Else None: the chunk's own rows, or all rows for role WHOLE.
        """
        if role is Role.KEYS:
            return self.span(node, consumer_span)
        if role is Role.ROWS:
            signature = self.axes.signatures[node]
            for result_label, window in signature.windows.items():
                if window.source == label:
                    return ShiftedRows(self.rows(self.axes.labels[node][result_label]), window.start, window.reach)
        return None

    def shown_rows(self, placement: Placement, selector: Selector) -> ShiftedRows | None:
        """Return the selector if it selects the chunk's own rows, of an axis that may start later or end earlier; else None.

        For example a slice `x[:, 3:]`: its row i is row i + 3 of x, so both are the same row of the sequence.
        """
        return selector if isinstance(selector, ShiftedRows) and self.distance(placement, selector) == OWN_ROWS else None

    def distance(self, placement: Placement, selector: Selector) -> Span:
        """Return how far the rows that a selector reads are from the chunk's own rows, as a span [s + low, e + high).

        (0, 0): the same rows of the sequence. Unbounded if the distance is known only at run time. `placement` is that of the
        operand, which has one sequence dimension.
        """
        if isinstance(selector, Span):
            return selector
        if selector is None:
            return OWN_ROWS
        block = placement.rows.block
        low = selector.by * block + placement.rows.offset - selector.rows.offset
        return Span(low, low + selector.reach * block) if isinstance(low, int) else Span()
