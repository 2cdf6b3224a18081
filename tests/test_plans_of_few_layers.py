"""A plan of which few layers are traced is that of all layers, and all are traced where few do not stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.tools.inspect import tracing
from streamfx.tools.inspect.eager import EagerCall, alike_layers
from streamfx.tools.inspect.full_depth import FullGraph, LayerSubset, of_all_layers
from streamfx.tools.inspect.layers import repeat_of
from streamfx.tools.planner.predict import Prediction, predict

LENGTH = 256


class OwnBackward(torch.autograd.Function):
    """A copy, whose backward half does more or less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, does_more: bool) -> Tensor:
        ctx.does_more = does_more
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.cos().sin() if ctx.does_more else gradient, None


class Layer(nn.Module):
    """Attention in a window or not. What it does beside that is in `does`, where nobody looks for settings."""

    def __init__(self, window: int | None, does: str = "") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.window, self.does = window, (does,)

    def forward(self, x: Tensor, masks: dict[int | None, Tensor]) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[self.window]).transpose(1, 2).flatten(-2)
        if self.does[0].startswith("back"):
            mixed = OwnBackward.apply(mixed, self.does == ("back more",))  # type: ignore[no-untyped-call]
        return x + self.out(mixed.cos() if self.does == ("more",) else mixed)


class Stack(nn.Module):
    """Layers one after the other; each may read what came out of the one `skips` before, too, and the head may read them all."""

    def __init__(self, windows: list[int | None], skips: bool = False, reads_all: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(50, 32)
            self.layers = nn.ModuleList(Layer(window) for window in windows)
            self.head = nn.Linear(32, 50, bias=False)
        self.skips, self.reads_all = skips, reads_all

    def forward(self, ids: Tensor) -> Tensor:
        x, rows = self.embed(ids), torch.arange(ids.shape[1], device=ids.device)
        behind = rows[:, None] - rows
        masks = {window: (behind >= 0) & (behind < (window or LENGTH)) for window in (None, 16)}
        out = [x, x]
        for layer in self.layers:
            out.append(layer(out[-1] + out[-2] if self.skips else out[-1], masks))
        logits = self.head(torch.stack(out).sum(0) if self.reads_all else out[-1])
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Tracer:
    """Predicts with few layers traced, or with all, and knows which it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.wholes = monkeypatch, list[FullGraph]()

        def watched(*given: Any) -> FullGraph:
            self.wholes.append(of_all_layers(*given))
            return self.wholes[-1]

        monkeypatch.setattr(tracing, "of_all_layers", watched)

    def predicted(
        self, model: nn.Module, few: Callable[[EagerCall], LayerSubset | None] | None = None, **options: Any
    ) -> Prediction:
        ids = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")
        with self.patch.context() as patch:
            if few is not None:
                patch.setattr(EagerCall, "few", few)
            return predict(model, {"ids": ids}, LENGTH, {"chunk_size": 32, **options})


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    return Tracer(monkeypatch)


def with_frozen(model: Stack) -> Stack:
    for layer in model.layers:
        layer.out.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Stack([None] * 9), {"save": "attention"}),
        (Stack([16, None] * 6), {"save": "inputs", "keep_every": 3}),
        (with_frozen(Stack([None] * 8)), {"memory_budget": "1MiB", "chunk_size": "auto"}),
    ],
    ids=["alike", "windows in turn", "frozen weights, within a budget"],
)
def test_a_plan_of_few_layers_is_that_of_all(model: Stack, options: dict[str, Any], tracer: Tracer) -> None:
    found = tracer.predicted(model, **options)
    (whole,) = tracer.wholes
    assert len(set(whole.origins)) < len(whole.origins) == len(list(model.parameters())) + 1
    every = tracer.predicted(model, lambda call: None, **options)
    assert len(tracer.wholes) == 1
    assert found == every and found.curves == every.curves
    assert sum(stage["attention"] != [] for stage in found.stages) == len(model.layers)


def one_does_more(model: Stack) -> Stack:
    model.layers[5].does = ("more",)  # type: ignore[assignment]
    return model


def one_does_more_backward(model: Stack) -> Stack:
    for number, layer in enumerate(model.layers):
        layer.does = ("back more" if number == 4 else "back",)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "model",
    [
        one_does_more(Stack([None] * 9)),
        one_does_more_backward(Stack([None] * 9)),
        Stack([None] * 9, skips=True),
        Stack([None] * 9, reads_all=True),
    ],
    ids=["one does more", "one does more backward", "layers read the one before the last", "the head reads all"],
)
def test_all_layers_are_traced_where_few_do_not_stand_for_them(model: Stack, tracer: Tracer) -> None:
    assert repeat_of(model, by_settings=True) is not None
    found = tracer.predicted(model)
    assert not tracer.wholes and sum(stage["attention"] != [] for stage in found.stages) == 9


def test_layers_with_a_backward_half_of_their_own_are_not_alike() -> None:
    inputs = {"ids": torch.empty(2, LENGTH, dtype=torch.int64, device="meta")}
    assert alike_layers(Stack([None] * 9), inputs) is not None
    assert alike_layers(one_does_more_backward(Stack([None] * 9)), inputs) is None


@pytest.mark.parametrize("how", [{"skips": True}, {"reads_all": True}], ids=["skips", "reads all"])
def test_the_graph_itself_is_looked_at(how: dict[str, bool], tracer: Tracer) -> None:
    """Whatever was said of the layers."""
    model = Stack([None] * 9, **how)
    repeat = repeat_of(model, by_settings=True)
    assert repeat is not None
    found = tracer.predicted(model, lambda call: LayerSubset(repeat, "layers"))
    assert not tracer.wholes and sum(stage["attention"] != [] for stage in found.stages) == 9


def test_layers_with_other_words_in_them_are_not_alike() -> None:
    """A window is seen in what a module holds; a layer's own number is not."""
    in_turn = Stack([16, None] * 6)
    for number, layer in enumerate(in_turn.layers):
        layer.number = number  # type: ignore[assignment]
    alike, finer = repeat_of(in_turn), repeat_of(in_turn, by_settings=True)
    assert alike is not None and finer is not None
    assert (alike.period, finer.period) == (1, 2)


def test_numbers_of_layers_are_renumbered(tracer: Tracer) -> None:
    found = tracer.predicted(Stack([None] * 9))
    assert tracer.wholes and isinstance(tracer.wholes[0].module, fx.GraphModule)
    assert [stage["name"] for stage in found.stages][1:9] == [f"layers.{number}" for number in range(1, 9)]
