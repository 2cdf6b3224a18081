"""What a mask is found to hide has to be hidden: named cases, near misses, and masks that hold data."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.masks import INF, LENGTH, Mask, attention, columns, fused, qkv, rows
from tests.support.spread import spread
from tests.support.tracing import compare_function


def spans(facts: Facts) -> set[str]:
    """The spans of keys of the operators that are no masks themselves."""
    return set(facts.causality.verdicts.values())


# -- what is to be found

T = LENGTH
VISIBLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "column <= row": (lambda: columns(T) <= rows(T), "causal"),
    "row >= column": (lambda: rows(T) >= columns(T), "causal"),
    "column < row + 1": (lambda: columns(T) < rows(T) + 1, "causal"),
    "not column > row": (lambda: ~(columns(T) > rows(T)), "causal"),
    "difference": (lambda: (rows(T) - columns(T)) >= 0, "causal"),
    "scaled": (lambda: 3 * columns(T) <= 3 * rows(T) + 2, "causal"),
    "from minus": (lambda: -rows(T) <= -columns(T), "causal"),
    "tril": (lambda: torch.ones(T, T).tril() == 1, "causal"),
    "tril of booleans": (lambda: torch.ones(T, T, dtype=torch.bool).tril(), "causal"),
    "not triu": (lambda: torch.ones(T, T).triu(1) == 0, "causal"),
    "window": (lambda: (columns(T) <= rows(T)) & (columns(T) > rows(T) - 3), "window(3)"),
    "band of two triangles": (lambda: torch.ones(T, T).tril().triu(-2).bool(), "window(3)"),
    "distance": (lambda: (rows(T) - columns(T)).abs() < 3, "band([s-2, e+2))"),
    "cumulated ones": (lambda: columns(T) < torch.ones(T, dtype=torch.long).cumsum(0)[:, None], "causal"),
    "only itself": (lambda: columns(T) == rows(T), "window(1)"),
    "strictly before or itself": (lambda: (columns(T) < rows(T)) | (columns(T) == rows(T)), "causal"),
}
HIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda s, visible: s.masked_fill(~visible, -INF),
    "where": lambda s, visible: torch.where(visible, s, -INF),
    "where turned": lambda s, visible: torch.where(~visible, torch.full_like(s, -INF), s),
    "added": lambda s, visible: s + torch.zeros(T, T, dtype=s.dtype).masked_fill(~visible, -INF),
    "logarithm": lambda s, visible: s + visible.to(s.dtype).log(),
    "huge": lambda s, visible: s.masked_fill(~visible, torch.finfo(s.dtype).min),
}


@pytest.mark.parametrize(("name", "hide"), spread(product(VISIBLE, HIDE), 5))
def test_masks_that_are_understood(name: str, hide: str) -> None:
    visible, verdict = VISIBLE[name]
    compare_function(attention(lambda scores: HIDE[hide](scores, visible())), qkv(), (2, 1, 4), streams=True, attention={verdict})


@pytest.mark.parametrize(("kind", "name"), spread(product(("boolean", "additive"), VISIBLE), 3))
def test_fused_masks_that_are_understood(name: str, kind: str) -> None:
    visible, verdict = VISIBLE[name]

    def mask(t: int) -> Tensor:
        return visible() if kind == "boolean" else torch.where(visible(), 0.0, -INF).double()

    compare_function(fused(mask), qkv(), (2, 1, 4), streams=True, attention={verdict})


def test_no_mask_and_causal_flag() -> None:
    compare_function(fused(lambda t: None), qkv(), (2, 1, 4), streams=True, attention={"masked"})  # type: ignore[arg-type,return-value]
    causal = fused(lambda t: None, is_causal=True)  # type: ignore[arg-type,return-value]
    compare_function(causal, qkv(), (2, 1, 4), streams=True, attention={"causal"})


# -- near misses: exact, and not called what they resemble

NEAR: dict[str, tuple[Mask, str]] = {
    "one step ahead": (lambda s: s.masked_fill(columns(T) > rows(T) + 1, -INF), "band([0, e+1))"),
    "tril(1)": (lambda s: s.masked_fill(torch.ones(T, T).tril(1) == 0, -INF), "band([0, e+1))"),
    "transposed": (lambda s: s.masked_fill(columns(T) < rows(T), -INF), "band([s, T))"),
    "-1e4": (lambda s: s.masked_fill(columns(T) > rows(T), -1e4), "masked"),
    "-1e9": (lambda s: s.masked_fill(columns(T) > rows(T), -1e9), "masked"),
    "turned around": (lambda s: torch.where(columns(T) > rows(T) - 1, s, -INF), "band([s, T))"),
    "plus infinity": (lambda s: s.masked_fill(columns(T) > rows(T), INF), "masked"),
    "zero": (lambda s: s.masked_fill(columns(T) > rows(T), 0.0), "masked"),
    "times zero": (lambda s: s * (columns(T) <= rows(T)), "masked"),
    "before the scale": (lambda s: s.masked_fill(columns(T) > rows(T), -INF) * -1.0, "masked"),
    "columns twice": (lambda s: s.masked_fill(2 * columns(T) > rows(T), -INF), "masked"),
    "modulo": (lambda s: s.masked_fill(columns(T) % 3 > rows(T) % 3, -INF), "masked"),
    "flipped": (lambda s: s.masked_fill((columns(T) > rows(T)).flip(1), -INF), "masked"),
    "rolled": (lambda s: s.masked_fill((columns(T) > rows(T)).roll(1, 0), -INF), "masked"),
    "by value": (lambda s: s.masked_fill(s > 0.3, -INF), "masked"),
    "counted columns": (lambda s: s.masked_fill(torch.ones(T, T).cumsum(-1) > 1, -INF), "masked"),
    "counted rows": (lambda s: s.masked_fill(torch.ones(T, T).cumsum(0) <= 1, -INF), "masked"),
    "one of two heads": (lambda s: s.masked_fill(torch.ones(2, T, T).cumsum(0)[0] > 1, -INF), "masked"),
    "swapped rows": (lambda s: s.masked_fill(columns(T) > rows(T)[torch.arange(T - 1, -1, -1)], -INF), "masked"),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    mask, _ = NEAR[name]
    facts = compare_function(attention(mask), qkv(), (2, 1, 4))
    assert spans(facts) != {"causal"}, "taken for a causal mask"


@pytest.mark.parametrize("name", [name for name, (_, verdict) in NEAR.items() if verdict.startswith("band")])
def test_near_misses_that_are_bands(name: str) -> None:
    mask, verdict = NEAR[name]
    compare_function(attention(mask), qkv(), (2, 1, 4), attention={verdict})


def test_swapped_rows_and_columns() -> None:
    """The softmax runs over the first of the two: rows are keys then."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        scores = (k @ q.transpose(-2, -1)).masked_fill(rows(T) > columns(T), -INF)  # [keys, queries]
        return (torch.softmax(scores, -2).transpose(-2, -1) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4), streams=True, attention={"causal"})


