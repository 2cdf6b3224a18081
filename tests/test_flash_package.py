"""The flash-attn package's operators stream as those of `scaled_dot_product_attention` do: by a stand-in with their contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.kernels import sdpa
from tests.support.exactness import compare, recorder
from tests.support.flash_package import IS_STAND_IN, flash_attn_func, flash_attn_varlen_func
from tests.support.spread import only

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU"),
]

VOCABULARY, WIDTH, LENGTH = 31, 20, 23
PLAIN_ENDS, GAPS = [0, 4, 5, 11, LENGTH], [0, 0, 9, 9, LENGTH]  # GAPS: two documents without rows
CASES: dict[str, tuple[dict[str, Any], int, set[str]]] = {  # how it is called, groups of heads, what is seen
    "causal": ({"causal": True}, 2, {"causal"}),
    "grouped": ({"causal": True, "softmax_scale": 0.3}, 1, {"causal"}),
    "window": ({"causal": True, "window_size": (4, 4)}, 2, {"window(5)"}),
    "window to both sides": ({"window_size": (4, 2)}, 1, {"band([s-4, e+2))"}),
    "causal by its window": ({"window_size": (-1, 0)}, 2, {"causal"}),
    "all keys": ({}, 2, {"masked"}),
}


class Decoder(nn.Module):
    """Heads of width 10, which the package pads to 16; with `ends`, over one row of documents, whose keys may have other ends."""

    def __init__(self, how: dict[str, Any], groups: int) -> None:
        super().__init__()
        self.how, self.groups = how, groups
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // 2 * groups)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor, ends: Tensor | None = None, others: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        key, value = self.keys(x).unflatten(-1, (2, self.groups, -1)).unbind(-3)
        query = self.query(x).unflatten(-1, (2, -1))
        if ends is None:
            made = flash_attn_func(query, key, value, **self.how)
        else:
            others = ends.clone() if others is None else others
            made = flash_attn_varlen_func(query, key, value, ends, others, LENGTH, LENGTH, **self.how)
        x = x + made.flatten(-2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def batch(*shape: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, shape or (2, LENGTH)) for name in ("ids", "labels")}


def packed(*ends: list[int]) -> dict[str, Tensor]:
    tensors = {name: torch.tensor(own, dtype=torch.int32) for name, own in zip(("ends", "others"), ends, strict=False)}
    return {**batch(ends[0][-1]), **tensors}


DENSE = [(name, None) for name in CASES]
OF_DOCUMENTS = [*((name, PLAIN_ENDS) for name in CASES if "by its" not in name), ("causal", GAPS), ("all keys", GAPS)]


@pytest.mark.parametrize(("name", "ends"), only([DENSE[3], OF_DOCUMENTS[2], OF_DOCUMENTS[-2]], [*DENSE, *OF_DOCUMENTS]), ids=str)
def test_it_streams(name: str, ends: list[int] | None) -> None:
    how, groups, seen = CASES[name]
    given = batch() if ends is None else packed(ends)
    compare(Decoder(how, groups).double(), given, chunk_size=6, loss_chunk_size=5, also=(1,), attention=seen)


OTHERS = [("causal", [0, 6, 7, 8, LENGTH]), ("window to both sides", [0, 1, 8, 20, LENGTH]), ("all keys", PLAIN_ENDS)]


@pytest.mark.parametrize(("name", "others"), only(OTHERS[:1], OTHERS), ids=str)
def test_ends_that_nothing_proves_equal(name: str, others: list[int]) -> None:
    """They stream too, and a document's keys may be more or fewer than its rows: both end together."""
    how, groups, _ = CASES[name]
    given = packed(PLAIN_ENDS, others)
    compare(Decoder(how, groups).double(), given, chunk_size=6, loss_chunk_size=5, also=(1,), attention={"masked"})


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"alibi_slopes": torch.ones(2)}, {"dropout_p": 0.1}])
def test_what_no_kernel_of_ours_does_is_left_alone(asked: dict[str, Any]) -> None:
    """The operator runs whole, and the reason names what is asked."""

    def function(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8))
        return flash_attn_func(heads, heads * 2, heads, causal=True, **asked).square().sum()

    x, backend = torch.randn(2, LENGTH, 16, dtype=torch.float64), recorder(chunk_size=6)
    compiled = torch.compile(function, backend=backend)
    if "softcap" in asked:
        torch.testing.assert_close(compiled(x), function(x))
    else:  # nor does the stand-in
        with pytest.raises(AssertionError):
            compiled(x)
    (name,) = asked
    assert any(name in str(facts.analysis_error) or name in " ".join(facts.reasons()) for facts in backend.facts)


def test_keys_before_the_rows_are_left_alone() -> None:
    """A causal mask ends at the last row and key, where ours begins at the first."""

    def function(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8))
        values = heads * 2  # Dynamo of 2.11 has wrong gradients where a function is given one tensor twice
        return flash_attn_func(heads[:, 5:], heads, values, causal=True).square().sum()

    x = torch.randn(2, LENGTH, 16, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(function(x), x)
    (found,) = torch.autograd.grad(torch.compile(function, backend=recorder(chunk_size=6))(x), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one tensor", "two"])
def test_documents_are_taken_apart(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers: no kernel is given a mask, and no row is compared with another document's keys."""
    seen: list[tuple[bool, int]] = []

    def noted(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *others: Any) -> Any:
        seen.append((bias is None, key.shape[2]))
        return forward(query, key, value, bias, *others)

    forward, ends = sdpa.forward, [0, 9, LENGTH]
    monkeypatch.setattr(sdpa, "forward", noted)
    model, given = Decoder({"causal": True}, 2).double(), packed(ends, ends) if apart else packed(ends)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=recorder(chunk_size=6))(**given), model(**given))
    assert seen and all(is_plain and keys <= LENGTH - 9 for is_plain, keys in seen)
