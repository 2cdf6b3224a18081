"""Operators that number rows: the number is the position in the sequence only if no other axis shares the dimension."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.masks import LENGTH as T
from tests.support.masks import qkv
from tests.support.tables import named_cases
from tests.support.tracing import compare_function

Way = Callable[[Tensor], Tensor]
SIZES = (4, 1, 2, 9)


def compared(
    number_of: Callable[[Tensor, Tensor, Tensor], Tensor], sizes: tuple[int, ...] = SIZES, streams: bool | None = None
) -> Facts:
    """Against eager: a number computed from the result of attention [b h t d], keys and values."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        return number_of(F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v)

    return compare_function(function, qkv(), sizes, tolerance=1e-12, streams=streams)


MERGED: dict[str, Way] = named_cases("merged dimensions", globals(), "x")


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True)


@pytest.mark.parametrize("name", MERGED)
def test_the_sequence_is_one_factor_of_the_dimension(name: str) -> None:
    facts = compared(lambda x, k, v: MERGED[name](x).square().square().sum())
    assert any("depends on row indices along a dimension" in reason for reason in facts.reasons())


def twice(x: Tensor) -> Tensor:
    """[b h t d] to [b h (t 2) d]: two rows side by side."""
    return torch.stack((x, x / 2), 3).flatten(2, 3)


def test_a_mask_of_rows_side_by_side_is_kept() -> None:
    """It hides only keys outside the span, but a kernel that counts keys would hide others."""

    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = (torch.arange(T) <= torch.arange(T)[:, None]).repeat_interleave(2, 1).repeat_interleave(2, 0)
        return F.scaled_dot_product_attention(twice(x), twice(k), twice(k), mask).square().sum()

    assert not compared(number_of).reasons()


SHIFTED: dict[str, Way] = named_cases("shifted rows", globals(), "x")


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", SHIFTED)
def test_attention_of_rows_outside_the_sequence(name: str, window: int | None) -> None:
    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = SHIFTED[name](x)
        delta = torch.arange(x.shape[2]) - torch.arange(x.shape[2])[:, None]
        seen = (delta <= 0) & (delta > -(window or x.shape[2]))
        return F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=seen).square().sum()

    compared(number_of)


@pytest.mark.parametrize("cropped", [(5, T), (0, T - 5)], ids=str)
def test_a_scan_of_some_rows(cropped: tuple[int, int]) -> None:
    """A carry must not be zero before the first row of a product."""

    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = x[:, :, slice(*cropped)] + 2
        return x.cumprod(2).sin().sum() + x.flip(2).cumprod(2).flip(2).cos().sum()

    compared(number_of)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_combines_rows_in_eagers_order(reverse: bool) -> None:
    """A product that is infinite within a chunk is zero after a zero; such a sum is finite after a large negative term."""

    def function(inputs: Tensor) -> Tensor:
        x = inputs[0].tanh()
        factors = (torch.arange(T) > 0).double() * 1e120
        terms = torch.tensor([-1.5e308, 1e308, 1e308], dtype=torch.float64).repeat(T)[:T]
        of_rows = x.detach().square().sum((0, 1, 3)) * 0  # else they are computed before the loops
        product, total = (item.flip(0) + of_rows if reverse else item + of_rows for item in (factors, terms))
        scale = product.cumprod(0), total.cumsum(0) / 1e308
        return sum(((x * (item.flip(0) if reverse else item)[:, None]).square().sum() for item in scale), x.new_zeros(()))

    compare_function(function, qkv(), SIZES, tolerance=1e-12)


def test_a_triangle_of_scores_streams_and_one_of_blocks_is_exact() -> None:
    facts = compared(lambda x, k, v: ((x @ k.transpose(-2, -1)).tril() @ v).square().sum(), streams=True)
    assert "causal" in facts.key_spans.span_kinds.values()
    compared(lambda x, k, v: x[0, 0].unflatten(0, (-1, 3)).sum(1).tril().square().square().sum(), (3, 6))


# -- values that an operator computes over all keys before a mask hides some

ROWS = 13
Made = Callable[[Tensor, Tensor], Tensor]
MADE: dict[str, Made] = named_cases("functions of distances", globals(), "c, d")


def over_distances(made: Made) -> Facts:
    x = torch.randn(2, ROWS, 4, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, decay: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=torch.float64)
        return (made(decay, at[:, None] - at).tril() @ x).square().sum()

    return compare_function(function, (x, decay), (4,), tolerance=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_operators_over_keys_read_all_keys(name: str) -> None:
    over_distances(MADE[name])


def test_elementwise_values_cover_the_keys_of_their_consumer() -> None:
    """A decay by distance is not computed for hidden keys."""
    facts = over_distances(lambda c, d: torch.exp(-c * d))
    assert "causal" in facts.key_spans.span_kinds.values()
    assert {node.name for node in facts.key_spans.recomputed_per_consumer} >= {"exp", "tril"}
