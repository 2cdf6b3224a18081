"""Models whose parameters are sharded tensors, gathered where they are used: SimpleFSDP, as torchtitan writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def sharded(model: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> nn.Module:
    """The model, in place: each parameter is a shard of its rows, and whoever reads it gets the whole.

    Gradients are means over the ranks. With other `placements` a dimension of the mesh holds copies.
    """
    held = placements or [Shard(0)] * mesh.ndim
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        own = {name: value for name, value in module._parameters.items() if value is not None}
        for name, value in own.items():
            if value not in known:
                known[value] = nn.Parameter(distribute_tensor(value.data, mesh, held), value.requires_grad)
            module._parameters[name] = known[value]
        if own:
            readers = {name: property(_reader(name)) for name in own}
            module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), readers)
    return model


def _reader(name: str) -> Callable[[Any], Tensor]:
    return lambda module: whole(module._parameters[name])


def whole(parameter: DTensor) -> Tensor:
    """All of a parameter, on each rank; its gradient is the mean over the ranks."""
    dims = parameter.device_mesh.ndim
    return parameter.redistribute(placements=[Replicate()] * dims).to_local(grad_placements=[Partial("avg")] * dims)
