"""What these examples train, and how they compare themselves with one process: a decoder, real text, three steps of AdamW."""

from __future__ import annotations

import copy
import email.message
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LENGTH, STEPS, RATE = 1024, 3, 1e-3
EXACT = 1e-9  # the largest difference of a weight after all steps, in float64


class Layer(nn.Module):
    """Causal attention in heads of 16 numbers, and a gated network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (part(h).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Reads bytes."""

    def __init__(self, kind: Callable[[int], nn.Module] = Layer, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.layers, self.norm = nn.ModuleList(kind(width) for _ in range(layers)), nn.RMSNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


Step = Callable[[Tensor, Tensor], Tensor]


def compare(prepare: Callable[[nn.Module], Step], groups: int | None = None, kind: Callable[[int], nn.Module] = Layer) -> None:
    """Train what `prepare` makes of the model, on the ranks that torchrun has started, and a copy of it in one process.

    So many `groups` of ranks have data of their own, by default each rank. The model has layers of a `kind`.
    """
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = Decoder(kind)
    model = copy.deepcopy(truth)
    run = prepare(model)
    count = groups or dist.get_world_size()
    own = dist.get_rank() * count // dist.get_world_size()
    optimizers = [torch.optim.AdamW(weights.parameters(), lr=RATE) for weights in (model, truth)]
    for step in range(STEPS):
        begin = time.perf_counter()
        run(*text(step, own)).backward()
        losses = [truth(*text(step, group)) for group in range(count)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        say(f"step {step}: loss {losses[own].item():.4f}, {time.perf_counter() - begin:.1f} s")
    difference = worst(model, truth)
    say(f"{dist.get_world_size()} ranks and one process differ by {difference:.1e} in their weights after {STEPS} steps")
    dist.barrier()  # gloo's threads free the last tensors while we wait: at the interpreter's end they would abort the process
    dist.destroy_process_group()
    if difference > EXACT:
        raise SystemExit(1)


def text(step: int, group: int) -> tuple[Tensor, Tensor]:
    """Bytes of Python's own library, and the byte that follows each: others for each step and group."""
    data = Path(email.message.__file__).read_bytes()
    begin = (step * 7 + group) * LENGTH
    ids = torch.tensor([data[(begin + i) % len(data)] for i in range(LENGTH + 1)])[None]
    return ids[:, :-1], ids[:, 1:]


def worst(model: nn.Module, truth: nn.Module) -> float:
    """The largest difference of a weight; wrappers keep the order of parameters."""
    pairs = zip(model.parameters(), truth.parameters(), strict=True)
    return max((whole(own.detach()) - other).abs().max().item() for own, other in pairs)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def say(line: str) -> None:
    if int(os.environ["RANK"]) == 0:
        print(line, flush=True)
