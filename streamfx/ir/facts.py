"""What the passes establish about a joint graph. Each pass reads some of it and adds one part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import lcm
from typing import Literal, TypeAlias, TypeVar

from torch import fx

from streamfx.ir.axis_table import Atom, AxisTable, Dim
from streamfx.ir.collective_ops import Collectives
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.joint import JointGraph
from streamfx.ir.program import Program
from streamfx.ir.recurrence import Truncation
from streamfx.ir.search_trace import SearchTrace
from streamfx.ir.signature import Letter, RunningSum, Signature
from streamfx.ir.sizes import Size
from streamfx.ir.span import Span
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import ChunkPlan

Shape: TypeAlias = "tuple[Dim, ...]"
T = TypeVar("T")


@dataclass(frozen=True)
class SequenceAxis:
    """The axis that is streamed, and its relatives.

    `members` maps an atom to (offset, length): row i of such an axis stands at position i + offset of the sequence.
    Slices and paddings of the sequence are members of their own. The main atom has offset 0 and all `length` rows.
    `blocks` holds the members whose every row stands for a block of rows of the sequence, with the block's size: row i stands
    for rows i * size + offset to (i + 1) * size + offset. Chunks begin where blocks do, at multiples of `granule`;
    also where operators begin that take so many rows `together`.
    """

    main: Atom
    length: Size
    members: Mapping[Atom, tuple[Size, Size]]
    blocks: Mapping[Atom, int] = field(default_factory=dict)
    together: frozenset[int] = frozenset()

    def block(self, atom: Atom) -> int:
        """How many rows of the sequence a row of this axis stands for."""
        return self.blocks.get(atom, 1)

    @property
    def granule(self) -> int:
        return lcm(*self.blocks.values(), *self.together)


@dataclass(frozen=True)
class AxisFacts:
    """Which axis each dimension ranges over.

    `shapes` holds the dimensions of each tensor, `results` of each result of an operator. `signatures` holds what each
    operator does with them; a missing entry has its reason in `declined`.
    """

    table: AxisTable
    shapes: Mapping[fx.Node, Shape]
    results: Mapping[fx.Node, tuple[Shape, ...]]
    signatures: Mapping[fx.Node, Signature]
    letters: Mapping[fx.Node, Mapping[Letter, Dim]]
    declined: Mapping[fx.Node, str]
    static: frozenset[fx.Node]
    sequence: SequenceAxis | None = None

    def sequence_atom(self, dim: Dim) -> Atom | None:
        """The atom of the sequence in a dimension, if it has one."""
        if self.sequence is not None:
            for atom in self.table.resolve(dim):
                if atom in self.sequence.members:
                    return atom
        return None

    def is_running(self, node: fx.Node) -> bool:
        """Whether an operator hands something on from row to row of the sequence: a running sum, a recurrence."""
        signature = self.signatures.get(node)
        running = (
            () if signature is None else (letter for letter, index in signature.index.items() if isinstance(index, RunningSum))
        )
        return any(self.sequence_atom(self.letters[node].get(letter, ())) is not None for letter in running)

    def row_axis(self, dim: Dim) -> Atom | None:
        """The atom of a dimension that is the sequence and nothing else, not in blocks: an index along it is a row's number."""
        atoms = self.table.resolve(dim)
        if self.sequence is None or len(atoms) != 1 or atoms[0] not in self.sequence.members or atoms[0] in self.sequence.blocks:
            return None
        return atoms[0]

    def sequence_dims(self, shape: Shape) -> tuple[int, ...]:
        """The positions of the dimensions that hold the sequence."""
        return tuple(i for i, dim in enumerate(shape) if self.sequence_atom(dim) is not None)


class Role(Enum):
    """What a loop over chunks does with a letter that ranges over the sequence."""

    ROWS = "rows"  # the chunk's own rows [s, e)
    KEYS = "keys"  # the rows that the chunk's queries can see
    WHOLE = "whole"  # all rows


