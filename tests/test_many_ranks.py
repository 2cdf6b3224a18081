"""Many ranks of which one is there: all of them would send the same in the same order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamfx.planner.context import Ulysses
from streamfx.torch_private.groups import imagined_ranks
from tests.support import cut_by_hand
from tests.support.collectives import data_of
from tests.support.cut_by_hand import CutDecoder
from tests.support.over_ranks import facts_of, text_of_ranks
from tests.support.sharded import Decoder, Layer, sharded
from tests.support.spread import only

WIDTH, NEAR = 256, 8  # weights have rows for 256 ranks; so many ranks exchange rows


def near_ranks(world: int) -> Any:
    """Ranks one beside the other, and those that have the same place among such. Torch remembers groups of equal meshes: those
    of two ranks, which are tried in one process, are not to be equal.
    """
    return init_device_mesh("cpu", (world // NEAR, NEAR), mesh_dim_names=(f"far from {dist.get_rank()}", "near"))


def gathered(world: int, model: Decoder) -> nn.Module:
    """All ranks divide the weights."""
    return sharded(model, init_device_mesh("cpu", (world,)))


class Divided(Layer):
    """A layer of a rank that has a part of each sequence, and swaps rows for heads with those that have the others."""

    exchange: Ulysses

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.exchange(self, q, k, v, None)[0]

    def by_rows(self, mixed: Tensor) -> Tensor:
        return mixed.flatten(-2)


def in_context(world: int, model: Decoder) -> nn.Module:
    """All ranks divide the weights, those of a machine each sequence."""
    for layer in model.layers:
        layer.__class__ = Divided
        layer.exchange = Ulysses(near_ranks(world).get_group("near"), NEAR)  # type: ignore[assignment]
    return gathered(world, model)


def cut(world: int, model: Decoder) -> nn.Module:
    """Those of a machine cut the layers, and ranks with the same part of them divide its weights."""
    mesh = near_ranks(world)
    cut_by_hand.cut_over[:] = [mesh.get_group("near")]
    own = CutDecoder(model, (WIDTH // cut_by_hand.HEAD // NEAR,) * NEAR, (2 * WIDTH // NEAR,) * NEAR)
    for layer in own.layers:
        layer.shard(mesh[f"far from {dist.get_rank()}"])  # type: ignore[operator]
    return own


@pytest.fixture(autouse=True)
def groups_are_forgotten() -> Iterator[None]:
    yield
    cut_by_hand.cut_over.clear()


def told(make: Callable[[int, Decoder], nn.Module], world: int, rank: int) -> str:
    """What a rank tells the others, but for the names of groups."""
    torch.manual_seed(0)
    with imagined_ranks(world, rank):
        facts = facts_of(make(world, Decoder(2, WIDTH, WIDTH)), data_of(rank, 8), lambda text, *_, **__: [text])
        return re.sub(r"^(\w+) \w+ torch", r"\1 torch", text_of_ranks(facts), flags=re.MULTILINE)


CASES = [(gathered, 256, "all_gather_into_tensor"), (in_context, 256, "all_to_all_single"), (cut, 64, "sum torch.float")]


@pytest.mark.parametrize(("make", "world", "sent"), only([CASES[-1]], CASES))
def test_all_ranks_send_the_same_in_the_same_order(make: Callable[..., nn.Module], world: int, sent: str) -> None:
    first, second, last = (told(make, world, rank) for rank in (0, 1, world - 1))
    assert first == second == last and sent in first
