"""A model whose parameters, gradients and optimizer's state are divided among ranks, as the engines of that name do.

    ddp      whole parameters, whole gradients, whole state; each gradient is all-reduced
    zero1    the state is divided: a gradient is reduced to each rank's part, updated parameters are gathered after the step
    zero2    gradients, too: whole parameters live from their first use to the end of the backward half (FSDP's SHARD_GRAD_OP)
    zero3    parameters, too: gathered for the forward half, and again for the backward half

The model is traced with its collectives, so that what is alive when, and what is sent when, is what `put_back.py` makes of it.
Ranks that divide a sequence (`context.py`) hold parts of the same weights, as DeepSpeed's ZeRO with sequence parallel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.errors import PlanError
from streamfx.planner.context import sequences_divided
from streamfx.torch_private.groups import has_ranks, imagined_ranks

DDP, ZERO1, ZERO2, ZERO3 = SHARDS = "ddp", "zero1", "zero2", "zero3"


@dataclass(frozen=True)
class Sharding:
    """How a step is divided among `world` ranks: weights by `shard`, and each sequence among `context` of them."""

    world: int = 1
    shard: str = DDP
    context: int = 1

    @property
    def divides_parameters(self) -> bool:
        return self.shard in (ZERO2, ZERO3)

    @property
    def holders(self) -> int:
        """Among how many ranks an optimizer's state is divided."""
        return 1 if self.shard == DDP else self.world

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the backend that the engine's name stands for."""
        return {"reshard": False} if self.shard == ZERO2 and self.world > 1 else {}

    @contextmanager
    def divided(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with its parameters divided, in place, as long as the ranks are there; alone it stays as it is."""
        if self.world == 1:
            yield model
            return
        if has_ranks():
            raise PlanError(
                f"a plan for {self.world} ranks imagines them",
                found="a process group, which this process belongs to",
                do="plan in a process of its own, as `streamfx plan` does",
            )
        from torch.distributed.device_mesh import init_device_mesh

        with imagined_ranks(self.world), ExitStack() as changed:
            if self.context > 1:
                mesh = init_device_mesh("cpu", (self.world // self.context, self.context), mesh_dim_names=("data", "context"))
                changed.enter_context(sequences_divided(model, mesh["context"].get_group(), self.context))
            changed.enter_context(_with_parameters_of(model, init_device_mesh("cpu", (self.world,)), self.divides_parameters))
            yield model


ALONE = Sharding()


def checked_sharding(world: int, shard: Any, context: int = 1) -> Sharding:
    """A way that is known, of devices to divide among."""
    if shard not in SHARDS:
        raise PlanError(f"nothing is divided as {shard!r}", do=f"give one of {', '.join(SHARDS)}")
    if world % context:
        raise PlanError(
            f"sequences are to be divided among {context} devices",
            found=f"a world of {world}",
            do=f"give a multiple of {context}",
        )
    if world == 1 and shard != DDP:
        raise PlanError(f"{shard} divides a step among devices", found="a world of 1", do="say of how many, as --world 8")
    return Sharding(world, shard, context)


@contextmanager
def _with_parameters_of(model: nn.Module, mesh: Any, divided: bool) -> Iterator[None]:
    """Each parameter a tensor of all ranks; whoever reads one gets the whole, and its gradient is the mean over the ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement: Any = Shard(0) if divided else Replicate()
    known: dict[Tensor, nn.Parameter] = {}
    kept = []
    for module in list(model.modules()):
        own = {name: value for name, value in module._parameters.items() if value is not None}
        if not own:
            continue
        kept.append((module, module.__class__, own))
        for name, value in own.items():
            if value not in known:
                local = _part(value, mesh.size()) if divided else value.detach()
                made = DTensor.from_local(local, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride())
                known[value] = nn.Parameter(made, value.requires_grad)
            module._parameters[name] = known[value]
        readers = {name: property(_reader(name)) for name in own}
        module.__class__ = type(type(module).__name__, (type(module),), readers)
    try:
        yield
    finally:
        for module, kind, own in kept:
            module.__class__ = kind
            module._parameters.update(own)


def _part(value: Tensor, world: int) -> Tensor:
    """The rows of the first rank, which has the most."""
    rows = -(-value.shape[0] // world) if value.dim() else 1
    return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device=value.device)


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda module: _whole(module._parameters[name])


def _whole(parameter: Any) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate

    whole: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return whole


def own_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of this rank's part of it."""
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes
