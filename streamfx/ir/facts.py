"""Facts that passes establish about a joint graph. Each pass reads some of them and fills in one field.

A loop runs the graph for one *chunk* of the sequence at a time: rows [s, e). An operator's *signature* names the dimensions of
its operands and results by *axis labels* (`AxisLabel`), as in `m k, k n -> m n`. A dimension is a product of *axis factors*
(`AxisFactor`), as in `(b t)`. Operators that cannot be chunked *fall back*: they run on the full sequence, between loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import lcm
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from torch import fx

from streamfx.ir.axis_table import AxisFactor, AxisTable, Dim
from streamfx.ir.collective_ops import Collectives
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.joint import JointGraph, is_tensor
from streamfx.ir.program import Program
from streamfx.ir.recurrence import Truncation
from streamfx.ir.search_trace import SearchTrace
from streamfx.ir.signature import AxisLabel, RunningSum, Signature
from streamfx.ir.sizes import Size
from streamfx.ir.span import Span
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import StagePlan

DimAxes: TypeAlias = "tuple[Dim, ...]"  # the axes of each dimension of a tensor: [(b t) d] is ((b, t), (d,))
T = TypeVar("T")


class DerivedRows(NamedTuple):
    """The first row of a derived axis, as a row of the sequence, and the number of its rows: `x[:, 3:40]` has (3, 37)."""

    offset: Size
    length: Size


@dataclass(frozen=True)
class SequenceAxis:
    """The axis that is chunked, and the axes derived from it.

    `members`: the offset and the length of each derived axis, by factor. Row i of the axis is row i + offset of the
    sequence. Slices and paddings of the sequence are derived axes; the factor `main` has offset 0 and all `length` rows.
    `blocks`: the block size of each derived axis of blocks. Its row i represents the rows from i * size + offset on.
    `group_sizes`: how many rows an operator processes at once, for each operator that processes rows in groups.
    """

    main: AxisFactor
    length: Size
    members: Mapping[AxisFactor, DerivedRows]
    blocks: Mapping[AxisFactor, int] = field(default_factory=dict)
    group_sizes: frozenset[int] = frozenset()

    def block(self, factor: AxisFactor) -> int:
        """Return how many rows of the sequence one row of this axis represents: 1 unless it is an axis of blocks."""
        return self.blocks.get(factor, 1)

    @property
    def chunk_alignment(self) -> int:
        """Each chunk has a multiple of this number of rows: the least common multiple of all block and group sizes."""
        return lcm(*self.blocks.values(), *self.group_sizes)


@dataclass(frozen=True)
class AxisFacts:
    """The axes of each dimension of each value.

    `shapes` holds the axes of each dimension of each tensor, `results` those of each result of an operator. `signatures` holds
    the effect of each operator on its axes, `labels` the dimension of each of its axis labels; if an operator has no
    signature, `missing_rules` holds the reason. `static` holds the values that depend only on integers, booleans,
    vectors, and constants: masks, rotary tables, labels. `sequence` is None if no axis can be chunked.
    """

    table: AxisTable
    shapes: Mapping[fx.Node, DimAxes]
    results: Mapping[fx.Node, tuple[DimAxes, ...]]
    signatures: Mapping[fx.Node, Signature]
    labels: Mapping[fx.Node, Mapping[AxisLabel, Dim]]
    missing_rules: Mapping[fx.Node, str]
    static: frozenset[fx.Node]
    sequence: SequenceAxis | None = None

    def sequence_factor(self, dim: Dim) -> AxisFactor | None:
        """Return the axis factor of a dimension that is the sequence or derived from it; None if no factor is."""
        if self.sequence is not None:
            for factor in self.table.resolve(dim):
                if factor in self.sequence.members:
                    return factor
        return None

    def is_running(self, node: fx.Node) -> bool:
        """Return whether an operator passes a state from row to row of the sequence: a running sum, a recurrence."""
        signature = self.signatures.get(node)
        if signature is None or not signature.index:
            return False
        running = (label for label, index in signature.index.items() if isinstance(index, RunningSum))
        return any(self.sequence_factor(self.labels[node].get(label, ())) is not None for label in running)

    def row_axis(self, dim: Dim) -> AxisFactor | None:
        """Return the axis factor of a dimension whose indices are rows of the sequence; None for other dimensions.

        None for a product such as `(b t)`, for axes that are not the sequence, and for blocks of rows.
        """
        factors = self.table.resolve(dim)
        if (
            self.sequence is None
            or len(factors) != 1
            or factors[0] not in self.sequence.members
            or factors[0] in self.sequence.blocks
        ):
            return None
        return factors[0]

    def indices_per_row(self, dim: Dim, size: Size) -> tuple[int, int] | None:
        """Return which row of the sequence index 0 of a dimension belongs to, and how many indices each row has: n for `(t n)`.

        None if the dimension does not begin with rows of the sequence, or if a number is dynamic.
        """
        factors = self.table.resolve(dim)
        axis = self.row_axis(factors[:1])
        start, length = (None, None) if self.sequence is None or axis is None else self.sequence.members[axis]
        if not isinstance(start, int) or len(factors) == 1:
            return (start, 1) if isinstance(start, int) else None
        return (start, size // length) if isinstance(size, int) and isinstance(length, int) else None

    def sequence_dims(self, shape: DimAxes) -> tuple[int, ...]:
        """Return the indices of the dimensions that hold the sequence."""
        if self.sequence is None:
            return ()
        members, resolve = self.sequence.members.keys(), self.table.resolve
        return tuple([i for i, dim in enumerate(shape) if not members.isdisjoint(resolve(dim))])


class Role(Enum):
    """Which rows a loop reads for a chunk [s, e), along an axis label that ranges over the sequence."""

    ROWS = "rows"  # query positions: the chunk's own rows [s, e)
    KEYS = "keys"  # key positions: the rows visible to the chunk's queries
    WHOLE = "whole"  # all rows: not chunked


class StorageClass(Enum):
    """The storage class of a value: how it is computed and stored."""

    OUTSIDE = "outside"  # no sequence axis: computed once, between loops
    WHOLE = "whole"  # has the sequence axis, but is not chunked: computed at once, between loops
    ROWS = "rows"  # computed chunk by chunk
    PAIR = "pair"  # query positions by key positions, computed chunk by chunk, never stored
    SUM = "sum"  # a sum over chunks
    KEYSUM = "key sum"  # for each key position, a sum over the chunks whose queries see it


NOT_IN_LOOPS = (StorageClass.OUTSIDE, StorageClass.WHOLE)


@dataclass(frozen=True)
class AccessFacts:
    """The rows of its operands that each operator needs, and how its results are computed and stored.

    `roles`: by axis label, for the labels that range over the sequence. `storage_classes`: one for each result.
    `reasons`: why an operator falls back, for each that does.
    """

    roles: Mapping[fx.Node, Mapping[AxisLabel, Role]]
    storage_classes: Mapping[fx.Node, tuple[StorageClass, ...]]
    reasons: Mapping[fx.Node, str]

    def storage_class(self, node: fx.Node) -> StorageClass:
        """Return the storage class of a node's first result."""
        return self.storage_classes[node][0]

    def is_in_loop(self, node: fx.Node) -> bool:
        """Return whether any result of a node is computed chunk by chunk."""
        storage_classes = self.storage_classes.get(node, ())
        if len(storage_classes) == 1:  # most operators: passes ask this of all
            return storage_classes[0] not in NOT_IN_LOOPS
        return any(storage_class not in NOT_IN_LOOPS for storage_class in storage_classes)


