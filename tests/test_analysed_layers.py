"""What analyses find in the graph of few layers tells what they find in that of all: the same, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import Facts
from streamfx.ir.span import Span
from streamfx.passes import run_analyses
from streamfx.tools.inspect import repeated_analysis, tracing
from streamfx.tools.inspect.layer_segments import LayersDifferError
from streamfx.tools.inspect.repeated_analysis import facts_of_all_layers
from streamfx.tools.planner.models import built
from streamfx.tools.planner.predict import predict
from tests.test_plans_of_few_layers import LENGTH, Layer, Stack, with_frozen

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 500}


class Both:
    """Keeps the facts that few layers tell, and those that are found in all; which analyses have run on all is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: Facts | None = None
        self.every: Facts | None = None
        self.refused = ""

        def watched(run: Callable[[Any, Any], Facts]) -> Callable[[Any, Any], Facts]:
            def found(call: Any, capture: Callable[[], Facts]) -> Facts:
                try:
                    self.told = facts_of_all_layers(call.found_of_few, call.few)
                except LayersDifferError as error:
                    self.refused = str(error)
                self.every = run_analyses(capture(), call.options)
                return run(call, capture)

            return found

        monkeypatch.setattr(tracing._SubsetCompilation, "found_by_passes", watched(tracing._SubsetCompilation.found_by_passes))

    def of(self, model: nn.Module, name: str = "ids") -> tuple[Facts, Facts]:
        predict(model, {name: torch.empty(2, LENGTH, dtype=torch.int64, device="meta")}, LENGTH, {"chunk_size": 32})
        assert self.every is not None
        return self.told or self.every, self.every


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(monkeypatch)


def decoder(**kind: Any) -> nn.Module:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = built({**SIZES, **kind}, "float32", None, None)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    return Loss()


def spans_together(spans: list[Span | None]) -> list[int | None]:
    """Which operators have one span: the first of those that share it."""
    first: dict[int, int] = {}
    return [None if span is None else first.setdefault(id(span), number) for number, span in enumerate(spans)]


def found_of(facts: Facts) -> list[Any]:
    """All that is found, by the place of operators in the graph; of axes their sizes, and whether they are of the sequence."""
    axes, demand, causality = facts.axes, facts.demand, facts.causality
    nodes = [node for node in facts.joint.graph.nodes if node.op != "output"]
    number = {node: i for i, node in enumerate(nodes)}
    assert axes.sequence is not None
    members = axes.sequence.members

    def kind(dim: Dim) -> Any:
        return [(axes.table.size(atom), members.get(atom)) for atom in axes.table.resolve(dim)]

    def of(node: fx.Node) -> Any:
        signature = axes.signatures.get(node)
        return (
            node.op if node.op == "placeholder" else node.target,
            fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: number[source]),
            [kind(dim) for shape in (axes.shapes.get(node, ()), *axes.results.get(node, ())) for dim in shape],
            None if signature is None else (signature.operands, signature.results, signature.index, signature.keys),
            {letter: kind(dim) for letter, dim in axes.letters.get(node, {}).items()},
            (node in axes.static, axes.declined.get(node), node in facts.joint.forward),
            (demand.roles.get(node), demand.forms.get(node), demand.reasons.get(node)),
            (causality.spans.get(node), causality.verdicts.get(node)),
            [node in own for own in (causality.measured, causality.exact, causality.ordinary)],
            node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else None,
        )

    results = [number[item] if isinstance(item, fx.Node) else item for item in (*facts.joint.outputs, *facts.joint.gradients)]
    return [*map(of, nodes), results, spans_together([causality.spans.get(node) for node in nodes])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack([None] * 9),
        lambda: Stack([16, None] * 6),
        lambda: with_frozen(Stack([None] * 8)),
        lambda: decoder(model_type="qwen3", num_hidden_layers=9, num_key_value_heads=2, head_dim=16),
    ],
    ids=["alike", "windows in turn", "frozen weights", "qwen3"],
)
def test_few_layers_tell_what_is_found_in_all(make: Callable[[], nn.Module], both: Both) -> None:
    told, every = both.of(make())
    assert both.told is not None, both.refused
    assert found_of(told) == found_of(every)


class Drawing(Layer):
    def forward(self, x: Tensor, masks: dict[int | None, Tensor]) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1), masks)


class Spelled(Layer):
    def forward(self, x: Tensor, masks: dict[int | None, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~masks[None], -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


def made_of(layer: type[Layer]) -> Stack:
    model = Stack([None] * 9)
    with torch.device("meta"):
        model.layers = nn.ModuleList(layer(None) for _ in range(9))
    return model


@pytest.mark.parametrize(
    ("layer", "why"), [(Drawing, "more than an operator"), (Spelled, "not all operators agree")], ids=["draws", "spelled out"]
)
def test_what_belongs_to_a_graph_as_a_whole_is_looked_for_in_all(layer: type[Layer], why: str, both: Both) -> None:
    both.of(made_of(layer))
    assert both.told is None and why in both.refused


def test_periods_of_which_something_else_is_found_tell_nothing(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.Node] = []
    own = repeated_analysis._found_of

    def found(node: fx.Node, facts: Facts) -> Any:
        seen.append(node)
        return (*own(node, facts), node if len(seen) == 7 else None)

    monkeypatch.setattr(repeated_analysis, "_found_of", found)
    both.of(Stack([None] * 9))
    assert both.told is None and "what is found of" in both.refused
