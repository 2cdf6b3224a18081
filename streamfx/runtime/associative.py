"""PyTorch's `associative_scan`, which Dynamo traces as a tree, as one operator for the full sequence or a chunk of it.

The operator that AOTAutograd differentiates refers to the combine function by an identifier. The passes turn it into
recurrences: the carry between chunks of the sequence holds the blocks that represent all rows so far; in the backward graph it
holds their gradients. A block of level l is the combination of 2 ** l consecutive rows (`prefix_scan.py`).

A row has several leaves: one tensor [rows, ...] per leaf holds all rows. Shared tensors are further arguments of the combine
function, the same for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from streamfx.dialect.associative_scan import COMBINES, SCAN_BACKWARD, TREE_SCAN
from streamfx.dialect.declare import implement
from streamfx.ir.recurrence import TreePlan
from streamfx.ir.sizes import Size, product
from streamfx.runtime.chunked_recurrences import Chunk, Recurrence
from streamfx.runtime.prefix_scan import Blocks, Rows, block_levels, scan_levels, vjp_of_scan
from streamfx.torch_private.autograd import autograd_inside_operators

# -- in plain operators


def scan_rows(
    combine_id: int, rows: Sequence[Tensor], shared: Sequence[Tensor], blocks: Mapping[int, Rows], first: int
) -> tuple[Rows, Blocks]:
    """Combine each of the rows with all rows before it, by the registered function `combine_id`.

    `blocks`, by level, represent the rows of the sequence before `rows`; `first` is the number of these rows. Return (the
    combined rows, the blocks that represent all rows up to the last one).
    """
    combine_all = COMBINES[combine_id].combine_rows
    return scan_levels(lambda left, right: list(combine_all(*left, *right, *shared)), list(rows), blocks, first)


def scan_gradients(
    combine_id: int,
    rows: Sequence[Tensor],
    shared: Sequence[Tensor],
    blocks: Mapping[int, Rows],
    first: int,
    gradients: Sequence[Tensor | None],
    final_block_gradients: Mapping[int, Sequence[Tensor]],
) -> tuple[list[Tensor], Blocks]:
    """Return the gradients of the rows and the shared tensors in one list, and the gradients of the blocks before the rows.

    `blocks` represent the rows of the sequence before `rows`, `first` is the number of these rows. `gradients`: the
    gradient of each leaf of the combined rows, or None. `final_block_gradients`: the gradients of the blocks after the rows,
    by level. Absent gradients in the list are zeros. No two results share memory: the gradients of a single row could, so each
    is cloned.
    """
    with autograd_inside_operators():
        gradients_or_none, block_gradients = vjp_of_scan(
            lambda rows, shared, blocks: scan_rows(combine_id, rows, shared, blocks, first),
            rows,
            shared,
            blocks,
            gradients,
            final_block_gradients,
        )
    value_gradients = [
        torch.zeros_like(value) if value_gradient is None else value_gradient
        for value_gradient, value in zip(gradients_or_none, (*rows, *shared), strict=True)
    ]
    if len(rows[0]) == 1:
        value_gradients = [value_gradient.clone() for value_gradient in value_gradients]
    return value_gradients, block_gradients


# -- the operators' implementations


def _scan(rows: Sequence[Tensor], shared: Sequence[Tensor], combine_id: int) -> list[Tensor]:
    """Implement `streamfx::associative_scan`: combine all rows of the sequence, from the first one, without a carry."""
    # `vmap` needs dispatch keys that are disabled inside an operator's implementation
    with autograd_inside_operators(), torch.no_grad():
        results, _ = scan_rows(combine_id, rows, shared, blocks={}, first=0)
    # a single row is combined with nothing: the clone ensures that no result shares memory with an operand
    return [result.clone() for result in results] if len(rows[0]) == 1 else results


def _scan_backward(
    gradients: Sequence[Tensor | None], rows: Sequence[Tensor], shared: Sequence[Tensor], combine_id: int
) -> list[Tensor]:
    """Implement `streamfx::associative_scan_backward`: return the gradients of all rows, then those of the shared tensors.

    `gradients`: the gradient of each leaf of the combined rows, or None.
    """
    value_gradients, _ = scan_gradients(
        combine_id, rows, shared, blocks={}, first=0, gradients=gradients, final_block_gradients={}
    )
    return value_gradients


implement(TREE_SCAN, _scan)
implement(SCAN_BACKWARD, _scan_backward)

# -- in chunks


def bytes_of_blocks(row_shapes: Sequence[Sequence[Size]], types: Sequence[torch.dtype], length: int) -> Size:
    """Return the size in bytes of a carry: one block per level, each with every leaf in elements of the widest dtype.

    `row_shapes`: the shape of a row of each leaf. `types`: the dtype of each leaf. `length`: the number of rows of the
    sequence.
    """
    return product((sum(map(product, row_shapes)), length.bit_length(), _max_itemsize(types)))


def _max_itemsize(types: Sequence[torch.dtype]) -> int:
    """Return the bytes of the widest dtype."""
    return max(dtype.itemsize for dtype in types)


class _Tree(Recurrence):
    """A recurrence whose carry, a vector of bytes, holds for each level a block of the rows so far, or its gradient."""

    def __init__(self, plan: TreePlan) -> None:
        """Wrap a plan, the description of one scan in a graph."""
        super().__init__(plan.name, plan.axes)
        self.plan, self.carry_size = plan, plan.carry_size

    def _read(self, carry: Tensor | None, num_rows: int, like: Sequence[Tensor]) -> Blocks:
        """Return copies, by level, of the blocks in the carry that represent the first `num_rows` rows of the sequence.

        They are copies because the carry will be overwritten. `like` begins with a tensor of each leaf.
        """
        if carry is None or num_rows == 0:
            return {}
        leaf_views = self._leaf_views(carry, like)
        return {level: [leaf_view[level : level + 1].clone() for leaf_view in leaf_views] for level in block_levels(num_rows)}

    def _write(self, carry: Tensor | None, blocks: Blocks, like: Sequence[Tensor]) -> None:
        """Copy blocks into the bytes of the carry (if any), each at its level. `like` begins with a tensor of each leaf."""
        if carry is None:
            return
        leaf_views = self._leaf_views(carry, like)
        for level, block in blocks.items():
            for leaf_view, value in zip(leaf_views, block, strict=True):
                leaf_view[level : level + 1].copy_(value)

    def _leaf_views(self, carry: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each leaf, a view [levels, ...] of its blocks in the bytes of a carry.

        `like` begins with a tensor [rows, ...] of each leaf, which has the shape of a row and the dtype.
        """
        num_levels, max_itemsize = self.plan.length.bit_length(), _max_itemsize(self.plan.dtypes)
        views: list[Tensor] = []
        start = 0  # byte at which the blocks of a leaf begin
        for value in like[: len(self.plan.dtypes)]:
            shape = (num_levels, *value.shape[1:])
            buffer = carry[start : start + prod(shape) * value.element_size()].view(value.dtype)
            views.append(buffer.view(shape))
            start += prod(shape) * max_itemsize
        return views


