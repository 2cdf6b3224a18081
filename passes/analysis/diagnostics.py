"""Explain, in the user's terms, why an operator on rows of the sequence is not chunked.

x.split(counts)         splits the sequence into slices of different lengths
x[order]                gathers rows by index, from anywhere in the sequence
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from streamfx.errors import ordinal
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import bound_arguments
from streamfx.ir.signature import Letter, Signature
from streamfx.ir.sizes import quotient
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.passes.ops.rules.attention import M
from streamfx.passes.ops.traits import CUTS, is_moved_elements

aten = torch.ops.aten
JOINS = frozenset({aten.cat.default, aten.slice_scatter.default})
TAKES = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default}
)
PUTS = frozenset(
    {
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.index_add.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    }
)
TURNS = frozenset({aten.flip.default, aten.roll.default})

CUTS_PARTS = "{target} cuts the sequence into parts, each with rows of its own"
JOINS_PARTS = "{target} joins parts, each with rows of its own, to one sequence"
TAKES_ROWS = "{target} takes rows by number, from anywhere in the sequence"
PUTS_ROWS = "{target} puts rows by number, anywhere in the sequence"
TURNS_ROWS = "{target} puts the rows of the sequence in another order"
OTHER_QUERIES = "{target} has queries that are no rows of the sequence, and each of them sees all of it"
CUTS_ROWS = "{target} cuts the sequence into blocks of {size} rows, or joins them, and these do not fit into chunks"
JOINS_ROWS = "{target} cuts the sequence into blocks, or joins blocks"
CUTS_OR_PADS = "{target} cuts or pads the sequence to what is worked on in one piece"
JOINS_BLOCKS = "{target} joins rows of the sequence and blocks of its rows to one dimension, or cuts it apart again"
MIXES_ROWS = "{target} mixes the rows of the sequence"
MANY_DIMENSIONS = "{target} has rows of the sequence in {count} dimensions at once: a chunk has rows in one, and keys in another"

_FAMILIES = {CUTS: CUTS_PARTS, JOINS: JOINS_PARTS, TAKES: TAKES_ROWS, PUTS: PUTS_ROWS, TURNS: TURNS_ROWS}


def why_whole(node: fx.Node, signature: Signature, axes: AxisFacts) -> str:
    """Return the reason for an operator that has no rows to loop over, or whose results are needed in full."""
    step = bound_arguments(node)["step"] if node.target is aten.slice.Tensor else 1
    if step != 1:
        return f"{node.target} takes every {ordinal(step)} row of the sequence"
    if signature.windows:
        return (JOINS_BLOCKS if joins_blocks(node, signature, axes) else CUTS_OR_PADS).format(target=node.target)
    if signature.tiles:
        letter, tile = next(iter(signature.tiles.items()))
        length, outer = (axes.table.size_of_dim(axes.letters[node][item]) for item in (tile.source, letter))
        return CUTS_ROWS.format(target=node.target, size=quotient(length, outer))
    if node.target in (ATTENTION, ATTENTION_BACKWARD) and axes.sequence_atom(axes.letters[node][M]) is None:
        return OTHER_QUERIES.format(target=node.target)
    return (_of_family(node, signature, axes) or (JOINS_ROWS if is_moved_elements(node) else MIXES_ROWS)).format(
        target=node.target
    )


def joins_blocks(node: fx.Node, signature: Signature, axes: AxisFacts) -> bool:
    """Return whether rows of the sequence are also rows of an axis that is sliced from blocks, or vice versa."""
    pairs = [(letter, window.source) for letter, window in signature.windows.items()]
    sides = [[axes.sequence_atom(axes.letters[node][item]) for item in pair] for pair in pairs]
    blocks = {} if axes.sequence is None else axes.sequence.blocks
    return any(None not in side and len({atom in blocks for atom in side}) == 2 for side in sides)


def why_too_many(node: fx.Node, signature: Signature, axes: AxisFacts, letters: Sequence[Letter]) -> str:
    """Return the reason for an operator that has the sequence in more dimensions than query positions and key positions."""
    return (_of_family(node, signature, axes) or MANY_DIMENSIONS).format(target=node.target, count=len(letters))


def _of_family(node: fx.Node, signature: Signature, axes: AxisFacts) -> str | None:
    """Return the reason given for an operator's family if one of the dimensions that it needs in full is the sequence."""
    if all(axes.sequence_atom(axes.letters[node].get(letter, ())) is None for letter in signature.full_letters):
        return None
    return next((text for operators, text in _FAMILIES.items() if node.target in operators), None)
