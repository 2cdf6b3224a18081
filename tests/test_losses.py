"""Losses as users write them, and parts of a decoder that are compiled alone, stream with exact gradients."""

import operator
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.ir.facts import known
from streamfx.node_meta import VALUE
from streamfx.passes.partition.code_sinking import sink_operators
from streamfx.passes.partition.node_order import move_last_stage_first
from tests.support import layouts
from tests.support.decoders.parts import VOCABULARY, WIDTH, Heads, Plain, RMSNorm, SwiGLU, made
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.used import Use, Used, batch, labelled, used

pytestmark = pytest.mark.compiled

aten = torch.ops.aten

LENGTH = 13
Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"  # of logits [b t v] and labels [b t], some of which are ignored


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    is_kept, chosen = labels != layouts.IGNORED, logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return ((logits.logsumexp(-1) - chosen) * is_kept).sum() / is_kept.sum()


def yes_or_no(logits: Tensor, labels: Tensor) -> Tensor:
    target = (labels[..., None] == torch.arange(logits.shape[-1])).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target)


def to_a_constant(logits: Tensor, labels: Tensor) -> Tensor:
    one = torch.ones_like(logits)
    huber = F.huber_loss(logits, one, delta=0.5) + F.smooth_l1_loss(logits, one)
    return F.mse_loss(logits, one) + huber + F.l1_loss(logits, one)


LOSSES: dict[str, Loss] = named_cases("losses", globals(), "x, y")


@pytest.mark.parametrize("name", only(["three tokens ahead"], LOSSES))
def test_losses(name: str) -> None:
    inputs = batch(LENGTH)
    inputs["labels"][0, 2:5] = inputs["labels"][-1, -1] = layouts.IGNORED
    model = used(lambda model, x, labels: LOSSES[name](model.head(x), labels))
    compare(model, inputs, chunk_size=5, also=(1, 16), attention={"causal"})


class LastState(nn.Module):
    """The loss is of logits, and of running sums after the last row, three for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23, bias=False)
        self.out, self.wide = nn.Linear(8, 8), nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        sums = (self.out(x).tanh().unsqueeze(-1) * self.wide).cumsum(1)
        x = x + self.out((sums * self.wide).sum(-1))
        return F.cross_entropy(*flat(self.head(x), labels)) + sums[:, -1].square().mean()


def test_the_gradient_of_a_last_state_is_saved_for_one_row() -> None:
    """All other rows of it are zeros, which the backward fills in."""
    report = compare(made(LastState), batch(LENGTH), chunk_size=4, also=(1, LENGTH))
    program = known(report.facts[0].program)
    assert program.backward is not None
    saved = [node.meta["val"] for node in program.backward.graph.find_nodes(op="placeholder")]
    assert max(item.numel() for item in saved if item.is_floating_point() and item.shape != (23, 8)) <= 2 * LENGTH * 8


# -- parts


class Layers(Plain):
    """The layers without the embedding and the head."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.hidden(x)


class HeadWithLoss(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("part", only([RMSNorm, Layers, HeadWithLoss], [RMSNorm, SwiGLU, Heads, Layers, HeadWithLoss]))
def test_a_part_streams(part: type[nn.Module]) -> None:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, batch(LENGTH)["labels"]] if part is HeadWithLoss else [x]
    report = compare(made(part), inputs, chunk_size=5, also=(1, 16))
    assert known(report.facts[0].axes.sequence).length == LENGTH


def test_a_gradient_is_written_into_zeros_right_before_its_use() -> None:
    """As long as only one row of it exists, it takes the memory of one row."""
    graph = fx.Graph()
    last, early = graph.placeholder("last"), graph.placeholder("early")
    written = graph.call_function(aten.select_backward.default, (last, [4, 4], 0, 3))
    product = graph.call_function(aten.mm.default, (early, early))
    total = graph.call_function(aten.add.Tensor, (written, product))
    for node, size in ((last, (4,)), (early, (4, 4)), (written, (4, 4)), (product, (4, 4)), (total, (4, 4))):
        node.meta[VALUE] = torch.empty(size)
    assert move_last_stage_first([written, product, total], {last: 1, early: 0}, 1) == [product, written, total]


# -- losses of early layers


