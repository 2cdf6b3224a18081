"""What a user's code, or torch's own, asserts of data is asserted: in the streamed program, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.exactness import compare
from tests.support.spread import only

pytestmark = pytest.mark.compiled

WIDTH, VOCABULARY, LENGTH = 8, 11, 19
OPTIONS: dict[str, Any] = {"chunk_size": 4, "bodies": "eager"}
Loss = Callable[["Decoder", Tensor, Tensor], Tensor]


class Watched(torch.autograd.Function):
    """A function that looks at its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        torch._assert_async(gradient.isfinite().all() & (labels >= 0).all(), "bad gradient")
        return gradient * 1.0, None


class Decoder(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss: Any = loss
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.loss(self, x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0], labels)  # type: ignore[no-any-return]


def token_loss(model: Decoder, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1)


def asserted(check: Callable[[Decoder, Tensor, Tensor], Tensor]) -> Loss:
    def loss(model: Decoder, x: Tensor, labels: Tensor) -> Tensor:
        torch._assert_async(check(model, x, labels), "negative")
        return token_loss(model, x, labels)

    return loss


def of_classes(model: Decoder, x: Tensor, labels: Tensor) -> Tensor:
    return -(F.one_hot(labels, VOCABULARY) * model.head(x).log_softmax(-1)).sum(-1).mean()


def of_rows(model: Decoder, x: Tensor, labels: Tensor) -> Tensor:
    """A row of each sequence by its number, which is looked up in another way."""
    last = torch.where((labels < 0).any(1), LENGTH, labels[:, 0])
    return model.head(x)[torch.arange(len(x)), last].square().mean()


LOSSES: dict[str, Loss] = {
    "all": asserted(lambda model, x, labels: (labels >= 0).all()),
    "a sum": asserted(lambda model, x, labels: (labels >= 0).sum() == labels.numel()),
    "activations": asserted(lambda model, x, labels: ((x.square().sum(-1) < 1e6) & (labels >= 0)).all()),
    "gradients": lambda model, x, labels: token_loss(model, Watched.apply(x, labels), labels),
    "classes": of_classes,
    "rows": of_rows,
    "probabilities": lambda model, x, labels: F.binary_cross_entropy(
        model.head(x)[..., 0].sigmoid(), labels.double() / VOCABULARY
    ),
}


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def classes_are_checked() -> bool:
    """Whether a compiled `one_hot` refuses negative numbers, as in eager: the graphs of torch 2.11 do not assert it."""
    try:
        torch.compile(lambda labels: F.one_hot(labels, VOCABULARY), backend="aot_eager")(-tokens(2))
    except RuntimeError:
        return True
    assert torch.__version__.startswith("2.11.")
    return False


@pytest.mark.parametrize("name", only(["a sum", "gradients", "classes"], LOSSES))
def test_what_is_asserted_is_looked_at(name: str) -> None:
    """And the rest streams."""
    model, streams = Decoder(LOSSES[name]), True if name in ("all", "a sum", "classes") else None
    compare(model, {"ids": tokens(1), "labels": tokens(2)}, chunk_size=4, also=(7,), streams=streams)
    torch._dynamo.reset()
    function = torch.compile(model, backend="streambp", options=OPTIONS)
    function(tokens(1), tokens(2)).backward()
    wrong = tokens(2)
    wrong[0, 3] = -1
    with pytest.raises(RuntimeError) if name != "classes" or classes_are_checked() else nullcontext():
        function(tokens(1), wrong).backward()
    function(tokens(1), tokens(2)).backward()
