"""What one of many ranks runs, and sends to whom, without the others: loops and collectives of both halves, in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from streamfx.ir.collective_ops import group_among
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import bound_arguments
from streamfx.node_meta import REDUCED
from streamfx.passes.ops.collectives import is_collective, is_wait
from streamfx.runtime.collective_calls import begin
from streamfx.runtime.loop import Loop
from streamfx.tools.planner.context import Ulysses
from streamfx.torch_private import tree_leaves
from streamfx.torch_private.groups import group_called
from tests.support import cut_by_hand
from tests.support.cut_by_hand import CutDecoder
from tests.support.sharded import Decoder, Layer, sharded

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

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed, _ = self.exchange(self, q, k, v, None)
        x = x + self.out(mixed.flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


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
    for layer in model.layers if world > NEAR else ():
        layer.shard(mesh[f"far from {dist.get_rank()}"])  # type: ignore[operator]
    return model


KINDS: dict[str, Callable[[int], nn.Module]] = {"gathers": gathered, "Ulysses": in_context, "tensor": cut}


def listing(facts: Facts) -> str:
    """Both halves: loops by name, in front of them and in them what is sent, of how many numbers, and to which ranks."""
    program = known(facts.program)
    halves = (("forward", program.forward), ("backward", known(program.backward)))
    return "\n".join(line for name, module in halves for line in (name, *_lines(module, "  "))) + "\n"


def _lines(module: fx.GraphModule, margin: str) -> Iterator[str]:
    for line, run in groupby(_steps(module, margin)):
        count = len(list(run))
        yield line if count == 1 else f"{line} ({count} times)"


def _steps(module: fx.GraphModule, margin: str) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op == "call_module" and isinstance(loop := module.get_submodule(str(node.target)), Loop):
            yield f"{margin}{loop.spec.name}, chunks of {loop.spec.chunk_size}"
            yield from _lines(loop.spec.body, margin + "  ")
        elif is_wait(node):
            yield f"{margin}wait"
        elif is_collective(node) or node.target is begin:
            yield margin + _sent(node)


def _sent(node: fx.Node) -> str:
    """A collective, and how many numbers of how many values a rank gives; in a loop, those that it gives in all chunks."""
    if node.target is begin:
        _, _, dtype, sizes = REDUCES.fullmatch(node.meta[REDUCED]).groups()  # type: ignore[union-attr]
        return f"all reduce, {dtype} {sizes} in all chunks, {_ranks(str(node.args[2]))}"
    given = bound_arguments(node)
    values = [value for value in tree_leaves(next(iter(given.values()))) if isinstance(value, fx.Node)]
    numbers = sum(value.meta["val"].numel() for value in values)
    of = "" if len(values) == 1 else f" of {len(values)} values"
    name = str(node.target).split(".")[1].removesuffix("_coalesced").replace("_", " ")
    return f"{name}{of}, {numbers:,} numbers, {_ranks(group_among(given))}"


def _ranks(group: str) -> str:
    """How many ranks, and how far apart: the same for groups of one dimension of a mesh."""
    ranks = dist.get_process_group_ranks(group_called(group))
    (apart,) = {later - sooner for sooner, later in pairwise(ranks)}
    return f"{len(ranks)} ranks, {apart} apart"
