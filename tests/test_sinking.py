"""Large values that would wait for another model's layers are computed after them, in a valid order."""

import operator
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from streamfx.passes.partition.code_sinking import sink_operators
from tests.support.decoders import VOCABULARY
from tests.support.exactness import compare
from tests.support.used import Used, batch, used

pytestmark = pytest.mark.compiled


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
