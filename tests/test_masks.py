"""Masks: a key outside the span that the analysis finds is hidden. Named masks, near misses, misleading ones, random ones."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.ir.facts import Role
from streamfx.ir.piecewise import (
    Fact,
    Pieces,
    Slope,
    absolute_value,
    combine_pieces,
    compare_slope,
    constant_pieces,
    hull_of,
    merge_equal_pieces,
)
from streamfx.ir.ranges import Range, constant
from tests.support.decoders.parts import VOCABULARY, Decoder, Heads, made
from tests.support.exactness import compare
from tests.support.masks import FUSED, HIDE, INF, LENGTH, MIN, Mask, Seen, attention, columns, fused, qkv, rows, under
from tests.support.spread import only, spread
from tests.support.tables import named_cases, read
from tests.support.tracing import compare_function

T = LENGTH
U8, I8, F16, BF16, F32 = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32
SIZES = (2, 1, 4)
TABLES = read(Path(__file__).parent / "support" / "masks.txt", 3)
UNDERSTOOD, NEAR, HIDDEN, BIASES, READ, PARTS = (
    {name: (verdict, made) for name, verdict, made in TABLES[section]}
    for section in ("understood", "scores that look causal", "hidden keys", "biases", "buffers", "parts of random masks")
)


def value(made: str, **names: Any) -> Tensor:
    """An expression of `masks.txt`, of row and column indices and other values."""
    result: Tensor = eval(made, {**globals(), "r": rows(T), "c": columns(T), **names})
    return result


PROVEN = [way for way in HIDE if "1e" not in way]


@pytest.mark.parametrize(
    ("name", "way"),
    spread([*((name, "masked_fill") for name in UNDERSTOOD), *(("window", way) for way in (*PROVEN[1:], *FUSED))], 2),
)
def test_masks_that_are_understood(name: str, way: str) -> None:
    verdict, made = UNDERSTOOD[name]
    compare_function(under(way, lambda r, c: value(made)), qkv(), SIZES, streams=True, attention={verdict})


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_causal_flag(is_causal: bool) -> None:
    verdict = "causal" if is_causal else "masked"
    compare_function(fused(lambda t: None, is_causal=is_causal), qkv(), SIZES, streams=True, attention={verdict})


def spans_of(mask: Mask, data: tuple[Tensor, ...] = ()) -> set[str]:
    """The key spans of attention; its results are exact."""
    facts = compare_function(attention(mask), [*qkv(), *data], (2, 4), tolerance=1e-12)
    return set(facts.key_spans.span_kinds.values())


@pytest.mark.parametrize("name", NEAR)
def test_scores_that_look_causal(name: str) -> None:
    assert spans_of(lambda s: value(NEAR[name][1], s=s)) != {"causal"}


@pytest.mark.parametrize("name", HIDDEN)
def test_arithmetic_of_indices(name: str) -> None:
    verdict, made = HIDDEN[name]
    spans = spans_of(lambda s: s.masked_fill(value(made) & (columns(T) != rows(T)), -INF))
    assert (spans == {"causal"}) is (verdict == "causal")


PRODUCTS: dict[str, tuple[Callable[..., Tensor], set[str] | None]] = named_cases("products of scores", globals())


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
OF_DATA: dict[str, tuple[str, Seen, Tensor, str]] = named_cases("masks of data", globals())


@pytest.mark.parametrize("name", OF_DATA)
def test_masks_of_data(name: str) -> None:
    way, seen, data, verdict = OF_DATA[name]
    compare_function(under(way, seen), [*qkv(), data], SIZES, streams=True, attention={verdict})


INTERLEAVED: dict[str, tuple[Seen, str]] = named_cases("two indices per row", globals())


@pytest.mark.parametrize("name", INTERLEAVED)
def test_masks_of_two_indices_per_row(name: str) -> None:
    """Queries and keys of two heads are interleaved: row t has the indices 2 t and 2 t + 1."""
    seen, verdict = INTERLEAVED[name]

    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unflatten(-1, (2, -1)).flatten(3, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(rows(2 * T), columns(2 * T))).pow(2).sum()

    compare_function(function, qkv(), SIZES, streams=True, attention={verdict})


def _shifted(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return x[:, :, first : T - 1 + first], x[:, :, 1 - first : T - first]


@pytest.mark.parametrize("first", [0, 1])
def test_causal_flag_between_shifted_slices(first: int) -> None:
    """`is_causal` compares indices, not positions: query i + a sees key i + b and all before."""

    def function(inputs: Tensor) -> Tensor:
        q, y = _shifted(torch.tanh(inputs[0]), first)
        return F.scaled_dot_product_attention(q, y, y, is_causal=True).pow(2).sum()

    compare_function(function, qkv(), SIZES)


# -- scores that are as large as the numbers that hide keys

GATE = torch.tensor([1.0, 1, 1, 1, -1, 1, -1, 1, -1], dtype=torch.float64)
COUNT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("name", BIASES)
def test_rows_whose_visible_keys_are_all_hidden(name: str) -> None:
    """They see keys that a finite number hides, too, unless a key is proven to be visible."""
    verdict, made = BIASES[name]

    def mask(s: Tensor, gate: Tensor, count: Tensor) -> Tensor:
        return value(made, s=s, gate=gate, count=count).masked_fill(columns(T) > rows(T), MIN)

    assert spans_of(mask, (GATE, COUNT)) == {verdict}


@pytest.mark.compiled
def test_a_bias_that_the_caller_trains() -> None:
    """It is no activation, and may be as large as numbers that hide keys."""
    function = attention(lambda s, bias: (s + bias).masked_fill(columns(T) > rows(T), MIN))
    inputs, bias = qkv()[0], torch.where(GATE < 0, 0.0, -INF).requires_grad_()
    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 2, "bodies": "eager"})
    wanted, found = (torch.autograd.grad(run(inputs, bias), (inputs, bias)) for run in (function, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_histogram_needs_hidden_keys() -> None:
    """It counts zeros, which a sum may omit."""

    def function(inputs: Tensor) -> Tensor:
        q, k, _ = inputs.unbind()
        level = q[0, 0, :, 0].detach().abs()
        counts = torch.histc(torch.where(columns(T) > rows(T), 0, level + level[:, None]), 3, 0, 4)
        return attention(lambda s: s.masked_fill(columns(T) > rows(T), -INF))(inputs) + counts[0] * k.sum()

    compare_function(function, qkv(), (2, 4))


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2.0**100])
def test_a_fused_scale_makes_scores_large(scale: float, of_data: bool) -> None:
    """They are then as low as hidden scores. Inputs are integers, so matmuls are equal for all chunk sizes."""

    def function(inputs: Tensor, seen: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        later = columns(T) > rows(T)
        hidden = torch.zeros(T, T, dtype=q.dtype).masked_fill(later | ~seen if of_data else later, -1e33)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=scale).pow(2).sum()

    seen = torch.arange(T) < T - 2
    facts = compare_function(function, [(100 * qkv()[0]).detach().round().requires_grad_(), seen], (2, 4), tolerance=1e-12)
    assert set(facts.key_spans.span_kinds.values()) == {"causal" if scale < 1 and not of_data else "masked"}


def test_fewer_keys_than_rows() -> None:
    """A row without its own key has no visible score that exceeds the hidden ones."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        keys = x[:, :, 3:]
        return ((x @ keys.mT).masked_fill(columns(T - 3) + 3 > rows(T), MIN).softmax(-1) @ keys).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_a_softmax_over_heads_sees_hidden_keys() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        return ((q @ k.mT).masked_fill(columns(T) > rows(T), MIN).softmax(1) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


# -- buffers with a pattern that operators change


class Buffered(Heads):
    """Attention under a registered triangle, read in some way."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.read: Any = read
        self.register_buffer("seen", torch.ones(40, 40, dtype=torch.bool).tril())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~self.read(self.get_buffer("seen"), q.shape[-2]), -INF).softmax(-1) @ v


@pytest.mark.compiled
@pytest.mark.parametrize("name", spread(READ, 2))
def test_patterns_of_buffers(name: str) -> None:
    class Own(Decoder):
        attention = lambda _: Buffered(eval(f"lambda buffer, t: {READ[name][1]}"))  # type: ignore[assignment]  # noqa: E731

    ids, labels = torch.randint(0, VOCABULARY, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    compare(made(lambda: Own(layers=1)), {"ids": ids, "labels": labels}, chunk_size=4)


# -- random masks

SHORT = 7
FORMS = ["({} & {})", "({} & {})", "({} | {})", "torch.where({}, {}, r >= c)"]


@st.composite
def visible(draw: st.DrawFn, depth: int = 2) -> str:
    """An expression of visible keys."""
    if depth and draw(st.booleans()):
        return draw(st.sampled_from(FORMS)).format(draw(visible(depth - 1)), draw(visible(depth - 1)))
    leaf = draw(st.sampled_from([made for _, made in PARTS.values()])).format(n=draw(st.integers(-4, 4)))
    return f"(~{leaf})" if draw(st.integers(0, 4)) == 0 else leaf


@pytest.mark.parametrize("way", only(["huge", "boolean"], [*HIDE, *FUSED]))
@settings(max_examples=6, deadline=None)
@given(visible(), st.booleans(), st.integers(1, 10), st.integers(0, 99))
def test_random_masks(way: str, expression: str, causal: bool, chunk_size: int, seed: int) -> None:
    """Every operator with scores has rows and keys. Without a fused kernel each row sees itself, else eager's result is NaN."""

    def seen(r: Tensor, c: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        names = {"r": r, "c": c, "T": SHORT, "torch": torch, "keep": keep[:, None, None]}
        found = eval(expression, {**names, "doc": document[:, None, :, None], "docs": document[:, None, None]})
        found = found & (r >= c) if causal else found
        return found if way in FUSED else found | (r == c)

    torch.manual_seed(seed)
    data = [torch.rand(2, SHORT) < 0.6, torch.randint(0, 3, (2, SHORT))]
    facts = compare_function(under(way, seen), [*qkv(length=SHORT, seed=seed), *data], (chunk_size, 2))
    for node, roles in facts.access.roles.items():
        if len(facts.axes.sequence_dims(facts.axes.results[node][0])) == 2:
            assert sorted(role.value for role in roles.values()) == [Role.KEYS.value, Role.ROWS.value], node


# -- facts by interval of delta

DELTAS = range(-40, 41)
ORDINARY, UNKNOWN = Range(-9, 9), Range(-math.inf, math.inf, True)
RELATIONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne}
drawn_slopes = st.builds(
    lambda factor, offset, unit, rest: Slope(factor * unit, offset * unit + rest),
    st.integers(-3, 3),
    st.integers(-9, 9),
    st.sampled_from([1, 1, 2**55]),
    st.sampled_from([0, 0, -3, 3]),
)
drawn_facts = st.one_of(st.builds(constant, st.integers(-2, 2)), drawn_slopes, st.sampled_from([ORDINARY, UNKNOWN]))


@st.composite
def drawn_pieces(draw: st.DrawFn) -> Pieces:
    cuts = sorted(draw(st.sets(st.integers(-12, 12), max_size=4)))
    return merge_equal_pieces(cuts, draw(st.lists(drawn_facts, min_size=len(cuts) + 1, max_size=len(cuts) + 1)))


def value_at(fact: Fact, delta: int) -> float | None:
    return fact.factor * delta + fact.offset if isinstance(fact, Slope) else fact.constant


@given(st.sampled_from(sorted(RELATIONS)), drawn_slopes, st.one_of(st.integers(-20, 20), st.floats(allow_nan=False)))
def test_compare_slope(relation: str, slope: Slope, bound: float) -> None:
    found = compare_slope(relation, slope, bound)
    for delta in DELTAS:
        assert found.at(delta) == constant(RELATIONS[relation](slope.factor * delta + slope.offset, bound)), delta


@given(st.sampled_from(sorted(RELATIONS)), drawn_slopes, st.integers(0, 3), st.integers(-20, 20), st.integers(-2, 2))
def test_slopes_that_spread(relation: str, slope: Slope, spread: int, bound: int, number: int) -> None:
    """A comparison is known only where all values agree; a multiple has exactly the multiples of the ends."""
    wide = replace(slope, spread=spread)
    found, multiple = compare_slope(relation, wide, bound), wide.times(number).plus(Slope(0, bound))
    for delta in DELTAS:
        values = [slope.factor * delta + slope.offset + change for change in range(spread + 1)]
        verdicts = {RELATIONS[relation](value, bound) for value in values}
        assert found.at(delta) in (Range(0, 1), *map(constant, verdicts)) and (
            len(verdicts) == 1 or found.at(delta) == Range(0, 1)
        )
        assert found.at(delta) != Range(0, 1) or len(verdicts) == 2 or relation in ("eq", "ne")
        ends = multiple.factor * delta + multiple.offset, multiple.factor * delta + multiple.offset + multiple.spread
        assert ends == (min(number * value for value in values) + bound, max(number * value for value in values) + bound)


@given(drawn_slopes)
def test_absolute(slope: Slope) -> None:
    found = absolute_value(slope)
    for delta in DELTAS:
        assert value_at(found.at(delta), delta) == abs(slope.factor * delta + slope.offset)


@given(drawn_pieces(), drawn_pieces(), st.integers(-10, 10))
def test_combined_applies_a_function_at_every_delta(one: Pieces, other: Pieces, bound: int) -> None:
    """The function itself gives pieces."""

    def positive(a: Fact, b: Fact) -> Pieces:
        known = b if a is UNKNOWN else a
        return compare_slope("gt", known, bound) if isinstance(known, Slope) else constant_pieces(known)

    made = combine_pieces(positive, one, other)
    for delta in DELTAS:
        fact = other.at(delta) if one.at(delta) is UNKNOWN else one.at(delta)
        wanted = constant(fact.factor * delta + fact.offset > bound) if isinstance(fact, Slope) else fact
        assert made.at(delta) == wanted, delta


@given(drawn_pieces())
def test_the_hull_holds_all_facts(one: Pieces) -> None:
    around = hull_of(one, max(DELTAS))
    for delta in DELTAS:
        fact = one.at(delta)
        known = constant(fact.factor * delta + fact.offset) if isinstance(fact, Slope) else fact
        assert around.low <= known.low and known.high <= around.high and known.nan <= around.nan
