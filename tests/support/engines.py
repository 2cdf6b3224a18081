"""Models as engines of sharded data parallel training get them, and a step of one against one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamfx.frontend.backend import streambp
from streamfx.integrations import calls, parts
from tests.support.collectives import data_of, worst
from tests.support.profiled import names_of
from tests.support.sharded import Decoder, Layer

LENGTH, VOCABULARY, WIDTH = 29, 17, 8
WIRE = "c10d::"


class Masked(Layer):
    """A layer with a mask in a buffer, and a number of its own."""

    mask: Tensor

    def __init__(self, width: int, window: int) -> None:
        super().__init__(width)
        rows = torch.arange(LENGTH)
        self.register_buffer("mask", (rows[:, None] >= rows) & (rows[:, None] - rows < window))
        self.times = window % 5

    @staticmethod
    def make(width: int, number: int) -> Masked:
        """The first and the third are alike; the second differs in its mask, the fourth in its number, too."""
        return Masked(width, (3, 8, 3, 4)[number])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2)) * self.times
        return x + self.down(F.gelu(self.up(x)))


def plain(width: int, number: int) -> Layer:
    return Layer(width)


class Body(nn.Module):
    """Layers in a loop of a module of their own, as most libraries write it."""

    def __init__(self, layers: int, width: int, vocabulary: int, layer: Callable[[int, int], Layer]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(layer(width, number) for number in range(layers))
        self.is_checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Nested(nn.Module):
    """A body, and a head with a loss behind it; without labels, logits."""

    def __init__(
        self,
        layers: int = 2,
        width: int = WIDTH,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
        layer: Callable[[int, int], Layer] = plain,
    ) -> None:
        super().__init__()
        self.body, self.head = Body(layers, width, vocabulary, layer), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.body(ids))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def twins(make: Callable[[], nn.Module] = Nested) -> tuple[nn.Module, nn.Module]:
    """A model in float64, and a copy that stays as it is."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def checkpointed(model: nn.Module) -> None:
    """Layers that make their activations again in eager."""
    for module in model.modules():
        if isinstance(module, (Body, Decoder)):
            module.is_checkpointed = True


@contextmanager
def graphs_seen() -> Iterator[list[list[str]]]:
    """The operators of each graph that Dynamo makes for enabled modules."""
    seen: list[list[str]] = []

    def noted(module: Any, inputs: Any, **options: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        seen.append([getattr(node.target, "__name__", str(node.target)) for node in nodes])
        return streambp(module, inputs, **options)

    with mock.patch.object(calls, "streambp", noted), mock.patch.object(parts, "streambp", noted):
        yield seen


@dataclass(frozen=True)
class Done:
    """The largest error of a gradient in one step, and the collectives of both halves."""

    error: float
    forward: dict[str, int]
    backward: dict[str, int]


def collectives(call: Callable[[], Any]) -> dict[str, int]:
    """Calls of each collective, as an engine begins them."""
    return dict(Counter(name for name in names_of(call) if name.startswith(WIRE)))


def one_process(truth: nn.Module, rank: int, world: int = 2, length: int = LENGTH, micro: int = 1) -> None:
    """Gradients of the mean over the ranks' losses, each of which has another tangent."""
    truth.zero_grad()
    for part in range(micro):
        losses = [truth(*data_of(world * part + other, length)) * (other + 1) for other in range(world)]
        torch.stack(losses).mean().backward()


def step(model: nn.Module, truth: nn.Module, rank: int, length: int = LENGTH) -> Done:
    """One step of a wrapped model against one process with the data of all ranks."""
    one_process(truth, rank, length=length)
    model.zero_grad()
    made: list[Tensor] = []
    forward = collectives(lambda: made.append(model(*data_of(rank, length))))
    backward = collectives(lambda: (made[0] * (rank + 1)).backward())
    return Done(worst(model, truth), forward, backward)