class StorageClass(Enum):
    """In which form a value naturally exists."""

    SCALAR = "outside"  # no sequence axis: computed once, between loops
    WHOLE = "whole"  # has the sequence axis, and is computed in one piece between loops
    ROWS = "rows"  # made chunk by chunk
    PAIR = "pair"  # rows by keys, made chunk by chunk, never stored
    SUM = "sum"  # a sum over chunks
    KEYSUM = "key sum"  # for every key, a sum over the chunks whose queries see it


@dataclass(frozen=True)
class AccessFacts:
    """Which rows of its operands each operator needs, and the form of its results."""

    roles: Mapping[fx.Node, Mapping[Letter, Role]]
    forms: Mapping[fx.Node, tuple[StorageClass, ...]]
    reasons: Mapping[fx.Node, str]

    def form(self, node: fx.Node) -> StorageClass:
        return self.forms[node][0]


@dataclass(frozen=True)
class SpanFacts:
    """Which keys the rows of a chunk can see: a span for each operator that has keys, and how it was found.

    Operators that are `measured`, and their parts, have none: they are made anew for the keys of each that uses them.
    """

    spans: Mapping[fx.Node, Span]
    verdicts: Mapping[fx.Node, str]
    measured: frozenset[fx.Node] = frozenset()
    exact: frozenset[fx.Node] = frozenset()  # fused attention whose mask is exactly its span
    ordinary: frozenset[fx.Node] = frozenset()  # fused attention whose scores leave nothing of what a huge number hides


def known(fact: T | None) -> T:
    """What a pass has found."""
    assert fact is not None, "the pass that finds this has not run"
    return fact


@dataclass(frozen=True)
class Facts:
    """Everything known so far; passes return a copy with their part filled in.

    Passes read what those before them have found (`facts.axes`); who asks whether a pass has run reads the field itself
    (`facts.found_axes`), which is None until then. `program` stays None where nothing is rewritten.
    `lengths` are those that the plan holds for, if it depends on them. A graph runs as it stands where it `fits` into the budget,
    where its analysis `failed`, and where no loop may be made of it: `stands` is the reason. `whole` names operators that have to
    run whole, with reasons: what a pass has found that could not run them in a loop. `collectives` are those on weights, which
    were taken off the graph. Rows are reduced over ranks `apart` from loops, between them, where that has a reason.
    `truncations` are those of recurrences. `begins` is the line of code that the graph begins with, if it is a second part of one
    that works on two sequences. `faults` tells of exceptions that no pass meant to raise, and of remedies.
    """

    joint: JointGraph
    collectives: Collectives | None = None
    found_axes: AxisFacts | None = None
    found_demand: AccessFacts | None = None
    found_causality: SpanFacts | None = None
    found_stages: tuple[Stage, ...] | None = None
    found_plan: ChunkPlan | None = None
    program: Program | None = None
    lengths: Lengths | None = None
    fitting: SearchTrace | None = None
    fits: Literal["compiled", "eager"] | None = None
    failed: str | None = None
    stands: str | None = None
    whole: Mapping[str, str] = field(default_factory=dict)
    apart: str | None = None
    faults: tuple[str, ...] = ()
    begins: str = ""
    truncations: Mapping[fx.Node, Truncation] = field(default_factory=dict)

    @property
    def axes(self) -> AxisFacts:
        return known(self.found_axes)

    @property
    def demand(self) -> AccessFacts:
        return known(self.found_demand)

    @property
    def causality(self) -> SpanFacts:
        return known(self.found_causality)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return known(self.found_stages)

    @property
    def plan(self) -> ChunkPlan:
        return known(self.found_plan)

    def reasons(self) -> list[str]:
        """Why something does not stream, one line for each operator that runs whole."""
        if self.stands is not None:
            return [self.stands]
        return [] if self.found_demand is None else list(dict.fromkeys(self.demand.reasons.values()))
