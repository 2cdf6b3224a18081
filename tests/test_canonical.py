"""Each row of canonicalization is a theorem: a small graph computes the same before and after it, for all that a row may meet.

Zeros have signs, rows have infinities or nothing else, dimensions are empty, and operands are not what they usually are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.passes.along_sequence import _root_of_sum, _sum_of_paddings
from streamfx.passes.building import GraphWriter
from streamfx.passes.canonicalize import canonicalize

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
Function = Callable[..., Any]


def special(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of which some are zeros of both signs, infinite, or none."""
    numbers = torch.tensor([1.5, -0.0, 0.0, -2.25, INF, -INF, NAN, 3e-300, -0.0, 7.0], dtype=torch.float64)
    count = torch.Size(shape).numel()
    return numbers.repeat(count // len(numbers) + 1)[:count].reshape(shape).to(dtype)


def plain(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def scores(*shape: int) -> Tensor:
    """Rows that see nothing, one key, an infinite one, and something that is no number."""
    made = plain(*shape)
    made[..., 0, :], made[..., 1, 1:], made[..., 2, 0], made[..., 3, 1] = -INF, -INF, INF, NAN
    made[..., 4, :] = torch.finfo(torch.float64).min
    made[..., 5, :2] = 9.0  # two that are the largest
    return made


@dataclass(frozen=True)
class Case:
    """A function of tensors; whether it is rewritten, and whether it then has the very same bits."""

    function: Function
    inputs: tuple[Tensor, ...]
    changes: bool = True
    bits: bool = True


def graphs(case: Case) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The traced graph, and the same after canonicalization. What is an output itself may not be replaced: times one it may."""

    def function(*tensors: Tensor) -> list[Tensor]:
        made = case.function(*tensors)
        return [item * 1 for item in (made if isinstance(made, (list, tuple)) else [made])]

    before = make_fx(function, tracing_mode="fake")(*case.inputs)
    graph = copy.deepcopy(before.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    canonicalize(graph)
    return before, fx.GraphModule(before, graph)


def same(actual: Tensor, truth: Tensor, bits: bool) -> None:
    assert (actual.shape, actual.dtype) == (truth.shape, truth.dtype)
    if not bits:
        close = 8 * torch.finfo(truth.dtype).eps
        torch.testing.assert_close(actual, truth, rtol=16 * close, atol=close, equal_nan=True)
        return
    assert torch.equal(actual.isnan(), truth.isnan()), (actual, truth)
    known = ~truth.isnan()
    assert torch.equal(actual[known], truth[known]) and torch.equal(actual.signbit()[known], truth.signbit()[known]), (
        actual,
        truth,
    )


def targets(module: fx.GraphModule) -> set[Any]:
    """Which operators there are; how often is not asked, since equal ones are merged."""
    return {node.target for node in module.graph.nodes if node.op == "call_function"} - {operator.getitem}


def check(case: Case) -> None:
    before, after = graphs(case)
    assert (targets(before) != targets(after)) is case.changes, targets(after)
    truth = before(*[item.clone() for item in case.inputs])
    for actual, wanted in zip(after(*[item.clone() for item in case.inputs]), truth, strict=True):
        same(actual, wanted, case.bits)


X = special(4, 3)
MOVES = {
    "alias": Case(aten.alias, (X,)),
    "view": Case(lambda x: aten.view(x, [4, 3]), (X,)),
    "another view": Case(lambda x: aten.view(x, [3, 4]), (X,), changes=False),
    "no rows": Case(lambda x: aten.view(x, [0, 3]), (special(0, 3),)),
    "expand": Case(lambda x: aten.expand(x, [4, 3]), (X,)),
    "expand wider": Case(lambda x: aten.expand(x, [2, 4, 3]), (X,), changes=False),
    "turned twice": Case(lambda x: aten.t(aten.t(x)), (X,)),
    "copied over": Case(aten.copy, (plain(4, 3), X)),
    "copied over another type": Case(aten.copy, (plain(4, 3).float(), X), changes=False),
    "a row copied over": Case(aten.copy, (plain(4, 3), special(3)), changes=False),
    "sliced": Case(lambda x: aten.slice(x, 0, 0, 9), (X,)),
    "every other": Case(lambda x: aten.slice(x, 0, 0, 4, 2), (X,), changes=False),
    "the only one of every other": Case(lambda x: aten.slice(x, 0, 0, 1, 2), (special(1, 3),), changes=False),
    "padded and sliced": Case(lambda x: aten.slice(aten.constant_pad_nd(x, [0, 5], 2.0), 1, 0, 3), (X,)),
    "padded in front": Case(lambda x: aten.slice(aten.constant_pad_nd(x, [1, 5], 2.0), 1, 0, 3), (X,), changes=False),
    "cut and sliced": Case(lambda x: aten.slice(aten.constant_pad_nd(x, [0, 2, -1, 1], 2.0), 1, 0, 3), (X,), changes=False),
    "gradient of all": Case(lambda x: aten.slice_backward(x, [4, 3], 0, 0, 4, 1), (X,)),
    "gradient of some": Case(lambda x: aten.slice_backward(x, [6, 3], 0, 1, 5, 1), (X,), changes=False),
    "padded by nothing": Case(lambda x: aten.constant_pad_nd(x, [0, 0, 0, 0], 1.0), (X,)),
    "moved by padding": Case(lambda x: aten.constant_pad_nd(x, [1, -1], 1.0), (X,), changes=False),
    "flipped twice": Case(lambda x: x.flip(0).flip(0), (X,)),
    "flipped twice, otherwise": Case(lambda x: x.flip(0).flip(1), (X,), changes=False),
    "unfolded": Case(lambda x: x.unfold(0, 2, 1), (X,)),
    "unfolded in steps": Case(lambda x: x.unfold(0, 2, 2), (X,), changes=False),
}
FILLS = {
    "new": Case(lambda x: [x.new_zeros(2), x.new_ones(2), x.new_full((2,), 0.5), x.new_full((0, 2), -0.0)], (X,)),
    "new whole numbers": Case(lambda x: [x.new_full((2,), 2), x.new_ones(2)], (X.nan_to_num(0, 0, 0).long(),)),
    "new truths": Case(lambda x: [x.new_full((2,), 2), x.new_zeros(2)], (X > 0,)),
    "filled": Case(lambda x: aten.fill(x, -0.0), (X,)),
    "equal but for a sign": Case(
        lambda x: [x * 0.0, x * -0.0, torch.full_like(x, 0.0), torch.full_like(x, -0.0)], (X,), changes=False
    ),
    "signs copied": Case(lambda x: [aten.copysign(x, 0.0), aten.copysign(x, -0.0)], (X,), changes=False),
    "alike": Case(lambda x: [x * 2.0, x * 2.0], (X,), changes=False),
    "whole or not": Case(
        lambda x: [aten.mul(x, 2), aten.mul(x, 2.0), aten.mul(x, True)], (X.nan_to_num(0, 0, 0).long(),), changes=False
    ),
    "plus zero": Case(lambda x: [x + torch.zeros_like(x), torch.zeros_like(x) + x], (X,), changes=False),
    "minus zero": Case(lambda x: [x - torch.zeros_like(x), x + torch.full_like(x, -0.0)], (X,), changes=False),
    "scattered zeros": Case(
        lambda x: aten.scatter(torch.zeros_like(x), 1, torch.zeros(4, 1, dtype=torch.int64), torch.full_like(x, -0.0)),
        (X,),
        changes=False,
    ),
}


def beside(value: float, other: float, front: bool) -> Function:
    def function(x: Tensor) -> Tensor:
        fills = x.new_full((1, 3), value), x.new_full((2, 3), other)
        return torch.cat([fills[0], x, fills[1]] if front else [x, *fills])

    return function


JOINS = {
    "with nothing": Case(lambda x: torch.cat([x.new_empty(0, 3), x]), (X,)),
    "with nothing of another type": Case(lambda x: torch.cat([x.new_empty(0, 3).float(), x]), (X,)),
    "with nothing of a wider type": Case(
        lambda x: torch.cat([torch.empty(0, 3, dtype=torch.float64), x]), (X.float(),), changes=False
    ),
    "with a list of nothing": Case(lambda x: torch.cat([torch.empty(0), x], -1), (X,)),
    "nothings": Case(lambda x: torch.cat([x[:, :0], x[:, 3:]]), (X,), changes=False),
    **{
        f"fills {a} {b} {front}": Case(beside(a, b, front), (X,))
        for a, b in ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (0.1, 0.1))
        for front in (True, False)
    },
    "fills of two signs": Case(beside(0.0, -0.0, True), (X,)),
    "two fills": Case(beside(0.0, 1.0, True), (X,)),
    "half fills": Case(beside(0.1, 0.1, True), (X.bfloat16(),)),
    "rows and a fill of another type": Case(
        lambda x: torch.cat([torch.zeros(1, 3, dtype=torch.float64), x]), (X.float(),), changes=False
    ),
    "a row in front": Case(lambda x, row: torch.cat([row, x[:, :-1]], 1), (special(2, 5, 3), special(2, 1, 3))),
    "a row behind": Case(lambda x, row: torch.cat([x[:, 1:], row], -2), (special(2, 5, 3), special(2, 1, 3))),
    "two rows": Case(lambda x, row: torch.cat([row, x[:, :1]], 1), (special(2, 5, 3), special(2, 1, 3)), changes=False),
    **{
        f"written {value} {start} {end}": Case(
            lambda x, value=value, start=start, end=end: aten.slice_scatter(x.new_full((6, 3), value), x[:2], 0, start, end), (X,)
        )
        for value, start, end in ((0.0, 1, 3), (-0.0, None, 2), (0.3, 4, 99), (0.0, -2, None))
    },
    "written nowhere": Case(lambda x: aten.slice_scatter(x.new_zeros(4, 3), x[:0], 0, 7, 9), (X,)),
    "written in steps": Case(lambda x: aten.slice_scatter(x.new_zeros(4, 3), x[:2], 0, 0, 4, 2), (X,)),
    "written over rows": Case(lambda x, y: aten.slice_scatter(y, x[:2], 0, 1, 3), (X, special(6, 3)), changes=False),
    "written over another type": Case(lambda x: aten.slice_scatter(x.new_zeros(4, 3).float(), x[:2], 0, 1, 3), (X,)),
}


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
LOOKUPS = {
    "one of each": Case(of_each, (special(3, 5, 2), torch.tensor([1, -1, 0]))),
    "one of each, twice": Case(of_each, (special(3, 1), torch.tensor([0, 0, -1]))),
    "one of none": Case(of_each, (special(0, 4, 2), torch.empty(0, dtype=torch.int64))),
    "one of each by other rows": Case(lambda x, i: x[i, i], (special(3, 5, 2), torch.tensor([1, 2, 0])), changes=False),
    "put": Case(put(False), (special(3, 2), torch.tensor([1, -1, 0]))),
    "added": Case(put(True), (special(3, 2), torch.tensor([1, -1, 0]))),
    **{f"scattered {name}": Case(scattered(mask), PLACES, changes=changes) for name, (mask, changes) in MASKS.items()},
    **{f"added back {name}": Case(scattered_back(mask), PLACES, changes, bits=False) for name, (mask, changes) in MASKS.items()},
    "scattered from nothing": Case(
        scattered(MASKS["before"][0]), (special(2, 3, 4), torch.zeros(2, 3), special(2, 0, 4)), changes=False
    ),
    "gathered rows": Case(lambda x, i: aten.gather(x, 0, i[:, None].expand(4, 3)), (X, torch.tensor([3, 0, 0, 1]))),
    "gathered elements": Case(lambda x, i: aten.gather(x, 1, i[:, None]), (X, torch.tensor([2, 0, 0, 1])), changes=False),
}


def windows_back(x: Tensor) -> Tensor:
    return aten.unfold_backward(x, [4, 3], 0, 2, 1)


def scan(name: str, dims: tuple[int, int, int], **more: Any) -> Function:
    return lambda x: getattr(torch, name)(x.flip(dims[0]), dims[1], **more).flip(dims[2])


SUMS = {
    **{
        f"{name} from behind": Case(scan(name, (0, 0, -2)), (plain(4, 3),), bits=False)
        for name in ("cumsum", "cumprod", "logcumsumexp")
    },
    "along another": Case(scan("cumsum", (0, 1, 0)), (plain(4, 3),), changes=False),
    "half turned": Case(scan("cumsum", (0, 0, 1)), (plain(4, 3),), changes=False),
    "in another type": Case(scan("cumsum", (0, 0, 0), dtype=torch.float32), (plain(4, 3),), changes=False),
    "whole numbers": Case(scan("cumsum", (0, 0, 0)), (torch.arange(4, dtype=torch.uint8),), changes=False),
    "of nothing": Case(scan("cumsum", (0, 0, 0)), (plain(0, 3),), bits=False),
    "windows": Case(windows_back, (plain(3, 3, 2),), bits=False),
}


def shifted(how: Function, **more: Any) -> Function:
    return lambda x: torch.softmax(torch.sub(x, how(x), **more), -1)


S = scores(2, 7, 5)
SOFTMAX = {
    "less the largest": Case(shifted(lambda x: x.amax(-1, keepdim=True)), (S,), bits=False),
    "less the largest, by max": Case(shifted(lambda x: x.max(-1, keepdim=True).values), (S,), bits=False),
    "of half numbers": Case(shifted(lambda x: x.amax(-1, keepdim=True)), (S.to(torch.float16),), bits=False),
    "less twice the largest": Case(shifted(lambda x: x.amax(-1, keepdim=True), alpha=2), (S,), changes=False),
    "less the largest of others": Case(shifted(lambda x: x.amax(-2, keepdim=True)), (S,), changes=False),
    "less the largest of all": Case(shifted(lambda x: x.amax(keepdim=True)), (S,), changes=False),
    "less another's largest": Case(shifted(lambda x: (2 * x).amax(-1, keepdim=True)), (S,), changes=False),
    "less the least": Case(shifted(lambda x: x.amin(-1, keepdim=True)), (S,), changes=False),
    "of one number": Case(lambda x: torch.softmax(x - x.amax(), 0), (plain(),), changes=False),
}


def back(how: Function, probabilities: Function = lambda x: torch.softmax(x, -1), dim: int = -1) -> Function:
    """A gradient of scores and what the largest score adds to it."""

    def function(x: Tensor, gradient: Tensor) -> Tensor:
        return how(aten._softmax_backward_data(gradient, probabilities(x), dim, x.dtype), x)

    return function


def at_largest(d: Tensor, x: Tensor) -> Tensor:
    return d + torch.zeros_like(d).scatter(-1, x.max(-1, keepdim=True).indices, (-d).sum(-1, keepdim=True))


def among_largest(d: Tensor, x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True) == x
    return (-d).sum(-1, keepdim=True) / largest.sum(-1, keepdim=True) * largest + d


G = (S[:, 4:], plain(2, 3, 5))  # rows of numbers; in others both sides are none
GRADIENTS = {
    "at the largest": Case(back(at_largest), G, bits=False),
    "among the largest": Case(back(among_largest), G, bits=False),
    "of no softmax": Case(back(at_largest, lambda x: x.sigmoid()), G, changes=False, bits=False),
    "among the largest of no softmax": Case(back(among_largest, lambda x: x.sigmoid()), G, changes=False, bits=False),
    "of another dimension": Case(back(at_largest, lambda x: torch.softmax(x, -2)), G, changes=False, bits=False),
    "along another dimension": Case(back(at_largest, dim=1), G, changes=False, bits=False),
    "twice": Case(
        back(lambda d, x: torch.add(torch.zeros_like(d).scatter(-1, x.argmax(-1, True), d.sum(-1, True)), d, alpha=2)),
        G,
        changes=False,
        bits=False,
    ),
    "into ones": Case(
        back(lambda d, x: d + torch.ones_like(d).scatter(-1, x.argmax(-1, True), d.sum(-1, True))), G, changes=False, bits=False
    ),
    "among those above zero": Case(
        back(lambda d, x: d + d.sum(-1, keepdim=True) / (x > 0).sum(-1, keepdim=True) * (x > 0)), G, changes=False, bits=False
    ),
    "of two dimensions": Case(
        back(lambda d, x: d + torch.zeros_like(d).scatter(-1, x.argmax(-1, True)[:1, :1], d.sum((0, 1), True)[..., :1])),
        G,
        changes=False,
        bits=False,
    ),
    "a sum alone": Case(back(lambda d, x: d.sum(-1, keepdim=True)), G, changes=False, bits=False),
}


def with_column(first: bool, sink: float) -> Function:
    def function(x: Tensor, gradient: Tensor) -> list[Tensor]:
        column = x.new_full((2, 7, 1), sink) * x.new_ones(2, 7, 1)
        both = torch.softmax(torch.cat([column, x] if first else [x, column], -1), -1)
        low, high = (1, 6) if first else (0, 5)
        part = both[..., low:high]
        d = aten._softmax_backward_data(aten.slice_backward(gradient, [2, 7, 6], 2, low, high, 1), both, -1, x.dtype)
        return [part, d[..., low:high], d[..., :1] if first else d[..., 5:]]

    return function


COLUMNS = {
    f"sink {sink} {first}": Case(with_column(first, sink), (S, plain(2, 7, 5)), bits=False)
    for first in (True, False)
    for sink in (0.3, -40.0, 300.0, -INF, INF, NAN)
}


def losses(weighted: bool, total: float | None, ignored: int) -> Function:
    def function(x: Tensor, labels: Tensor, weight: Tensor, tangent: Tensor) -> list[Tensor]:
        given = weight if weighted else None
        loss, count = aten.nll_loss_forward(x, labels, given, 1, ignored)
        count = count if total is None else x.new_full((), total) * tangent.sign()
        return [loss, count, aten.nll_loss_backward(tangent, x, labels, given, 1, ignored, count)]

    return function


LABELS = torch.tensor([1, 0, -100, 4, 1])
LOSSES = {
    f"mean {weighted} {total} {ignored}": Case(
        losses(weighted, total, ignored),
        (plain(5, 6), LABELS if ignored == -100 else LABELS.abs() % 5, plain(6).abs(), plain()),
        bits=False,
    )
    for weighted in (False, True)
    for total, ignored in ((None, -100), (7.0, -100), (0.0, -100), (None, 1))
}
LOSSES["no label counts"] = Case(losses(False, None, -100), (plain(5, 6), LABELS * 0 - 100, plain(6), plain()), bits=False)


def convolved(x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...], changes: bool, *arguments: Any) -> Case:
    def function(dy: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        return list(aten.convolution_backward(dy, x, w, [w.shape[0]], *arguments, [True, True, not arguments[3]]))[
            : 2 + (not arguments[3])
        ]

    return Case(function, (plain(*y), plain(*x), plain(*weight)), changes, bits=False)


CONVOLUTIONS = {
    "causal": convolved((2, 3, 8), (4, 3, 3), (2, 4, 10), True, [1], [2], [1], False, [0], 1),
    "dilated groups": convolved((2, 4, 8), (4, 2, 3), (2, 4, 4), True, [1], [0], [2], False, [0], 2),
    "transposed": convolved((2, 3, 8), (3, 4, 3), (2, 4, 10), True, [1], [0], [1], True, [0], 1),
    "in steps": convolved((2, 3, 8), (4, 3, 3), (2, 4, 3), False, [2], [0], [1], False, [0], 1),
    "one tap": convolved((2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 4, 5), True, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "one tap, padded": convolved((2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 6, 5), False, [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
}


def put_back(how: Function) -> Function:
    def function(x: Tensor, keys: Tensor) -> Tensor:
        order = keys.argsort()
        return how(x[order] * 2, order, x)

    return function


P = (special(5, 2), torch.tensor([3, 1, 3, 0, 2]))
ORDERS = {
    "by the inverse": Case(put_back(lambda rows, order, x: rows[order.argsort()]), P),
    "written": Case(put_back(lambda rows, order, x: torch.zeros_like(x).index_put([order], rows)), P),
    "written to more rows": Case(
        put_back(lambda rows, order, x: torch.zeros(7, 2, dtype=x.dtype).index_put([order], rows)), P, changes=False
    ),
    "one row for all": Case(
        lambda x, keys: torch.zeros_like(x).index_put([keys.argsort()[:1]], x[keys.argsort()][:1]), P, changes=False
    ),
    "added": Case(put_back(lambda rows, order, x: torch.ones_like(x).index_put([order], rows, True)), P, changes=False),
    "by the order": Case(put_back(lambda rows, order, x: rows[order]), P, changes=False),
    "summed": Case(put_back(lambda rows, order, x: rows.sum(0)), (plain(5, 2), P[1]), bits=False),
    "largest": Case(put_back(lambda rows, order, x: rows.cumsum(0).sum(0)), P, changes=False),
    "partly scattered": Case(
        lambda x, keys: torch.zeros(7, dtype=x.dtype).scatter(0, keys.argsort(), x[:, 0].repeat(2)[:7][:7]), P, changes=False
    ),
}
CASES = MOVES | FILLS | JOINS | LOOKUPS | SUMS | SOFTMAX | GRADIENTS | COLUMNS | LOSSES | CONVOLUTIONS | ORDERS


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("x", [special(2, 3), plain(2, 3), plain(0, 3), special(2, 3, dtype=torch.float32)], ids=str)
def test_along_sequence(x: Tensor) -> None:
    """Joins and norms along the sequence are sums: a join keeps zeros' signs."""

    def function(x: Tensor) -> list[Tensor]:
        return [torch.cat([x, x[:1], x]), torch.linalg.vector_norm(x, 2, 0), torch.linalg.vector_norm(x)]

    before = make_fx(function, tracing_mode="fake")(x)
    graph = copy.deepcopy(before.graph)
    writer = GraphWriter(graph)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        node.replace_all_uses_with(_sum_of_paddings(node, writer.before(node)), propagate_meta=False)
    for node in graph.find_nodes(op="call_function", target=aten.linalg_vector_norm.default):
        node.replace_all_uses_with(_root_of_sum(node, writer.before(node)), propagate_meta=False)
    for actual, wanted, bits in zip(fx.GraphModule(before, graph)(x), before(x), (True, False, False), strict=True):
        same(actual, wanted, bits)
