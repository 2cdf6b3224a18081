"""An operator that no loop can run costs itself, not the graph: it runs whole, the rest streams, gradients are those of eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import streamfx
from streamfx.ir.facts import known
from streamfx.passes.lowering import bodies, lowering_table
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.rewrite.canonicalize import canonicalize
from tests.support.exactness import compare
from tests.support.spread import only

pytestmark = pytest.mark.compiled

LENGTH, WIDTH, VOCABULARY = 37, 8, 11
Between = Callable[["Decoder", Tensor], Tensor]


class Decoder(nn.Module):
    """Two layers of attention and a head; `between` runs between the layers."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between: Any = between
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.w = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(WIDTH))
        self.double()

    def layer(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.between(self, self.layer(self.embed(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.library.custom_op("streamfx_tests::two_of_each", mutates_args=())
def two_of_each(x: Tensor) -> list[Tensor]:
    return [2 * x, 3 * x]


@torch.library.custom_op("streamfx_tests::counted", mutates_args=("seen",))
def counted(x: Tensor, seen: Tensor) -> Tensor:
    seen.add_(x.sum((0, 1)))
    return x.sin()


@torch.library.custom_op("streamfx_tests::flat", mutates_args=())
def flat(x: Tensor) -> Tensor:
    return x.view(-1).sin().view(x.shape)  # fails where rows do not lie side by side


two_of_each.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])
two_of_each.register_autograd(lambda ctx, gradients: 2 * gradients[0] + 3 * gradients[1])
counted.register_fake(lambda x, seen: torch.empty_like(x))
flat.register_fake(lambda x: torch.empty_like(x))
flat.register_autograd(lambda ctx, gradient: flat(gradient.contiguous()))


def either(flag: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(flag, lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).cos(), (x, w))


def paired(self: Decoder, x: Tensor) -> Tensor:
    """As `combine_mode="pointwise"` is traced for GPUs."""
    rows = [x.transpose(0, 1)]
    made = torch.ops.higher_order.associative_scan(lambda left, right: [left + right.sin()], rows, ())
    return x + made[0].transpose(0, 1)


def looped(self: Decoder, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, halved = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y / 2), (torch.tensor(0), x.detach()))
    return x + halved


def windows(self: Decoder, x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 2, 0))
    rows = padded[:, 1:].transpose(0, 1)  # it reads memory before the view's first element
    return x + rows.as_strided((2, LENGTH, 3, WIDTH), (padded.stride(0), WIDTH, WIDTH, 1), 0).sum(2)


def scattered(self: Decoder, x: Tensor) -> Tensor:
    return torch.as_strided_scatter(x.contiguous(), x[:, :5].sin(), (2, 5, WIDTH), (LENGTH * WIDTH, WIDTH, 1), 2 * WIDTH)


PROGRAMS: dict[str, tuple[Between, str]] = {
    "cond": (lambda self, x: either(x.sum() > 0, x, self.w), "torch.cond(flag"),
    "cond of a flag": (lambda self, x: either(self.seen[0] > 0, x, self.w), "torch.cond(flag"),
    "as_strided": (windows, "rows.as_strided("),
    "as_strided_scatter": (scattered, "torch.as_strided_scatter("),
    "bits": (lambda self, x: x * (x.detach().view(torch.int64) >> 62).to(x.dtype), ""),
    "a list of results": (lambda self, x: x + two_of_each(x)[0] * two_of_each(x)[1].sin(), "two_of_each(x)[0]"),
    "an operator that writes": (lambda self, x: x + counted(x.detach(), self.seen), "counted(x.detach(), self.seen)"),
    "an operator that reads layouts": (lambda self, x: flat(self.layer(x.transpose(0, 1)).contiguous()).transpose(0, 1), "flat("),
}


@pytest.mark.parametrize("name", only(["an operator that writes"], PROGRAMS))
def test_operators_around_a_fallback_stream(name: str) -> None:
    between, line = PROGRAMS[name]
    model = Decoder(between)
    (facts,) = compare(model, {"ids": ids()}, chunk_size=8, streams=None).facts
    assert facts.program is not None and len(facts.program.loops) > 2
    assert facts.axes.sequence.length == LENGTH  # type: ignore[union-attr]
    shown = streamfx.explain(model, ids(), options={"chunk_size": 8}).summary()
    assert shown["streamed_flops_share"] > 0.6
    reasons = [stage["reason"] for stage in shown["stages"] if stage["reason"]]
    assert bool(reasons) == bool(line)
    assert all("test_whole.py" in reason and line in reason and "please report" not in reason for reason in reasons)


ADVICE = {
    "torch.where of what both functions give": PROGRAMS["cond of a flag"][0],
    "torch._higher_order_ops.scan": looped,
    "generic": paired,
}


@pytest.mark.parametrize("advice", only(["generic"], ADVICE))
def test_the_reason_names_an_alternative(advice: str) -> None:
    assert advice in str(streamfx.explain(Decoder(ADVICE[advice]), ids(), options={"chunk_size": 8}))


def test_equal_calls_of_functions_and_unknown_operators_are_not_merged() -> None:
    """They may draw random numbers, so two equal calls may differ."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    functions = {torch.ops.higher_order.cond: (True, "same", "same", (x,)), torch.ops.streamfx_tests.flat.default: (x,)}
    graph.output(tuple(graph.call_function(target, args) for target, args in functions.items() for _ in range(2)))
    canonicalize(graph)
    assert all(len(graph.find_nodes(op="call_function", target=target)) == 2 for target in functions)


def test_an_operator_that_a_later_pass_refuses_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes start again after they mark an operator."""
    refused: list[str] = []
    find_lowering, target = lowering_table.find_lowering, "aten.mm.default"

    def refusing(node: Any) -> Any:
        if str(node.target) == target and not refused:
            refused.append(node.name)
            raise FallbackError(node, f"{target} is refused")
        return find_lowering(node)

    model = Decoder(lambda self, x: x + x.cumsum(1) / LENGTH)
    monkeypatch.setattr(bodies, "find_lowering", refusing)
    (facts,) = compare(model, {"ids": ids()}, chunk_size=8, streams=None).facts
    assert refused
    assert facts.reasons() == [f"{target} is refused"]
    assert len(known(facts.program).loops) > 1
