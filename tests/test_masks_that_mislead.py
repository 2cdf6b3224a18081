"""Masks that look causal and are not: an argument, arithmetic that wraps or rounds, scores that are no ordinary numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.decoders.parts import VOCABULARY, Decoder, Heads, made
from tests.support.exactness import compare
from tests.support.masks import INF, LENGTH, MIN, Mask, attention, columns, qkv, rows
from tests.support.spread import spread
from tests.support.tracing import compare_function

T = LENGTH
U8, I8, F16, BF16, F32 = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32


def spans_of(mask: Mask, data: tuple[Tensor, ...] = ()) -> set[str]:
    """How far each attention looks; exact in any case."""
    facts = compare_function(attention(mask), [*qkv(), *data], (2, 4), tolerance=1e-12)
    return set(facts.key_spans.span_kinds.values())


# -- arguments that have to be looked at, and types that have to hold what is computed

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
STILL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sub with alpha": lambda r, c: torch.sub(2 * c, r, alpha=2) > 0,
    "small integers that hold": lambda r, c: (c.to(I8) - r.to(I8)) > 0,
    "float positions": lambda r, c: (c.to(F32) - r.to(F32)) > 0.5,
    "bfloat16 positions": lambda r, c: c.to(BF16) > r.to(BF16),
    "unsigned positions compared": lambda r, c: c.to(U8) > r.to(U8),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_arithmetic_that_misleads(name: str) -> None:
    """Each row sees itself, so that eager's own result is a number."""
    r, c = rows, columns
    spans = spans_of(lambda s: s.masked_fill(HIDDEN[name](r(T), c(T)) & (c(T) != r(T)), -INF))
    assert spans != {"causal"}


@pytest.mark.parametrize("name", STILL)
def test_arithmetic_that_holds_is_still_understood(name: str) -> None:
    assert spans_of(lambda s: s.masked_fill(STILL[name](rows(T), columns(T)), -INF)) == {"causal"}


# -- scores that count as ordinary ones, and are not

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
    """They look at what a finite number hides as well: nothing proves that a key is left."""
    spans = spans_of(lambda s, gate, count: bias(s, gate, count).masked_fill(columns(T) > rows(T), MIN), (GATE, COUNT))
    assert spans == {"causal" if bias is ordinary else "masked"}


@pytest.mark.compiled
def test_a_bias_that_the_caller_trains() -> None:
    """It is no activation for that: rows whose visible keys it hides look at what a finite number hides."""
    function = attention(lambda s, bias: (s + bias).masked_fill(columns(T) > rows(T), MIN))
    inputs, bias = qkv()[0], torch.where(GATE < 0, 0.0, -INF).requires_grad_()
    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 2, "bodies": "eager"})
    wanted, found = (torch.autograd.grad(run(inputs, bias), (inputs, bias)) for run in (function, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_zero_that_is_counted() -> None:
    """Only what a sum is linear in tells which keys it needs: a histogram counts what is zero, too."""

    def function(inputs: Tensor) -> Tensor:
        q, k, _ = inputs.unbind()
        level = q[0, 0, :, 0].detach().abs()
        counts = torch.histc(torch.where(columns(T) > rows(T), 0, level + level[:, None]), 3, 0, 4)
        return attention(lambda s: s.masked_fill(columns(T) > rows(T), -INF))(inputs) + counts[0] * k.sum()

    compare_function(function, qkv(), (2, 4))


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2.0**100])
def test_a_fused_scale_makes_scores_large(scale: float, of_data: bool) -> None:
    """Then they are as negative as what hides. Whole numbers: products are the same in chunks of all sizes."""

    def function(inputs: Tensor, seen: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        later = columns(T) > rows(T)
        hidden = torch.zeros(T, T, dtype=q.dtype).masked_fill(later | ~seen if of_data else later, -1e33)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=scale).pow(2).sum()

    seen = torch.arange(T) < T - 2
    facts = compare_function(function, [(100 * qkv()[0]).detach().round().requires_grad_(), seen], (2, 4), tolerance=1e-12)
    assert set(facts.key_spans.span_kinds.values()) == {"causal" if scale < 1 and not of_data else "masked"}


def test_fewer_keys_than_rows() -> None:
    """A row without a key of its own has nothing beside which the hidden ones vanish."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        keys = x[:, :, 3:]
        return ((x @ keys.mT).masked_fill(columns(T - 3) + 3 > rows(T), MIN).softmax(-1) @ keys).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_a_softmax_over_heads_leaves_shares_of_what_is_hidden() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        return ((q @ k.mT).masked_fill(columns(T) > rows(T), MIN).softmax(1) @ v).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


# -- buffers whose pattern does not survive what is done to them

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
