"""Unfused attention with many scores, among them scores that reshapes shift row by row, streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support.canonical import Case, check, graphs, plain, same, special
from tests.support.masks import HEAD, INF, LENGTH, MIN, columns, qkv, rows
from tests.support.tables import named_cases
from tests.support.tracing import compare_function, take_gradients, traced

aten = torch.ops.aten
small = st.integers(1, 5)
Shift = Callable[[Tensor, int], Tensor]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(small, small, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_the_operators_equal_their_definition(rows: int, columns: int, before: int, after: int, transposed: bool) -> None:
    """Element by element, for any strides; the second operator is the adjoint of the first."""
    first, width = rows - 1 + before, rows - 1 + before + columns + after
    x, gradient = plain(2, rows, width, 3), plain(2, rows, columns, 3)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    wanted = torch.stack([torch.stack([x[:, i, first - i + j] for j in range(columns)], 1) for i in range(rows)], 1)
    made = RELATIVE_SHIFT(x, 1, first, columns)
    assert torch.equal(made, wanted)
    back = RELATIVE_SHIFT_BACKWARD(gradient, 1, first, width)
    assert torch.equal(RELATIVE_SHIFT(back, 1, first, columns), gradient)
    torch.testing.assert_close((made * gradient).sum(), (x * back).sum())


# -- which reshapes are a shift


def by_views(x: Tensor, columns: int, start: int = 1, less: int = 1) -> Tensor:
    """As in XLNet: [b t w]."""
    b, t, w = x.shape
    return x.reshape(b, w, t)[:, start:].reshape(b, -1, w - less)[..., :columns]


def by_index(x: Tensor, columns: int) -> Tensor:
    b, t, w = x.shape
    return x.reshape(b, w, t)[:, 1:].reshape(b, t, w - 1).index_select(2, torch.arange(columns))


def after_zeros(x: Tensor, columns: int) -> Tensor:
    """As in the Conformer and Transformer-XL; with as many columns as rows, later keys get numbers of the next row."""
    return by_views(F.pad(x, (1, 0)), columns)


def rows_first(x: Tensor, columns: int) -> Tensor:
    t, w, b = x.shape
    return x.reshape(w, t, b)[1:].reshape(t, w - 1, b)[:, :columns]


def with_gradient(function: Callable[..., Tensor], *more: Any) -> Callable[..., list[Tensor]]:
    def both(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        made = function(x, *more)
        return [made, *torch.autograd.grad(made, x, made.detach())]

    return both


SHIFTS = named_cases("shifts", globals())
OTHERS: dict[str, Callable[[Tensor], Tensor]] = named_cases("other views", globals(), "x")


@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift(name: str) -> None:
    """To the same bits, and without views."""
    check(SHIFTS[name])
    _, after = graphs(SHIFTS[name])
    found = {node.target for node in after.graph.nodes}
    assert found >= {RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD}
    assert found.isdisjoint({aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.slice_backward.default})


@pytest.mark.parametrize("name", OTHERS)
def test_no_shift(name: str) -> None:
    x = special(2, 4, 8)
    before, after = graphs(Case(with_gradient(OTHERS[name]), (x,)))
    assert {node.target for node in after.graph.nodes}.isdisjoint({RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD})
    for actual, wanted in zip(after(x), before(x), strict=True):
        same(actual, wanted, bits=True)


@pytest.mark.parametrize(("index", "source"), [([0, 1, 2], 3), ([0, 2, 1], 3), ([0, 1, 2, 3], 4)], ids=str)
def test_first_rows_by_index(index: list[int], source: int) -> None:
    """Indices that count up take a slice, but a sum with ones keeps its operator, as do indices in another order."""
    x, y = special(2, 4, 3), special(2, source, 3)

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        numbers = torch.arange(source) if index == sorted(index) else torch.tensor(index)
        return [
            x.index_select(1, numbers),
            torch.zeros_like(x).index_add(1, numbers, y),
            torch.ones_like(x).index_add(1, numbers, y),
        ]

    before, after = graphs(Case(function, (x, y)))
    kept = sum(node.target in (aten.index_select.default, aten.index_add.default) for node in after.graph.nodes)
    assert kept == (1 if index == sorted(index) else 3)
    for actual, wanted in zip(after(x, y), before(x, y), strict=True):
        same(actual, wanted, bits=True)


# -- attention with shifted scores


def over_heads(shift: Shift) -> Shift:
    return lambda x, columns: shift(x.flatten(0, 1), columns).unflatten(0, x.shape[:2])


def four(x: Tensor, columns: int) -> Tensor:
    b, h, t, w = x.shape
    return x.reshape(b, h, w, t)[:, :, 1:].reshape(b, h, t, w - 1)[..., :columns]


TO_THE_LEFT, NEXT_ROW = range(LENGTH - 1, -1, -1), "reads elements of the next row"
# name: shift, distances, the last key that a row sees (None: all keys), the verdict of the mask, or the reason for a fallback
ATTENTION: dict[str, tuple[Shift, range, int | None, str]] = named_cases("attention", globals())


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_shifted_scores(name: str) -> None:
    shift, distances, last, verdict = ATTENTION[name]

    def function(inputs: Tensor, weight: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        angles = torch.tensor(distances).to(q.dtype)[:, None] * torch.arange(1, 5, dtype=q.dtype)
        scores = q @ k.mT + shift(torch.einsum("bhid,jd->bhij", q, angles.sin() @ weight), LENGTH)
        if last is not None:  # and the three keys before it
            seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(last).triu(last - 3)
            scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).pow(2).sum()

    weight = torch.randn(4, HEAD, dtype=torch.float64, requires_grad=True)
    streams = verdict != NEXT_ROW
    facts = compare_function(function, [*qkv(), weight], (4, 1, 64), streams=streams, attention={verdict} if streams else None)
    assert any(node.target is RELATIVE_SHIFT for node in facts.joint.nodes) or not streams
    assert streams or any(NEXT_ROW in reason for reason in facts.reasons()), facts.reasons()


# -- scores of unfused attention

T = LENGTH


def causal(scores: Tensor, by: float = -INF, more: int = 0) -> Tensor:
    t, keys = scores.shape[-2:]
    return scores.masked_fill(columns(keys) > rows(t) + more, by)


def part_of_shares(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Rows and keys are sliced from probabilities and padded with zeros."""
    weights = causal(q @ k.mT).softmax(-1)
    return (weights + F.pad(weights[..., 2 : T - 1, 3 : T - 1] * 2, (3, 1, 2, 1))) @ v


