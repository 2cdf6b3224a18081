"""Masks: a key outside the span that the analysis finds is hidden. Named masks, near misses, misleading ones, random ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.ir.facts import Role
from tests.support.decoders.parts import VOCABULARY, Decoder, Heads, made
from tests.support.exactness import compare
from tests.support.masks import FUSED, HIDE, INF, LENGTH, MIN, Mask, Seen, attention, columns, fused, qkv, rows, under
from tests.support.spread import only, spread
from tests.support.tracing import compare_function

T = LENGTH
U8, I8, F16, BF16, F32 = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32
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


def spans_of(mask: Mask, data: tuple[Tensor, ...] = ()) -> set[str]:
    """The key spans of attention; its results are exact."""
    facts = compare_function(attention(mask), [*qkv(), *data], (2, 4), tolerance=1e-12)
    return set(facts.key_spans.span_kinds.values())


NEAR: dict[str, Mask] = {  # of scores, and numbers of rows and columns
    "-1e9": lambda s, r, c: s.masked_fill(c > r, -1e9),
    "times zero": lambda s, r, c: s * (c <= r),
    "columns twice": lambda s, r, c: s.masked_fill(2 * c > r, -INF),
    "flipped": lambda s, r, c: s.masked_fill((c > r).flip(1), -INF),
    "by value": lambda s, r, c: s.masked_fill(s > 0.3, -INF),
    "counted rows": lambda s, r, c: s.masked_fill(torch.ones(T, T).cumsum(0) <= 1, -INF),
    "swapped rows": lambda s, r, c: s.masked_fill(c > r[torch.arange(T - 1, -1, -1)], -INF),
}


@pytest.mark.parametrize("name", NEAR)
def test_masks_that_look_causal(name: str) -> None:
    assert spans_of(lambda s: NEAR[name](s, rows(T), columns(T))) != {"causal"}


PRODUCTS: dict[str, tuple[Callable[..., Tensor], set[str] | None]] = {  # of the scores and values, and their verdicts
    "keys by rows": (lambda s, v: s.mT.masked_fill(rows(T) > columns(T), -INF).softmax(-2).mT @ v, {"causal"}),
    "softmax over queries": (lambda s, v: s.masked_fill(columns(T) > rows(T), -INF).softmax(-2) @ v, None),
    "no softmax": (lambda s, v: s.tril() @ v, {"causal", "band([s, T))"}),
    "less the largest score": (lambda s, v: _by_hand(s.masked_fill(columns(T) > rows(T), -INF)) @ v, None),
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
def test_masks_of_data(name: str) -> None:
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
    """Or of the last rows only, aligned at the end."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        q, y = (x[:, :, 3:], x) if first is None else _shifted(x, first)
        hidden = columns(y.shape[2]) > rows(q.shape[2]) + y.shape[2] - q.shape[2]
        return ((q @ y.mT).masked_fill(hidden, -INF).softmax(-1) @ y).pow(2).sum()

    compare_function(function, qkv(), SIZES)


# -- index arithmetic that depends on arguments, or that a type wraps or rounds

HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # by numbers of rows and columns
    "sub with alpha": lambda r, c: torch.sub(c, r, alpha=2) > 0,
    "add with alpha": lambda r, c: torch.add(c, r, alpha=-2) > 0,
    "rsub with alpha": lambda r, c: torch.rsub(r, c, alpha=2) > 0,
    "alpha after the difference": lambda r, c: torch.sub(c - r, 3, alpha=2) > 0,
    "unsigned difference": lambda r, c: (c.to(U8) - r.to(U8)) > 0,
    "wide difference, cast": lambda r, c: (c - r).to(U8) > 0,
    "products of small integers": lambda r, c: (c.to(I8) * 40 - r.to(I8) * 40) > 0,
    "products of small integers, widened": lambda r, c: (c.to(I8) * 40).long() > (r.to(I8) * 40).long(),
    "sums of small integers": lambda r, c: (c.to(I8) + 124) > (r.to(I8) + 124),
    "distance as truth": lambda r, c: (c - r).bool() > 0,
    "rounded positions": lambda r, c: (c.to(BF16) + 512) > (r.to(BF16) + 512),
    "rounded where it is compared": lambda r, c: c - r + 512 > torch.full((1,), 512, dtype=BF16),
    "halves that do not underflow beside a number": lambda r, c: ((c - r).to(F16) * 1e-8) > 0,
    "a number beside halves that they would round": lambda r, c: ((c - r).to(F16) - 1.0004) >= 0,
    "a number beside bfloat16 that it would round": lambda r, c: torch.rsub((c - r).to(BF16), 1.003) <= 0,
    "halves that overflow": lambda r, c: (c.to(F16) * 20000) > (r.to(F16) * 20000),
    "a number that wraps": lambda r, c: (c.to(U8) - r.to(U8)) > torch.tensor([255]).to(U8),
    "every other number": lambda r, c: c > torch.arange(0, 2 * T, 2)[:, None],
    "one row, repeated": lambda r, c: c > torch.arange(1)[:, None].expand(T, 1),
    "the first part again": lambda r, c: torch.cat([torch.arange(3), torch.arange(3), torch.arange(6, T)]) > r,
    "negative start of a slice": lambda r, c: torch.arange(2 * T)[-T:][None] > r + T + 1,
    "rows counted from the end": lambda r, c: c > torch.arange(2 * T)[-T:][:, None],
    "start in front of the first": lambda r, c: torch.arange(T)[-2 * T :][None] > r + 1,
    "transposed beside itself": lambda r, c: (c > r).transpose(0, 1) | (c > r + 2),
}
CAUSAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sub with alpha": lambda r, c: torch.sub(2 * c, r, alpha=2) > 0,
    "small integers without overflow": lambda r, c: (c.to(I8) - r.to(I8)) > 0,
    "float positions": lambda r, c: (c.to(F32) - r.to(F32)) > 0.5,
    "bfloat16 positions": lambda r, c: c.to(BF16) > r.to(BF16),
    "unsigned positions compared": lambda r, c: c.to(U8) > r.to(U8),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_arithmetic_that_misleads(name: str) -> None:
    """Each row sees itself, so eager's result is finite."""
    r, c = rows, columns
    assert spans_of(lambda s: s.masked_fill(HIDDEN[name](r(T), c(T)) & (c(T) != r(T)), -INF)) != {"causal"}


@pytest.mark.parametrize("name", CAUSAL)
def test_arithmetic_that_is_causal(name: str) -> None:
    assert spans_of(lambda s: s.masked_fill(CAUSAL[name](rows(T), columns(T)), -INF)) == {"causal"}


# -- scores that are as large as the numbers that hide keys

GATE = torch.tensor([1.0, 1, 1, 1, -1, 1, -1, 1, -1], dtype=torch.float64)
COUNT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
BIASES: dict[str, Mask] = {  # of scores, a gate and a count
    "looked up": lambda s, gate, count: s + torch.tensor([-INF, 0.0], dtype=s.dtype)[count],
    "embedded": lambda s, gate, count: s + F.embedding(count, torch.tensor([[-1e300], [0.0]], dtype=s.dtype))[:, 0],
    "by one-hot": lambda s, gate, count: s + (F.one_hot(count, 2).to(s.dtype) @ gate.new_tensor([-1e300, 0])),
    "one less than a reciprocal": lambda s, gate, count: s + (1 - 1 / count.to(s.dtype)),
    "exponential": lambda s, gate, count: s - torch.exp((1 - count.to(s.dtype)) * 1000),
    "products one by one": lambda s, gate, count: s - (1 - count) * 1e100 * 1e100 * 1e108,
    "quotient": lambda s, gate, count: s - (1 - count) / torch.tensor(1e-308, dtype=s.dtype),
    "its own key": lambda s, gate, count: s - 1e306 * torch.eye(T, dtype=s.dtype),
    "reciprocal root": lambda s, gate, count: s - torch.relu(-gate).rsqrt(),
}


def ordinary(s: Tensor, gate: Tensor, count: Tensor) -> Tensor:
    return 30 * torch.tanh((s + torch.tanh(gate) - count.clamp(0, 7) * 2.0 + torch.where(gate < 0, 0.5, -3.0)) / 30)


@pytest.mark.parametrize("bias", [*BIASES.values(), ordinary], ids=[*BIASES, "ordinary"])
def test_rows_whose_visible_keys_are_all_hidden(bias: Mask) -> None:
    """They see keys that a finite number hides, too: no key is proven to be visible."""
    spans = spans_of(lambda s, gate, count: bias(s, gate, count).masked_fill(columns(T) > rows(T), MIN), (GATE, COUNT))
    assert spans == {"causal" if bias is ordinary else "masked"}


