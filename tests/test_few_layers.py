"""Costs, plans and facts of a model follow from few of its layers; all layers are traced if they differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.cost.repeats import Repeat
from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import Facts
from streamfx.passes import run_analyses
from streamfx.tools.inspect import repeated_analysis, tracing
from streamfx.tools.inspect.eager import EagerCall, checkpointed, tracing_mode
from streamfx.tools.inspect.full_depth import FullGraph, LayerSubset, of_all_layers
from streamfx.tools.inspect.layer_segments import LayersDifferError
from streamfx.tools.inspect.layers import find_repeat, layers_of
from streamfx.tools.inspect.repeated_analysis import facts_of_all_layers
from streamfx.tools.planner.predict import Prediction, predict

pytestmark = pytest.mark.compiled

LENGTH = 256


class OwnBackward(torch.autograd.Function):
    """A copy with its own backward function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, does_more: bool) -> Tensor:
        ctx.does_more = does_more
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.cos().sin() if ctx.does_more else gradient, None


class Layer(nn.Module):
    """Attention, with a window if one is given. `does` is a tuple, which is not compared as a setting."""

    def __init__(self, window: int | None = None, does: str = "", inner: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 3 * inner, bias=False), nn.Linear(inner, 32, bias=False)
        self.window, self.does = window, (does,)

    def forward(self, x: Tensor, masks: dict[int | None, Tensor]) -> Tensor:
        does = self.does[0]
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if does == "unfused":
            mixed = (q @ k.mT).masked_fill(~masks[None], -torch.inf).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[self.window])
        mixed = mixed.transpose(1, 2).flatten(-2)
        if does.startswith("back"):
            mixed = OwnBackward.apply(mixed, does == "back more")
        then: dict[str, Callable[[Tensor], Tensor]] = {"more": torch.cos, "draws": F.dropout}
        return x + self.out(then.get(does, lambda y: y)(mixed))


class Stack(nn.Module):
    """Layers in sequence; a layer may also read the output two layers before, and the head may read all outputs."""

    def __init__(self, make: Callable[[], list[nn.Module]], skips: bool = False, reads_all: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed, self.layers, self.head = nn.Embedding(50, 32), nn.ModuleList(make()), nn.Linear(32, 50, bias=False)
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


def stack(*does: str, **how: Any) -> Stack:
    return Stack(lambda: [Layer(does=one) for one in does or [""] * 9], **how)


def in_turn() -> Stack:
    return Stack(lambda: [Layer(16 * (number % 2) or None) for number in range(12)])


def widths(*inner: int) -> Stack:
    return Stack(lambda: [Layer(inner=one) for one in inner])


def frozen(model: Stack) -> Stack:
    for layer in model.layers:
        layer.out.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


def ids() -> Tensor:
    return torch.empty(2, LENGTH, dtype=torch.int64, device="meta")


MORE, MORE_BACKWARD = [*[""] * 5, "more", *[""] * 3], [*["back"] * 4, "back more", *["back"] * 4]
COSTS: list[tuple[Stack, bool]] = [
    (frozen(widths(*[64] * 2, *[32, 64] * 7, 32)), True),
    (stack(*MORE), False),
    (stack(*MORE_BACKWARD), False),
]


@pytest.mark.parametrize(("model", "are_alike"), COSTS, ids=["alternating", "one does more", "one does more backward"])
def test_few_layers_predict_the_cost_of_eager(model: Stack, are_alike: bool) -> None:
    """Also with checkpoints around layers."""
    inputs = {"ids": ids()}
    for around in (None, checkpointed):
        with tracing_mode(model, (), inputs) as faker:
            call, every = (EagerCall(model, (), inputs, faker) for _ in range(2))
            every.__dict__["repeat"] = None
            found, full = call.cost(around), every.cost(around)
        assert (call.repeat is not None) == are_alike
        assert found is not None and full is not None and found == full and found.gradients > 0
        assert found.forward_curve == full.forward_curve and found.backward_curve == full.backward_curve


def test_layers_repeat_unless_they_share_a_weight_or_have_a_hook() -> None:
    """Layers with different settings do not repeat if settings are compared."""
    layers: list[nn.Module] = [Layer() for _ in range(12)]
    assert layers_of(nn.Sequential(nn.Linear(16, 16), nn.Sequential(*layers), nn.LayerNorm(16))) == layers
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))) == []
    shared, hooked = stack(), stack()
    shared.layers[7].out = shared.layers[3].out
    hooked.layers[7].register_forward_hook(lambda module, given, out: out + 1)
    assert find_repeat(shared) is find_repeat(hooked) is find_repeat(widths(), by_settings=True) is None
    assert find_repeat(in_turn()) == Repeat(1, 1, 4, 12)
    assert find_repeat(in_turn(), by_settings=True).period == 2  # type: ignore[union-attr]


