"""Masks composed at random: whatever they are found to hide, the result is exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.ir.facts import Role
from tests.support.masks import INF, attention, columns, qkv, rows
from tests.support.tracing import compare_function

small = st.integers(-4, 4)


@st.composite
def visible(draw: st.DrawFn, depth: int = 2) -> str:
    """An expression in r, c (positions), t (length), data `keep` [B, 1, 1, T] and `doc` [B, 1, T, 1], `docs` [B, 1, 1, T]."""
    if depth and draw(st.booleans()):
        one, other = draw(visible(depth - 1)), draw(visible(depth - 1))
        form = draw(st.sampled_from(["({} & {})", "({} | {})", "torch.where({}, {}, r >= c)", "({} & {})"]))
        return form.format(one, other)
    number = draw(small)
    leaf = draw(
        st.sampled_from(
            [
                f"(c <= r + {number})",
                f"(r - c < {abs(number) + 1})",
                f"(c > r - {number})",
                f"((r - c).abs() <= {abs(number)})",
                f"(c != r + {number})",
                f"(2 * c <= 2 * r + {number})",
                f"(c < {abs(number)})",
                f"(r >= {abs(number)})",
                f"(torch.ones(t, t).tril({number}) == 1)",
                f"(torch.ones(t, t).triu({number}) == 0)",
                f"torch.ones(t, t, dtype=torch.bool).triu({number})",
                "keep",
                "(doc == docs)",
            ]
        )
    )
    return f"(~{leaf})" if draw(st.integers(0, 4)) == 0 else leaf


HIDINGS = [
    "s.masked_fill(~m, float('-inf'))",
    "torch.where(m, s, float('-inf'))",
    "s + torch.zeros(t, t, dtype=s.dtype).masked_fill(~m, float('-inf'))",
    "s.masked_fill(~m, torch.finfo(s.dtype).min)",
    "s.masked_fill(~m, -1e4)",
    "s + m.to(s.dtype).log()",
    "s + (1 - m.to(s.dtype)) * -1e9",
    "s + (1 - m.to(s.dtype)) * torch.finfo(s.dtype).min",
    "torch.where(m, 5 * torch.tanh(s / 5), float('-inf'))",
    "(s - (r - c).to(s.dtype)).masked_fill(~m, float('-inf'))",
]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(visible(), st.sampled_from(HIDINGS), st.integers(1, 10), st.integers(0, 99))
def test_random_masks(expression: str, hiding: str, chunk_size: int, seed: int) -> None:
    """Whatever a mask is found to be, the result is exact. Each row sees itself, else eager's own result is NaN."""
    t = 7

    def mask(s: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        r, c = rows(t), columns(t)
        names = {"r": r, "c": c, "t": t, "torch": torch, "s": s}
        names |= {"keep": keep[:, None, None], "doc": document[:, None, :, None], "docs": document[:, None, None]}
        m = eval(expression, names) | (r == c)
        return eval(hiding, {**names, "m": m})

    torch.manual_seed(seed)
    data = [torch.rand(2, t) < 0.6, torch.randint(0, 3, (2, t))]
    compare_function(attention(mask), [*qkv(length=t, seed=seed), *data], (chunk_size, 2))


@settings(max_examples=25, deadline=None)
@given(visible(), st.booleans(), st.booleans(), st.integers(1, 10), st.integers(0, 99))
def test_random_fused_masks(expression: str, additive: bool, causal: bool, chunk_size: int, seed: int) -> None:
    """The same, of a fused operator, where rows that see nothing give zero."""
    t = 7

    def function(inputs: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        names = {"r": rows(t), "c": columns(t), "t": t, "torch": torch}
        names |= {"keep": keep[:, None, None], "doc": document[:, None, :, None], "docs": document[:, None, None]}
        m: Tensor = eval(expression, names)
        if causal:
            m = m & (rows(t) >= columns(t))
        given = torch.zeros(m.shape, dtype=q.dtype).masked_fill(~m, -INF) if additive else m
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given).pow(2).sum()

    torch.manual_seed(seed)
    data = [torch.rand(2, t) < 0.6, torch.randint(0, 3, (2, t))]
    compare_function(function, [*qkv(length=t, seed=seed), *data], (chunk_size, 2))


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(visible(depth=1), st.integers(0, 99))
def test_roles_are_rows_and_keys(expression: str, seed: int) -> None:
    """Every operator with scores has one of each."""
    t = 7

    def mask(s: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        names = {"r": rows(t), "c": columns(t), "t": t, "torch": torch}
        names |= {"keep": keep[:, None, None], "doc": document[:, None, :, None], "docs": document[:, None, None]}
        return s.masked_fill(~(eval(expression, names) | (rows(t) == columns(t))), -INF)

    data = [torch.rand(2, t) < 0.6, torch.randint(0, 3, (2, t))]
    facts = compare_function(attention(mask), [*qkv(length=t, seed=seed), *data], (3,), streams=True)
    for node, roles in facts.demand.roles.items():
        if len(facts.axes.sequence_dims(facts.axes.results[node][0])) == 2:
            assert sorted(role.value for role in roles.values()) == [Role.KEYS.value, Role.ROWS.value], node
