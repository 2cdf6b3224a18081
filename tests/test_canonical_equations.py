"""Equations of softmax, losses, convolutions, orders and sums, before and after: theorems as in `test_canonical`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.driver import simplify
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.constant_writes import constant_writes_to_where
from tests.support.canonical import INF, NAN, Case, Function, cases, check, graphs, plain, same, scores, special

aten = torch.ops.aten


def shifted(how: Function, **more: Any) -> Function:
    return lambda x: torch.softmax(torch.sub(x, how(x), **more), -1)


S = scores(2, 7, 5)
SOFTMAX = cases(
    {
        "less the largest": (shifted(lambda x: x.amax(-1, keepdim=True)), S),
        "less the largest, by max": (shifted(lambda x: x.max(-1, keepdim=True).values), S),
        "of half numbers": (shifted(lambda x: x.amax(-1, keepdim=True)), S.to(torch.float16)),
    },
    bits=False,
) | cases(
    {
        "less twice the largest": (shifted(lambda x: x.amax(-1, keepdim=True), alpha=2), S),
        "less the largest of others": (shifted(lambda x: x.amax(-2, keepdim=True)), S),
        "less the largest of all": (shifted(lambda x: x.amax(keepdim=True)), S),
        "less another's largest": (shifted(lambda x: (2 * x).amax(-1, keepdim=True)), S),
        "less the least": (shifted(lambda x: x.amin(-1, keepdim=True)), S),
        "of one number": (lambda x: torch.softmax(x - x.amax(), 0), plain()),
    },
    changes=False,
)


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


def put_at(d: Tensor, x: Tensor, base: Function = torch.zeros_like) -> Tensor:
    return base(d).scatter(-1, x.argmax(-1, True), d.sum(-1, True))


def of_two_dimensions(d: Tensor, x: Tensor) -> Tensor:
    return d + torch.zeros_like(d).scatter(-1, x.argmax(-1, True)[:1, :1], d.sum((0, 1), True)[..., :1])


G = (S[:, 4:], plain(2, 3, 5))  # rows of numbers; in others both sides are none
GRADIENTS = cases({"at the largest": (back(at_largest), *G), "among the largest": (back(among_largest), *G)}, bits=False) | cases(
    {
        "of no softmax": (back(at_largest, lambda x: x.sigmoid()), *G),
        "among the largest of no softmax": (back(among_largest, lambda x: x.sigmoid()), *G),
        "of another dimension": (back(at_largest, lambda x: torch.softmax(x, -2)), *G),
        "along another dimension": (back(at_largest, dim=1), *G),
        "twice": (back(lambda d, x: torch.add(put_at(d, x), d, alpha=2)), *G),
        "into ones": (back(lambda d, x: d + put_at(d, x, torch.ones_like)), *G),
        "among those above zero": (back(lambda d, x: d + d.sum(-1, True) / (x > 0).sum(-1, True) * (x > 0)), *G),
        "of two dimensions": (back(of_two_dimensions), *G),
        "a sum alone": (back(lambda d, x: d.sum(-1, keepdim=True)), *G),
    },
    changes=False,
    bits=False,
)


def with_column(first: bool, sink: float) -> Function:
    def function(x: Tensor, gradient: Tensor) -> list[Tensor]:
        column = x.new_full((2, 7, 1), sink) * x.new_ones(2, 7, 1)
        both = torch.softmax(torch.cat([column, x] if first else [x, column], -1), -1)
        low, high = (1, 6) if first else (0, 5)
        part = both[..., low:high]
        d = aten._softmax_backward_data(aten.slice_backward(gradient, [2, 7, 6], 2, low, high, 1), both, -1, x.dtype)
        return [part, d[..., low:high], d[..., :1] if first else d[..., 5:]]

    return function


def gradient_of_the_column(x: Tensor, gradient: Tensor) -> list[Tensor]:
    """The scores' part is asked for, and a gradient comes for the column's."""
    both = torch.softmax(torch.cat([x, gradient[..., 1:2]], -1), -1)
    d = aten._softmax_backward_data(aten.slice_backward(gradient[..., :1], [2, 7, 6], 2, 5, 6, 1), both, -1, x.dtype)
    return [both[..., :5], d[..., :5], d[..., 5:]]


COLUMNS = {
    "gradient of the column": Case(gradient_of_the_column, (S, plain(2, 7, 5)), changes=False, bits=False),
} | {
    f"sink {sink} {first}": Case(with_column(first, sink), (S, plain(2, 7, 5)), bits=False)
    for first in (True, False)
    for sink in (0.3, 300.0, -INF, INF, NAN)
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
    """Rows [5 2] in an order, and that order."""

    def function(x: Tensor, keys: Tensor) -> Tensor:
        order = keys.argsort()
        return how(x[order] * 2, order, x)

    return function


def in_order(how: Function, keys_descend: bool = False) -> Function:
    """Rows [2 5 3] in an order of each sequence's own, and what undoes it, as numbers [2 5]."""

    def function(x: Tensor, keys: Tensor) -> Any:
        order = keys.argsort(1, descending=keys_descend)
        undone = numbered(order)
        return how(x.gather(1, columns(order)) * 2, order, undone)

    return function


