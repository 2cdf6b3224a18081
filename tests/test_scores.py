"""Scores that are cut, joined with a column of their own, shifted or solved: exact, and causal where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.masks import INF, LENGTH, columns, qkv, rows
from tests.support.tracing import compare_function, take_gradients, traced

T = LENGTH

# -- parts of scores


@pytest.mark.parametrize("rows_from", [0, 2])
@pytest.mark.parametrize("columns_from", [0, 2])
def test_parts_of_scores(rows_from: int, columns_from: int) -> None:
    """Rows and keys are cut out of probabilities, and put back with zeros around them."""

    def function(one: Tensor) -> Tensor:
        q, k, v = one
        weights = torch.softmax((q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF), -1)
        part = weights[..., rows_from : T - 1, :][..., columns_from : T - 1] * 2
        around = F.pad(part, (columns_from, 1, rows_from, 1))
        return ((weights + around) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_rows_solved_one_after_another() -> None:
    """A triangular system by hand, as linear attention with a delta rule has it."""

    def function(one: Tensor) -> Tensor:
        q, k, v = one
        scores = (k @ k.transpose(-2, -1) * 0.3).tril(-1)
        for i in range(1, T):
            row, sub = scores[..., i, :i].clone(), scores[..., :i, :i].clone()
            scores = scores.select_scatter(F.pad(row + (row[..., None] * sub).sum(-2), (0, T - i)), 2, i)
        out = torch.softmax((q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF), -1) @ (scores @ v)
        return out.pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


# -- softmax by parts


def with_sink(scores: Tensor, sink: Tensor, first: bool, shifted: bool) -> Tensor:
    """Probabilities of keys beside a column of its own, which is then dropped."""
    column = sink[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    both = torch.cat([column, scores] if first else [scores, column], -1)
    if shifted:
        both = both - both.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(both, -1)
    return probabilities[..., 1:] if first else probabilities[..., :-1]


@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_sink_beside_the_keys(first: bool, shifted: bool, hidden: float) -> None:
    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), hidden)
        return (with_sink(scores, sink, first, shifted) @ v).pow(2).sum()

    sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    compare_function(function, [*qkv(), sink], (2, 1, 4), streams=True, attention={"causal"})


@pytest.mark.parametrize("level", [-40.0, -20.0, 8.0, -INF, INF])
@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float64).min])
def test_a_sink_over_rows_that_see_no_key(hidden: float, level: float) -> None:
    """All of their mass is the sink's, and its gradient keeps its digits however small its share is elsewhere."""
    seen = torch.ones(2, T, dtype=torch.bool)
    seen[0, :2] = level == -INF  # without a sink, such rows are no numbers

    def function(one: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill((columns(T) > rows(T)) | ~seen[:, None, None, :], hidden)
        return (with_sink(scores, sink, False, False) @ v).pow(2).sum()

    sink = torch.tensor([level, 0.3], dtype=torch.float64, requires_grad=True)
    tensors = [*qkv(), sink, seen]
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    traced(function, tensors, chunk_size=2)
    for name, gradient in take_gradients(tensors).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-11, atol=1e-28, equal_nan=True)


def test_a_sink_as_low_as_what_is_hidden() -> None:
    """A row that sees no key looks at all of them, and at the sink, alike: one number among many, not one half."""

    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) >= rows(T), -1e30)
        return (with_sink(scores, sink, False, False) @ v).pow(2).sum()

    sink = torch.full((2,), -1e30, dtype=torch.float64, requires_grad=True)
    compare_function(function, [*qkv(), sink], (2,))


