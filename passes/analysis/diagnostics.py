"""The reasons, in the user's terms, why operators on rows of the sequence fall back: run on the full sequence, not in a loop.

x.split(counts)         splits the sequence into slices of different lengths
x[order]                gathers rows by index, from anywhere in the sequence
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.errors import ordinal
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import bound_arguments
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.signature import AxisLabel, Signature
from streamfx.ir.sizes import quotient
from streamfx.passes.ops.rules.attention import M
from streamfx.passes.ops.traits import only_moves_elements

aten = torch.ops.aten
SPLITS = of_kind(Kind.SPLIT, Kind.UNBIND)
CONCATENATIONS = of_kind(Kind.CONCAT) | {aten.slice_scatter.default}
READS_BY_INDEX = of_kind(Kind.LOOKUP, Kind.GATHER)
WRITES_BY_INDEX = of_kind(Kind.PUT, Kind.SCATTER)

SPLITS_PARTS = "{target} splits the sequence into parts with separate rows"
CONCATENATES_PARTS = "{target} concatenates parts with separate rows to one sequence"
READS_ROWS = "{target} reads rows by index, from anywhere in the sequence"
WRITES_ROWS = "{target} writes rows by index, anywhere in the sequence"
REORDERS_ROWS = "{target} changes the order of the rows of the sequence"
FOREIGN_QUERIES = "{target} has queries that are not rows of the sequence, and each of them sees all keys"
SPLITS_BLOCKS = (
    "{target} splits the sequence into blocks of {size} rows, or concatenates them, and chunks do not align with these blocks"
)
SPLITS_OR_CONCATENATES = "{target} splits the sequence into blocks, or concatenates blocks"
SLICES_OR_PADS = "{target} slices or pads the sequence to an axis that is not chunked"
CONCATENATES_BLOCKS = "{target} concatenates rows of the sequence and blocks of its rows, or slices them apart"
MIXES_ROWS = "{target} mixes the rows of the sequence"
MANY_DIMENSIONS = (
    "{target} has the sequence in {count} dimensions: a chunk has query positions in one, and key positions in another"
)

_FAMILIES = {
    SPLITS: SPLITS_PARTS,
    CONCATENATIONS: CONCATENATES_PARTS,
    READS_BY_INDEX: READS_ROWS,
    WRITES_BY_INDEX: WRITES_ROWS,
    of_kind(Kind.REORDER): REORDERS_ROWS,
}


def fallback_reason(node: fx.Node, signature: Signature, axes: AxisFacts) -> str:
    """Return why an operator falls back whose axis labels give it no rows to loop over, or results that need all rows.

    `signature`: the operator's axis labels; `axes`: the axis of each label. The text names what it does with the rows.
    """
    step = bound_arguments(node)["step"] if node.target is aten.slice.Tensor else 1
    if step != 1:
        return f"{node.target} reads every {ordinal(step)} row of the sequence"
    if signature.windows:
        return (CONCATENATES_BLOCKS if mixes_rows_and_blocks(node, signature, axes) else SLICES_OR_PADS).format(
            target=node.target
        )
    if signature.tiles:
        label, tile = next(iter(signature.tiles.items()))
        num_rows, num_blocks = (axes.table.size_of_dim(axes.labels[node][item]) for item in (tile.source, label))
        return SPLITS_BLOCKS.format(target=node.target, size=quotient(num_rows, num_blocks))
    if node.target in (ATTENTION, ATTENTION_BACKWARD) and axes.sequence_factor(axes.labels[node][M]) is None:
        return FOREIGN_QUERIES.format(target=node.target)
    return (
        _family_reason(node, signature, axes) or (SPLITS_OR_CONCATENATES if only_moves_elements(node) else MIXES_ROWS)
    ).format(target=node.target)


def mixes_rows_and_blocks(node: fx.Node, signature: Signature, axes: AxisFacts) -> bool:
    """Return whether a slice or padding relates an axis of sequence rows to an axis of blocks of such rows."""
    pairs = [(label, window.source) for label, window in signature.windows.items()]
    sides = [[axes.sequence_factor(axes.labels[node][item]) for item in pair] for pair in pairs]
    blocks = {} if axes.sequence is None else axes.sequence.blocks
    return any(None not in side and len({factor in blocks for factor in side}) == 2 for side in sides)


def too_many_dims_reason(node: fx.Node, signature: Signature, axes: AxisFacts, labels: Sequence[AxisLabel]) -> str:
    """Return why an operator falls back that has the sequence in more than two dimensions (those labeled by `labels`)."""
    return (_family_reason(node, signature, axes) or MANY_DIMENSIONS).format(target=node.target, count=len(labels))


def _family_reason(node: fx.Node, signature: Signature, axes: AxisFacts) -> str | None:
    """Return the text, with `{target}`, for a family of operators such as look-ups by index, if it explains the fallback.

    None if the operator is in no family, or if no dimension that it needs in full is the sequence.
    """
    if all(axes.sequence_factor(axes.labels[node].get(label, ())) is None for label in signature.full_labels):
        return None
    return next((text for operators, text in _FAMILIES.items() if node.target in operators), None)