@pytest.mark.compiled
def test_a_bias_that_the_caller_trains() -> None:
    """It is not taken for an activation, which is never as large as numbers that hide keys."""
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

READ: dict[str, Callable[[Tensor, int], Tensor]] = {
    "one column, repeated": lambda buffer, t: buffer[:t, :1].expand(t, t),
    "one row, repeated": lambda buffer, t: buffer[:1, :t].expand(t, t),
    "from the second row": lambda buffer, t: buffer[1 : t + 1, :t],
    "every other row": lambda buffer, t: buffer[: 2 * t : 2, :t],
    "looked up": lambda buffer, t: buffer[torch.arange(t).flip(0)][:, :t],
    "turned": lambda buffer, t: buffer.transpose(0, 1)[:t, :t],
    "flipped": lambda buffer, t: buffer[:t, :t].flip(0),
}


class Buffered(Heads):
    """Attention under a registered triangle, read in some way."""

    def __init__(self, read: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("seen", torch.ones(40, 40, dtype=torch.bool).tril())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~self.read(self.get_buffer("seen"), q.shape[-2]), -INF).softmax(-1) @ v


@pytest.mark.compiled
@pytest.mark.parametrize("name", spread(READ, 2))
def test_patterns_of_buffers(name: str) -> None:
    class Own(Decoder):
        attention = lambda _: Buffered(READ[name])  # type: ignore[assignment]  # noqa: E731

    ids, labels = torch.randint(0, VOCABULARY, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    compare(made(lambda: Own(layers=1)), {"ids": ids, "labels": labels}, chunk_size=4)


# -- random masks

SHORT = 7
LEAVES = [  # of positions r and c, a number n, and data: `keep` [B, 1, 1, T], `doc` [B, 1, T, 1], `docs` [B, 1, 1, T]
    "(c <= r + {n})",
    "(r - c < abs({n}) + 1)",
    "(c > r - {n})",
    "((r - c).abs() <= abs({n}))",
    "(c != r + {n})",
    "(2 * c <= 2 * r + {n})",
    "(c < abs({n}))",
    "(r >= abs({n}))",
    "(torch.ones(t, t).tril({n}) == 1)",
    "(torch.ones(t, t).triu({n}) == 0)",
    "torch.ones(t, t, dtype=torch.bool).triu({n})",
    "keep",
    "(doc == docs)",
]
FORMS = ["({} & {})", "({} & {})", "({} | {})", "torch.where({}, {}, r >= c)"]


@st.composite
def visible(draw: st.DrawFn, depth: int = 2) -> str:
    """An expression of what is seen."""
    if depth and draw(st.booleans()):
        return draw(st.sampled_from(FORMS)).format(draw(visible(depth - 1)), draw(visible(depth - 1)))
    leaf = draw(st.sampled_from(LEAVES)).format(n=draw(st.integers(-4, 4)))
    return f"(~{leaf})" if draw(st.integers(0, 4)) == 0 else leaf


@pytest.mark.parametrize("way", only(["huge", "boolean"], [*HIDE, *FUSED]))
@settings(max_examples=6, deadline=None)
@given(visible(), st.booleans(), st.integers(1, 10), st.integers(0, 99))
def test_random_masks(way: str, expression: str, causal: bool, chunk_size: int, seed: int) -> None:
    """Every operator with scores has rows and keys. Without a fused kernel each row sees itself, else eager's result is NaN."""

    def seen(r: Tensor, c: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        names = {"r": r, "c": c, "t": SHORT, "torch": torch, "keep": keep[:, None, None]}
        found = eval(expression, {**names, "doc": document[:, None, :, None], "docs": document[:, None, None]})
        found = found & (r >= c) if causal else found
        return found if way in FUSED else found | (r == c)

    torch.manual_seed(seed)
    data = [torch.rand(2, SHORT) < 0.6, torch.randint(0, 3, (2, SHORT))]
    facts = compare_function(under(way, seen), [*qkv(length=SHORT, seed=seed), *data], (chunk_size, 2))
    for node, roles in facts.access.roles.items():
        if len(facts.axes.sequence_dims(facts.axes.results[node][0])) == 2:
            assert sorted(role.value for role in roles.values()) == [Role.KEYS.value, Role.ROWS.value], node
