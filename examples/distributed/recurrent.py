"""A recurrent model whose sequence lies on several ranks: states go from rank to rank, and their gradients back.

    torchrun --standalone --nproc-per-node 2 examples/distributed/recurrent.py

All ranks run at once: a recurrence that is linear in its state may begin with nothing, and add afterwards what the ranks before
have left. What is sent is a state per layer, however long the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel
from training import Step, compare

from streamfx import enable


class Recurrence(nn.Module):
    """h_t = a_t h_(t-1) + x_t, with decays a_t that follow from the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.decay, self.value = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.gate, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.ranks = 1  # among which the sequence is divided

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        decays, states = products_and_states(self.decay(h).sigmoid(), self.value(h))
        if self.ranks > 1:
            states = states + decays * state_before(decays[:, -1], states[:, -1])[:, None]
        return x + self.out(states * self.gate(h).sigmoid())


def products_and_states(decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the product of all decays so far, and the state, where the first row begins with nothing."""

    def step(before: tuple[Tensor, Tensor], row: tuple[Tensor, Tensor]) -> Any:
        product, state = row[0] * before[0], row[0] * before[1] + row[1]
        return (product, state), (product.clone(), state.clone())

    nothing = x.new_zeros(x.shape[0], x.shape[2])
    made: tuple[Tensor, Tensor] = scan(step, (nothing + 1, nothing), (decay, x), dim=1)[1]
    return made


def state_before(product: Tensor, last: Tensor) -> Tensor:
    """The state that this rank's first row begins with. Every rank reads what all have sent, so that all send gradients back."""
    before = (torch.arange(dist.get_world_size()) < dist.get_rank())[:, None, None]
    products = torch.where(before, all_gather_tensor_autograd(product[None], 0, dist.group.WORLD), 1.0)
    states = torch.where(before, all_gather_tensor_autograd(last[None], 0, dist.group.WORLD), 0.0)
    state = torch.zeros_like(last)
    for decay, own in zip(products, states, strict=True):
        state = decay * state + own
    return state


def prepare(model: Any) -> Step:
    for layer in model.layers:
        layer.ranks = dist.get_world_size()
    wrapped = DistributedDataParallel(model)  # the mean of the gradients of all rows
    enable(wrapped, chunk_size=128)  # the one line
    return lambda *text: wrapped(*(part.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for part in text))


if __name__ == "__main__":
    compare(prepare, groups=1, kind=Recurrence)
