"""Attention of kernels from the hub: what are the flash-attn package's operators streams, of all others is told what helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.passes.ops.hub_kernels import is_attention, name_of
from streamfx.tools.report.fallback_reasons import ATTENTION, NO_SHAPES
from tests.support import hf, hub_kernels, layouts
from tests.support.exactness import compare, recorder
from tests.support.flash_package import IS_STAND_IN
from tests.test_flash_package import LENGTH, Decoder, PackedDecoder, batch, packed

pytestmark = pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU")

Attention = Callable[..., Tensor]


class Around(nn.Module):
    """A layer of heads [b m h d] around some attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention, self.qkv, self.out = attention, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(self.attention(q, k, v).flatten(2)).square().mean()


def test_flash_attn2_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_flash_package.flash_attn_func", hub_kernels.flash_attn2().flash_attn_func)
    how = {"causal": True, "window_size": (4, 0)}
    model = Decoder(how, 1).double()
    compare(model, batch(), chunk_size=6, loss_chunk_size=5, also=(1,), attention={"window(5)"}, streams=True)


def test_documents_of_flash_attn2_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_flash_package.flash_attn_varlen_func", hub_kernels.flash_attn2().flash_attn_varlen_func)
    model, given = PackedDecoder({"causal": True}, 2).double(), packed([0, 4, 5, 11, LENGTH])
    compare(model, given, chunk_size=6, loss_chunk_size=5, attention={"causal"}, streams=True)


def test_through_transformers() -> None:
    pytest.importorskip("transformers")
    with hub_kernels.loaded_by_transformers() as implementation:
        model = hf.made("llama", implementation)
        given = layouts.LAYOUTS["plain"](layouts.tokens(hf.VOCABULARY, 2, 22))
        compare(model, given, chunk_size=7, also=(16,), attention=hf.verdicts("llama"), streams=True)


def test_what_the_package_does_not_stream_runs_whole() -> None:
    """With the reason that its own operator has."""
    attention = hub_kernels.flash_attn2().flash_attn_func
    model = Around(lambda q, k, v: attention(q, k, v, causal=True, softcap=30.0)).double()
    assert "softcap=30.0" in reasons(model)


@pytest.mark.parametrize("kernel", ["_flash_attn4_cuda_8f3c1d2", "flash_attn2_cuda_8f3c1d2", "_flash_attn_2_8f3c1d2"])
def test_another_kernel_with_the_same_operators_is_not_taken_for_it(kernel: str) -> None:
    """Nobody says that it computes the same."""
    attention = hub_kernels.flash_attn2(kernel).flash_attn_func
    model = Around(lambda q, k, v: attention(q, k, v, causal=True)).double()
    compare(model, {"x": torch.randn(2, LENGTH, 16, dtype=torch.float64)}, chunk_size=6, streams=None)
    assert f"no rule for {kernel}" in reasons(model)


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
    """Its operator runs whole; the reason names it."""
    text = explained(hub_kernels.flash_attn3)
    assert f"no rule for {hub_kernels.FA3}._flash_attn_forward" in text and ATTENTION in text


def test_what_helps_with_a_kernel_that_dynamo_does_not_trace_is_told() -> None:
    assert NO_SHAPES in explained(hub_kernels.vllm_flash_attn3)


def explained(attention: Attention) -> str:
    torch._dynamo.reset()
    with torch.no_grad():
        return str(streamfx.explain(Around(attention).double(), rows(), chunk_size=6))


def rows() -> Tensor:
    return torch.randn(2, LENGTH, 16, dtype=torch.float64)


def reasons(model: nn.Module) -> str:
    torch._dynamo.reset()
    backend: Any = recorder(chunk_size=6)
    with torch.no_grad():
        torch.compile(model, backend=backend)(rows())
    return " ".join(reason for facts in backend.facts for reason in facts.reasons())
