"""The flash-attn package's operators stream as those of `scaled_dot_product_attention` do: by a stand-in with their contract."""

from collections.abc import Callable
from functools import partial  # noqa: F401  (in tests/tables)
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.kernels import sdpa
from streamfx.passes.ops.hub_kernels import is_attention, operator_name
from streamfx.tools.report.fallback_reasons import ATTENTION, DECLARE_SHAPES  # noqa: F401  (in tests/tables)
from tests.support import hf, hub_kernels, layouts
from tests.support.calls import noted
from tests.support.exactness import compare, recorder
from tests.support.flash_package import IS_STAND_IN, flash_attn_func, flash_attn_varlen_func
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU"),
]

VOCABULARY, WIDTH, LENGTH = 31, 20, 23
PLAIN_ENDS, GAPS = [0, 4, 5, 11, LENGTH], [0, 0, 9, 9, LENGTH]  # GAPS: two documents without rows
CASES: dict[str, tuple[dict[str, Any], int, set[str]]] = named_cases("cases", globals())


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


DENSE = [(name, None, None) for name in CASES]
OF_DOCUMENTS = [
    *((name, PLAIN_ENDS, None) for name in CASES if "by its" not in name),
    *(("causal", GAPS, None), ("all keys", GAPS, None)),
    # ends of keys that nothing proves equal: a document's keys may be more or fewer than its rows, and both end together
    ("causal", PLAIN_ENDS, [0, 6, 7, 8, LENGTH]),
    ("window to both sides", PLAIN_ENDS, [0, 1, 8, 20, LENGTH]),
    ("all keys", PLAIN_ENDS, PLAIN_ENDS),
]
DEFAULT = [DENSE[3], OF_DOCUMENTS[2], OF_DOCUMENTS[5], OF_DOCUMENTS[7]]


@pytest.mark.parametrize(("name", "ends", "others"), only(DEFAULT, [*DENSE, *OF_DOCUMENTS]), ids=str)
def test_calls_of_the_package_stream(name: str, ends: list[int] | None, others: list[int] | None) -> None:
    how, groups, seen = CASES[name]
    given = batch() if ends is None else packed(ends) if others is None else packed(ends, others)
    attention = seen if others is None else {"masked"}
    compare(Decoder(how, groups).double(), given, chunk_size=6, loss_chunk_size=5, also=(1,), attention=attention)


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"alibi_slopes": torch.ones(2)}, {"dropout_p": 0.1}])
def test_unsupported_arguments_fall_back(asked: dict[str, Any]) -> None:
    """The reason names the argument."""

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


def test_more_keys_than_queries_fall_back() -> None:
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
def test_documents_run_separately_without_a_mask(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers: no kernel is given a mask, and no row is compared with another document's keys."""
    seen = noted(monkeypatch, sdpa, "forward", lambda call: (call.bias is None, call.key.shape[2]))
    ends = [0, 9, LENGTH]
    model, given = Decoder({"causal": True}, 2).double(), packed(ends, ends) if apart else packed(ends)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=recorder(chunk_size=6))(**given), model(**given))
    assert seen and all(is_plain and keys <= LENGTH - 9 for is_plain, keys in seen)


# -- kernels from the hub with the operators of the package, and other kernels

Attention = Callable[..., Tensor]


class Around(nn.Module):
    """A layer of heads [b m h d] around some attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention, self.qkv, self.out = attention, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(self.attention(q, k, v).flatten(2)).square().mean()


def explained(attention: Attention) -> str:
    torch._dynamo.reset()
    with torch.no_grad():
        return str(streamfx.explain(Around(attention).double(), torch.randn(2, LENGTH, 16, dtype=torch.float64), chunk_size=6))


@pytest.mark.parametrize(("name", "given"), [("window", batch()), ("causal", packed([0, 4, 5, 11, LENGTH]))])
def test_flash_attn2_streams(name: str, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(f"{__name__}.{function}", getattr(hub_kernels.flash_attn2(), function))
    how, groups, seen = CASES[name]
    compare(Decoder(how, groups).double(), given, chunk_size=6, loss_chunk_size=5, attention=seen)


@pytest.mark.long
def test_a_hub_kernel_streams_through_transformers() -> None:
    pytest.importorskip("transformers")
    with hub_kernels.loaded_by_transformers() as implementation:
        model = hf.made("llama", implementation)
        given = layouts.LAYOUTS["plain"](layouts.tokens(hf.VOCABULARY, 2, 22))
        compare(model, given, chunk_size=7, also=(16,), attention=hf.verdicts("llama"))


def test_an_operator_with_other_arguments_is_not_recognized() -> None:
    hub_kernels.flash_attn2()
    own, other = getattr(torch.ops, f"_flash_attn2_{hub_kernels.BUILD}"), getattr(torch.ops, hub_kernels.FA3)
    library = torch.library.Library("_flash_attn2_other", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor")
    assert operator_name(own._flash_attn_forward.default) == "flash_attn::_flash_attn_forward"
    assert operator_name(torch.ops._flash_attn2_other._flash_attn_forward.default) == "_flash_attn2_other::_flash_attn_forward"
    assert operator_name(other._flash_attn_forward.default) == f"{hub_kernels.FA3}::_flash_attn_forward"
    assert operator_name(torch.ops.aten.mm.default) == "aten::mm" and operator_name(len) is None
    assert is_attention(other._flash_attn_forward.default) and not is_attention(torch.ops.aten.mm.default)


OTHER = "_flash_attn4_cuda_8f3c1d2"  # has the operators of flash-attn2, which may compute something else
FALLBACKS: dict[str, tuple[Callable[[], Attention], tuple[str, ...]]] = named_cases("fallbacks", globals())


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_names_its_operator_and_an_alternative(name: str) -> None:
    attention, texts = FALLBACKS[name]
    found = explained(attention())
    assert all(text in found for text in texts)