class Associative(_Tree):
    """Combine each row with all rows before it."""

    reverse = False

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Combine the chunk's rows with the blocks before them; return the combined rows that the graph uses.

        `operands`: the rows of each leaf, then the shared tensors.
        """
        plan, leaves = self.plan, len(self.plan.dtypes)
        blocks = self._read(chunk.carry, chunk.before, operands)
        results, later_blocks = scan_rows(plan.combine, operands[:leaves], operands[leaves:], blocks, chunk.before)
        self._write(chunk.next_carry, later_blocks, operands)
        return tuple(results[i] for i in plan.results)


class AssociativeBackward(_Tree):
    """Compute the gradients of rows and shared tensors. A chunk recombines its rows with the blocks before them."""

    reverse = True
    needs_states = True

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the chunk's gradients; replace, in the carry, the gradients of the blocks after it by those before it.

        `operands`: the present gradients of the combined rows, then the rows of each leaf, then the shared tensors. The
        blocks are those of the forward graph: `chunk.after` rows precede the chunk in the sequence.
        """
        plan, leaves = self.plan, len(self.plan.dtypes)
        present = iter(operands)
        gradients = [None if i in plan.absent_gradients else next(present) for i in range(leaves)]
        values = list(present)
        rows, shared = values[:leaves], values[leaves:]
        final_gradients = self._read(chunk.carry, plan.length - chunk.before, rows) if chunk.before else {}
        blocks = self._read(chunk.forward_carry, chunk.after, rows)
        results, block_gradients = scan_gradients(plan.combine, rows, shared, blocks, chunk.after, gradients, final_gradients)
        self._write(chunk.next_carry, block_gradients, rows)
        return tuple(results[i] for i in plan.results)
