"""Many ranks of which one is there: what it runs, and sends to whom, and that all others send the same in the same order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from streamfx.ir.collectives import group_among
from streamfx.ir.facts import known
from streamfx.ir.joint import bound_arguments
from streamfx.passes.codegen.waits import REDUCED
from streamfx.passes.operators.collectives import is_collective, is_wait
from streamfx.planner.context import Ulysses
from streamfx.runtime.collectives import begin
from streamfx.runtime.loop import Loop
from streamfx.torch_private import tree_leaves
from streamfx.torch_private.groups import group_called, imagined_ranks
from tests.support import cut_by_hand
from tests.support.collectives import data_of
from tests.support.cut_by_hand import CutDecoder
from tests.support.over_ranks import facts_of
from tests.support.sharded import Decoder, Layer, sharded
from tests.support.spread import only

LAYERS, WIDTH, NEAR = 2, 256, 8  # weights have rows for 256 ranks; so many ranks exchange rows
REDUCES = re.compile(r"(\w+) (\w+) torch\.(\w+) (\[[\d, ]+\]) .*")  # how, over which group, what


def near_ranks(world: int) -> Any:
    """Ranks one beside the other, and those that have the same place among such. Torch remembers groups of equal meshes: those
    of two ranks, which are tried in one process, are not to be equal.
    """
    return init_device_mesh("cpu", (world // NEAR, NEAR), mesh_dim_names=(f"far from {dist.get_rank()}", "near"))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(LAYERS, WIDTH, WIDTH)


def gathered(world: int) -> nn.Module:
    """All ranks divide the weights."""
    return sharded(decoder(), init_device_mesh("cpu", (world,)))


class Divided(Layer):
    """A layer of a rank that has a part of each sequence, and swaps rows for heads with those that have the others."""

    exchange: Ulysses

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.exchange(self, q, k, v, None)[0]

    def by_rows(self, mixed: Tensor) -> Tensor:
        return mixed.flatten(-2)


def in_context(world: int) -> nn.Module:
    """All ranks divide the weights, those of a machine each sequence."""
    model = decoder()
    for layer in model.layers:
        layer.__class__ = Divided
        layer.exchange = Ulysses(near_ranks(world).get_group("near"), NEAR)  # type: ignore[assignment]
    return sharded(model, init_device_mesh("cpu", (world,)))


def cut(world: int) -> nn.Module:
    """Those of a machine cut the layers, and ranks with the same part of them divide its weights."""
    mesh = near_ranks(world)
    cut_by_hand.cut_over[:] = [mesh.get_group("near")]
    model = CutDecoder(decoder(), (WIDTH // cut_by_hand.HEAD // NEAR,) * NEAR, (2 * WIDTH // NEAR,) * NEAR)
    for layer in model.layers:
        layer.shard(mesh[f"far from {dist.get_rank()}"])  # type: ignore[operator]
    return model


KINDS: dict[str, Callable[[int], nn.Module]] = {"gathers": gathered, "Ulysses": in_context, "tensor": cut}


def listing(kind: str, world: int, rank: int) -> str:
    """Both halves: loops by name, in front of them and in them what is sent, of how many numbers, and to which ranks."""
    with imagined_ranks(world, rank):
        program = known(facts_of(KINDS[kind](world), data_of(rank, 8), lambda text, *_, **__: [text]).program)
        halves = (("forward", program.forward), ("backward", known(program.backward)))
        return "\n".join(line for name, module in halves for line in (name, *lines_of(module, "  "))) + "\n"


def lines_of(module: fx.GraphModule, margin: str) -> Iterator[str]:
    for line, run in groupby(steps_of(module, margin)):
        count = len(list(run))
        yield line if count == 1 else f"{line} ({count} times)"


def steps_of(module: fx.GraphModule, margin: str) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op == "call_module" and isinstance(loop := module.get_submodule(str(node.target)), Loop):
            yield f"{margin}{loop.spec.name}, chunks of {loop.spec.chunk_size}"
            yield from lines_of(loop.spec.body, margin + "  ")
        elif is_wait(node):
            yield f"{margin}wait"
        elif is_collective(node) or node.target is begin:
            yield margin + sent(node)


def sent(node: fx.Node) -> str:
    """A collective, and how many numbers of how many values a rank gives; in a loop, those that it gives in all chunks."""
    if node.target is begin:
        _, _, dtype, sizes = REDUCES.fullmatch(node.meta[REDUCED]).groups()  # type: ignore[union-attr]
        return f"all reduce, {dtype} {sizes} in all chunks, {ranks_of(str(node.args[2]))}"
    given = bound_arguments(node)
    values = [value for value in tree_leaves(next(iter(given.values()))) if isinstance(value, fx.Node)]
    numbers = sum(value.meta["val"].numel() for value in values)
    of = "" if len(values) == 1 else f" of {len(values)} values"
    name = str(node.target).split(".")[1].removesuffix("_coalesced").replace("_", " ")
    return f"{name}{of}, {numbers:,} numbers, {ranks_of(group_among(given))}"


def ranks_of(group: str) -> str:
    """How many ranks, and how far apart: the same for groups of one dimension of a mesh."""
    ranks = dist.get_process_group_ranks(group_called(group))
    (apart,) = {later - sooner for sooner, later in pairwise(ranks)}
    return f"{len(ranks)} ranks, {apart} apart"


@pytest.fixture(autouse=True)
def groups_are_forgotten() -> Iterator[None]:
    yield
    cut_by_hand.cut_over.clear()


@pytest.mark.parametrize(("kind", "world"), only([], [(kind, 64) for kind in KINDS]))
def test_both_halves_of_many_ranks(kind: str, world: int, golden: Callable[[str], None]) -> None:
    golden(listing(kind, world, 0))


@pytest.mark.parametrize(("kind", "world"), only([("tensor", 64)], [("tensor", 64), ("gathers", 256), ("Ulysses", 256)]))
def test_all_ranks_send_the_same_in_the_same_order(kind: str, world: int) -> None:
    first, second, last = (listing(kind, world, rank) for rank in (0, 1, world - 1))
    assert first == second == last
    assert f"{NEAR if kind != 'gathers' else world} ranks, 1 apart" in first
