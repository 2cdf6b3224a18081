"""Attention scores that are cut, mixed, concatenated with a column, or biased: exact, and causal if they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.masks import HEAD, INF, LENGTH, MIN, columns, qkv, rows
from tests.support.tracing import compare_function, take_gradients, traced

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
