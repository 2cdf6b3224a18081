"""A model whose parameters, gradients and optimizer's state are divided among ranks, as the engines of that name do.

    ddp      whole parameters, whole gradients, whole state; each gradient is all-reduced
    zero1    the state is divided: a gradient is reduced to each rank's part, updated parameters are gathered after the step
    zero2    gradients, too: whole parameters live from their first use to the end of the backward half (FSDP's SHARD_GRAD_OP)
    zero3    parameters, too: gathered for the forward half, and again for the backward half

The model is traced with its collectives, so that what is alive when, and what is sent when, is what `reinsert_collectives.py` makes of it.
Ranks that divide a sequence (`context.py`) hold parts of the same weights, as DeepSpeed's ZeRO with sequence parallel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.argument_checks import one_of
from streamfx.errors import PlanError
from streamfx.tools.planner.context import sequences_divided
from streamfx.tools.planner.tensors import layers_cut
from streamfx.torch_private.groups import has_ranks, imagined_ranks

DDP, ZERO1, ZERO2, ZERO3 = SHARDS = "ddp", "zero1", "zero2", "zero3"


@dataclass(frozen=True)
class Sharding:
    """How a step is divided among `world` ranks: layers are cut among `tensor` of them, which run the same rows; each sequence is
    divided among `context`; and all ranks that hold the same part of layers divide weights by `shard`.
    """

    world: int = 1
    shard: str = DDP
    tensor: int = 1
    context: int = 1

    @property
    def divides_parameters(self) -> bool:
        return self.shard in (ZERO2, ZERO3)

    @property
    def near(self) -> int:
        """How many ranks, one beside the other, exchange rows while they compute."""
        return self.tensor * self.context

    @property
    def holders(self) -> int:
        """Among how many ranks an optimizer's state is divided, of those that hold the same part of layers."""
        return 1 if self.shard == DDP else self.world // self.tensor

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the backend that the engine's name stands for."""
        return {"reshard": False} if self.shard == ZERO2 and self.world > 1 else {}

    @contextmanager
    def divided(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model as one rank has it, in place, as long as the ranks are there; alone it stays as it is."""
        with (
            self.cut(model) as mesh,
            nullcontext() if mesh is None else _with_parameters_of(model, mesh, self.divides_parameters),
        ):
            yield model

    @contextmanager
    def cut(self, model: nn.Module) -> Iterator[Any]:
        """The model with its layers cut and its sequences divided, and the mesh of ranks with the same weights; None if alone."""
        if self.world == 1:
            yield None
            return
        if has_ranks():
            raise PlanError(
                f"a plan for {self.world} ranks imagines them",
                found="a process group, which this process belongs to",
                do="plan in a process of its own, as `streamfx plan` does",
            )
        from torch.distributed.device_mesh import init_device_mesh

        with imagined_ranks(self.world), ExitStack() as changed:
            alike = init_device_mesh("cpu", (self.world // self.tensor, self.tensor), mesh_dim_names=("alike", "tensor"))
            if self.tensor > 1:
                changed.enter_context(layers_cut(model, alike["tensor"]))
            if self.context > 1:
                sizes = self.world // self.near, self.context, self.tensor
                group = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context", "tensor")).get_group("context")
                changed.enter_context(sequences_divided(model, group, self.context))
            yield alike["alike"]


ALONE = Sharding()


def checked_sharding(world: int, shard: Any, tensor: int = 1, context: int = 1) -> Sharding:
    """A way that is known, of devices to divide among."""
    if shard not in SHARDS:
        raise PlanError(f"nothing is divided as {shard!r}", do=one_of(shard, SHARDS))
    if world % (tensor * context):
        raise PlanError(
            f"a step is divided among tensor={tensor} times context={context} devices",
            found=f"a world of {world}",
            do=f"give a multiple of {tensor * context}",
        )
    if world == 1 and shard != DDP:
        raise PlanError(f"{shard} divides a step among devices", found="a world of 1", do="say of how many, as --world 8")
    return Sharding(world, shard, tensor, context)


@contextmanager
def _with_parameters_of(model: nn.Module, mesh: Any, divided: bool) -> Iterator[None]:
    """Each parameter a tensor of all ranks; whoever reads one gets the whole, and its gradient is the mean over the ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement: Any = Shard(0) if divided else Replicate()
    known: dict[Tensor, nn.Parameter] = {}
    kept = []
    for module in list(model.modules()):
        held = {name: value for name, value in module._parameters.items() if value is not None}
        if not held:
            continue
        kept.append((module, module.__class__, held))
        for name, value in held.items():
            if value not in known:
                own = own_part(value)
                local = _part(own, mesh.size()) if divided else own.detach()
                made = DTensor.from_local(local, mesh, [placement], run_check=False, shape=own.shape, stride=own.stride())
                known[value] = nn.Parameter(made, value.requires_grad)
            module._parameters[name] = known[value]
        readers = {name: property(_reader(name, value)) for name, value in held.items()}
        module.__class__ = type(type(module).__name__, (type(module),), readers)
    try:
        yield
    finally:
        for module, kind, held in kept:
            module.__class__ = kind
            module._parameters.update(held)


def _part(value: Tensor, world: int) -> Tensor:
    """The rows of the first rank, which has the most."""
    rows = -(-value.shape[0] // world) if value.dim() else 1
    return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device=value.device)


def own_part(value: Any) -> Tensor:
    """This rank's part of a parameter that is cut among ranks; any other as it is."""
    own: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return own


def _reader(name: str, before: Any) -> Callable[[nn.Module], Tensor]:
    """Reads a parameter as it was before it was divided: the whole, or the whole of this rank's part of what is cut."""
    if not hasattr(before, "to_local"):
        return lambda module: _whole(module._parameters[name])
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = before.device_mesh, before.placements, before.shape, before.stride()
    return lambda module: DTensor.from_local(
        _whole(module._parameters[name]), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _whole(parameter: Any) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate

    whole: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return whole


def own_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of this rank's part of it."""
    return own_part(tensor).nbytes
