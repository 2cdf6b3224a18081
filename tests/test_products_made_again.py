"""A model that returns its logits beside the loss runs no product more than eager with every layer checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from tests.support.counting import Counting
from tests.support.exactness import assert_small, errors, outcome

WIDTH, VOCABULARY, BATCH, LENGTH = 8, 40, 2, 24
CHUNKS = {"chunk_size": 6, "loss_chunk_size": 6}
aten = torch.ops.aten


class Products(Counting):
    """FLOPs of matrix products."""

    def flops_of(self, func: Any, args: Any, result: Any) -> int:
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):  # those into given memory, too
            return 2 * int(result.numel()) * int(args[-1].shape[-2])
        return 0


class Norm(nn.Module):
    def __init__(self, scaled: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.scaled = nn.Parameter(torch.randn(WIDTH)), scaled

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return self.scaled(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), self.weight).type_as(x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "of layers": lambda: nn.LayerNorm(WIDTH),
    "of rows, a kernel": lambda: nn.RMSNorm(WIDTH),
    "of rows": lambda: Norm(lambda x, weight: weight * x),
    "of rows, from one": lambda: Norm(lambda x, weight: x * (1.0 + weight)),  # a weight that is made outside of loops
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]), None


class States(nn.Module):
    """A loop over rows with a product at each, whose last state is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.keep, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        entering = self.enter(x)
        state, states = torch.zeros_like(x[:, 0]), []
        for row in range(x.shape[1]):
            state = torch.tanh(self.keep(state) + entering[:, row])
            states.append(state)
        return self.out(torch.stack(states, 1)), state


class Layer(nn.Module):
    def __init__(self, mixer: type[nn.Module], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.mixer = norm(), norm(), mixer()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, state = self.mixer(self.first(x))
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.second(x)))), state


class Decoder(nn.Module):
    def __init__(self, mixer: type[nn.Module], norm: Callable[[], nn.Module], checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False), norm()
        self.layers = nn.ModuleList(Layer(mixer, norm) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> tuple[Any, ...]:
        x, states = self.embedding(ids), []
        for layer in self.layers:
            x, state = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            states.append(state)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits, *states


def decoder(mixer: type[nn.Module], norm: str, checkpointed: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder(mixer, NORMS[norm], checkpointed).double()


def loss_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids)[0]


def products(model: Any, ids: Tensor) -> int:
    with Products() as counted:
        model(ids)[0].backward()
    return counted.flops


@pytest.mark.parametrize(("mixer", "norm"), [*((Attention, norm) for norm in NORMS), (States, "of rows, from one")])
def test_no_product_more_than_with_checkpoints(mixer: type[nn.Module], norm: str) -> None:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    model, eager = decoder(mixer, norm), decoder(mixer, norm)
    compiled = torch.compile(model, backend="streambp", options=dict(CHUNKS))
    expected = outcome(loss_of(eager), eager, {"ids": ids})
    assert_small(errors(outcome(loss_of(compiled), model, {"ids": ids}), expected), 1e-11, norm)
    most = products(decoder(mixer, norm, checkpointed=True), ids)
    if mixer is States:  # both layers are in one stage, and the last product of the first is made again
        most += 2 * BATCH * LENGTH * 3 * WIDTH * WIDTH
    assert products(compiled, ids) <= most
    stages = streamfx.explain(eager, ids, **CHUNKS).summary()["stages"]
    assert [(stage["kind"], stage["loops"]) for stage in stages][-1] == ("streamed", 1)  # forward and backward in one
