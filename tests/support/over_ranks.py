"""Graphs that reduce rows over ranks, without other processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamfx.frontend.backend import Compilation
from streamfx.ir.facts import Facts, known
from streamfx.options import resolve_options
from streamfx.passes.lowering.collective_order import describe_order_with_chunks
from streamfx.runtime.collective_calls import begin
from streamfx.torch_private.dynamo import unwrap_errors
from tests.support.cut_by_hand import CutDecoder
from tests.support.sharded import Decoder

WORLD = 8
Exchange = Callable[..., list[str]]


@contextmanager
def one_of_many(world: int = WORLD) -> Iterator[None]:
    """A fake process group of `world` ranks; this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def everybody() -> Any:
    return dist.group.WORLD


def facts_of(call: Callable[..., Tensor], inputs: Sequence[Tensor], exchange: Exchange | None = None, **options: Any) -> Facts:
    """Return the final facts of a compiled function."""
    torch._dynamo.reset()
    given = resolve_options({"chunk_size": 4, "loss_chunk_size": 4, "check_passes": True, **options})
    seen: list[Facts] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with unwrap_errors(module.graph):
            return Compilation(module, given, seen, exchange=exchange).compile(example_inputs)

    torch.compile(call, backend=backend)(*inputs)
    return seen[-1]


def decoder(layers: int = 2) -> CutDecoder:
    """Layers of width 16, of which this rank has one head and four of the inner numbers."""
    torch.manual_seed(0)
    return CutDecoder(Decoder(layers, width=32), (1,) * WORLD, (8,) * WORLD)


def reductions(facts: Facts) -> list[int]:
    """How many reductions each loop has."""
    loops = known(facts.program).loops
    return [sum(node.target is begin for node in loop.spec.body.graph.nodes) for loop in loops]


def text_of_ranks(facts: Facts) -> str:
    """Return this rank's message to the others."""
    return describe_order_with_chunks(facts, everybody().group_name)
