"""Rows combined with all rows before them, in pairs, pairs of pairs, and so on: PyTorch's `associative_scan`, chunk by chunk.

    level 2   (((0 1)(2 3))          of row 5: ((0 1)(2 3)) (4 5)       of row 6: (((0 1)(2 3)) (4 5)) 6
    level 1   (0 1) (2 3) (4 5)
    level 0   0 1 2 3 4 5 6

Behind the first rows of the sequence stand whole blocks of them, one for each bit of how many these are: of seven rows one of
four, one of two, one of one. That is all that later rows need, and what a chunk hands on. Nothing is assumed of the function: a
row is combined from the same blocks, in the same order, as without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Rows = list[Tensor]  # of each leaf
Blocks = dict[int, Rows]  # by level: each is one row
Combine = Callable[[Rows, Rows], Rows]  # many rows with as many


def scanned(combine: Combine, rows: Rows, blocks: Mapping[int, Rows], first: int) -> tuple[Rows, Blocks]:
    """Rows from the `first` on, combined with all before them, of which `blocks` are left; and what is left behind the last."""
    after = dict(blocks)
    return _combined(combine, 0, first, rows, blocks, after), after


def levels_behind(rows: int) -> list[int]:
    """The levels of the blocks that stand behind so many rows."""
    return [level for level in range(rows.bit_length()) if rows >> level & 1]


def _combined(combine: Combine, level: int, first: int, rows: Rows, blocks: Mapping[int, Rows], after: Blocks) -> Rows:
    """The same one level up: `rows` are blocks of this level, from the `first` on."""
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
    """Blocks at even places, each combined with all before it, which is the result at the odd place before."""
    if first % 2 == 0:
        before = _before(combine, level + 1, first // 2, blocks)
        if before is None:
            rest = _called(combine, [leaf[: len(rows[0]) - 1] for leaf in odds], [leaf[1:] for leaf in rows])
            return [torch.cat((leaf[:1], own)) for leaf, own in zip(rows, rest, strict=True)]
        odds = [torch.cat(both) for both in zip(before, odds, strict=True)]
    return _called(combine, [leaf[: len(rows[0])] for leaf in odds], rows)


def _before(combine: Combine, level: int, first: int, blocks: Mapping[int, Rows]) -> Rows | None:
    """All blocks before the `first` of a level, combined."""
    if first == 0:
        return None
    before = _before(combine, level + 1, first // 2, blocks)
    if first % 2 == 0:
        return before
    return blocks[level] if before is None else combine(before, blocks[level])


def _called(combine: Combine, left: Rows, right: Rows) -> Rows:
    return combine(left, right) if len(left[0]) else left


def _interleaved(one: Tensor, other: Tensor) -> Tensor:
    """Rows of both by turns; the first may have one more."""
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
    """Gradients of rows and of what they are given, and of the blocks before them: from those of the results, and of the blocks
    that are `left` behind the rows. The rows are combined once more. Without a gradient: None, of a block zeros.
    """
    own_rows, own_given = [_leaf(value) for value in rows], [_leaf(value) for value in given]
    own_blocks = {level: [_leaf(value) for value in block] for level, block in blocks.items()}
    made, after = scan(own_rows, own_given, own_blocks)
    pairs = list(zip(made, gradients, strict=True))
    pairs += [pair for level, block in left.items() for pair in zip(after[level], block, strict=True)]
    pairs = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
    inputs = [*own_rows, *own_given, *(value for block in own_blocks.values() for value in block)]
    found = iter(_gradients(pairs, inputs))
    direct = [next(found) for _ in (*own_rows, *own_given)]
    return direct, {level: [_or_zeros(next(found), value) for value in block] for level, block in own_blocks.items()}


def _gradients(pairs: Sequence[tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [value for value in inputs if value.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    outputs, cotangents = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
    return [next(found) if value.requires_grad else None for value in inputs]


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, requires_grad=False) if gradient is None else gradient