@dataclass(frozen=True)
class SpanFacts:
    """The key positions visible to a chunk [s, e): a span [s + low, e + high) for each operator that has keys.

    `span_kinds`: the kind of each span, as reports print it ("causal"). Operators in `recomputed_per_consumer`, such as masks,
    and slices of their results, have no span: each consumer recomputes them for its keys.
    """

    spans: Mapping[fx.Node, Span]
    span_kinds: Mapping[fx.Node, str]
    recomputed_per_consumer: frozenset[fx.Node] = frozenset()
    exact_masks: frozenset[fx.Node] = frozenset()  # fused attention whose mask equals its span
    # fused attention whose scores are small enough: a huge negative mask value, such as -1e30, hides a key exactly
    ordinary_scores: frozenset[fx.Node] = frozenset()


def known(fact: T | None) -> T:
    """Return a fact, and assert that its pass has run."""
    assert fact is not None, "the pass that finds this has not run"
    return fact


@dataclass(frozen=True)
class Facts:
    """All facts so far; each pass returns a copy with its field filled in.

    A pass reads earlier facts through properties (`facts.axes`). To ask whether a pass has run, read the field
    (`facts.found_axes`), which is None before.

    `collectives`: the collectives on weights that were removed from the graph.
    `program`: the host programs; None if the original graph runs unchunked.
    `lengths`: the sequence lengths for which the plan is valid, if it depends on them.
    `search_trace`: the candidates that the search for a plan within the memory budget tried.
    `fits`: how the original graph runs, if it fits into the memory budget unchunked.
    `analysis_error`: the error for which the original graph runs unchunked.
    `unchunked_reason`: another reason for which the original graph runs unchunked.
    `fallbacks`: by name, operators that a pass could not run in a loop, with the reason.
    `separate_reductions`: the reason why rows are reduced over ranks between loops instead of inside them.
    `faults`: unexpected exceptions in passes, with their remedies.
    `first_line`: the source line at which the graph begins, if it is the second part of a graph with two sequences.
    `truncations`: how far gradients of recurrences reach back.
    """

    joint: JointGraph
    collectives: Collectives | None = None
    found_axes: AxisFacts | None = None
    found_access: AccessFacts | None = None
    found_key_spans: SpanFacts | None = None
    found_stages: tuple[Stage, ...] | None = None
    found_plan: StagePlan | None = None
    program: Program | None = None
    lengths: Lengths | None = None
    search_trace: SearchTrace | None = None
    fits: Literal["compiled", "eager"] | None = None
    analysis_error: str | None = None
    unchunked_reason: str | None = None
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    separate_reductions: str | None = None
    faults: tuple[str, ...] = ()
    first_line: str = ""
    truncations: Mapping[fx.Node, Truncation] = field(default_factory=dict)

    @property
    def axes(self) -> AxisFacts:
        """The axis facts; their pass must have run."""
        return known(self.found_axes)

    @property
    def access(self) -> AccessFacts:
        """The access facts; their pass must have run."""
        return known(self.found_access)

    @property
    def key_spans(self) -> SpanFacts:
        """The span facts; their pass must have run."""
        return known(self.found_key_spans)

    def has_rows(self, node: fx.Node) -> bool:
        """Return whether loops compute a tensor chunk by chunk, and it depends on more than integers and vectors (`static`)."""
        return is_tensor(node) and node not in self.axes.static and self.access.storage_class(node) is StorageClass.ROWS

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; their pass must have run."""
        return known(self.found_stages)

    @property
    def plan(self) -> StagePlan:
        """The plan of all stages; its pass must have run."""
        return known(self.found_plan)

    def reasons(self) -> list[str]:
        """Return the reasons why operators fall back, without repetitions, or the reason why the graph runs unchunked."""
        if self.unchunked_reason is not None:
            return [self.unchunked_reason]
        return [] if self.found_access is None else list(dict.fromkeys(self.access.reasons.values()))
