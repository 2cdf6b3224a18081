"""Models whose parameters are sharded tensors, gathered where they are used: SimpleFSDP, as torchtitan writes it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def sharded(
    model: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement] | None = None, policy: CheckpointPolicy | None = None
) -> nn.Module:
    """Shard each parameter by rows, in place; reading a parameter gathers it.

    Gradients are means over the ranks. With other `placements` a dimension of the mesh holds copies; a `policy` says whether
    gathered weights are saved or gathered again.
    """
    read = whole if policy is None else _with_policy(policy)
    held = placements or [Shard(0)] * mesh.ndim
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        own = {name: value for name, value in module._parameters.items() if value is not None}
        for name, value in own.items():
            if value not in known:
                known[value] = nn.Parameter(distribute_tensor(value.data, mesh, held), value.requires_grad)
            module._parameters[name] = known[value]
        if own:
            readers = {name: property(_reader(name, read)) for name in own}
            module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), readers)
    return model


def _reader(name: str, read: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda module: read(module._parameters[name])


def _with_policy(policy: CheckpointPolicy) -> Callable[[Any], Tensor]:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda context, operator, *args, **kwargs: policy)

    return lambda parameter: checkpoint(whole, parameter, use_reentrant=False, context_fn=contexts)


def whole(parameter: DTensor) -> Tensor:
    """All of a parameter, on each rank; its gradient is the mean over the ranks."""
    dims = parameter.device_mesh.ndim
    return parameter.redistribute(placements=[Replicate()] * dims).to_local(grad_placements=[Partial("avg")] * dims)


class Layer(nn.Module):
    """Attention with heads of four numbers, and a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.by_rows(self.attended(*self.parts(self.norm(x)))))
        return x + self.down(F.gelu(self.up(x)))

    def parts(self, h: Tensor) -> Iterable[Tensor]:
        """Queries, keys and values."""
        return (self.by_heads(project(h).unflatten(-1, (-1, 4))) for project in (self.q, self.k, self.v))

    def by_heads(self, part: Tensor) -> Tensor:
        """[b t h e] -> [b h t e]"""
        return part.transpose(1, 2)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def by_rows(self, mixed: Tensor) -> Tensor:
        """[b h t e] -> [b t he]"""
        return mixed.transpose(1, 2).flatten(-2)


class Decoder(nn.Module):
    """A decoder whose vocabulary no even number of ranks divides; with `is_checkpointed`, layers are checkpointed."""

    def __init__(self, layers: int = 3, width: int = 8, vocabulary: int = 17, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.is_checkpointed = False
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
