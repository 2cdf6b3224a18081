"""What an operator needs of an operand inside a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AccessFacts, AxisFacts, Role, SpanFacts, StorageClass
from streamfx.ir.joint import tensor_operands
from streamfx.ir.program import Placement, RowRange, Selector, ShiftedRows
from streamfx.ir.recurrence import Truncation
from streamfx.ir.sizes import Size, product
from streamfx.ir.span import Span

OWN_ROWS = Span(0, 0)


@dataclass(frozen=True)
class OperandAccess:
    """Rows of one operand: for each dimension that holds the sequence, the role and which rows."""

    operand: fx.Node
    where: tuple[tuple[Placement, Role, Selector], ...]

    @cached_property
    def roles(self) -> frozenset[Role]:
        return frozenset(role for _, role, _ in self.where)

    @property
    def selector(self) -> Selector:
        """The rows of an operand with a single sequence dimension."""
        return self.where[0][2]


@dataclass(frozen=True)
class Layout:
    """Axes, roles and spans together: answers where the rows of a value are and how many a chunk has.

    The graph and its facts stay as they are while a layout is asked, so that an answer is worked out once.
    """

    axes: AxisFacts
    demand: AccessFacts
    causality: SpanFacts
    truncations: Mapping[fx.Node, Truncation]
    _needs: dict[tuple[fx.Node, Span | None], tuple[OperandAccess, ...]] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, dim: Dim) -> RowRange:
        sequence = self.axes.sequence
        atom = self.axes.sequence_atom(dim)
        assert sequence is not None and atom is not None
        offset, length = sequence.members[atom]
        return RowRange(offset, length, sequence.block(atom))

    def placement(self, value: fx.Node, position: int) -> Placement:
        """Where a value's dimension holds the sequence."""
        dim = self.axes.table.resolve(self.axes.shapes[value][position])
        atom = self.axes.sequence_atom(dim)
        assert atom is not None
        at = dim.index(atom)
        size = self.axes.table.size
        return Placement(position, self.rows(dim), product(size(a) for a in dim[:at]), product(size(a) for a in dim[at + 1 :]))

    def placements(self, value: fx.Node) -> tuple[Placement, ...]:
        return tuple(self.placement(value, i) for i in self.axes.sequence_dims(self.axes.shapes[value]))

    def full_shape(self, value: fx.Node) -> tuple[Size, ...]:
        return tuple(self.axes.table.size_of_dim(self.axes.table.resolve(dim)) for dim in self.axes.shapes[value])

    def span(self, node: fx.Node, asked: Span | None = None) -> Span:
        """The keys that an operator runs over; one that is made to measure runs over those that its user asks for."""
        return self.causality.spans.get(node, asked or Span())

    def is_made_to_measure(self, node: fx.Node) -> bool:
        """Whether a value with rows and keys is made anew for the keys of each that uses it."""
        return self.demand.form(node) is StorageClass.PAIR and node in self.causality.measured

    def needs(self, node: fx.Node, asked: Span | None = None) -> tuple[OperandAccess, ...]:
        """The needs of an operator that runs inside a loop, one per tensor operand."""
        key = (node, asked if self._takes_keys_asked_for(node) else None)
        known = self._needs.get(key)
        if known is None:
            known = self._needs[key] = tuple(self._found_needs(node, asked))
        return known

    def _takes_keys_asked_for(self, node: fx.Node) -> bool:
        return node not in self.causality.spans and Role.KEYS in self.demand.roles.get(node, {}).values()

    def _found_needs(self, node: fx.Node, asked: Span | None) -> Iterator[OperandAccess]:
        signature, roles = self.axes.signatures[node], self.demand.roles.get(node, {})
        for operand, letters in zip(tensor_operands(node), signature.operands, strict=True):
            where: list[tuple[Placement, Role, Selector]] = []
            for position in self.axes.sequence_dims(self.axes.shapes[operand]):
                letter = next(letter for letter in letters[position] if letter in roles)
                selector = self._selector(node, letter, roles[letter], asked)
                where.append((self.placement(operand, position), roles[letter], selector))
            yield OperandAccess(operand, tuple(where))

    def _selector(self, node: fx.Node, letter: int, role: Role, asked: Span | None) -> Selector:
        if role is Role.KEYS:
            return self.span(node, asked)
        if role is Role.ROWS:
            signature = self.axes.signatures[node]
            for other, window in signature.windows.items():
                if window.of == letter:
                    return ShiftedRows(self.rows(self.axes.letters[node][other]), window.start, window.reach)
        return None

    def shown_rows(self, placement: Placement, selector: Selector) -> ShiftedRows | None:
        """The selector, where an axis lies beside the operand's: at its rows, though it may begin later or end earlier."""
        return selector if isinstance(selector, ShiftedRows) and self.distance(placement, selector) == OWN_ROWS else None

    def distance(self, placement: Placement, selector: Selector) -> Span:
        """How far the rows of a need with a single sequence dimension lie from the chunk's own; unbounded where unknown."""
        if isinstance(selector, Span):
            return selector
        if selector is None:
            return OWN_ROWS
        block = placement.rows.block
        low = selector.by * block + placement.rows.offset - selector.rows.offset
        return Span(low, low + selector.reach * block) if isinstance(low, int) else Span()
