"""The flash-attn package's operators stream as those of `scaled_dot_product_attention` do: by a stand-in with their contract."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.exactness import compare, recorder

if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("the package itself is installed", allow_module_level=True)

from tests.support.flash_package import flash_attn_func

VOCABULARY, WIDTH, LENGTH = 31, 20, 23
CASES: dict[str, tuple[dict[str, Any], int, set[str]]] = {  # how it is called, groups of heads, what is seen
    "causal": ({"causal": True}, 2, {"causal"}),
    "grouped": ({"causal": True, "softmax_scale": 0.3}, 1, {"causal"}),
    "window": ({"causal": True, "window_size": (4, 0)}, 2, {"window(5)"}),
    "window to both sides": ({"window_size": (4, 2)}, 1, {"band([s-4, e+2))"}),
    "causal by its window": ({"window_size": (-1, 0)}, 2, {"causal"}),
    "all keys": ({}, 2, {"masked"}),
}


class Decoder(nn.Module):
    """Heads of width 10, which the package pads to 16."""

    def __init__(self, how: dict[str, Any], groups: int) -> None:
        super().__init__()
        self.how, self.groups = how, groups
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // 2 * groups)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        key, value = self.keys(x).unflatten(-1, (2, self.groups, -1)).unbind(2)
        x = x + flash_attn_func(self.query(x).unflatten(-1, (2, -1)), key, value, **self.how).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (2, LENGTH)) for name in ("ids", "labels")}


@pytest.mark.parametrize("name", CASES)
def test_it_streams(name: str) -> None:
    how, groups, seen = CASES[name]
    compare(Decoder(how, groups).double(), batch(), chunk_size=6, loss_chunk_size=5, also=(1,), attention=seen, streams=True)


def test_what_no_kernel_of_ours_does_is_left_alone() -> None:
    """Scores that are capped: the operator runs whole, and says so."""
    model, given = Decoder({"causal": True, "softcap": 30.0}, 2).double(), batch()
    backend = recorder(chunk_size=6, loss_chunk_size=5)
    with torch.no_grad():
        found = torch.compile(model, backend=backend)(**given)
        torch.testing.assert_close(found, model(**given))
    assert any("flash_attn" in reason for facts in backend.facts for reason in facts.reasons())


def test_keys_before_the_rows_are_left_alone() -> None:
    """A causal mask ends at the last row and key, where ours begins at the first."""

    def function(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8))
        return flash_attn_func(heads[:, 5:], heads, heads, causal=True).square().sum()

    x = torch.randn(2, LENGTH, 16, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(function(x), x)
    (found,) = torch.autograd.grad(torch.compile(function, backend=recorder(chunk_size=6))(x), x)
    torch.testing.assert_close(found, wanted)
