"""Parameters that are sharded tensors, gathered where they are read: SimpleFSDP, as torchtitan has it. A step is one graph.

    torchrun --standalone --nproc-per-node 2 examples/distributed/simple_fsdp.py

streamfx puts one gather in front of the loops that use a layer's weights, and one reduction behind the loop that makes their
gradients, whatever the number of chunks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from training import Step, compare


class Gathered(nn.Module):
    """A parameter is read as all of it; its gradient is the mean over the ranks."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def prepare(model: nn.Module) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        for name, value in list(module._parameters.items()):
            if value is not None:
                setattr(module, name, nn.Parameter(distribute_tensor(value.data, mesh, [Shard(0)])))
                parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return torch.compile(model, backend="streambp", options={"chunk_size": 256})  # the one line


if __name__ == "__main__":
    compare(prepare)
