"""Rules that users register for their own operators."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.ir.signature import Signature
from streamfx.passes.ops.rules.registry import RULES, notation_rule
from tests.support.spread import spread

pytestmark = pytest.mark.compiled

WIDTH = 8


@torch.library.custom_op("streamfx_tests::gate", mutates_args=())
def gate(x: Tensor) -> Tensor:
    """The first half, scaled by the second: [..., 2 d] to [..., d]."""
    left, right = x.chunk(2, -1)
    return left * right.sigmoid()


def gate_backward(ctx: Any, gradient: Tensor) -> Tensor:
    left, right = ctx.saved_tensors[0].chunk(2, -1)
    share = right.sigmoid()
    return torch.cat((gradient * share, gradient * left * share * (1 - share)), -1)


gate.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
gate.register_autograd(gate_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        y: Tensor = self.down(gate(self.up(x)))
        return y.square().mean()


X = (2, 11, WIDTH)
OTHERS = "has other tensors, or other dimensions, than the call"


RULES_THAT_DO_NOT_APPLY: list[tuple[Any, str]] = [
    (lambda call: vars(call)["rows"], "the rule for streamfx_tests.gate.default raises KeyError: 'rows'"),
    (lambda call: "... e! -> ... d", "must return a Signature or None, and returns '... e! -> ... d' (str)"),
    (lambda call: Signature((((0,),),), (((0,),),)), OTHERS),
    (None, "no rule for streamfx_tests.gate"),
    (lambda call: Signature((), ()), OTHERS),
    (lambda call: None, "the rule for streamfx_tests.gate.default does not cover these arguments"),
]


@pytest.mark.parametrize(("rule", "says"), spread(RULES_THAT_DO_NOT_APPLY, 3))
def test_a_rule_that_does_not_apply_is_reported(rule: Any, says: str) -> None:
    """The operator falls back, and is exact."""
    if rule is not None:
        streamfx.register_rule(gate, rule)
    model, x = Gated(), torch.randn(X)
    reasons = [stage["reason"] or "" for stage in streamfx.explain(model, x).summary()["stages"]]
    assert any(says in reason and "test_user_rules.py" in reason for reason in reasons), reasons
    assert rule is not None or {"streamfx.register_rule", "streamfx.register_recurrence"} <= set(
        re.findall(r"[\w.]+", str(reasons))
    )
    assert streamfx.verify(model, x, chunk_size=4).ok


def test_with_rules_it_streams() -> None:
    streamfx.register_rule(gate, "... e! -> ... d")
    model, x = Gated().double(), torch.randn(X, dtype=torch.float64, requires_grad=True)
    assert {stage["kind"] for stage in streamfx.explain(model, x).summary()["stages"]} == {"streamed"}
    assert streamfx.verify(model, x, chunk_size=4).max_error < 1e-12


REFUSED: list[tuple[Any, Any, str]] = [
    (gate, "... e! to ... d", "one arrow"),
    (gate, "... e! -> d, d", "1 tensor arguments and 1 results"),
    (gate, "... e? -> d", "one arrow"),
    (gate, "b d d -> b d", "has a letter twice"),
    (gate, "... d! -> ... d d!", "has a letter twice"),
    (gate, 3, "notation such as"),
    (gate, "e! -> ... d", "has ... on the right only"),
    (torch.sigmoid, "... -> ...", "torch.library.custom_op"),
    (torch.ops.aten.mm, "m k, k n -> m n", "several overloads"),
    (torch.ops.aten.mm.default, "m k, k n -> m n", "already has a rule"),
    (torch.ops.aten.sin.default, "... -> ...", "already has a rule"),
    (torch.ops.aten.silu.default, lambda call: None, "already has a rule"),
    (torch.ops.aten.mse_loss.default, "..., ... -> ", "already has a rule"),
]


def test_wrong_rules_are_refused() -> None:
    before = dict(RULES)
    for operator, rule, says in REFUSED:
        with pytest.raises(streamfx.RuleError, match=says):
            streamfx.register_rule(operator, rule)
    assert before == RULES


@torch.library.custom_op("streamfx_tests::add_to", mutates_args=())
def add_to(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of any shapes that can be added."""
    return x + y


@torch.library.custom_op("streamfx_tests::spread_out", mutates_args=())
def spread_out(x: Tensor) -> Tensor:
    """[b d] to [b t], a dimension that the operand does not have."""
    return torch.linspace(0.0, 1.0, 11, dtype=x.dtype) * x.sum(1, keepdim=True)


add_to.register_fake(lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)))
spread_out.register_fake(lambda x: x.new_empty(x.shape[0], 11))


FITTING: dict[str, Callable[[Tensor], Tensor]] = {
    "of another rank": lambda x: add_to(x, x[0]),  # as many sequences as rows
    "one row for all": lambda x: add_to(x, x[:, :1]),
    "a new dimension": lambda x: spread_out(x[:, 0])[..., None],
}


@pytest.mark.parametrize("made", spread(FITTING.values(), 3), ids=FITTING)
def test_notation_holds_for_the_calls_it_fits(made: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for operator, notation in ((add_to, "... d, ... d -> ... d"), (spread_out, "b d -> b t")):
        monkeypatch.setitem(RULES, operator._opoverload, notation_rule(notation))
    x = torch.randn(11, 11, WIDTH, dtype=torch.float64, requires_grad=True)

    def beside(x: Tensor) -> Tensor:
        """Scale rows by the result of an operator without gradients."""
        q = x.sin()[:, None]
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return (y * made(y.detach())).square().mean()

    assert streamfx.verify(beside, x, chunk_size=4).max_error < 1e-12