class Drawn:
    """A graph of nodes that are named, sized and connected by hand."""

    def __init__(self) -> None:
        self.graph, self.nodes, self.bytes = fx.Graph(), list[fx.Node](), dict[fx.Node, int]()

    def add(self, name: str, size: int, *operands: fx.Node, target: object = operator.add) -> fx.Node:
        node = self.graph.create_node("call_function", target, operands, name=name)  # type: ignore[arg-type]
        self.nodes.append(node)
        self.bytes[node] = size
        return node

    def order(self, *attentions: fx.Node) -> list[fx.Node]:
        starts = [self.nodes.index(node) for node in attentions]
        return sink_operators(self.nodes, starts, self.bytes.__getitem__)


def test_sinking_keeps_a_valid_order() -> None:
    """In random graphs no node is lost, and each node comes after its operands."""
    for seed in range(200):
        draw, d = random.Random(seed), Drawn()
        attentions = []
        for number in range(30):
            sources = draw.sample(d.nodes, min(len(d.nodes), draw.randint(0, 3)))
            is_part = bool(sources) and draw.random() < 0.1
            target = operator.getitem if is_part else operator.add
            node = d.add(f"n{number}", draw.choice([0, 4, 100, 1000]), *(sources[:1] if is_part else sources), target=target)
            if draw.random() < 0.15 and not is_part:
                attentions.append(node)
        order = d.order(*attentions)
        assert sorted(order, key=d.nodes.index) == d.nodes, seed
        place = {node: i for i, node in enumerate(order)}
        assert all(place[source] < place[node] for node in order for source in node.all_input_nodes), seed


def early_exits(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """Every layer has its own logits, and the last layer's teach the others; one layer adds a loss of its own."""
    exits, loss = [], torch.zeros((), dtype=torch.float64)
    for attend in model.attend:
        x = x + attend(x)
        exits.append(model.head(model.norms[-1](x)).log_softmax(-1))
        loss = loss + 0.1 * x.square().mean()
    *students, teacher = exits
    for student in students:
        loss = loss + F.kl_div(student, teacher.detach(), log_target=True, reduction="batchmean")
    return loss + F.nll_loss(teacher.flatten(0, 1), labels.flatten())


def test_logits_of_early_exits_do_not_wait() -> None:
    (facts,) = compare(used(early_exits, layers=3), batch(13), chunk_size=5, also=(1, 16), attention={"causal"}).facts
    wide = [node for stage in facts.stages for node in stage.outputs if VOCABULARY in node.meta["val"].shape]
    assert not wide, "logits of an early layer wait for the last one"


# -- assertions about data, by user code or by torch


class Checked(torch.autograd.Function):
    """A function that asserts something about its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        torch._assert_async(gradient.isfinite().all() & (labels >= 0).all(), "bad gradient")
        return gradient * 1.0, None


def asserted(check: Callable[[Tensor, Tensor], Tensor]) -> Use:
    def loss(model: Used, x: Tensor, labels: Tensor) -> Tensor:
        torch._assert_async(check(x, labels), "negative")
        return labelled(model, x, labels.relu())

    return loss


def by_index(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """One row of each sequence."""
    last = torch.where((labels < 0).any(1), x.shape[1], labels[:, 0])
    return model.head(x)[torch.arange(len(x)), last].square().mean()


ASSERTED: dict[str, Use] = named_cases("asserted", globals())


def classes_are_checked() -> bool:
    """Return whether a compiled `one_hot` refuses negative numbers: graphs of torch 2.11 do not assert it."""
    try:
        torch.compile(lambda labels: F.one_hot(labels, VOCABULARY), backend="aot_eager")(-batch()["labels"])
    except RuntimeError:
        return True
    assert torch.__version__.startswith("2.11.")
    return False


@pytest.mark.parametrize("name", only(["a sum", "gradients", "classes"], ASSERTED))
def test_a_failed_assertion_raises_and_the_rest_streams(name: str) -> None:
    model, good = used(ASSERTED[name]), batch()
    compare(model, good, chunk_size=4, also=(7,), streams=True if name in ("a sum", "classes") else None)
    torch._dynamo.reset()
    function = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "eager"})
    function(**good).backward()
    wrong = good["labels"].clone()
    wrong[0, 3] = -1
    with pytest.raises(RuntimeError) if name != "classes" or classes_are_checked() else nullcontext():
        function(good["ids"], wrong).backward()
    function(**good).backward()
