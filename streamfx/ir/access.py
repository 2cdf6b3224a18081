"""Access patterns: the rows of each operand that an operator reads inside a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AccessFacts, AxisFacts, Role, SpanFacts, StorageClass
from streamfx.ir.joint import tensor_operands
from streamfx.ir.program import Placement, RowRange, Selector, ShiftedRows
from streamfx.ir.recurrence import Truncation
from streamfx.ir.sizes import Size, product
from streamfx.ir.span import Span

OWN_ROWS = Span(0, 0)


class SequenceAccess(NamedTuple):
    """How an operator reads one sequence dimension of an operand: where it lies, its role, and which rows are read."""

    placement: Placement
    role: Role
    selector: Selector


@dataclass(frozen=True)
class OperandAccess:
    """The rows of one operand that an operator reads: one `SequenceAccess` for each sequence dimension."""

    operand: fx.Node
    sequence_dims: tuple[SequenceAccess, ...]

    @cached_property
    def roles(self) -> frozenset[Role]:
        """The roles of all sequence dimensions of the operand."""
        return frozenset(access.role for access in self.sequence_dims)

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

    The graph and its facts must not change while a layout is in use, because `operand_accesses` caches its results.
    """

    axes: AxisFacts
    access: AccessFacts
    key_spans: SpanFacts
    truncations: Mapping[fx.Node, Truncation]
    _accesses: dict[tuple[fx.Node, Span | None], tuple[OperandAccess, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def rows(self, dim: Dim) -> RowRange:
        """Return the rows of the sequence that a dimension holds: offset, length, and block size."""
        sequence = self.axes.sequence
        atom = self.axes.sequence_atom(dim)
        assert sequence is not None and atom is not None
        offset, length = sequence.members[atom]
        return RowRange(offset, length, sequence.block(atom))

    def placement(self, value: fx.Node, position: int) -> Placement:
        """Return the placement of the sequence in one dimension of a value."""
        dim = self.axes.table.resolve(self.axes.shapes[value][position])
        atom = self.axes.sequence_atom(dim)
        assert atom is not None
        atom_index = dim.index(atom)
        size = self.axes.table.size
        return Placement(
            position, self.rows(dim), product(size(a) for a in dim[:atom_index]), product(size(a) for a in dim[atom_index + 1 :])
        )

    def placements(self, value: fx.Node) -> tuple[Placement, ...]:
        """Return the placement of the sequence in each sequence dimension of a value."""
        return tuple(self.placement(value, i) for i in self.axes.sequence_dims(self.axes.shapes[value]))

    def full_shape(self, value: fx.Node) -> tuple[Size, ...]:
        """Return the sizes of all dimensions of a value, for all rows of the sequence."""
        return tuple(self.axes.table.size_of_dim(self.axes.table.resolve(dim)) for dim in self.axes.shapes[value])

    def span(self, node: fx.Node, requested_span: Span | None = None) -> Span:
        """Return the key positions that an operator covers.

        An operator that is recomputed per consumer covers the span that the consumer requests (`requested_span`).
        """
        return self.key_spans.spans.get(node, requested_span or Span())

    def is_recomputed_per_consumer(self, node: fx.Node) -> bool:
        """Return whether a query-by-key value is recomputed for the key positions of each consumer."""
        return self.access.storage_class(node) is StorageClass.PAIR and node in self.key_spans.recomputed_per_consumer

    def operand_accesses(self, node: fx.Node, requested_span: Span | None = None) -> tuple[OperandAccess, ...]:
        """Return the rows that an operator reads inside a loop, one `OperandAccess` per tensor operand."""
        key = (node, requested_span if self._uses_requested_keys(node) else None)
        accesses = self._accesses.get(key)
        if accesses is None:
            accesses = self._accesses[key] = tuple(self._accesses_of(node, requested_span))
        return accesses

    def _uses_requested_keys(self, node: fx.Node) -> bool:
        """Return whether an operator reads key positions and has no span: its consumer chooses them."""
        return node not in self.key_spans.spans and Role.KEYS in self.access.roles.get(node, {}).values()

    def _accesses_of(self, node: fx.Node, requested_span: Span | None) -> Iterator[OperandAccess]:
        """Yield the rows of each tensor operand that an operator reads; its consumer may request a span of keys."""
        signature, roles = self.axes.signatures[node], self.access.roles.get(node, {})
        for operand, letters in zip(tensor_operands(node), signature.operands, strict=True):
            sequence_dims: list[SequenceAccess] = []
            for position in self.axes.sequence_dims(self.axes.shapes[operand]):
                letter = next(letter for letter in letters[position] if letter in roles)
                selector = self._selector(node, letter, roles[letter], requested_span)
                sequence_dims.append(SequenceAccess(self.placement(operand, position), roles[letter], selector))
            yield OperandAccess(operand, tuple(sequence_dims))

    def _selector(self, node: fx.Node, letter: int, role: Role, requested_span: Span | None) -> Selector:
        """Return the selector of one letter: a span for keys, shifted rows for a window, None for the chunk's own rows."""
        if role is Role.KEYS:
            return self.span(node, requested_span)
        if role is Role.ROWS:
            signature = self.axes.signatures[node]
            for row_letter, window in signature.windows.items():
                if window.source == letter:
                    return ShiftedRows(self.rows(self.axes.letters[node][row_letter]), window.start, window.reach)
        return None

    def shown_rows(self, placement: Placement, selector: Selector) -> ShiftedRows | None:
        """Return the selector if it selects a chunk's own rows of an axis that may start later or end earlier; else None."""
        return selector if isinstance(selector, ShiftedRows) and self.distance(placement, selector) == OWN_ROWS else None

    def distance(self, placement: Placement, selector: Selector) -> Span:
        """Return the distance from the chunk's own rows to the rows that an operand with one sequence dimension provides.

        The span is unbounded if the distance is unknown.
        """
        if isinstance(selector, Span):
            return selector
        if selector is None:
            return OWN_ROWS
        block = placement.rows.block
        low = selector.by * block + placement.rows.offset - selector.rows.offset
        return Span(low, low + selector.reach * block) if isinstance(low, int) else Span()
