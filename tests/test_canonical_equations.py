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
from streamfx.passes.rewrite.pattern import equation
from streamfx.passes.rewrite.views.constant_writes import constants_that_were_written
from streamfx.passes.rewrite.views.decompose_on_sequence import _root_of_sum, _sum_of_paddings
from tests.support.canonical import INF, NAN, Case, Function, check, graphs, plain, same, scores, special

aten = torch.ops.aten


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
        put_back(lambda rows, order, x: rows[torch.zeros(7, dtype=torch.int64).scatter(0, order, torch.arange(7))]),
        P,
        changes=False,
    ),
    "scattered": Case(put_back(lambda rows, order, x: rows[torch.zeros_like(order).scatter(0, order, torch.arange(5))]), P),
}


def in_order(how: Function, keys_descend: bool = False) -> Function:
    """Rows [2 5 3] in an order of each sequence's own, and what undoes it, as numbers [2 5]."""

    def function(x: Tensor, keys: Tensor) -> Any:
        order = keys.argsort(1, descending=keys_descend)
        undone = torch.zeros_like(order).scatter(1, order, torch.arange(5).expand(2, 5))
        return how(x.gather(1, columns(order)) * 2, order, undone)

    return function


def columns(index: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, 3)


def numbered(order: Tensor, numbers: Tensor) -> Tensor:
    return torch.zeros_like(order).scatter(1, order, numbers.expand_as(order))


Q = (special(2, 5, 3), torch.tensor([[3, 1, 3, 0, 2], [0, 5, 1, 1, 1]]))
PUT_BACK = {
    "put back": Case(in_order(lambda rows, order, undone: rows.gather(1, columns(undone))), Q),
    "put back from the largest": Case(in_order(lambda rows, order, undone: rows.gather(1, columns(undone)), True), Q),
    "put back by another sort": Case(in_order(lambda rows, order, undone: rows.gather(1, columns(order.argsort(1)))), Q),
    "put back from behind": Case(in_order(lambda rows, order, undone: rows.gather(-2, columns(undone))), Q),
    "numbers put back": Case(in_order(lambda rows, order, undone: order.gather(1, undone)), Q),
    "put in order again": Case(in_order(lambda rows, order, undone: [rows.gather(1, columns(order)), undone]), Q, changes=False),
    "put back in part": Case(in_order(lambda rows, order, undone: rows.gather(1, columns(undone[:, :3]))), Q, changes=False),
    "put back from the end": Case(
        in_order(lambda rows, order, undone: [rows.gather(1, columns(order.argsort(1, descending=True))), undone]),
        Q,
        changes=False,
    ),
    "put back by counting down": Case(
        in_order(lambda rows, order, undone: rows.gather(1, columns(numbered(order, torch.arange(5).flip(0))))), Q, changes=False
    ),
    "put back by part of an order": Case(
        in_order(
            lambda rows, order, undone: rows.gather(1, columns(undone.scatter(1, order[:, :2], torch.arange(2).expand(2, 2))))
        ),
        Q,
        changes=False,
    ),
    "put back along another dimension": Case(
        lambda x, keys: x.gather(0, torch.zeros_like(keys).scatter(1, keys.argsort(1), torch.arange(5).expand(5, 5))),
        (special(5, 5), Q[1].repeat(3, 1)[:5]),
        changes=False,
    ),
    "put back by what is scattered along another": Case(
        lambda x, keys: x.gather(0, torch.zeros_like(keys).scatter(1, keys.argsort(0), torch.arange(5)[:, None].expand(5, 5))),
        (special(5, 5), Q[1].repeat(3, 1)[:5]),
        changes=False,
    ),
    "put back from more rows": Case(
        lambda x, keys: x.gather(1, columns(keys.argsort(1).argsort(1))), (special(2, 7, 3), Q[1]), changes=False
    ),
    "put back by an order of fewer rows": Case(
        lambda x, keys: x.gather(
            1, columns(torch.zeros(2, 7, dtype=torch.int64).scatter(1, keys.argsort(1), torch.arange(5).expand(2, 5)))
        ),
        (special(2, 7, 3), Q[1]),
        changes=False,
    ),
    "gradients of fewer rows": Case(
        lambda x, keys: torch.zeros(2, 7, 3, dtype=x.dtype).scatter_add(1, columns(keys.argsort(1)), x), Q, changes=False
    ),
    "put back by what is sorted along another": Case(
        lambda x, keys: x.gather(1, torch.zeros_like(keys).scatter(1, keys.argsort(0), torch.arange(5).expand(5, 5))),
        (special(5, 5), Q[1].repeat(3, 1)[:5]),
        changes=False,
    ),
    "put back by what counts along another": Case(
        lambda x, keys: x.gather(1, torch.zeros_like(keys).scatter(1, keys.argsort(1), torch.arange(5)[:, None].expand(5, 5))),
        (special(5, 5), Q[1].repeat(3, 1)[:5]),
        changes=False,
    ),
    "gradients put back": Case(
        in_order(lambda rows, order, undone: torch.zeros_like(rows).scatter_add(1, columns(undone), rows)), Q
    ),
    "gradients in order": Case(
        in_order(lambda rows, order, undone: [torch.zeros_like(rows).scatter_add(1, columns(order), rows), undone]), Q
    ),
    "gradients of some in order": Case(
        in_order(
            lambda rows, order, undone: (
                torch.zeros_like(rows).scatter_add(1, columns(order[:, :3]), rows[:, :3]) + undone[..., None]
            )
        ),
        Q,
        changes=False,
    ),
    "gradients in an order along another dimension": Case(
        lambda x, keys: torch.zeros_like(x).scatter_add(0, keys.argsort(1), x),
        (special(5, 5), Q[1].repeat(3, 1)[:5]),
        changes=False,
    ),
    "gradients added to others": Case(
        in_order(lambda rows, order, undone: torch.ones_like(rows).scatter_add(1, columns(undone), rows)), Q, changes=False
    ),
    "gradients of a part": Case(
        in_order(lambda rows, order, undone: torch.zeros_like(rows).scatter_add(1, columns(undone[:, :3]), rows[:, :3])),
        Q,
        changes=False,
    ),
}


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


CASES = SOFTMAX | GRADIENTS | COLUMNS | LOSSES | CONVOLUTIONS | ORDERS | PUT_BACK


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


def test_a_size_that_is_no_input() -> None:
    """What replaces a value does not read the value's size: the graph would have a cycle, in which the next pass goes around."""

    def function(x: Tensor) -> list[Tensor]:
        padded = torch.nn.functional.pad(x, (0, 0, 3, 0)).sin()
        return [aten.slice_scatter(padded, torch.full((1, 1), 0.5, dtype=x.dtype).expand(padded.shape[0] - 1, 2), 0, 1)]

    x = plain(5, 2)
    before = make_fx(function, tracing_mode="symbolic")(x)
    graph = copy.deepcopy(before.graph)
    assert simplify(graph, [constants_that_were_written])
    graph.lint()
    same(fx.GraphModule(before, graph)(x)[0], before(x)[0], bits=True)


def test_an_equation_that_makes_a_value_of_itself() -> None:
    @equation(aten.sin.default)
    def of_itself(node: fx.Node, writer: GraphWriter) -> fx.Node:
        return writer.call(aten.cos.default, node)

    with pytest.raises(AssertionError, match="makes a value out of itself"):
        simplify(make_fx(lambda x: [torch.sin(x)], tracing_mode="fake")(plain(2)).graph, [of_itself])
