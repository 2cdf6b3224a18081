"""Sequence parallel by hand: a rank has a part of the rows, and gathers keys, or swaps rows for heads (Ulysses). Exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from tests.support.collectives import data_of, worst
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, Layer

CHUNK, ROWS = 8, 32  # of a rank


def everybody() -> list[int]:
    return list(range(dist.get_world_size()))


class Gathered(Layer):
    """Queries of a rank's own rows, keys and values of all."""

    def forward(self, x: Tensor) -> Tensor:
        h, rank, world = self.norm(x), dist.get_rank(), dist.get_world_size()
        q, k, v = (project(h).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        k, v = (all_gather_tensor_autograd(part.contiguous(), 2, everybody()) for part in (k, v))
        row, column = torch.arange(x.shape[1]) + rank * x.shape[1], torch.arange(x.shape[1] * world)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=row[:, None] >= column)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Ulysses(Layer):
    """Queries, keys and values of all rows, for a part of the heads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (self.by_heads(project(h).unflatten(-1, (-1, 4))) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(self.by_rows(mixed))
        return x + self.down(F.gelu(self.up(x)))

    def by_heads(self, part: Tensor) -> Tensor:
        """[b t h e] -> [b h/w wt e]"""
        sent = part.unflatten(2, (dist.get_world_size(), -1)).permute(2, 1, 0, 3, 4).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).flatten(0, 1).permute(1, 2, 0, 3)

    def by_rows(self, mixed: Tensor) -> Tensor:
        """[b h/w wt e] -> [b t he]"""
        sent = mixed.permute(2, 0, 1, 3).unflatten(0, (dist.get_world_size(), -1)).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).permute(2, 1, 0, 3, 4).flatten(2)


UNEVEN = (20, 12)


class Swapped(Layer):
    """Queries of a rank's own rows, keys and values of all; ranks have other numbers of rows, and send them all to all."""

    def forward(self, x: Tensor) -> Tensor:
        h, rank, count = self.norm(x), dist.get_rank(), x.shape[1]
        q, k, v = (project(h).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        own = torch.cat([k, v], -1).movedim(2, 0).contiguous()
        sent = torch.cat([own] * len(UNEVEN)).flatten(1)
        every = all_to_all_single_autograd(sent, list(UNEVEN), [count] * len(UNEVEN), everybody()).unflatten(1, own.shape[1:])
        k, v = every.movedim(0, 2).chunk(2, -1)
        row, column = torch.arange(count) + sum(UNEVEN[:rank]), torch.arange(sum(UNEVEN))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=row[:, None] >= column)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


def error_of(rank: int, kind: type[Layer], rows: tuple[int, ...] | None = None) -> float:
    """The largest error of a gradient: each rank has the loss of its own rows."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = Decoder(layers=2)
    model: Any = copy.deepcopy(truth)
    for layer in model.layers:
        layer.__class__ = kind
    rows = rows or (ROWS,) * dist.get_world_size()
    data = data_of(0, sum(rows))
    truth(*data).backward()
    run = torch.compile(model, backend="streambp", options={"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True})
    own = [part.split(rows, 1)[rank] for part in data]
    (run(*own) * rows[rank] / sum(rows)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Gathered, Ulysses])
def test_gradients_are_those_of_one_process(kind: type[nn.Module]) -> None:
    assert max(on_ranks(error_of, kind)) < 1e-12


def test_ranks_with_other_numbers_of_rows_exchange_them_again() -> None:
    """What is exchanged is made again in the backward half, where the parts are of other sizes, too."""
    assert max(on_ranks(error_of, Swapped, UNEVEN)) < 1e-12
