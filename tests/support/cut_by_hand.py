"""A decoder whose layers are cut over ranks by hand, in parts of any sizes, and its gradients against the whole one's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.collectives import whole_gradient
from tests.support.sharded import Decoder, Layer, whole

HEAD = 4  # numbers of a head, as in `Layer`


cut_over: list[Any] = []  # the group of ranks, where it is not that of all


def summed(x: Tensor) -> Tensor:
    everybody: Any = dist.group.WORLD
    return all_reduce(x, "sum", cut_over[0] if cut_over else everybody)


def own_part(parts: Sequence[Tensor]) -> Tensor:
    return parts[dist.get_rank(*cut_over[:1])]


class Shared(torch.autograd.Function):
    """What all ranks read: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class Summed(torch.autograd.Function):
    """The sum of what each rank has a part of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def part(parameter: Tensor, sizes: Sequence[int], dim: int) -> nn.Parameter:
    """This rank's part of a weight."""
    return nn.Parameter(own_part(parameter.detach().split(list(sizes), dim)).clone())


class CutLayer(nn.Module):
    """This rank's heads, and its part of the network's inner width."""

    def __init__(self, layer: Layer, heads: Sequence[int], inner: Sequence[int]) -> None:
        super().__init__()
        widths = [HEAD * count for count in heads]
        self.cuts: dict[str, tuple[Sequence[int], int]] = {
            **dict.fromkeys(("q.weight", "k.weight", "v.weight"), (widths, 0)),
            "out.weight": (widths, 1),
            "up.weight": (inner, 0),
            "up.bias": (inner, 0),
            "down.weight": (inner, 1),
        }
        given = dict(layer.named_parameters())
        self.norm = nn.LayerNorm(len(given["norm.weight"]))
        self.norm.load_state_dict(layer.norm.state_dict())
        self.own = nn.ParameterDict({name.replace(".", "_"): part(given[name], *cut) for name, cut in self.cuts.items()})
        self.is_sharded = False

    def shard(self, mesh: DeviceMesh) -> None:
        """Let ranks of another dimension of a mesh have shards of this rank's part, and gather them where they are used."""
        self.is_sharded = True
        for name, value in self.own.items():
            self.own[name] = nn.Parameter(distribute_tensor(value.data, mesh, [Shard(0)]))

    def read(self, name: str) -> Tensor:
        return whole(self.own[name]) if self.is_sharded else self.own[name]  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = Shared.apply(self.norm(x))
        q, k, v = (F.linear(h, self.read(f"{name}_weight")).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + Summed.apply(F.linear(mixed, self.read("out_weight")))
        inner = F.gelu(F.linear(Shared.apply(x), self.read("up_weight"), self.read("up_bias")))
        return x + Summed.apply(F.linear(inner, self.read("down_weight")))

    def error(self, layer: Layer) -> float:
        """The largest difference between a gradient and the whole layer's."""
        true = {name: parameter.grad for name, parameter in layer.named_parameters()}
        pairs: list[tuple[Any, Any]] = []
        for name, (sizes, dim) in self.cuts.items():
            pairs.append((whole_gradient(self.own[name.replace(".", "_")]), own_part(true[name].split(list(sizes), dim))))  # type: ignore[union-attr]
        if not self.is_sharded:  # else nobody has added up those of the norm
            pairs += [(self.norm.weight.grad, true["norm.weight"]), (self.norm.bias.grad, true["norm.bias"])]  # type: ignore[list-item]
        return max((one - other).abs().max().item() for one, other in pairs)


class CutDecoder(nn.Module):
    """The layers of a decoder, cut; everything else is the same on all ranks."""

    def __init__(self, whole: Decoder, heads: Sequence[int], inner: Sequence[int]) -> None:
        super().__init__()
        self.embed, self.head = whole.embed, whole.head
        self.layers = nn.ModuleList(CutLayer(layer, heads, inner) for layer in whole.layers)  # type: ignore[arg-type]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.of(self.embed(ids), labels)

    def of(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def error(self, whole: Decoder) -> float:
        return max(own.error(layer) for own, layer in zip(self.layers, whole.layers, strict=True))  # type: ignore[operator]
