"""A model whose parameters, gradients and optimizer state are sharded among ranks, as by the engines of these names.

    ddp      parameters, gradients and state are replicated; each gradient is all-reduced
    zero1    the state is sharded: gradients are reduce-scattered, updated parameters are all-gathered after the step
    zero2    gradients, too: full parameters live from their first use to the end of the backward graph (FSDP's SHARD_GRAD_OP)
    zero3    parameters, too: gathered in the forward graph, and gathered anew in the backward graph

The model is traced with its collectives, so lifetimes and communication are those that `reinsert_collectives.py`
produces. Ranks of context parallelism (`context.py`) hold shards of the same weights, as in DeepSpeed's ZeRO with
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.errors import PlanError
from streamfx.tools.planner.context import context_parallel_attention, tensor_parallel_layers
from streamfx.tools.planner.model_names import SHARDS
from streamfx.torch_private.groups import has_ranks, simulated_ranks

DDP, ZERO1, ZERO2, ZERO3 = SHARDS


@dataclass(frozen=True)
class Sharding:
    """The layout of a step on `world` ranks. `tensor` ranks split the layers and run the same positions; `context`
    ranks split each sequence; all ranks with the same part of the layers shard weights by `shard`.
    """

    world: int = 1
    shard: str = DDP
    tensor: int = 1
    context: int = 1

    @property
    def near(self) -> int:
        """The number of neighboring ranks that exchange activations."""
        return self.tensor * self.context

    @property
    def holders(self) -> int:
        """The number of ranks that shard an optimizer state, among those with the same part of the layers."""
        return 1 if self.shard == DDP else self.world // self.tensor

    @property
    def options(self) -> Mapping[str, Any]:
        """The backend options that correspond to the engine."""
        return {"reshard": False} if self.shard == ZERO2 and self.world > 1 else {}

    @contextmanager
    def divided(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the model as one rank holds it, in place, while the ranks exist; a single rank leaves it unchanged."""
        with self.cut(model) as mesh:
            is_sharded = self.shard in (ZERO2, ZERO3)
            with nullcontext() if mesh is None else _with_parameters_of(model, mesh, is_sharded):
                yield model

    @contextmanager
    def cut(self, model: nn.Module) -> Iterator[Any]:
        """Split the layers and sequences of the model, and yield the mesh of ranks with the same weights; None for a
        single rank.
        """
        if self.world == 1:
            yield None
            return
        if has_ranks():
            raise PlanError(
                f"a plan for {self.world} ranks creates fake ranks",
                found="this process already belongs to a process group",
                do="plan in a separate process, as `streamfx plan` does",
            )
        from torch.distributed.device_mesh import init_device_mesh

        with simulated_ranks(self.world), ExitStack() as contexts:
            mesh = init_device_mesh("cpu", (self.world // self.tensor, self.tensor), mesh_dim_names=("alike", "tensor"))
            if self.tensor > 1:
                contexts.enter_context(tensor_parallel_layers(model, mesh["tensor"]))
            if self.context > 1:
                sizes = self.world // self.near, self.context, self.tensor
                group = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context", "tensor")).get_group("context")
                contexts.enter_context(context_parallel_attention(model, group, self.context))
            yield mesh["alike"]


ALONE = Sharding()


@contextmanager
def _with_parameters_of(model: nn.Module, mesh: Any, is_sharded: bool) -> Iterator[None]:
    """Replace each parameter by a distributed tensor. Reading one returns the full tensor; its gradient is averaged
    over the ranks.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement: Any = Shard(0) if is_sharded else Replicate()
    sharded_parameters: dict[Tensor, nn.Parameter] = {}
    originals = []
    for module in list(model.modules()):
        parameters = {name: value for name, value in module._parameters.items() if value is not None}
        if not parameters:
            continue
        originals.append((module, module.__class__, parameters))
        for name, value in parameters.items():
            if value not in sharded_parameters:
                local_part = rank_part(value)
                local = _largest_shard(local_part, mesh.size()) if is_sharded else local_part.detach()
                sharded = DTensor.from_local(
                    local, mesh, [placement], run_check=False, shape=local_part.shape, stride=local_part.stride()
                )
                sharded_parameters[value] = nn.Parameter(sharded, value.requires_grad)
            module._parameters[name] = sharded_parameters[value]
        readers = {name: property(_parameter_reader(name, value)) for name, value in parameters.items()}
        module.__class__ = type(type(module).__name__, (type(module),), readers)
    try:
        yield
    finally:
        for module, kind, parameters in originals:
            module.__class__ = kind
            module._parameters.update(parameters)


def _largest_shard(value: Tensor, world: int) -> Tensor:
    """Return a shard with the size of the first rank's, which is the largest."""
    rows = -(-value.shape[0] // world) if value.dim() else 1
    return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device=value.device)


def rank_part(value: Any) -> Tensor:
    """Return this rank's part of a tensor-parallel parameter, or the parameter itself."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def _parameter_reader(name: str, original: Any) -> Callable[[nn.Module], Tensor]:
    """Return a function that reads a parameter in its layout before sharding: the full tensor, or this rank's
    tensor-parallel part.
    """
    if not hasattr(original, "to_local"):
        return lambda module: _gathered(module._parameters[name])
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = original.device_mesh, original.placements, original.shape, original.stride()
    return lambda module: DTensor.from_local(
        _gathered(module._parameters[name]), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _gathered(parameter: Any) -> Tensor:
    """Return the full tensor of a distributed parameter; its gradient is averaged over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    full: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return full


def rank_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's part of it."""
    return rank_part(tensor).nbytes


# -- the state of optimizers: bytes kept from step to step


BLOCK = 256  # elements of an 8-bit state that share a float32 scale (Dettmers et al., 2022, section 2.1)

STATES: dict[str, Callable[[Tensor], int]] = {
    "none": lambda parameter: 0,
    "sgd": lambda parameter: 0,  # without momentum
    "adamw": lambda parameter: 2 * parameter.nbytes,
    "adamw_master": lambda parameter: 12 * parameter.numel(),  # weights and both moments in float32
    "adamw8bit": lambda parameter: 2 * (parameter.numel() + 4 * -(-parameter.numel() // BLOCK)),
}


def state_bytes(model: nn.Module, optimizer: str, ranks: Sharding) -> int:
    """Return the bytes of the optimizer state of all trained parameters on one rank."""
    with ranks.cut(model):
        trained = [rank_part(parameter) for parameter in model.parameters() if parameter.requires_grad]
        return -(-sum(map(STATES[optimizer], trained)) // ranks.holders)
