"""Attention of kernels from the hub: what are the flash-attn package's operators streams, of all others is told what helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.passes.ops.hub_kernels import is_attention, name_of
from streamfx.tools.report.fallback_reasons import ATTENTION, DECLARE_SHAPES
from tests.support import hf, hub_kernels, layouts
from tests.support.exactness import compare
from tests.support.flash_package import IS_STAND_IN
from tests.test_flash_package import CASES, LENGTH, Decoder, batch, packed

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU"),
]

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
        monkeypatch.setattr(f"tests.test_flash_package.{function}", getattr(hub_kernels.flash_attn2(), function))
    how, groups, seen = CASES[name]
    compare(Decoder(how, groups).double(), given, chunk_size=6, loss_chunk_size=5, attention=seen)


@pytest.mark.long
def test_through_transformers() -> None:
    pytest.importorskip("transformers")
    with hub_kernels.loaded_by_transformers() as implementation:
        model = hf.made("llama", implementation)
        given = layouts.LAYOUTS["plain"](layouts.tokens(hf.VOCABULARY, 2, 22))
        compare(model, given, chunk_size=7, also=(16,), attention=hf.verdicts("llama"))


def test_what_the_package_does_not_stream_runs_whole() -> None:
    """With the reason that its own operator has."""
    attention = hub_kernels.flash_attn2().flash_attn_func
    assert "softcap=30.0" in explained(lambda q, k, v: attention(q, k, v, causal=True, softcap=30.0))


def test_another_kernel_with_the_same_operators_is_not_taken_for_it() -> None:
    """Nobody says that it computes the same."""
    kernel = "_flash_attn4_cuda_8f3c1d2"
    attention = hub_kernels.flash_attn2(kernel).flash_attn_func
    assert f"no rule for {kernel}" in explained(lambda q, k, v: attention(q, k, v, causal=True))


def test_other_arguments_are_of_another_operator() -> None:
    hub_kernels.flash_attn2()
    own, other = getattr(torch.ops, f"_flash_attn2_{hub_kernels.BUILD}"), getattr(torch.ops, hub_kernels.FA3)
    library = torch.library.Library("_flash_attn2_other", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor")
    assert name_of(own._flash_attn_forward.default) == "flash_attn::_flash_attn_forward"
    assert name_of(torch.ops._flash_attn2_other._flash_attn_forward.default) == "_flash_attn2_other::_flash_attn_forward"
    assert name_of(other._flash_attn_forward.default) == f"{hub_kernels.FA3}::_flash_attn_forward"
    assert name_of(torch.ops.aten.mm.default) == "aten::mm" and name_of(len) is None
    assert is_attention(other._flash_attn_forward.default) and not is_attention(torch.ops.aten.mm.default)


def test_what_helps_with_another_kernel_is_told() -> None:
    """The reason names its operator, or says that Dynamo does not trace it."""
    text = explained(hub_kernels.flash_attn3)
    assert f"no rule for {hub_kernels.FA3}._flash_attn_forward" in text and ATTENTION in text
    assert DECLARE_SHAPES in explained(hub_kernels.vllm_flash_attn3)
