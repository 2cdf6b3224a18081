"""Unfused attention with a sink becomes one fused kernel with the same values, also for extreme numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamfx.dialect.attention import ATTENTION
from tests.support.canonical import INF, NAN, Case, graphs, plain, targets
from tests.support.tables import read

__all__ = ["INF"]  # a name in the table

aten = torch.ops.aten
LEAST = torch.finfo(torch.float64).min


def spelled(
    first: bool = False,
    scaled: Callable[[Tensor, float], Tensor] = torch.mul,
    back: Callable[[Tensor, float], Tensor] = torch.mul,
    dropped: Callable[[Tensor], Tensor] = lambda p: p,
    shown: bool = False,
    of_mask: bool = False,
    other: bool = False,
    bounded: Callable[[Tensor], Tensor] = lambda sink: sink.clamp(-1e20, 1e20),
    folded: bool = False,
    ahead: bool = False,
) -> Callable[..., list[Tensor]]:
    """The result and all gradients, as autograd writes them."""

    def function(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, sink: Tensor, *mask: Tensor) -> list[Tensor]:
        b, h, m, d = q.shape
        n = k.shape[2]
        queries, keys = q.reshape(b * h, m, d), k.transpose(2, 3).reshape(b * h, d, n)
        values, result = v.reshape(b * h, n, -1), gradient.reshape(b * h, m, -1)
        s = scaled(aten.bmm(queries, keys).view(-1 if folded else b, 1 if folded else h, m, n), 0.5)
        s = (s + mask[0] if mask else s).view(b, h, m, n)
        column = bounded(sink)[:, :, None, None].expand(b, h, m, 1)
        both = torch.softmax(torch.cat([column, s] if first else [s, column], -1), -1)
        low, high = (1, n + 1) if first else (0, n)
        p = dropped(both[..., low:high]).reshape(b * h, m, n)
        of_p = aten.bmm(result, values.transpose(1, 2)).view(b, h, m, n)
        of_both = aten._softmax_backward_data(aten.slice_backward(of_p, [b, h, m, n + 1], 3, low, high, 1), both, -1, s.dtype)
        of_s = back(of_both[..., low:high], 0.5).reshape(b * h, m, n)
        early = [aten.bmm(p.transpose(1, 2), result)] if ahead else []
        made = [
            *early,
            aten.bmm(p, values).view(b, h, m, -1),
            aten.bmm(p.transpose(1, 2), result + 1 if other else result).view(b, h, n, -1),
            aten.bmm(of_s, keys.transpose(1, 2)).view(b, h, m, d),
            aten.bmm(of_s.transpose(1, 2), queries),
            aten.bmm(queries.transpose(1, 2), of_s).view(b, h, d, n),
            of_both[..., :1] if first else of_both[..., n:],
        ]
        return [*made, *([p] if shown else []), *([of_s.sum(0)] if of_mask else [])]

    return function


def spread(rows: int, keys: int) -> Callable[..., Tensor]:
    """The result of scores that a mask makes more of than their product has."""

    def function(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        b, h, m, d = q.shape
        queries, turned = q[:, :, :rows].reshape(b * h, rows, d), k[:, :, :keys].transpose(2, 3).reshape(b * h, d, keys)
        s = aten.bmm(queries, turned).view(b, h, rows, keys) + mask
        column = sink.clamp(-1.0, 1.0)[:, :, None, None].expand(b, h, m, 1)
        p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
        return aten.bmm(p.reshape(b * h, m, -1), v.reshape(b * h, -1, v.shape[3])).view(b, h, m, -1)

    return function


def inputs(sink: float = 0.3, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    q, k, v, gradient = plain(2, 3, 5, 4), plain(2, 3, 7, 4) + 1, plain(2, 3, 7, 6) - 1, plain(2, 3, 5, 6)
    return q, k, v, gradient, torch.full((2, 3), sink, dtype=torch.float64), *(() if mask is None else (mask,))


def hidden(by: float) -> Tensor:
    """A mask under which a row sees nothing, and another two keys."""
    mask = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    mask[..., 2, :], mask[..., 1, 2:] = by, by
    return mask


TABLE = Path(__file__).parent / "support" / "attention_with_sink.txt"
CASES = {name: Case(eval(function), eval(given), changes=mark == "~") for name, mark, given, function in read(TABLE, 4)[""]}


@pytest.mark.parametrize("name", CASES)
def test_attention_with_a_sink_keeps_its_values(name: str) -> None:
    case = CASES[name]
    before, after = graphs(case)
    assert (ATTENTION in targets(after)) == case.changes
    for found, truth in zip(after(*case.inputs), before(*case.inputs), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_the_gradient_of_a_small_sink_keeps_its_digits() -> None:
    case = CASES["sink -40.0"]
    before, after = (module(*case.inputs)[-1] for module in graphs(case))
    torch.testing.assert_close(after, before, rtol=1e-11, atol=0)


def test_a_nan_query_yields_nan_in_its_row_only() -> None:
    """In its own row, as in eager: the kernel of a CPU makes zeros of it."""
    given = inputs()
    given[0][0, 0, 1, 0] = NAN
    before, after = (module(*given)[0].isnan() for module in graphs(Case(spelled(), given)))
    assert torch.equal(after, before)