def share_by_the_sum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Scaled by the log-sum-exp of the scores."""
    scores = causal(q @ k.mT, MIN)
    return torch.softmax(scores, -1) * torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True)) @ v


def means_over_rows(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    shares = causal(q @ k.mT).softmax(-1)
    return (shares @ v) * shares.mean(-2)[..., None]


def slopes_per_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A bias that grows with the key's position, in the form in which one product adds it to the scores."""
    q, k, v = (item.flatten(0, 1) for item in (q, k, v))
    slopes = torch.pow(torch.tensor(0.5, dtype=torch.float64), torch.arange(1, 5))
    bias = (slopes.view(2, 2, 1) * torch.ones(2, T, dtype=torch.long).cumsum(-1)[:, None]).view(-1, 1, T).double()
    return (torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.5) + causal(torch.zeros(T, T).double())).softmax(-1) @ v


def memory(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Learned keys before all others."""
    own = w.expand(len(q), -1, -1, -1)
    return causal(q @ torch.cat((own, k), 2).mT, MIN, 3).softmax(-1) @ torch.cat((own.sin(), v), 2)


def talking(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A convolution of one tap mixes heads before and after the softmax."""
    scores = F.conv2d(q @ k.mT, w[:, :2, :1, None], w[:, 0, 1])
    return F.conv2d(causal(scores, MIN).softmax(-1), w[:, 1:, 2:3, None]) @ v


def distances(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return causal(-(torch.cdist(q, k) ** 2), MIN).softmax(-1) @ v


CAUSAL = [share_by_the_sum, slopes_per_head, memory, talking, distances]


@pytest.mark.parametrize("mixed", [part_of_shares, means_over_rows, *CAUSAL], ids=lambda mixed: mixed.__name__)
def test_scores(mixed: Callable[..., Tensor]) -> None:
    how: dict[str, Any] = {"streams": True, "attention": {"causal"}} if mixed in CAUSAL else {}
    weight = torch.randn(2, 3, HEAD, dtype=torch.float64, requires_grad=True)
    function = lambda one, w: mixed(*one, w).pow(2).sum() + 0 * w.sum()  # noqa: E731
    compare_function(function, [*qkv(), weight], (2, 1, 4), **how)


# -- a column next to the keys, which is then dropped


def both_of(scores: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([scores, sink[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)], -1)


def sinks(*levels: float) -> Tensor:
    return torch.tensor(levels, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("level", [-40.0, -INF, INF])
def test_a_sink_over_rows_that_see_no_key(level: float) -> None:
    """The sink has their full mass. Its gradient is precise even if its share is small in other rows."""
    seen = torch.ones(2, T, dtype=torch.bool)
    seen[0, :2] = level == -INF  # without a sink, such rows are no numbers

    def function(one: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
        q, k, v = one
        return (both_of(causal(q @ k.mT).masked_fill(~seen[:, None, None], -INF), sink).softmax(-1)[..., :-1] @ v).pow(2).sum()

    tensors = [*qkv(), sinks(level, 0.3), seen]
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    traced(function, tensors, chunk_size=2)
    for name, gradient in take_gradients(tensors).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-11, atol=1e-28, equal_nan=True)


def test_a_sink_as_low_as_hidden_scores() -> None:
    """A row that sees no key weighs all keys and the sink equally."""

    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.mT).masked_fill(columns(T) >= rows(T), -1e30)
        return (both_of(scores, sink).softmax(-1)[..., :-1] @ v).pow(2).sum()

    compare_function(function, [*qkv(), sinks(-1e30, -1e30)], (2,))


class Other(torch.autograd.Function):
    """Its gradient runs along another dimension."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        result = torch.softmax(both, -1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data(gradients[0], ctx.saved_tensors[0], 1, torch.float64)


@pytest.mark.parametrize("is_used", [False, True])
def test_columns_that_are_not_dropped(is_used: bool) -> None:
    """The column's share is used, or the gradient differs: no rewrite."""

    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        both = both_of(causal(q @ k.mT), sink)
        shares = both.softmax(-1) if is_used else Other.apply(both)
        return (shares[..., :-1] @ v).pow(2).sum() + (shares[..., -1].pow(2).sum() if is_used else 0)

    compare_function(function, [*qkv(), sinks(0.3, -0.7)], (2, 4))