def test_softmax_over_queries_is_not_causal() -> None:
    """Normalised over the rows instead of over the keys, a triangle hides nothing that is needed."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF)
        return (torch.softmax(scores, -2) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_linear_attention_without_a_softmax() -> None:
    """What is multiplied by zero needs no key either."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        return ((q @ k.transpose(-2, -1)).tril() @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4), streams=True, attention={"causal", "band([s, T))"})


def test_subtracting_the_largest_score_by_hand() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        scores = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), -INF)
        weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        return ((weights / weights.sum(-1, keepdim=True)) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


# -- masks that hold data


def padding(t: int = T) -> Tensor:
    """Row 0 is full; row 1 begins with padding."""
    return torch.arange(t)[None] >= torch.tensor([[0], [3]])


@pytest.mark.parametrize("fill", [-INF, torch.finfo(torch.float64).min, -1e9])
def test_padding_and_causal(fill: float) -> None:
    """Rows of padding see nothing: NaN for minus infinity, the mean of all values for a finite number."""

    def mask(scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~((columns(T) <= rows(T)) & keep[:, None, None, :]), fill)

    inputs = qkv()
    given = [*inputs, padding()]
    if fill == -INF:
        given[-1] = torch.arange(T)[None] < torch.tensor([[T], [6]])  # padding on the right: each row sees something
    compare_function(attention(mask), given, (2, 1, 4))


def test_rows_that_see_nothing_at_all() -> None:
    compare_function(fused(lambda t, keep: (columns(t) <= rows(t)) & keep[:, None, None, :]), [*qkv(), padding()], (2, 1, 4))


def test_causal_and_data_is_causal() -> None:
    def mask(scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~((columns(T) <= rows(T)) & (keep[:, None, None, :] | (columns(T) == rows(T)))), -INF)

    compare_function(attention(mask), [*qkv(), padding()], (2, 1, 4), streams=True, attention={"causal"})


def test_causal_or_data_is_not_causal() -> None:
    def mask(scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~((columns(T) <= rows(T)) | keep[:, None, None, :]), -INF)

    compare_function(attention(mask), [*qkv(), padding()], (2, 1, 4), streams=True, attention={"masked"})


def test_prefix_language_model() -> None:
    """Causal, except that all see the first few tokens: how many is data."""

    def mask(scores: Tensor, prefix: Tensor) -> Tensor:
        return scores.masked_fill(~((columns(T) <= rows(T)) | (columns(T) < prefix)), -INF)

    compare_function(attention(mask), [*qkv(), torch.tensor(4)], (2, 1, 4), streams=True, attention={"masked"})


def test_documents() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])

    def mask(scores: Tensor, document: Tensor) -> Tensor:
        same = document[:, None, :, None] == document[:, None, None, :]
        return scores.masked_fill(~(same & (columns(T) <= rows(T))), -INF)

    compare_function(attention(mask), [*qkv(), document], (2, 1, 4), streams=True, attention={"causal"})


def test_an_offset_that_is_data() -> None:
    """`column <= row + offset` with an offset known only at run time."""

    def mask(scores: Tensor, offset: Tensor) -> Tensor:
        return scores.masked_fill(columns(T) > rows(T) + offset, -INF)

    for offset in (0, 2):
        compare_function(attention(mask), [*qkv(), torch.tensor(offset)], (2, 1, 4), attention={"masked"})


# -- queries and keys that are shifted against each other


@pytest.mark.parametrize("query_first", [0, 1])
def test_causal_flag_between_shifted_slices(query_first: int) -> None:
    """`is_causal` compares indices, not positions: query i + a sees key i + b and all before."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        end = T - 1 + query_first
        q = x[:, :, query_first:end]
        y = x[:, :, 1 - query_first : T - query_first]
        return F.scaled_dot_product_attention(q, y, y, is_causal=True).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


@pytest.mark.parametrize("query_first", [0, 1])
def test_triangle_between_shifted_slices(query_first: int) -> None:
    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        q = x[:, :, query_first : T - 1 + query_first]
        y = x[:, :, 1 - query_first : T - query_first]
        scores = (q @ y.transpose(-2, -1)).masked_fill(columns(T - 1) > rows(T - 1), -INF)
        return (scores.softmax(-1) @ y).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_fewer_queries_than_keys() -> None:
    """The last rows only: aligned at the end."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        q = x[:, :, 3:]
        scores = (q @ x.transpose(-2, -1)).masked_fill(columns(T) > rows(T - 3) + 3, -INF)
        return (scores.softmax(-1) @ x).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))
