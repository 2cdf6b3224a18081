"""Masks composed at random: whatever they are found to hide, the result is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.ir.facts import Role
from tests.support.masks import FUSED, HIDE, qkv, under
from tests.support.spread import only
from tests.support.tracing import compare_function

LENGTH = 7
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
    """Every operator with scores has rows and keys. Spelled out, each row sees itself, else eager's own result is NaN."""

    def seen(r: Tensor, c: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        names = {"r": r, "c": c, "t": LENGTH, "torch": torch, "keep": keep[:, None, None]}
        found = eval(expression, {**names, "doc": document[:, None, :, None], "docs": document[:, None, None]})
        found = found & (r >= c) if causal else found
        return found if way in FUSED else found | (r == c)

    torch.manual_seed(seed)
    data = [torch.rand(2, LENGTH) < 0.6, torch.randint(0, 3, (2, LENGTH))]
    facts = compare_function(under(way, seen), [*qkv(length=LENGTH, seed=seed), *data], (chunk_size, 2))
    for node, roles in facts.access.roles.items():
        if len(facts.axes.sequence_dims(facts.axes.results[node][0])) == 2:
            assert sorted(role.value for role in roles.values()) == [Role.KEYS.value, Role.ROWS.value], node