def columns(index: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, 3)


def numbered(order: Tensor, step: int = 1) -> Tensor:
    into, numbers = torch.zeros_like(order), torch.arange(5)
    return into.scatter(1, order, (numbers if step == 1 else numbers.flip(0)).expand_as(order))


def found(index_of: Function, keys_descend: bool = False) -> Function:
    """Rows in order are looked up by an index made of the order, and of what undoes it, which is shown."""
    return in_order(lambda rows, order, undone: [rows.gather(1, columns(index_of(order, undone))), undone], keys_descend)


def added(by_order: bool, base: Function = torch.zeros_like, count: int | None = None) -> Function:
    """Rows in order are added to what is there: by the order, and what undoes it is shown, or by that."""

    def how(rows: Tensor, order: Tensor, undone: Tensor) -> list[Tensor]:
        into, where = base(rows), order if by_order else undone
        where, rows = (where[:, :count], rows[:, :count]) if count else (where, rows)
        return [into.scatter_add(1, columns(where), rows), *[undone] * by_order]

    return in_order(how)


def along(gathered: int, ordered: int, counted: int) -> Function:
    """Rows and columns [5 5] are looked up along one dimension by what is sorted along one, and counts along one."""

    def function(x: Tensor, keys: Tensor) -> Tensor:
        numbers = torch.arange(5).view((5, 1) if counted == 0 else (1, 5)).expand(5, 5)
        return x.gather(gathered, torch.zeros_like(keys).scatter(1, keys.argsort(ordered), numbers))

    return function


def of_fewer(x: Tensor, keys: Tensor) -> Tensor:
    undone = torch.zeros(2, 7, dtype=torch.int64).scatter(1, keys.argsort(1), torch.arange(5).expand(2, 5))
    return x.gather(1, columns(undone))


def partly(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return rows[torch.zeros(7, dtype=torch.int64).scatter(0, order, torch.arange(7))]


P = (special(5, 2), torch.tensor([3, 1, 3, 0, 2]))
Q = (special(2, 5, 3), torch.tensor([[3, 1, 3, 0, 2], [0, 5, 1, 1, 1]]))
SQUARE, LONGER = (special(5, 5), Q[1].repeat(3, 1)[:5]), (special(2, 7, 3), Q[1])
ORDERS = cases(
    {
        "by the inverse": (put_back(lambda rows, order, x: rows[order.argsort()]), *P),
        "written": (put_back(lambda rows, order, x: torch.zeros_like(x).index_put([order], rows)), *P),
        "scattered": (put_back(lambda rows, order, x: rows[torch.zeros_like(order).scatter(0, order, torch.arange(5))]), *P),
        "put back": (in_order(lambda rows, order, undone: rows.gather(1, columns(undone))), *Q),
        "put back from the largest": (in_order(lambda rows, order, undone: rows.gather(1, columns(undone)), True), *Q),
        "put back by another sort": (in_order(lambda rows, order, undone: rows.gather(1, columns(order.argsort(1)))), *Q),
        "put back from behind": (in_order(lambda rows, order, undone: rows.gather(-2, columns(undone))), *Q),
        "numbers put back": (in_order(lambda rows, order, undone: order.gather(1, undone)), *Q),
        "gradients put back": (added(False), *Q),
        "gradients in order": (added(True), *Q),
    }
) | cases(
    {
        "written to more rows": (put_back(lambda rows, order, x: torch.zeros(7, 2, dtype=x.dtype).index_put([order], rows)), *P),
        "one row for all": (lambda x, i: torch.zeros_like(x).index_put([i.argsort()[:1]], x[i.argsort()][:1]), *P),
        "added": (put_back(lambda rows, order, x: torch.ones_like(x).index_put([order], rows, True)), *P),
        "by the order": (put_back(lambda rows, order, x: rows[order]), *P),
        "largest": (put_back(lambda rows, order, x: rows.cumsum(0).sum(0)), *P),
        "partly scattered": (put_back(partly), *P),
        "put in order again": (found(lambda order, undone: order), *Q),
        "put back in part": (found(lambda order, undone: undone[:, :3]), *Q),
        "put back from the end": (found(lambda order, undone: order.argsort(1, descending=True)), *Q),
        "put back by counting down": (found(lambda order, undone: numbered(order, step=-1)), *Q),
        "put back by part of an order": (
            found(lambda order, undone: undone.scatter(1, order[:, :2], torch.arange(2).expand(2, 2))),
            *Q,
        ),
        "put back along another dimension": (along(0, 1, 1), *SQUARE),
        "put back by what is scattered along another": (along(0, 0, 0), *SQUARE),
        "put back by what is sorted along another": (along(1, 0, 1), *SQUARE),
        "put back by what counts along another": (along(1, 1, 0), *SQUARE),
        "put back from more rows": (lambda x, keys: x.gather(1, columns(keys.argsort(1).argsort(1))), *LONGER),
        "put back by an order of fewer rows": (of_fewer, *LONGER),
        "gradients of fewer rows": (
            lambda x, i: torch.zeros(2, 7, 3, dtype=x.dtype).scatter_add(1, columns(i.argsort(1)), x),
            *Q,
        ),
        "gradients of some in order": (added(True, count=3), *Q),
        "gradients in an order along another dimension": (
            lambda x, keys: torch.zeros_like(x).scatter_add(0, keys.argsort(1), x),
            *SQUARE,
        ),
        "gradients added to others": (added(False, torch.ones_like), *Q),
        "gradients of a part": (added(False, count=3), *Q),
    },
    changes=False,
)
ORDERS["summed"] = Case(put_back(lambda rows, order, x: rows.sum(0)), (plain(5, 2), P[1]), bits=False)


def grouped(summed: Function, heads: int = 2, times: int = 3) -> Function:
    """Attention over heads that are repeated, and what becomes of the gradient of the keys."""

    def function(q: Tensor, k: Tensor, gradient: Tensor) -> list[Tensor]:
        n, d = k.shape[2:]
        wide = k[:, :, None].expand(2, heads, times, n, d).reshape(2, heads * times, n, d)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, wide, wide, 0.0, True)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, wide, wide, out, lse, 0.0, True)
        return [out, back[0], *(summed(part) for part in back[1:])]

    return function


