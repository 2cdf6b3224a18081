"""The effect of an operator on each axis, in einsum notation.

A `Signature` names the dimensions of one operator's tensor operands and results by axis labels (type `AxisLabel`): `mm` has
`m k, k n -> m n`. A label on both sides is kept; a label missing on the right is contracted (summed). Any other label has an
`Index`, which says how the operator accesses the *rows* along it, the elements with the same index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from streamfx.ir.axis_table import Dim
from streamfx.ir.sizes import Size

AxisLabel: TypeAlias = int  # an axis label
LabelDim: TypeAlias = "tuple[AxisLabel, ...]"  # a dimension: the product of the axes with these labels; () for size one
LabelShape: TypeAlias = "tuple[LabelDim, ...]"


@dataclass(frozen=True)
class FullAxis:
    """The operator mixes the rows and needs all of them: softmax, sort."""


@dataclass(frozen=True)
class RunningSum:
    """Each row depends on all rows before it, or on all rows after it if `reverse`: a running sum."""

    reverse: bool


@dataclass(frozen=True)
class SingleRow:
    """The operator selects the row `row_index`, or places one row there, among zeros."""

    row_index: Size


@dataclass(frozen=True)
class Window:
    """Row i reads rows i + start .. i + start + reach along the label `source`: a slice, padding, a convolution.

    `start` is negative for padding: `x[3:]` has start=3; padding by 2 rows in front has start=-2. The label may also be
    contracted: then row i of one operand meets these rows of another operand in a sum.
    """

    source: AxisLabel
    start: int
    reach: int = 0


@dataclass(frozen=True)
class Tile:
    """Each row is a block of rows along the label `source`: c in the view [(c l)] -> [c l]."""

    source: AxisLabel


@dataclass(frozen=True)
class ConcatAxes:
    """The rows of other labels, concatenated. `parts` has (label, number of rows before its first row) of each."""

    parts: tuple[tuple[AxisLabel, Size], ...]


Index: TypeAlias = FullAxis | RunningSum | SingleRow | Window | Tile | ConcatAxes


def full_axes(*labels: AxisLabel) -> dict[AxisLabel, Index]:
    """Return the `index` of a signature for labels along which the operator needs all rows: {label: FullAxis()}."""
    return dict.fromkeys(labels, FullAxis())


@dataclass(frozen=True)
class Signature:
    """The axis labels of one operator.

    `operands`: the labels of the tensor arguments, in call order; `results`: the labels of the outputs.
    `index`: how the operator accesses the rows of labels that are neither kept nor contracted.
    `keys`: the labels over key positions, if the operator is an attention and knows them.
    `index_dependent`: the labels along which the result depends on the index of a row, as `tril` does.
    `factors`: for labels of only a part of a dimension, that part, as axis factors.
    `combine`: the reduction over a contracted label ("sum").
    """

    operands: tuple[LabelShape, ...]
    results: tuple[LabelShape, ...]
    index: Mapping[AxisLabel, Index] = field(default_factory=dict)
    keys: frozenset[AxisLabel] = frozenset()
    index_dependent: frozenset[AxisLabel] = frozenset()
    factors: Mapping[AxisLabel, Dim] = field(default_factory=dict)
    combine: str = "sum"

    @cached_property
    def full_labels(self) -> frozenset[AxisLabel]:
        """Labels along which the operator needs more than a window of rows.

        A loop over chunks can run it only if it passes a state from chunk to chunk, which is possible for some (`RunningSum`).
        """
        return frozenset(label for label, index in self.index.items() if not isinstance(index, Window))

    @cached_property
    def windows(self) -> dict[AxisLabel, Window]:
        """The labels whose rows read a window of rows of another label, with that window."""
        return {label: index for label, index in self.index.items() if isinstance(index, Window)}

    @cached_property
    def tiles(self) -> dict[AxisLabel, Tile]:
        """The labels whose rows are blocks of rows of another label, with that label."""
        return {label: index for label, index in self.index.items() if isinstance(index, Tile)}

    @cached_property
    def concat(self) -> tuple[AxisLabel, ConcatAxes] | None:
        """The label whose rows concatenate the rows of other labels, with these; None if the operator is no concatenation."""
        return next(((label, index) for label, index in self.index.items() if isinstance(index, ConcatAxes)), None)

    def labels(self) -> set[AxisLabel]:
        """Return the labels of all operands and results."""
        return _labels_of((*self.operands, *self.results))

    def is_special(self, label: AxisLabel) -> bool:
        """Return whether the operator does more along a label than process each row separately, in the same way.

        True for labels with an `Index`, labels that a window or tile of another label reads, keys, and `index_dependent` ones.
        """
        source_labels = {index.source for index in self.index.values() if isinstance(index, (Window, Tile))}
        return label in self.index or label in self.keys | self.index_dependent | source_labels

    def contracted_labels(self, result: int = 0) -> set[AxisLabel]:
        """Return the labels of the operands over which result number `result` sums: it neither has them nor a window of them."""
        kept_labels = {label for dim in self.results[result] for label in dim}
        kept_labels |= {self.windows[label].source for label in kept_labels if label in self.windows}
        return _labels_of(self.operands) - kept_labels


def _labels_of(shapes: Iterable[LabelShape]) -> set[AxisLabel]:
    """Return the labels of some shapes."""
    return {label for shape in shapes for dim in shape for label in dim}