def test_another_gradient_of_a_sink() -> None:
    """A gradient along another dimension than the softmax is not the softmax's."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, both: Tensor) -> Tensor:
            result = torch.softmax(both, -1)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return torch.ops.aten._softmax_backward_data(gradients[0], ctx.saved_tensors[0], 1, torch.float64)

    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF)
        both = torch.cat([scores, sink[None, :, None, None].expand(2, -1, T, 1)], -1)
        return (Other.apply(both)[..., :-1] @ v).pow(2).sum()

    sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    compare_function(function, [*qkv(), sink], (2,))


def test_a_sink_that_is_used() -> None:
    """The column's own probability is asked for as well: nothing is rewritten."""

    def function(one: Tensor, sink: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF)
        both = torch.cat([scores, sink[None, :, None, None].expand(2, -1, T, 1)], -1)
        probabilities = torch.softmax(both, -1)
        return (probabilities[..., :-1] @ v).pow(2).sum() + probabilities[..., -1].pow(2).sum()

    sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    compare_function(function, [*qkv(), sink], (2, 1, 4))


@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float64).min])
def test_a_share_by_the_logarithm_of_the_sum(hidden: float) -> None:
    def function(one: Tensor) -> Tensor:
        q, k, v = one
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), hidden)
        share = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True))
        return (torch.softmax(scores, -1) * share @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4), streams=True, attention={"causal"})


@pytest.mark.parametrize("dim", [-1, -2])
def test_means_of_shares(dim: int) -> None:
    """Over keys, or over rows for each key: in each chunk a part of what all of them are divided by."""

    def function(one: Tensor) -> Tensor:
        q, k, v = one
        shares = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF).softmax(-1)
        return ((shares @ v) * shares.mean(dim)[..., None]).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float64).min])
def test_slopes_per_head(hidden: float) -> None:
    """A bias that grows with the key's position, in the form in which one product adds it to the scores."""

    def function(one: Tensor) -> Tensor:
        q, k, v = (item.flatten(0, 1) for item in one)
        slopes = torch.pow(torch.tensor(0.5, dtype=torch.float64), torch.arange(1, 5))
        bias = (slopes.view(2, 2, 1) * torch.ones(2, T, dtype=torch.long).cumsum(-1)[:, None]).view(-1, 1, T).double()
        scores = torch.baddbmm(bias, q, k.transpose(-2, -1), beta=1.0, alpha=0.5)
        mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(columns(T) > rows(T), hidden)
        return (torch.softmax(scores + mask, -1) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4), streams=True, attention={"causal"})


def test_blocks_of_rows_and_keys() -> None:
    """Scores of one block of rows and keys at a time, as linear attention has them, beside attention over all rows."""

    def function(one: Tensor) -> Tensor:
        q, k, v = one
        out = torch.softmax((q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF), -1) @ v
        parts = []
        for first in range(0, T, 4):
            block = slice(first, min(first + 4, T))
            weights = (q[:, :, block] @ k[:, :, block].transpose(-2, -1)).tril()
            parts.append(weights @ v[:, :, block])
        return (out + torch.cat(parts, -2)).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 3, 4))


def test_blocks_that_hand_on_a_state() -> None:
    """Linear attention block by block, each with what the blocks before have summed up."""

    def function(one: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (torch.nn.functional.silu(item @ weight) for item in one)
        state, parts = torch.zeros(2, 2, 4, 4, dtype=q.dtype), []
        decay = torch.exp(-0.1 * (rows(4) - columns(4)).double()).tril()
        for first in range(0, T, 4):
            block = slice(first, min(first + 4, T))
            count = len(range(T)[block])
            weights = q[:, :, block] @ k[:, :, block].transpose(-2, -1) * decay[:count, :count]
            parts.append(weights @ v[:, :, block] + q[:, :, block] @ state)
            state = state * 0.9 + k[:, :, block].transpose(-2, -1) @ v[:, :, block]
        linear = torch.sigmoid(torch.cat(parts, -2) @ weight)
        scores = (linear @ linear.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF)
        return (torch.softmax(scores, -1) @ linear).pow(2).sum()

    weight = torch.eye(4, dtype=torch.float64, requires_grad=True)
    compare_function(function, [*qkv(), weight], (2, 1, 3, 4))