class Watched:
    """Predictions, the graphs extended from few layers, the facts derived from few layers, and the facts of all layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.extended, self.refused = monkeypatch, list[FullGraph](), ""
        self.derived: Facts | None = None
        self.every: Facts | None = None
        run = tracing._SubsetCompilation.run_passes

        def noted(*given: Any) -> FullGraph:
            self.extended.append(of_all_layers(*given))
            return self.extended[-1]

        def run_passes(call: Any, capture: Callable[[], Facts]) -> Facts:
            try:
                self.derived = facts_of_all_layers(call.subset_facts, call.subset)
            except LayersDifferError as error:
                self.refused = str(error)
            self.every = run_analyses(capture(), call.options)
            return run(call, capture)

        monkeypatch.setattr(tracing, "of_all_layers", noted)
        monkeypatch.setattr(tracing._SubsetCompilation, "run_passes", run_passes)

    def predict(
        self, model: nn.Module, few: Callable[[EagerCall], LayerSubset | None] | None = None, **options: Any
    ) -> Prediction:
        with self.patch.context() as patch:
            if few is not None:
                patch.setattr(EagerCall, "find_layer_subset", few)
            return predict(model, {"ids": ids()}, LENGTH, {"chunk_size": 32, **options})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize(
    ("does", "how"),
    [
        pytest.param(MORE, {}, id="one"),
        pytest.param(MORE_BACKWARD, {}, id="backward"),
        pytest.param((), {"skips": True}, id="skips", marks=pytest.mark.long),
        pytest.param((), {"reads_all": True}, id="reads all", marks=pytest.mark.long),
    ],
)
def test_all_layers_are_traced_if_they_differ(does: list[str], how: dict[str, Any], watched: Watched) -> None:
    """Even if they were assumed to repeat."""
    model = stack(*does, **how)
    repeat = find_repeat(model, by_settings=True)
    assert repeat is not None
    found = watched.predict(model, (lambda call: LayerSubset(repeat, "layers")) if how else None)
    assert not watched.extended and sum(stage["attention"] != [] for stage in found.stages) == 9


def found_of(facts: Facts) -> list[Any]:
    """Return all facts, by the position of operators in the graph; an axis is its size, and whether it is of the sequence."""
    axes, access, key_spans = facts.axes, facts.access, facts.key_spans
    nodes = [node for node in facts.joint.graph.nodes if node.op != "output"]
    number = {node: i for i, node in enumerate(nodes)}
    assert axes.sequence is not None
    members, spans = axes.sequence.members, dict[int, int]()  # the first operator with the same span

    def kind(dim: Dim) -> Any:
        return [(axes.table.size(factor), members.get(factor)) for factor in axes.table.resolve(dim)]

    def of(node: fx.Node) -> Any:
        signature, span = axes.signatures.get(node), key_spans.spans.get(node)
        return (
            node.op if node.op == "placeholder" else node.target,
            fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: number[source]),
            [kind(dim) for shape in (axes.shapes.get(node, ()), *axes.results.get(node, ())) for dim in shape],
            None if signature is None else (signature.operands, signature.results, signature.index, signature.keys),
            {label: kind(dim) for label, dim in axes.labels.get(node, {}).items()},
            (node in axes.static, axes.missing_rules.get(node), node in facts.joint.forward),
            (access.roles.get(node), access.storage_classes.get(node), access.reasons.get(node)),
            (span, key_spans.span_kinds.get(node), None if span is None else spans.setdefault(id(span), number[node])),
            [node in own for own in (key_spans.recomputed_per_consumer, key_spans.exact_masks, key_spans.ordinary_scores)],
            node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else None,
        )

    results = [number[item] if isinstance(item, fx.Node) else item for item in (*facts.joint.outputs, *facts.joint.gradients)]
    return [*map(of, nodes), results]


PLANS: list[Any] = [
    (in_turn, {"save": "inputs", "keep_every": 3}),
    pytest.param(lambda: frozen(stack(*[""] * 8)), {"memory_budget": "1MiB", "chunk_size": "auto"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("make", "options"), PLANS, ids=["alternating windows", "frozen weights, within a budget"])
def test_few_layers_predict_the_plan_and_the_facts_of_all(
    make: Callable[[], Stack], options: dict[str, Any], watched: Watched
) -> None:
    model = make()
    found = watched.predict(model, **options)
    (full,) = watched.extended
    assert len(set(full.origins)) < len(full.origins) == len(list(model.parameters())) + 1
    assert watched.derived is not None and watched.every is not None, watched.refused
    assert found_of(watched.derived) == found_of(watched.every)
    every = watched.predict(model, lambda call: None, **options)
    assert len(watched.extended) == 1
    assert found == every and found.curves == every.curves
    assert sum(stage["attention"] != [] for stage in found.stages) == len(model.layers)


@pytest.mark.parametrize(("does", "why"), [("draws", "is not a plain operator"), ("unfused", "operators disagree")])
def test_facts_of_the_full_graph_are_not_derived_from_few_layers(does: str, why: str, watched: Watched) -> None:
    watched.predict(stack(*[does] * 9))
    assert watched.derived is None and why in watched.refused


def test_no_facts_are_derived_if_periods_differ(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.Node] = []
    own = repeated_analysis._node_facts

    def found(node: fx.Node, facts: Facts) -> Any:
        seen.append(node)
        return (*own(node, facts), node if len(seen) == 7 else None)

    monkeypatch.setattr(repeated_analysis, "_node_facts", found)
    watched.predict(stack())
    assert watched.derived is None and "different facts about" in watched.refused
