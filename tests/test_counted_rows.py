"""Operators that count rows: the number of a row is its place in the sequence only where a dimension is nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.masks import LENGTH as T
from tests.support.masks import qkv
from tests.support.spread import only
from tests.support.tracing import compare_function

Way = Callable[[Tensor], Tensor]
SIZES = (4, 1, 2, 9)


def compared(
    number_of: Callable[[Tensor, Tensor, Tensor], Tensor], sizes: tuple[int, ...] = SIZES, streams: bool | None = None
) -> Facts:
    """Against eager: a number of what attention makes [b h t d], and of keys and values."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        return number_of(F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v)

    return compare_function(function, qkv(), sizes, tolerance=1e-12, streams=streams)


MERGED: dict[str, Way] = {  # to [.. d]
    "sequences": lambda x: x[:, 0].flatten(0, 1),
    "heads": lambda x: x[0].flatten(0, 1),
    "time first": lambda x: x[:, 0].transpose(0, 1).flatten(0, 1),
    "heads of a row": lambda x: x[0].transpose(0, 1).flatten(0, 1),
}
COUNTS: dict[str, Way] = {
    "triangle": lambda x: x.triu(-T),
    "causal flag": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True),
    "triangle of scores": lambda x: (x @ x.T).tril() @ x,
}
PAIRS = list(product(COUNTS, MERGED))
SEEING = [("triangle", "sequences"), ("causal flag", "time first"), ("triangle of scores", "heads")]


@pytest.mark.parametrize(("counts", "merged"), only(SEEING, PAIRS))
def test_the_sequence_is_a_part_of_the_number(counts: str, merged: str) -> None:
    facts = compared(lambda x, k, v: COUNTS[counts](MERGED[merged](x)).square().square().sum())
    assert any("counts rows along a dimension" in reason for reason in facts.reasons())


def twice(x: Tensor) -> Tensor:
    """[b h t d] to [b h (t 2) d]: two rows side by side."""
    return torch.stack((x, x / 2), 3).flatten(2, 3)


@pytest.mark.parametrize(("keys", "queries"), only([(True, True)], [(True, False), (False, True), (True, True)]))
def test_a_mask_of_rows_side_by_side_is_kept(keys: bool, queries: bool) -> None:
    """It hides exactly what lies outside of the span, and yet no kernel may count keys instead."""

    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(T) <= torch.arange(T)[:, None]
        mask = mask.repeat_interleave(2, 1) if keys else mask
        mask = mask.repeat_interleave(2, 0) if queries else mask
        x, k = twice(x) if queries else x, twice(k) if keys else k
        return F.scaled_dot_product_attention(x, k, k, mask).square().sum()

    assert not compared(number_of).reasons()


SHIFTED: dict[str, Way] = {
    "behind the end": lambda x: F.pad(x[:, :, 2:], (0, 0, 0, 2)),
    "behind the end, by one pad": lambda x: F.pad(x, (0, 0, -2, 2)),
    "before the start": lambda x: F.pad(x[:, :, :-2], (0, 0, 2, 0)),
    "further rows at the end": lambda x: torch.cat((x, x[:, :, -3:]), 2),
    "further rows in front": lambda x: torch.cat((x[:, :, :3], x), 2),
    "halves swapped": lambda x: torch.cat((x[:, :, T // 2 :], x[:, :, : T // 2]), 2),
}


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", only(["behind the end", "before the start", "further rows at the end"], SHIFTED))
def test_rows_outside_of_the_sequence_see_what_lies_there(name: str, window: int | None) -> None:
    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = SHIFTED[name](x)
        delta = torch.arange(x.shape[2]) - torch.arange(x.shape[2])[:, None]
        seen = (delta <= 0) & (delta > -(window or x.shape[2]))
        return F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=seen).square().sum()

    compared(number_of)


SCANS = [*product(("cumsum", "cumprod", "logcumsumexp"), ((5, T), (0, T - 5), (2, T - 2)))]


@pytest.mark.parametrize(("scan", "cropped"), only([("cumprod", (5, T)), ("cumprod", (0, T - 5))], SCANS))
def test_a_scan_begins_where_its_rows_begin(scan: str, cropped: tuple[int, int]) -> None:
    """Zero, which a carry holds before its first row, is nothing to add, but not nothing to multiply by."""

    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x, along = x[:, :, slice(*cropped)] + 2, getattr(torch, scan)
        return along(x, 2).sin().sum() + along(x.flip(2), 2).flip(2).cos().sum()

    compared(number_of)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_goes_on_in_eagers_order(reverse: bool) -> None:
    """What is infinite within a chunk is nothing behind nothing, and finite behind what makes up for it."""

    def function(inputs: Tensor) -> Tensor:
        x = inputs[0].tanh()
        factors = (torch.arange(T) > 0).double() * 1e120
        terms = torch.tensor([-1.5e308, 1e308, 1e308], dtype=torch.float64).repeat(T)[:T]
        of_rows = x.detach().square().sum((0, 1, 3)) * 0  # else they are made before the loops
        product, total = (item.flip(0) + of_rows if reverse else item + of_rows for item in (factors, terms))
        scale = product.cumprod(0), total.cumsum(0) / 1e308
        return sum(((x * (item.flip(0) if reverse else item)[:, None]).square().sum() for item in scale), x.new_zeros(()))

    compare_function(function, qkv(), SIZES, tolerance=1e-12)


@pytest.mark.parametrize(("side", "missing"), only([("keys", 5), ("queries", 2)], [*product(("keys", "queries"), (1, 2, 5))]))
def test_queries_in_front_of_the_first_key(side: str, missing: int) -> None:
    """They see nothing."""

    def number_of(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first_key, first_query = (missing, 0) if side == "keys" else (0, -missing)
        seen = torch.arange(first_key, T) <= torch.arange(first_query, T)[:, None]
        x = F.pad(x, (0, 0, -first_query, 0))
        return F.scaled_dot_product_attention(x, k[:, :, first_key:], v[:, :, first_key:], attn_mask=seen).square().sum()

    compared(number_of)


def test_places_in_the_sequence_are_counted_in_chunks_and_those_of_blocks_are_not() -> None:
    facts = compared(lambda x, k, v: ((x @ k.transpose(-2, -1)).tril() @ v).square().sum(), streams=True)
    assert "causal" in facts.key_spans.span_kinds.values()
    compared(lambda x, k, v: x[0, 0].unflatten(0, (-1, 3)).sum(1).tril().square().square().sum(), (3, 6))
