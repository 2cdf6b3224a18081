"""Each row of canonicalization is a theorem: a small graph computes the same before and after it, for all that a row may meet.

Zeros have signs, rows have infinities or nothing else, dimensions are empty, and operands are not what they usually are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.canonical import INF, NAN, Case, Function, Table, cases, check, graphs, plain, special

aten = torch.ops.aten

X = special(4, 3)


def beside(value: float, other: float, front: bool) -> Function:
    def function(x: Tensor) -> Tensor:
        fills = x.new_full((1, 3), value), x.new_full((2, 3), other)
        return torch.cat([fills[0], x, fills[1]] if front else [x, *fills])

    return function


def of_each(x: Tensor, numbers: Tensor) -> Tensor:
    return x[torch.arange(len(x)), numbers]


def put(accumulate: bool) -> Function:
    def function(values: Tensor, numbers: Tensor) -> Tensor:
        target = values.new_zeros(3, 4, 2)
        return aten.index_put(target, [torch.arange(3), numbers], values, accumulate)

    return function


def scattered(mask_of: Function) -> Function:
    def function(x: Tensor, rows: Tensor, source: Tensor) -> Tensor:
        return x.masked_scatter(mask_of(rows[..., None], x), source)

    return function


def scattered_back(mask_of: Function) -> Function:
    def function(x: Tensor, rows: Tensor, source: Tensor) -> Tensor:
        return aten.masked_scatter_backward(x, mask_of(rows[..., None], x), list(source.shape))

    return function


def put_by(dims: int, accumulate: bool, of: torch.dtype = torch.bool) -> Function:
    """One number in the places of a mask of so many leading dimensions; of another type the mask has indices."""

    def function(x: Tensor, number: Tensor) -> Tensor:
        mask = (x > 0).flatten(dims).any(-1) if dims < 3 else x > 0
        return aten.index_put(x, [mask.to(of)], number, accumulate)

    return function


NUMBER = torch.tensor(-0.0, dtype=torch.float64)
PUTS: dict[str, tuple[tuple[Any, ...], bool]] = {
    "of elements": ((3, False), True),
    "of rows": ((2, False), True),
    "of the first": ((1, False), True),
    "added": ((2, True), False),
    "of indices": ((1, False, torch.int64), False),
}
ROWS = torch.tensor([[0.0, 2.0, 0.5], [NAN, 0.0, -3.0]], dtype=torch.float64)
PLACES = (special(2, 3, 4), ROWS, special(5, 4))
MASKS: dict[str, tuple[Function, bool]] = {
    "before": (lambda rows, x: rows.bool().expand(x.shape), True),
    "after": (lambda rows, x: rows.expand(x.shape).bool(), True),
    "after, copied": (lambda rows, x: rows.expand(x.shape).clone().bool(), True),
    "integers": (lambda rows, x: rows.nan_to_num().long().expand(x.shape).bool(), True),
    "rounded in between": (lambda rows, x: rows.nan_to_num().expand(x.shape).long().bool(), False),
    "compared": (lambda rows, x: rows.expand(x.shape) > 0, False),
    "of columns": (lambda rows, x: (rows[:, :1] > 0).transpose(1, 2).expand(2, 3, 1).expand(2, 3, 4), True),
    "of elements": (lambda rows, x: x > rows, False),
}


def windows_back(x: Tensor) -> Tensor:
    return aten.unfold_backward(x, [4, 3], 0, 2, 1)


def scan(name: str, dims: tuple[int, int, int], **more: Any) -> Function:
    return lambda x: getattr(torch, name)(x.flip(dims[0]), dims[1], **more).flip(dims[2])


REWRITTEN: Table = {
    "alias": (aten.alias, X),
    "view": (lambda x: aten.view(x, [4, 3]), X),
    "no rows": (lambda x: aten.view(x, [0, 3]), special(0, 3)),
    "expand": (lambda x: aten.expand(x, [4, 3]), X),
    "turned twice": (lambda x: aten.t(aten.t(x)), X),
    "copied over": (aten.copy, plain(4, 3), X),
    "copied over another type": (aten.copy, plain(4, 3).float(), X),
    "sliced": (lambda x: aten.slice(x, 0, 0, 9), X),
    "padded and sliced": (lambda x: aten.slice(aten.constant_pad_nd(x, [0, 5], 2.0), 1, 0, 3), X),
    "gradient of all": (lambda x: aten.slice_backward(x, [4, 3], 0, 0, 4, 1), X),
    "padded by nothing": (lambda x: aten.constant_pad_nd(x, [0, 0, 0, 0], 1.0), X),
    "flipped twice": (lambda x: x.flip(0).flip(0), X),
    "a marked conjugate": (lambda x: torch.view_as_real(aten._conj(torch.complex(x, x.flip(0))) * 2), X),
    "a conjugate's imaginary part": (lambda x: torch.complex(x, x.flip(0)).conj().imag + 1, X),
    "unfolded": (lambda x: x.unfold(0, 2, 1), X),
    "new": (lambda x: [x.new_zeros(2), x.new_ones(2), x.new_full((2,), 0.5), x.new_full((0, 2), -0.0)], X),
    "new whole numbers": (lambda x: [x.new_full((2,), 2), x.new_ones(2)], X.nan_to_num(0, 0, 0).long()),
    "new truths": (lambda x: [x.new_full((2,), 2), x.new_zeros(2)], X > 0),
    "filled": (lambda x: aten.fill(x, -0.0), X),
    "with nothing": (lambda x: torch.cat([x.new_empty(0, 3), x]), X),
    "with nothing of another type": (lambda x: torch.cat([x.new_empty(0, 3).float(), x]), X),
    "with a list of nothing": (lambda x: torch.cat([torch.empty(0), x], -1), X),
    "fills of two signs": (beside(0.0, -0.0, True), X),
    "two fills": (beside(0.0, 1.0, True), X),
    "half fills": (beside(0.1, 0.1, True), X.bfloat16()),
    "a row in front": (lambda x, row: torch.cat([row, x[:, :-1]], 1), special(2, 5, 3), special(2, 1, 3)),
    "a row behind": (lambda x, row: torch.cat([x[:, 1:], row], -2), special(2, 5, 3), special(2, 1, 3)),
    "written nowhere": (lambda x: aten.slice_scatter(x.new_zeros(4, 3), x[:0], 0, 7, 9), X),
    "written in steps": (lambda x: aten.slice_scatter(x.new_zeros(4, 3), x[:2], 0, 0, 4, 2), X),
    "written over another type": (lambda x: aten.slice_scatter(x.new_zeros(4, 3).float(), x[:2], 0, 1, 3), X),
    "one of each": (of_each, special(3, 5, 2), torch.tensor([1, -1, 0])),
    "one of each, twice": (of_each, special(3, 1), torch.tensor([0, 0, -1])),
    "one of none": (of_each, special(0, 4, 2), torch.empty(0, dtype=torch.int64)),
    "put": (put(False), special(3, 2), torch.tensor([1, -1, 0])),
    "added": (put(True), special(3, 2), torch.tensor([1, -1, 0])),
    "gathered rows": (lambda x, i: aten.gather(x, 0, i[:, None].expand(4, 3)), X, torch.tensor([3, 0, 0, 1])),
}
KEPT: Table = {
    "another view": (lambda x: aten.view(x, [3, 4]), X),
    "expand wider": (lambda x: aten.expand(x, [2, 4, 3]), X),
    "a row copied over": (aten.copy, plain(4, 3), special(3)),
    "every other": (lambda x: aten.slice(x, 0, 0, 4, 2), X),
    "the only one of every other": (lambda x: aten.slice(x, 0, 0, 1, 2), special(1, 3)),
    "padded in front": (lambda x: aten.slice(aten.constant_pad_nd(x, [1, 5], 2.0), 1, 0, 3), X),
    "cut and sliced": (lambda x: aten.slice(aten.constant_pad_nd(x, [0, 2, -1, 1], 2.0), 1, 0, 3), X),
    "gradient of some": (lambda x: aten.slice_backward(x, [6, 3], 0, 1, 5, 1), X),
    "moved by padding": (lambda x: aten.constant_pad_nd(x, [1, -1], 1.0), X),
    "flipped twice, otherwise": (lambda x: x.flip(0).flip(1), X),
    "a conjugate of its own": (lambda x: torch.view_as_real(aten.conj_physical(torch.complex(x, x)) * 2), X),
    "unfolded in steps": (lambda x: x.unfold(0, 2, 2), X),
    "equal but for a sign": (lambda x: [x * 0.0, x * -0.0, torch.full_like(x, 0.0), torch.full_like(x, -0.0)], X),
    "signs copied": (lambda x: [aten.copysign(x, 0.0), aten.copysign(x, -0.0)], X),
    "alike": (lambda x: [x * 2.0, x * 2.0], X),
    "whole or not": (lambda x: [aten.mul(x, 2), aten.mul(x, 2.0), aten.mul(x, True)], X.nan_to_num(0, 0, 0).long()),
    "plus zero": (lambda x: [x + torch.zeros_like(x), torch.zeros_like(x) + x], X),
    "minus zero": (lambda x: [x - torch.zeros_like(x), x + torch.full_like(x, -0.0)], X),
    "scattered zeros": (
        lambda x: aten.scatter(torch.zeros_like(x), 1, torch.zeros(4, 1, dtype=torch.int64), torch.full_like(x, -0.0)),
        X,
    ),
    "with nothing of a wider type": (lambda x: torch.cat([torch.empty(0, 3, dtype=torch.float64), x]), X.float()),
    "nothings": (lambda x: torch.cat([x[:, :0], x[:, 3:]]), X),
    "rows and a fill of another type": (lambda x: torch.cat([torch.zeros(1, 3, dtype=torch.float64), x]), X.float()),
    "two rows": (lambda x, row: torch.cat([row, x[:, :1]], 1), special(2, 5, 3), special(2, 1, 3)),
    "written over rows": (lambda x, y: aten.slice_scatter(y, x[:2], 0, 1, 3), X, special(6, 3)),
    "one of each by other rows": (lambda x, i: x[i, i], special(3, 5, 2), torch.tensor([1, 2, 0])),
    "scattered from nothing": (scattered(MASKS["before"][0]), special(2, 3, 4), torch.zeros(2, 3), special(2, 0, 4)),
    "gathered elements": (lambda x, i: aten.gather(x, 1, i[:, None]), X, torch.tensor([2, 0, 0, 1])),
    "along another": (scan("cumsum", (0, 1, 0)), plain(4, 3)),
    "half turned": (scan("cumsum", (0, 0, 1)), plain(4, 3)),
    "in another type": (scan("cumsum", (0, 0, 0), dtype=torch.float32), plain(4, 3)),
    "whole numbers": (scan("cumsum", (0, 0, 0)), torch.arange(4, dtype=torch.uint8)),
}
ROUNDED: Table = {
    "of nothing": (scan("cumsum", (0, 0, 0)), plain(0, 3)),
    "windows": (windows_back, plain(3, 3, 2)),
}
MORE = {
    **{
        f"fills {a} {b} {front}": Case(beside(a, b, front), (X,))
        for a, b in ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (0.1, 0.1))
        for front in (True, False)
    },
    **{
        f"written {value} {start} {end}": Case(
            lambda x, value=value, start=start, end=end: aten.slice_scatter(x.new_full((6, 3), value), x[:2], 0, start, end), (X,)
        )
        for value, start, end in ((0.0, 1, 3), (-0.0, None, 2), (0.3, 4, 99), (0.0, -2, None))
    },
    **{f"scattered {name}": Case(scattered(mask), PLACES, changes=changes) for name, (mask, changes) in MASKS.items()},
    **{f"added back {name}": Case(scattered_back(mask), PLACES, changes, bits=False) for name, (mask, changes) in MASKS.items()},
    **{f"put by a mask {name}": Case(put_by(*how), (special(2, 3, 4), NUMBER), changes) for name, (how, changes) in PUTS.items()},
    **{
        f"{name} from behind": Case(scan(name, (0, 0, -2)), (plain(4, 3),), bits=False)
        for name in ("cumsum", "cumprod", "logcumsumexp")
    },
}
CASES = cases(REWRITTEN) | cases(KEPT, changes=False) | cases(ROUNDED, bits=False) | MORE


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    check(CASES[name])


def test_rows_that_are_gathered_are_not_counted_from_the_end() -> None:
    _, after = graphs(CASES["gathered rows"])
    x, numbers = CASES["gathered rows"].inputs
    with pytest.raises(RuntimeError, match="out of bounds"):
        after(x, numbers - len(x))
