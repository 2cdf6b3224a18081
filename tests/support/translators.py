"""Models with more than one sequence: encoder-decoders, and decoders that are called in turn."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.engines import loss_of

WIDTH, HEADS, WORDS = 16, 2, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, memory: Tensor | None = None, is_causal: bool = False) -> Tensor:
        rows = self.norm(x)
        keys, values = self.kv(rows if memory is None else memory).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q(rows), keys, values))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2)
        return x + self.out(x)


class Translator(nn.Module):
    """An encoder and a decoder that share an embedding, which is the head, too."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(layers))
        self.decoder = nn.ModuleList(Block() for _ in range(2 * layers))

    def encoded(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.encoder:
            x = block(x)
        return x

    def decoded(self, memory: Tensor, labels: Tensor) -> Tensor:
        y = self.embed(labels)
        for i, block in enumerate(self.decoder):
            y = block(y, memory) if i % 2 else block(y, is_causal=True)
        return y

    def logits(self, memory: Tensor, labels: Tensor) -> Tensor:
        return self.decoded(memory, labels) @ self.embed.weight.T

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        memory = self.encoded(ids)
        logits = self.logits(memory, labels)
        return loss_of(logits[:, :-1], labels[:, 1:]), memory


class Counts(Translator):
    """Writes to a buffer in the encoder, and to the encoder's result in the decoder."""

    seen: Tensor

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        memory = self.encoded(ids)
        self.seen += ids.numel()
        scaled = memory + 1
        y = self.decoded(memory, labels) + scaled.mean(1, keepdim=True)
        scaled.mul_(3)
        return loss_of(y @ self.embed.weight.T, labels) + scaled.mean(), scaled


def batch(source: int = 24, target: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, WORDS, (2, length), generator=generator) for length in (source, target))  # type: ignore[return-value]


class Unread(Translator):
    """The decoder reads the encoder's result without a gradient: the encoder's parameters have no gradients, not zeros."""

    def __init__(self, way: str) -> None:
        super().__init__(1)
        self.way = way

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        memory = self.encoded(ids)
        if self.way == "detached":
            return loss_of(self.logits(memory.detach(), labels), labels)
        y = self.embed(labels)
        with torch.no_grad():
            y = y + self.decoded(memory, labels)
        return loss_of(y @ self.embed.weight.T, labels)


class Segments(Translator):
    """Segments that pass on a memory, each with a loss."""

    rows = 24

    def __init__(self) -> None:
        super().__init__(1)
        self.memory, self.head = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        memory, loss = self.memory.expand(len(ids), -1, -1), torch.zeros((), dtype=self.memory.dtype)
        for words, wanted in zip(ids.split(self.rows, 1), labels.split(self.rows, 1), strict=True):
            y = torch.cat([memory, self.embed(words), memory], 1)
            for block in self.decoder:
                y = block(y, is_causal=True)
            memory = y[:, -4:]
            loss = loss + loss_of(self.head(y[:, 4:-4]), wanted)
        return loss
