"""PyTorch's `associative_scan`, chunk by chunk: rows are combined in pairs, then pairs of pairs, and so on.

    level 2   (((0 1)(2 3))          of row 5: ((0 1)(2 3)) (4 5)       of row 6: (((0 1)(2 3)) (4 5)) 6
    level 1   (0 1) (2 3) (4 5)
    level 0   0 1 2 3 4 5 6

The first n rows of the sequence are represented by complete blocks, one for each set bit of n: seven rows by one
block of four, one of two and one of one. Later rows need nothing else, so these blocks are the carry between chunks.
The combine function need not be associative: each row is combined from the same blocks, in the same order, as without
chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Rows = list[Tensor]  # one tensor per leaf
Blocks = dict[int, Rows]  # keyed by level: each block is one row
Combine = Callable[[Rows, Rows], Rows]  # combines rows pairwise


def scanned(combine: Combine, rows: Rows, blocks: Mapping[int, Rows], first: int) -> tuple[Rows, Blocks]:
    """Combine rows `first`, `first + 1`, ... with all rows before them, which `blocks` represent.

    Also return the blocks after the last row.
    """
    after = dict(blocks)
    return _combined(combine, 0, first, rows, blocks, after), after


def levels_behind(rows: int) -> list[int]:
    """Return the levels of the blocks that represent the first `rows` rows."""
    return [level for level in range(rows.bit_length()) if rows >> level & 1]


def _combined(combine: Combine, level: int, first: int, rows: Rows, blocks: Mapping[int, Rows], after: Blocks) -> Rows:
    """Do the same at one level: `rows` are its blocks from index `first` on. Recurse to the next level for pairs."""
    count, odd = len(rows[0]), first % 2
    if not count:
        return rows
    paired = [torch.cat(both) for both in zip(blocks[level], rows, strict=True)] if odd else rows
    pairs, is_left = divmod(count + odd, 2)
    after.pop(level, None)
    if is_left:
        after[level] = [leaf[-1:] for leaf in paired]
    made = _called(combine, [leaf[: 2 * pairs : 2] for leaf in paired], [leaf[1 : 2 * pairs : 2] for leaf in paired])
    odds = _combined(combine, level + 1, first // 2, made, blocks, after)
    evens = _evens(combine, level, first, [leaf[odd::2] for leaf in rows], odds, blocks)
    return [_interleaved(*both) for both in (zip(odds, evens, strict=True) if odd else zip(evens, odds, strict=True))]


def _evens(combine: Combine, level: int, first: int, rows: Rows, odds: Rows, blocks: Mapping[int, Rows]) -> Rows:
    """Combine blocks at even indices with all blocks before them, which is the result at the odd index before."""
    if first % 2 == 0:
        before = _before(combine, level + 1, first // 2, blocks)
        if before is None:
            combined = _called(combine, [leaf[: len(rows[0]) - 1] for leaf in odds], [leaf[1:] for leaf in rows])
            return [torch.cat((leaf[:1], values)) for leaf, values in zip(rows, combined, strict=True)]
        odds = [torch.cat(both) for both in zip(before, odds, strict=True)]
    return _called(combine, [leaf[: len(rows[0])] for leaf in odds], rows)


def _before(combine: Combine, level: int, first: int, blocks: Mapping[int, Rows]) -> Rows | None:
    """Combine all blocks before index `first` of a level."""
    if first == 0:
        return None
    before = _before(combine, level + 1, first // 2, blocks)
    if first % 2 == 0:
        return before
    return blocks[level] if before is None else combine(before, blocks[level])


def _called(combine: Combine, left: Rows, right: Rows) -> Rows:
    return combine(left, right) if len(left[0]) else left


def _interleaved(one: Tensor, other: Tensor) -> Tensor:
    """Interleave the rows of two tensors; the first tensor may have one more."""
    both = torch.stack((one[: len(other)], other), 1).flatten(0, 1)
    return both if len(one) == len(other) else torch.cat((both, one[len(other) :]))


def pulled_back(
    scan: Callable[[Rows, Sequence[Tensor], Blocks], tuple[Rows, Blocks]],
    rows: Sequence[Tensor],
    given: Sequence[Tensor],
    blocks: Mapping[int, Rows],
    gradients: Sequence[Tensor | None],
    left: Mapping[int, Sequence[Tensor]],
) -> tuple[list[Tensor | None], Blocks]:
    """Return the gradients of rows and shared tensors (None if absent), and of the blocks before the rows (zeros if
    absent).

    They follow from the gradients of the results, and from `left`, the gradients of the blocks after the rows. The
    rows are recombined under autograd.
    """
    own_rows, own_given = [_leaf(value) for value in rows], [_leaf(value) for value in given]
    own_blocks = {level: [_leaf(value) for value in block] for level, block in blocks.items()}
    results, after = scan(own_rows, own_given, own_blocks)
    pairs = list(zip(results, gradients, strict=True))
    pairs += [pair for level, block in left.items() for pair in zip(after[level], block, strict=True)]
    pairs = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
    inputs = [*own_rows, *own_given, *(value for block in own_blocks.values() for value in block)]
    results_iterator = iter(_gradients(pairs, inputs))
    direct = [next(results_iterator) for _ in (*own_rows, *own_given)]
    return direct, {level: [_or_zeros(next(results_iterator), value) for value in block] for level, block in own_blocks.items()}


def _gradients(pairs: Sequence[tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    differentiable = [value for value in inputs if value.requires_grad]
    if not pairs or not differentiable:
        return [None] * len(inputs)
    outputs, cotangents = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outputs, differentiable, cotangents, allow_unused=True))
    return [next(gradients) if value.requires_grad else None for value in inputs]


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, requires_grad=False) if gradient is None else gradient
