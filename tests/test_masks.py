"""What a mask is found to hide has to be hidden: named masks, near misses, and masks that hold data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.masks import FUSED, HIDE, INF, LENGTH, Mask, Seen, attention, columns, fused, qkv, rows, under
from tests.support.spread import spread
from tests.support.tracing import compare_function

T = LENGTH
SIZES = (2, 1, 4)
UNDERSTOOD: dict[str, tuple[Seen, str]] = {
    "window": (lambda r, c: (c <= r) & (c > r - 3), "window(3)"),
    "column <= row": (lambda r, c: c <= r, "causal"),
    "not column > row": (lambda r, c: ~(c > r), "causal"),
    "difference": (lambda r, c: (r - c) >= 0, "causal"),
    "scaled": (lambda r, c: 3 * c <= 3 * r + 2, "causal"),
    "from minus": (lambda r, c: -r <= -c, "causal"),
    "tril of booleans": (lambda r, c: torch.ones(T, T, dtype=torch.bool).tril(), "causal"),
    "not triu": (lambda r, c: torch.ones(T, T).triu(1) == 0, "causal"),
    "band of two triangles": (lambda r, c: torch.ones(T, T).tril().triu(-2).bool(), "window(3)"),
    "distance": (lambda r, c: (r - c).abs() < 3, "band([s-2, e+2))"),
    "cumulated ones": (lambda r, c: c < torch.ones(T, dtype=torch.long).cumsum(0)[:, None], "causal"),
    "only itself": (lambda r, c: c == r, "window(1)"),
    "strictly before or itself": (lambda r, c: (c < r) | (c == r), "causal"),
    "one step ahead": (lambda r, c: c <= r + 1, "band([0, e+1))"),
    "tril(1)": (lambda r, c: torch.ones(T, T).tril(1) != 0, "band([0, e+1))"),
    "transposed": (lambda r, c: c >= r, "band([s, T))"),
}
PROVEN = [way for way in HIDE if "1e" not in way]


@pytest.mark.parametrize(
    ("name", "way"),
    spread([*((name, "masked_fill") for name in UNDERSTOOD), *(("window", way) for way in (*PROVEN[1:], *FUSED))], 2),
)
def test_masks_that_are_understood(name: str, way: str) -> None:
    seen, verdict = UNDERSTOOD[name]
    compare_function(under(way, seen), qkv(), SIZES, streams=True, attention={verdict})


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_causal_flag(is_causal: bool) -> None:
    verdict = "causal" if is_causal else "masked"
    compare_function(fused(lambda t: None, is_causal=is_causal), qkv(), SIZES, streams=True, attention={verdict})


NEAR: dict[str, Mask] = {  # of scores, and numbers of rows and columns
    "-1e9": lambda s, r, c: s.masked_fill(c > r, -1e9),
    "plus infinity": lambda s, r, c: s.masked_fill(c > r, INF),
    "times zero": lambda s, r, c: s * (c <= r),
    "before a scale that turns it around": lambda s, r, c: s.masked_fill(c > r, -INF) * -1.0,
    "columns twice": lambda s, r, c: s.masked_fill(2 * c > r, -INF),
    "modulo": lambda s, r, c: s.masked_fill(c % 3 > r % 3, -INF),
    "flipped": lambda s, r, c: s.masked_fill((c > r).flip(1), -INF),
    "rolled": lambda s, r, c: s.masked_fill((c > r).roll(1, 0), -INF),
    "by value": lambda s, r, c: s.masked_fill(s > 0.3, -INF),
    "counted columns": lambda s, r, c: s.masked_fill(torch.ones(T, T).cumsum(-1) > 1, -INF),
    "counted rows": lambda s, r, c: s.masked_fill(torch.ones(T, T).cumsum(0) <= 1, -INF),
    "one of two heads": lambda s, r, c: s.masked_fill(torch.ones(2, T, T).cumsum(0)[0] > 1, -INF),
    "swapped rows": lambda s, r, c: s.masked_fill(c > r[torch.arange(T - 1, -1, -1)], -INF),
}


@pytest.mark.parametrize("name", spread(NEAR, 2))
def test_near_misses(name: str) -> None:
    """They are exact, and not taken for what they resemble."""
    facts = compare_function(attention(lambda s: NEAR[name](s, rows(T), columns(T))), qkv(), (2, 4))
    assert set(facts.key_spans.span_kinds.values()) != {"causal"}


PRODUCTS: dict[str, tuple[Callable[..., Tensor], set[str] | None]] = {  # of the scores and values, and their verdicts
    "keys by rows": (lambda s, v: s.mT.masked_fill(rows(T) > columns(T), -INF).softmax(-2).mT @ v, {"causal"}),
    "softmax over queries": (lambda s, v: s.masked_fill(columns(T) > rows(T), -INF).softmax(-2) @ v, None),
    "no softmax": (lambda s, v: s.tril() @ v, {"causal", "band([s, T))"}),
    "the largest score taken off": (lambda s, v: _by_hand(s.masked_fill(columns(T) > rows(T), -INF)) @ v, None),
}


def _by_hand(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_scores(name: str) -> None:
    mixed, verdicts = PRODUCTS[name]

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        return mixed(q @ k.mT, v).pow(2).sum()

    compare_function(function, qkv(), SIZES, streams=True if verdicts else None, attention=verdicts)


KEEP = torch.arange(T)[None] >= torch.tensor([[0], [3]])  # row 0 is full; row 1 begins with padding
DOCUMENT = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
OF_DATA: dict[str, tuple[str, Seen, Tensor, str]] = {
    "padding behind": ("masked_fill", lambda r, c, keep: (c <= r) & keep[:, None, None], KEEP.flip(1), "causal"),
    "padding in front": ("huge", lambda r, c, keep: (c <= r) & keep[:, None, None], KEEP, "masked"),
    "rows that see nothing": ("boolean", lambda r, c, keep: (c <= r) & keep[:, None, None], KEEP, "causal"),
    "and": ("masked_fill", lambda r, c, keep: (c <= r) & (keep[:, None, None] | (c == r)), KEEP, "causal"),
    "or": ("masked_fill", lambda r, c, keep: (c <= r) | keep[:, None, None], KEEP, "masked"),
    "prefix": ("masked_fill", lambda r, c, prefix: (c <= r) | (c < prefix), torch.tensor(4), "masked"),
    "documents": ("masked_fill", lambda r, c, d: (d[:, None, :, None] == d[:, None, None]) & (c <= r), DOCUMENT, "causal"),
    "offset": ("masked_fill", lambda r, c, offset: c <= r + offset, torch.tensor(2), "masked"),
}


@pytest.mark.parametrize("name", OF_DATA)
def test_masks_that_hold_data(name: str) -> None:
    way, seen, data, verdict = OF_DATA[name]
    compare_function(under(way, seen), [*qkv(), data], SIZES, streams=True, attention={verdict})


def _shifted(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return x[:, :, first : T - 1 + first], x[:, :, 1 - first : T - first]


@pytest.mark.parametrize("first", [0, 1])
def test_causal_flag_between_shifted_slices(first: int) -> None:
    """`is_causal` compares indices, not positions: query i + a sees key i + b and all before."""

    def function(inputs: Tensor) -> Tensor:
        q, y = _shifted(torch.tanh(inputs[0]), first)
        return F.scaled_dot_product_attention(q, y, y, is_causal=True).pow(2).sum()

    compare_function(function, qkv(), SIZES)


@pytest.mark.parametrize("first", [0, 1, None])
def test_triangle_between_shifted_slices(first: int | None) -> None:
    """Or of the last rows alone, aligned at the end."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        q, y = (x[:, :, 3:], x) if first is None else _shifted(x, first)
        hidden = columns(y.shape[2]) > rows(q.shape[2]) + y.shape[2] - q.shape[2]
        return ((q @ y.mT).masked_fill(hidden, -INF).softmax(-1) @ y).pow(2).sum()

    compare_function(function, qkv(), SIZES)
