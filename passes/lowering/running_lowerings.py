"""Lowerings of operators with a carry: each chunk continues from the carry of the chunk before it in the scan's direction.

The *carry* is a buffer that each chunk reads and overwrites. The *states* are a buffer of its values at the start of each chunk,
which the forward loop stores, so that a loop in the opposite direction can start any chunk. An operator `advance`s; in a loop
in the opposite direction it `resume`s from states.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from streamfx.ir.facts import Role
from streamfx.ir.program import CHUNK, Broadcast, RowRange
from streamfx.ir.signature import AxisLabel
from streamfx.ir.sizes import product
from streamfx.node_meta import FORWARD_OPERATOR, VALUE
from streamfx.passes.lowering.bodies import BodyBuilder
from streamfx.passes.lowering.lowering_table import emit_copy, register_lowering
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.rules.scans import REVERSE_SCAN_NAMES, SCAN_NAMES
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.chunked_recurrences import Recurrence, UnrolledRecurrence
from streamfx.runtime.chunked_scans import RunningTotal
from streamfx.runtime.custom_scan import StatefulRecurrence
from streamfx.runtime.runtime_sizes import first_in_chunk, rows_in_chunk
from streamfx.runtime.truncated import TruncatedRecurrence

OPPOSITE_DIRECTION = "{target} runs over the rows in the opposite direction of the loop that reads its result"
INSIDE_BLOCKS = "{target} reads blocks of {block} rows, and chunks would start inside a block"
NO_STATES = "the backward pass of a loop over rows needs states that no loop of the forward pass has stored"


@register_lowering(*SCAN_NAMES, *REVERSE_SCAN_NAMES)
def lower_scan(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a cumulative sum (product, maximum, ...) over the sequence as a recurrence; if it is along another axis, copy it."""
    (dim,) = builder.layout.axes.signatures[node].index
    if builder.layout.access.roles.get(node, {}).get(dim) is not Role.ROWS:
        return emit_copy(builder, node)
    reverse = node.target in REVERSE_SCAN_NAMES
    kind = (REVERSE_SCAN_NAMES if reverse else SCAN_NAMES)[node.target]
    row_size = product(size for i, size in enumerate(builder.layout.full_shape(node)) if i != dim)
    total = RunningTotal(kind, reverse, dim, node.meta[VALUE].dtype, row_size)
    return builder.graph.call_function(operator.getitem, (_emit_rows(builder, node, total, dim), 0))


@register_lowering(UnrolledRecurrence, StatefulRecurrence, Associative, AssociativeBackward)
def lower_recurrence(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Lower a recurrence over the sequence; if it is along another axis, copy it."""
    recurrence: Recurrence = node.target  # type: ignore[assignment]
    if builder.layout.access.roles.get(node, {}).get(recurrence.axes.rows) is not Role.ROWS:
        return emit_copy(builder, node)
    return _emit_rows(builder, node, recurrence, recurrence.axes.rows)


def _emit_rows(builder: BodyBuilder, node: fx.Node, recurrence: Recurrence, rows: AxisLabel) -> fx.Node:
    """Emit the chunk's rows of a recurrence along the axis `rows`, which continues from this loop's carry.

    In a backward loop, a forward recurrence is recomputed from the states that a forward loop stored; a backward recurrence
    also reads them. A forward recurrence stores states if no loop has stored them yet. Raise `FallbackError` if the states are
    missing, or if chunks would start inside a block of rows.
    """
    layout = builder.layout
    axis_rows = layout.rows(layout.axes.labels[node][rows])
    if recurrence.block != 1 and (
        axis_rows.block != 1 or not isinstance(axis_rows.offset, int) or axis_rows.offset % recurrence.block
    ):
        raise FallbackError(node, INSIDE_BLOCKS.format(target=node.target, block=recurrence.block))
    rows_before = _rows_before(builder, axis_rows, recurrence.reverse)
    rows_after = _rows_before(builder, axis_rows, not recurrence.reverse)
    chunk, operands = builder.size_argument(CHUNK), builder.operands(node)
    forward = node.meta.get(FORWARD_OPERATOR, node)
    stored_states = builder.outer_states(forward) if forward is not None else None
    states = None if stored_states is None else builder.feed(f"{forward.name}_states", Broadcast(), stored_states)
    if node in layout.truncations:
        recurrence = TruncatedRecurrence(recurrence, layout.truncations[node])
    if recurrence.reverse != builder.reverse and (recurrence.reverse or stored_states is None):
        name = node.target if isinstance(recurrence, RunningTotal) else "a loop over rows"
        raise FallbackError(node, OPPOSITE_DIRECTION.format(target=name))
    if recurrence.needs_states and stored_states is None:
        raise FallbackError(node, NO_STATES)
    if builder.reverse and not recurrence.reverse:
        return builder.graph.call_function(recurrence.resume, (rows_before, rows_after, states, chunk, *operands))
    keeps_states = not recurrence.reverse and stored_states is None
    carry, new_states = builder.emit_carry(node, recurrence.carry_shape, torch.uint8, keeps_states)
    if isinstance(recurrence, UnrolledRecurrence) and (kept := _kept_steps(builder, forward, recurrence)) is not None:
        return builder.graph.call_function(recurrence.advance_from, (rows_before, rows_after, carry, kept, *operands))
    states = states if recurrence.reverse else new_states
    return builder.graph.call_function(recurrence.advance, (rows_before, rows_after, carry, states, chunk, *operands))


def _kept_steps(builder: BodyBuilder, forward: fx.Node | None, backward: UnrolledRecurrence) -> fx.Node | None:
    """Return the intermediate values of the forward recurrence if this body recomputes its rows; otherwise None.

    Then its steps run only once: the recomputing call also returns them.
    """
    recomputed = builder.lowered.get(forward)
    recurrence = None if forward is None else forward.target
    if (
        recomputed is None
        or not isinstance(recurrence, UnrolledRecurrence)
        or recomputed.target != recurrence.resume
        or not backward.can_reuse_kept(recurrence)
    ):
        return None
    recomputed.target = recurrence.resume_kept
    return builder.graph.call_function(operator.getitem, (recomputed, -1))


def _rows_before(builder: BodyBuilder, rows: RowRange, reverse: bool) -> fx.Node:
    """Return the number of an axis's rows that come before the chunk's rows (after, if `reverse`), as a body argument."""
    first = first_in_chunk(rows, builder.length)  # the first or last chunks may have no row of this axis
    return builder.size_argument(rows.length - first - rows_in_chunk(rows, builder.length) if reverse else first)
