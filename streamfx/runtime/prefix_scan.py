"""PyTorch's `associative_scan`, chunk by chunk: rows are combined in pairs, then pairs of pairs, and so on.

    level 2   (((0 1)(2 3))          of row 5: ((0 1)(2 3)) (4 5)       of row 6: (((0 1)(2 3)) (4 5)) 6
    level 1   (0 1) (2 3) (4 5)
    level 0   0 1 2 3 4 5 6

The first n rows of the sequence are represented by complete blocks, one for each set bit of n: seven rows by one
block of four, one of two and one of one. Later rows depend on these blocks alone, so they are the carry between chunks.
The combine function need not be associative: each row is combined from the same blocks, in the same order, as without
chunks.

A row has several leaves: `Rows` has one tensor [rows, ...] for each. "Row i" of level l is a block of 2 ** l rows.
`combine` takes two `Rows` of equal length, and combines row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Rows = list[Tensor]  # one tensor per leaf
Blocks = dict[int, Rows]  # keyed by level: each block is one row
Combine = Callable[[Rows, Rows], Rows]  # combines rows pairwise


def scan_levels(combine: Combine, rows: Rows, blocks: Mapping[int, Rows], first: int) -> tuple[Rows, Blocks]:
    """Combine each of the rows with all rows before it; `blocks` represent the rows of the sequence before `rows`.

    `first`: the index in the sequence of the first of these rows. Return (the combined rows, the blocks that represent all rows
    up to the last one). Blocks are keyed by level.
    """
    final_blocks = dict(blocks)
    return _scan_level(combine, 0, first, rows, blocks, final_blocks), final_blocks


def block_levels(num_rows: int) -> list[int]:
    """Return the levels of the blocks that represent the first `num_rows` rows: the set bits, 5 -> [0, 2]."""
    return [level for level in range(num_rows.bit_length()) if num_rows >> level & 1]


def _scan_level(combine: Combine, level: int, first: int, rows: Rows, blocks: Mapping[int, Rows], final_blocks: Blocks) -> Rows:
    """Combine each block of one level, from index `first` on, with all blocks before it; return the results, as many as blocks.

    `rows` holds these blocks. Pairs of them are blocks of the next level, whose results are those at odd indices of this
    level; the results at even indices follow from these. `blocks` represent what precedes the first block; `final_blocks` is
    updated in place to what represents everything up to the last one.
    """
    num_blocks, starts_odd = len(rows[0]), first % 2
    if not num_blocks:
        return rows
    paired = [torch.cat(pair) for pair in zip(blocks[level], rows, strict=True)] if starts_odd else rows
    num_pairs, has_unpaired = divmod(num_blocks + starts_odd, 2)
    final_blocks.pop(level, None)
    if has_unpaired:
        final_blocks[level] = [leaf[-1:] for leaf in paired]
    pair_blocks = _combine_nonempty(
        combine, [leaf[: 2 * num_pairs : 2] for leaf in paired], [leaf[1 : 2 * num_pairs : 2] for leaf in paired]
    )
    odd_results = _scan_level(combine, level + 1, first // 2, pair_blocks, blocks, final_blocks)
    even_results = _even_results(combine, level, first, [leaf[starts_odd::2] for leaf in rows], odd_results, blocks)
    return [
        _interleaved(*pair)
        for pair in (zip(odd_results, even_results, strict=True) if starts_odd else zip(even_results, odd_results, strict=True))
    ]


def _even_results(combine: Combine, level: int, first: int, rows: Rows, odd_results: Rows, blocks: Mapping[int, Rows]) -> Rows:
    """Return the results at even indices: each combines the result at the odd index before it with the block (in `rows`).

    `odd_results`: the results at odd indices, from `first` on. If `first` is even, the block at `first` is combined with the
    blocks before all of these (`blocks`); the sequence's first block is its own result.
    """
    if first % 2 == 0:
        block_before = _combined_before(combine, level + 1, first // 2, blocks)
        if block_before is None:
            combined = _combine_nonempty(combine, [leaf[: len(rows[0]) - 1] for leaf in odd_results], [leaf[1:] for leaf in rows])
            return [torch.cat((leaf[:1], values)) for leaf, values in zip(rows, combined, strict=True)]
        odd_results = [torch.cat(pair) for pair in zip(block_before, odd_results, strict=True)]
    return _combine_nonempty(combine, [leaf[: len(rows[0])] for leaf in odd_results], rows)


def _combined_before(combine: Combine, level: int, first: int, blocks: Mapping[int, Rows]) -> Rows | None:
    """Return the combination, as one row, of all blocks before index `first` of a level; None if `first` is 0."""
    if first == 0:
        return None
    earlier = _combined_before(combine, level + 1, first // 2, blocks)
    if first % 2 == 0:
        return earlier
    return blocks[level] if earlier is None else combine(earlier, blocks[level])


def _combine_nonempty(combine: Combine, left: Rows, right: Rows) -> Rows:
    """Return the row-by-row combination of two `Rows`; `left` if there are no rows, because `combine` may not accept that."""
    return combine(left, right) if len(left[0]) else left


def _interleaved(leading: Tensor, following: Tensor) -> Tensor:
    """Interleave the rows of two tensors, [0, 2, 4] and [1, 3] -> [0, 1, 2, 3, 4]; the first tensor may have one more."""
    interleaved = torch.stack((leading[: len(following)], following), 1).flatten(0, 1)
    return interleaved if len(leading) == len(following) else torch.cat((interleaved, leading[len(following) :]))


def vjp_of_scan(
    scan: Callable[[Rows, Sequence[Tensor], Blocks], tuple[Rows, Blocks]],
    rows: Sequence[Tensor],
    shared: Sequence[Tensor],
    blocks: Mapping[int, Rows],
    gradients: Sequence[Tensor | None],
    final_block_gradients: Mapping[int, Sequence[Tensor]],
) -> tuple[list[Tensor | None], Blocks]:
    """Recompute a scan under autograd, and return the gradients of (rows and shared tensors, blocks before the rows).

    `scan` takes (rows, shared, blocks) and returns (the combined rows, the blocks after the rows). `gradients`: the
    gradients of the combined rows, or None. `final_block_gradients`: the gradients of the blocks after the rows. In the
    returned lists, absent gradients of rows and shared tensors are None; absent gradients of blocks are zeros.
    """
    row_leaves, shared_leaves = [_leaf(value) for value in rows], [_leaf(value) for value in shared]
    block_leaves = {level: [_leaf(value) for value in block] for level, block in blocks.items()}
    results, final_blocks = scan(row_leaves, shared_leaves, block_leaves)
    pairs = list(zip(results, gradients, strict=True))
    pairs += [pair for level, block in final_block_gradients.items() for pair in zip(final_blocks[level], block, strict=True)]
    pairs = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
    inputs = [*row_leaves, *shared_leaves, *(value for block in block_leaves.values() for value in block)]
    results_iterator = iter(_gradients(pairs, inputs))
    direct_gradients = [next(results_iterator) for _ in (*row_leaves, *shared_leaves)]
    return direct_gradients, {
        level: [_or_zeros(next(results_iterator), value) for value in block] for level, block in block_leaves.items()
    }


def _gradients(pairs: Sequence[tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each input (None if absent) by autograd, from pairs of an output and its cotangent."""
    differentiable = [value for value in inputs if value.requires_grad]
    if not pairs or not differentiable:
        return [None] * len(inputs)
    outputs, cotangents = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outputs, differentiable, cotangents, allow_unused=True))
    return [next(gradients) if value.requires_grad else None for value in inputs]


def _leaf(value: Tensor) -> Tensor:
    """Return a detached view, a leaf of autograd's graph, that requires a gradient if its dtype can have one."""
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient, or zeros if it is absent."""
    return torch.zeros_like(like, requires_grad=False) if gradient is None else gradient
