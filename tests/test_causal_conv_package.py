"""The causal-conv1d package's operators stream: the last rows of a chunk are the state of the next."""

from typing import Any

import pytest
import torch
from torch import Tensor

import streamfx
from streamfx.kernels import causal_conv
from streamfx.runtime.custom_scan import Backward, Forward
from tests.support.causal_conv_package import IS_STAND_IN, causal_conv1d_fn
from tests.support.mixers import WIDTH, Mixed, compared, mixed, operators, tokens

pytestmark = [pytest.mark.compiled, pytest.mark.skipif(not IS_STAND_IN, reason="the package itself runs on GPUs alone")]


def convolved(m: Mixed, x: Tensor, width: int = 4, bias: bool = True, **how: Any) -> Tensor:
    """With contiguous rows, so Dynamo traces the package."""
    rows = m.up(x)[..., :WIDTH].transpose(1, 2).contiguous()
    made: Tensor = causal_conv1d_fn(rows, m.cell.weight_ih[:WIDTH, :width], m.first if bias else None, **how)
    return m.out(made.transpose(1, 2))


@pytest.mark.parametrize("how", [{"activation": "silu"}, {"bias": False, "width": 2}], ids=str)
def test_it_streams(how: dict[str, Any]) -> None:
    report = compared(lambda m, x: convolved(m, x, **how), chunk_size=4, also=(1, 2, 11))
    assert [type(node.target) for node in operators(report, Forward, Backward)] == [Forward, Backward]


def test_packed_sequences_fall_back() -> None:
    """A state has no sequence numbers: rows of the next chunk would see rows of an earlier sequence."""

    def packed(m: Mixed, x: Tensor) -> Tensor:
        number = (torch.arange(x.shape[1]) // 5).to(torch.int32).expand(x.shape[0], -1).contiguous()
        return convolved(m, x, seq_idx=number)

    (facts,) = compared(packed, chunk_size=4, streams=False).facts
    assert any("seq_idx passed by the caller" in reason for reason in facts.reasons()), facts.reasons()


def test_a_first_state_breaks_the_graph() -> None:
    """It requires contiguous channels, which Dynamo does not trace. The report names the remedy."""

    def from_a_state(m: Mixed, x: Tensor) -> Tensor:
        first = m.up.weight[:WIDTH, :3].t().expand(x.shape[0], 3, WIDTH).clone().transpose(1, 2)
        rows, weight = m.up(x)[..., :WIDTH].transpose(1, 2), m.cell.weight_ih[:WIDTH, :4]
        y, last = causal_conv1d_fn(rows, weight, initial_states=first, return_final_states=True)
        return m.out(y.transpose(1, 2)) + last.sum(-1)[:, None]

    compared(from_a_state, chunk_size=4, streams=None, graphs=None)
    torch._dynamo.reset()
    assert "x.contiguous()" in str(streamfx.explain(mixed(from_a_state), **tokens(), chunk_size=4))


@pytest.mark.parametrize(("length", "silu"), [(1, True), (2, False), (7, True)])
def test_our_state_is_the_packages_state(length: int, silu: bool) -> None:
    """The package takes it with contiguous channels."""
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, length, 8, dtype=torch.float64, generator=draw).transpose(1, 2) for _ in range(2))
    first, dlast = (torch.randn(2, 3, 8, dtype=torch.float64, generator=draw).transpose(1, 2) for _ in range(2))
    weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((8, 4), (8,)))
    own = [item.detach().clone(memory_format=torch.preserve_format).requires_grad_() for item in (x, weight, bias, first)]
    out, last = causal_conv1d_fn(*own[:3], initial_states=own[3], return_final_states=True, activation="silu" if silu else None)
    torch.autograd.backward((out, last), (dy, dlast))
    made = causal_conv.forward(x, weight, bias, silu, first)
    gradients = causal_conv.backward(dy, dlast, x, weight, bias, silu, first)
    torch.testing.assert_close([*made, *gradients], [out.detach(), last.detach(), *(item.grad for item in own)])
