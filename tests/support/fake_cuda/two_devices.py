"""A decoder on two CUDA devices, as a program; its arguments are options and the kind of layers."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from streamfx.ir.facts import known
from streamfx.tools.inspect.explain import Explanation
from streamfx.tools.inspect.tracing import traced
from streamfx.torch_private import FakeTensorMode
from tests.support.fake_cuda.attention import Device
from tests.support.fake_cuda.report import loop_report

VOCABULARY, WIDTH = 1000, 512
DEVICES = ("cuda:0", "cuda:0", "cuda:1", "cuda:1")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        made: Tensor = x + self.down(F.gelu(self.up(x)))
        return made


class Recurrent(nn.Module):
    """A state that goes from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            state = row[0] * state + row[1].tanh()
            return state, state.clone()

        rows = (self.decay(x).sigmoid(), x)
        made: Tensor = x + self.out(scan(step, self.first.expand(len(x), -1).clone(), rows, dim=1)[1])
        return made


KINDS = {"attention": Layer, "recurrent": Recurrent}


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.device(DEVICES[0]):
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for device in DEVICES:
            with torch.device(device):
                self.layers.append(KINDS[kind]())
        with torch.device(DEVICES[-1]):
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, device in zip(self.layers, DEVICES, strict=True):
            x = layer(x.to(device))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids.to(DEVICES[-1])[:, 1:].flatten())


def report(options: dict[str, Any], kind: str = "attention", length: int = 2048) -> dict[str, Any]:
    """Return the streamed share, and the devices of the loops' results."""
    Device("h100").install()
    with FakeTensorMode():
        model, ids = Decoder(kind), torch.zeros(1, length, dtype=torch.int64, device=DEVICES[0])
        call = traced(model, (ids,), {}, options, False)
    costs, (graph,) = Explanation(call).costs, call.graphs
    loops = [loop_report(loop) for loop in known(graph.facts.program).loops]
    return {
        "stopped": call.stopped,
        "graphs": len(call.graphs),
        "reasons": graph.facts.reasons(),
        "streamed": sum(cost.streamed_flops for cost in costs) / sum(cost.flops for cost in costs),
        "devices": [(loop["name"], loop["devices"]) for loop in loops],
    }


if __name__ == "__main__":
    print(json.dumps(report(**json.loads(sys.argv[1]))))
