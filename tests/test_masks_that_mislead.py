"""Masks that look causal and are not: an argument, arithmetic that wraps or rounds, scores that are no ordinary numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.decoders.parts import VOCABULARY, Decoder, Heads, made
from tests.support.exactness import compare
from tests.support.masks import INF, LENGTH, Mask, attention, columns, qkv, rows
from tests.support.tracing import compare_function

T = LENGTH
MIN = torch.finfo(torch.float64).min


def spans_of(mask: Mask, data: tuple[Tensor, ...] = ()) -> set[str]:
    """How far each attention looks; exact in any case."""
    facts = compare_function(attention(mask), [*qkv(), *data], (2, 4), tolerance=1e-12)
    return set(facts.causality.verdicts.values())


def i(dtype: torch.dtype) -> Tensor:
    return rows(T).to(dtype)


def j(dtype: torch.dtype) -> Tensor:
    return columns(T).to(dtype)


# -- arguments that have to be looked at, and types that have to hold what is computed

HIDDEN: dict[str, Callable[[], Tensor]] = {
    "sub with alpha": lambda: torch.sub(columns(T), rows(T), alpha=2) > 0,
    "add with alpha": lambda: torch.add(columns(T), rows(T), alpha=-2) > 0,
    "rsub with alpha": lambda: torch.rsub(rows(T), columns(T), alpha=2) > 0,
    "alpha after the difference": lambda: torch.sub(columns(T) - rows(T), 3, alpha=2) > 0,
    "unsigned difference": lambda: (j(torch.uint8) - i(torch.uint8)) > 0,
    "unsigned difference the other way": lambda: (i(torch.uint8) - j(torch.uint8)) < 0,
    "wide difference, cast": lambda: (j(torch.int64) - i(torch.int64)).to(torch.uint8) > 0,
    "products of small integers": lambda: (j(torch.int8) * 40 - i(torch.int8) * 40) > 0,
    "products of small integers, widened": lambda: (j(torch.int8) * 40).long() > (i(torch.int8) * 40).long(),
    "sums of small integers": lambda: (j(torch.int8) + 124) > (i(torch.int8) + 124),
    "distance as truth": lambda: (columns(T) - rows(T)).bool() > 0,
    "rounded positions": lambda: (j(torch.bfloat16) + 512) > (i(torch.bfloat16) + 512),
    "rounded distance": lambda: ((columns(T) - rows(T)).to(torch.bfloat16) + 300) > 300,
    "rounded where it is compared": lambda: columns(T) - rows(T) + 512 > torch.full((1,), 512, dtype=torch.bfloat16),
    "halves that do not underflow beside a number": lambda: ((columns(T) - rows(T)).to(torch.float16) * 1e-8) > 0,
    "a number beside halves that they would round": lambda: ((columns(T) - rows(T)).to(torch.float16) - 1.0004) >= 0,
    "a number beside bfloat16 that it would round": lambda: torch.rsub((columns(T) - rows(T)).to(torch.bfloat16), 1.003) <= 0,
    "halves that overflow": lambda: (j(torch.float16) * 20000) > (i(torch.float16) * 20000),
    "a number that wraps": lambda: (j(torch.uint8) - i(torch.uint8)) > torch.tensor([255]).to(torch.uint8),
    "every other number": lambda: columns(T) > torch.arange(0, 2 * T, 2)[:, None],
    "one row, repeated": lambda: columns(T) > torch.arange(1)[:, None].expand(T, 1),
    "pieces of which the second is the first": lambda: (
        torch.cat([torch.arange(3), torch.arange(3), torch.arange(6, T)]) > rows(T)
    ),
    "negative start of a slice": lambda: torch.arange(2 * T)[-T:][None] > rows(T) + T + 1,
    "rows counted from the end": lambda: columns(T) > torch.arange(2 * T)[-T:][:, None],
    "start in front of the first": lambda: torch.arange(T)[-2 * T :][None] > rows(T) + 1,
    "transposed": lambda: (columns(T) > rows(T)).transpose(0, 1),
    "transposed beside itself": lambda: (columns(T) > rows(T)).transpose(0, 1) | (columns(T) > rows(T) + 2),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_arithmetic_that_misleads(name: str) -> None:
    """Each row sees itself, so that eager's own result is a number."""
    spans = spans_of(lambda s: s.masked_fill(HIDDEN[name]() & (columns(T) != rows(T)), -INF))
    assert spans != {"causal"}


STILL: dict[str, Callable[[], Tensor]] = {
    "sub with alpha": lambda: torch.sub(2 * columns(T), rows(T), alpha=2) > 0,
    "small integers that hold": lambda: (j(torch.int8) - i(torch.int8)) > 0,
    "float positions": lambda: (j(torch.float32) - i(torch.float32)) > 0.5,
    "bfloat16 positions": lambda: j(torch.bfloat16) > i(torch.bfloat16),
    "unsigned positions compared": lambda: j(torch.uint8) > i(torch.uint8),
}


