"""Promise one, for losses: each is traced as the user wrote it, and streams with exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support import decoders, layouts
from tests.support.exactness import compare
from tests.support.spread import only

pytestmark = pytest.mark.compiled

LENGTH = 13
Loss: TypeAlias = "Callable[[Tensor, Tensor], Any]"  # of logits [B, T, V] and labels [B, T], which have holes


class WithLoss(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.decoder, self.loss = decoders.Plain(1), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.loss(self.decoder.logits(ids), labels)


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def kept(labels: Tensor) -> Tensor:
    return labels != layouts.IGNORED


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), reduction="none").view_as(labels)


def chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def yes_or_no(logits: Tensor, labels: Tensor) -> Tensor:
    target = (labels[..., None] == torch.arange(logits.shape[-1])).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target)


def to_a_constant(logits: Tensor, labels: Tensor) -> Tensor:
    one = torch.ones_like(logits)
    huber = F.huber_loss(logits, one, delta=0.5) + F.smooth_l1_loss(logits, one)
    return F.mse_loss(logits, one) + huber + F.l1_loss(logits, one)


LOSSES: dict[str, Loss] = {
    "label smoothing": lambda x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1),
    "one per token": token_losses,
    "summed over a count": lambda x, y: F.cross_entropy(*flat(x, y), reduction="sum") / kept(y).sum(),
    "square of a sum": lambda x, y: F.cross_entropy(*flat(x, y), reduction="sum").pow(2),
    "weighted by position": lambda x, y: (token_losses(x, y) * torch.linspace(0.5, 2, y.shape[1], dtype=x.dtype)).sum(),
    "weights of classes": lambda x, y: F.cross_entropy(
        *flat(x, y), weight=torch.linspace(0.5, 2, x.shape[-1]).to(x), label_smoothing=0.2
    ),
    "z-loss on all": lambda x, y: F.cross_entropy(*flat(x, y)) + 1e-2 * x.logsumexp(-1).pow(2).mean(),
    "classes second, none": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none").pow(2).mean(),
    "log softmax and gather": lambda x, y: -(chosen(x.log_softmax(-1), y) * kept(y)).sum() / kept(y).sum(),
    "logsumexp": lambda x, y: ((x.logsumexp(-1) - chosen(x, y)) * kept(y)).sum() / kept(y).sum(),
    # of several tokens: whole chunks have no label
    "three tokens ahead": lambda x, y: F.cross_entropy(*flat(x[:, :-3], y[:, 3:])) + F.cross_entropy(*flat(x[:, :-1], y[:, 1:])),
    "shifted by padding": lambda x, y: F.cross_entropy(*flat(F.pad(x, (0, 0, 3, 0))[:, : y.shape[1]], y)),
    "probabilities": lambda x, y: F.binary_cross_entropy(x.sigmoid(), F.one_hot(y.clamp(min=0), x.shape[-1]).to(x.dtype)),
    "yes or no": yes_or_no,
    "to a constant": to_a_constant,
    "entropies": lambda x, y: (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    # both carry a gradient, or the loss is made by the caller
    "logits, too": lambda x, y: (F.cross_entropy(*flat(x, y)), x),
    "logits alone": lambda x, y: x,
}


def batch(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """Labels with holes."""
    labels = layouts.tokens(decoders.VOCABULARY, batch, length, seed=1)
    labels[0, 2:5], labels[-1, -1] = layouts.IGNORED, layouts.IGNORED
    return {"ids": layouts.tokens(decoders.VOCABULARY, batch, length), "labels": labels}


@pytest.mark.parametrize("name", only(["three tokens ahead"], LOSSES))
def test_losses(name: str) -> None:
    compare(decoders.made(lambda: WithLoss(LOSSES[name])), batch(), chunk_size=5, also=(1, 16), attention={"causal"})


class LastState(nn.Module):
    """The loss sees running sums behind the last row, three of each channel, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23, bias=False)
        self.out, self.wide = nn.Linear(8, 8), nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        sums = (self.out(x).tanh().unsqueeze(-1) * self.wide).cumsum(1)
        x = x + self.out((sums * self.wide).sum(-1))
        return F.cross_entropy(*flat(self.head(x), labels)) + sums[:, -1].square().mean()


def test_of_the_last_state_no_gradient_is_kept_that_is_as_long_as_all_rows() -> None:
    """It is that of one row, among zeros: the backward half puts it there. Of the head the gradient of its rows is kept."""
    ids = layouts.tokens(23, 2, LENGTH, 0)
    report = compare(decoders.made(LastState), {"ids": ids, "labels": ids}, chunk_size=4, also=(1, LENGTH))
    program = known(report.facts[0].program)
    assert program.backward is not None
    taken = [node.meta["val"] for node in program.backward.graph.find_nodes(op="placeholder")]
    assert max(item.numel() for item in taken if item.is_floating_point() and item.shape != (23, 8)) <= 2 * LENGTH * 8
