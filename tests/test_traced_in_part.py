"""If Dynamo does not trace part of a call, the rest is not compared with the full call, and the reason is stable."""

import pytest
import torch
from torch import Tensor, nn

import streamfx
from tests.support.spread import only

pytestmark = pytest.mark.compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class BrokenInLoop(nn.Module):
    """Dynamo gives `forward` up, and finds the block by itself, where it is not `whole`: nothing at all."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.block, self.head, self.whole = Block(), nn.Linear(8, 400), whole

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.head.bias.sum() if self.whole else self.block(x)
            torch._dynamo.graph_break()
        return self.head(x).logsumexp(-1).mean()


def explained(model: nn.Module) -> streamfx.Explanation:
    return streamfx.explain(model, torch.randn(2, 64, 8), chunk_size=16)


def test_a_partly_traced_step_is_not_compared() -> None:
    """Behind a break in a loop the rest of a function is not traced: its memory is not in the figures."""
    found = explained(BrokenInLoop(False))
    assert any(item["given_up"] for item in found.summary()["break_reasons"])
    assert str(found).startswith("streamfx: not compared with baselines: part of the step is not traced")
    assert found.page.gains is None and found.page.verdict.startswith("Not compared")


def why(model: nn.Module) -> str:
    try:
        return str(explained(model).call.breaks)
    except streamfx.NotTracedError as error:
        return str(error)


WAYS = [("compiled", True), ("enabled", False), ("compiled too often", False)]


@pytest.mark.parametrize(("how", "whole"), only(WAYS[:2], WAYS))
def test_why_a_trace_breaks_does_not_depend_on_earlier_calls(how: str, whole: bool) -> None:
    """Dynamo leaves a function alone that it gave up once, and says nothing of it from then on."""
    model, x = BrokenInLoop(whole), torch.randn(2, 64, 8)
    told = why(model)
    assert "Call to `torch._dynamo.graph_break()`" in told
    if how == "enabled":
        with streamfx.enable(model, chunk_size=16):
            model(x).backward()
            assert why(model) == told
    else:
        compiled = torch.compile(model, backend="streambp", options={"chunk_size": 16}, dynamic=False)
        for rows in (64, 32, 16) if how == "compiled too often" else (64,):
            with torch._dynamo.config.patch(recompile_limit=1):
                compiled(x[:, :rows]).backward()
    assert why(model) == told


class Dropping(Block):
    """A layer is left out where a number that is drawn says so, as with layerdrop."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x.square().mean()
        return super().forward(x).square().mean()


def test_a_branch_on_data_is_named() -> None:
    found = explained(Dropping())
    assert "if torch.rand(()) < 0.5:" in found.call.stopped and "test_traced_in_part.py:" in found.call.stopped
    share = found.summary()["streamed_flops_share"]
    assert share is None or share < 1
    assert "100.0 %" not in str(found).splitlines()[5]