@pytest.mark.parametrize("name", STILL)
def test_arithmetic_that_holds_is_still_understood(name: str) -> None:
    assert spans_of(lambda s: s.masked_fill(STILL[name](), -INF)) == {"causal"}


# -- scores that count as ordinary ones, and are not

GATE = torch.tensor([1.0, 1, 1, 1, -1, 1, -1, 1, -1], dtype=torch.float64)
COUNT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])

BIASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chosen": lambda s, gate, count: s + torch.where(gate < 0, 0.0, -INF),
    "looked up": lambda s, gate, count: s + torch.tensor([-INF, 0.0], dtype=s.dtype)[count],
    "embedded": lambda s, gate, count: (
        s + torch.nn.functional.embedding(count, torch.tensor([[-1e300], [0.0]], dtype=s.dtype))[:, 0]
    ),
    "by one-hot": lambda s, gate, count: s + (torch.nn.functional.one_hot(count, 2).to(s.dtype) @ gate.new_tensor([-1e300, 0])),
    "one less than a reciprocal": lambda s, gate, count: s + (1 - 1 / count.to(s.dtype)),
    "exponential": lambda s, gate, count: s - torch.exp((1 - count.to(s.dtype)) * 1000),
    "products one by one": lambda s, gate, count: s - (1 - count) * 1e100 * 1e100 * 1e108,
    "quotient": lambda s, gate, count: s - (1 - count) / torch.tensor(1e-308, dtype=s.dtype),
    "subtracted": lambda s, gate, count: s - 1e306 * (1 - count),
    "its own key": lambda s, gate, count: s - 1e306 * torch.eye(T, dtype=s.dtype),
    "logarithm": lambda s, gate, count: s + count.to(s.dtype).log(),
    "reciprocal root": lambda s, gate, count: s - torch.relu(-gate).rsqrt(),
}


@pytest.mark.parametrize("name", BIASES)
def test_rows_whose_visible_keys_are_all_hidden(name: str) -> None:
    """They look at what a finite number hides as well: nothing proves that a key is left."""
    spans = spans_of(lambda s, gate, count: BIASES[name](s, gate, count).masked_fill(columns(T) > rows(T), MIN), (GATE, COUNT))
    assert spans == {"masked"}


def test_ordinary_scores_are_still_hidden_by_a_finite_number() -> None:
    def mask(s: Tensor, gate: Tensor, count: Tensor) -> Tensor:
        bias = torch.tanh(gate) - count.clamp(0, 7) * 2.0 + torch.where(gate < 0, 0.5, -3.0)
        return (30 * torch.tanh((s + bias) / 30)).masked_fill(columns(T) > rows(T), MIN)

    assert spans_of(mask, (GATE, COUNT)) == {"causal"}


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


FUSED_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "of positions": lambda seen: columns(T) > rows(T),
    "of data": lambda seen: (columns(T) > rows(T)) | ~seen,
}


@pytest.mark.parametrize("name", FUSED_MASKS)
@pytest.mark.parametrize(("scale", "proven"), [(None, True), (0.5, True), (2.0**100, False)])
def test_a_fused_scale_makes_scores_large(scale: float | None, proven: bool, name: str) -> None:
    """Then they are as negative as what hides. Whole numbers: products are the same in chunks of all sizes."""

    def function(inputs: Tensor, seen: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        hidden = torch.zeros(T, T, dtype=q.dtype).masked_fill(FUSED_MASKS[name](seen), -1e33)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=scale).pow(2).sum()

    seen = torch.arange(T) < T - 2
    facts = compare_function(function, [(100 * qkv()[0]).detach().round().requires_grad_(), seen], (2, 4), tolerance=1e-12)
    assert set(facts.causality.verdicts.values()) == {"causal" if proven and name == "of positions" else "masked"}


def test_fewer_keys_than_rows() -> None:
    """A row without a key of its own has nothing beside which the hidden ones vanish."""

    def function(inputs: Tensor) -> Tensor:
        x = torch.tanh(inputs[0])
        keys = x[:, :, 3:]
        scores = (x @ keys.transpose(-2, -1)).masked_fill(columns(T - 3) + 3 > rows(T), MIN)
        return (scores.softmax(-1) @ keys).pow(2).sum()

    compare_function(function, qkv(), (2, 1, 4))


def test_a_softmax_over_heads_leaves_shares_of_what_is_hidden() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        shares = (q @ k.transpose(-2, -1)).masked_fill(columns(T) > rows(T), MIN).softmax(1)
        return (shares @ v).pow(2).sum()

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
        t = q.shape[-2]
        return (q @ k.transpose(-2, -1)).masked_fill(~self.read(self.get_buffer("seen"), t), -INF).softmax(-1) @ v


@pytest.mark.parametrize("name", READ)
def test_patterns_of_buffers(name: str) -> None:
    class Own(Decoder):
        attention = lambda _: Buffered(READ[name])  # type: ignore[assignment]  # noqa: E731

    model = made(lambda: Own(layers=1))
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    compare(model, {"ids": ids, "labels": labels}, chunk_size=4)
