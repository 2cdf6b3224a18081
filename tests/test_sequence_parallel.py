"""Sequence parallel by hand: a rank has a part of the rows, and gathers keys, or swaps rows for heads (Ulysses). Exact."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from tests.support.collectives import data_of, worst
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, Layer

HEAD, UNEVEN = 4, (20, 12)
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8, "check_passes": True}


def everybody() -> list[int]:
    return list(range(dist.get_world_size()))


class Gathered(Layer):
    """Queries of a rank's own rows, keys and values of all."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (all_gather_tensor_autograd(part.contiguous(), 2, everybody()) for part in (k, v))
        return of_own_rows(q, k, v, dist.get_rank() * q.shape[2])


def of_own_rows(q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
    row, column = torch.arange(q.shape[2]) + before, torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=row[:, None] >= column)


class Ulysses(Layer):
    """Queries, keys and values of all rows, for a part of the heads."""

    def by_heads(self, part: Tensor) -> Tensor:
        """[b t h e] -> [b h/w wt e]"""
        sent = part.unflatten(2, (dist.get_world_size(), -1)).permute(2, 1, 0, 3, 4).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).flatten(0, 1).permute(1, 2, 0, 3)

    def by_rows(self, mixed: Tensor) -> Tensor:
        """[b h/w wt e] -> [b t he]"""
        sent = mixed.permute(2, 0, 1, 3).unflatten(0, (dist.get_world_size(), -1)).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).permute(2, 1, 0, 3, 4).flatten(2)


class Swapped(Layer):
    """Queries of a rank's own rows, keys and values of all; ranks have other numbers of rows, and send them all to all."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, count = torch.cat([k, v], -1).movedim(2, 0).contiguous(), q.shape[2]
        sent = torch.cat([own] * len(UNEVEN)).flatten(1)
        every = all_to_all_single_autograd(sent, list(UNEVEN), [count] * len(UNEVEN), everybody()).unflatten(1, own.shape[1:])
        k, v = every.movedim(0, 2).chunk(2, -1)
        return of_own_rows(q, k, v, sum(UNEVEN[: dist.get_rank()]))


def error_of(rank: int, kind: type[Layer], rows: tuple[int, ...] = ()) -> float:
    """The largest error of a gradient: each rank has the loss of its own rows, and a head."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = Decoder(layers=2, width=dist.get_world_size() * HEAD)
    model: Any = copy.deepcopy(truth)
    for layer in model.layers:
        layer.__class__ = kind
    rows = rows or (20,) * dist.get_world_size()
    data = data_of(0, sum(rows))
    truth(*data).backward()
    own = [part.split(rows, 1)[rank] for part in data]
    run = torch.compile(model, backend="streambp", options=OPTIONS)
    (run(*own) * rows[rank] / sum(rows)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


def test_ranks_with_different_lengths_repeat_exchanges() -> None:
    """The backward repeats the exchange, with parts of different sizes."""
    assert max(on_ranks(error_of, Swapped, UNEVEN)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize(("kind", "world"), [(Gathered, 2), (Gathered, 5), (Ulysses, 3), (Ulysses, 4)])
def test_gradients_are_those_of_one_process(kind: type[Layer], world: int) -> None:
    assert max(on_ranks(error_of, kind, world=world)) < 1e-12