HEADS = (plain(2, 6, 4, 2), plain(2, 2, 4, 2), plain(2, 6, 4, 2))
GROUPS = {
    "groups": (lambda dk: dk.view(2, 2, 3, 4, 2).sum(2), True),
    "groups, squeezed": (lambda dk: dk.view(2, 2, 3, 4, 2).sum(2, keepdim=True).squeeze(2), True),
    "other groups": (lambda dk: dk.view(2, 3, 2, 4, 2).sum(2), False),
    "one group": (lambda dk: dk.view(2, 1, 6, 4, 2).sum(2), False),
    "in another type": (lambda dk: dk.view(2, 2, 3, 4, 2).sum(2, dtype=torch.float32), False),
    "two sums": (lambda dk: dk.view(2, 2, 3, 4, 2).sum((2, 3)), False),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_heads(name: str) -> None:
    """Heads stay apart only where a gradient is summed over the very repeats."""
    summed, undone = GROUPS[name]
    case = Case(grouped(summed), HEADS, bits=False)
    check(case)
    _, after = graphs(case)
    assert any(node.target is aten.expand.default for node in after.graph.nodes) is not undone


CASES = SOFTMAX | GRADIENTS | COLUMNS | LOSSES | CONVOLUTIONS | ORDERS


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    check(CASES[name])


def test_a_size_that_is_no_input() -> None:
    """What replaces a value does not read the value's size: the graph would have a cycle, in which the next pass goes around."""

    def function(x: Tensor) -> list[Tensor]:
        padded = torch.nn.functional.pad(x, (0, 0, 3, 0)).sin()
        return [aten.slice_scatter(padded, torch.full((1, 1), 0.5, dtype=x.dtype).expand(padded.shape[0] - 1, 2), 0, 1)]

    x = plain(5, 2)
    before = make_fx(function, tracing_mode="symbolic")(x)
    graph = copy.deepcopy(before.graph)
    assert simplify(graph, [constant_writes_to_where])
    graph.lint()
    same(fx.GraphModule(before, graph)(x)[0], before(x)[0], bits=True)


def test_an_equation_that_makes_a_value_of_itself() -> None:
    @rewrite_rule(aten.sin.default)
    def of_itself(node: fx.Node, writer: GraphWriter) -> fx.Node:
        return writer.call(aten.cos.default, node)

    with pytest.raises(AssertionError, match="depends on the node that it replaces"):
        simplify(make_fx(lambda x: [torch.sin(x)], tracing_mode="fake")(plain(2)).graph, [of_itself])
