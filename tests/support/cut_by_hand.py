"""A decoder whose layers are cut over ranks by hand, in parts of any sizes, and its gradients against the whole one's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from tests.support.sharded import Decoder, Layer

HEAD = 4  # numbers of a head, as in `Layer`


def summed(x: Tensor) -> Tensor:
    everybody: Any = dist.group.WORLD
    return all_reduce(x, "sum", everybody)


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
    return nn.Parameter(parameter.detach().split(list(sizes), dim)[dist.get_rank()].clone())


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

    def forward(self, x: Tensor) -> Tensor:
        own, h = self.own, Shared.apply(self.norm(x))
        q, k, v = (F.linear(h, own[f"{name}_weight"]).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + Summed.apply(F.linear(mixed, own["out_weight"]))
        inner = F.gelu(F.linear(Shared.apply(x), own["up_weight"], own["up_bias"]))
        return x + Summed.apply(F.linear(inner, own["down_weight"]))

    def error(self, layer: Layer) -> float:
        """The largest difference between a gradient and the whole layer's."""
        true = {name: parameter.grad for name, parameter in layer.named_parameters()}
        own = {name: (self.own[name.replace(".", "_")].grad, *cut) for name, cut in self.cuts.items()}
        pairs = [(gradient, true[name].split(list(sizes), dim)[dist.get_rank()]) for name, (gradient, sizes, dim) in own.items()]  # type: ignore[union-attr]
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
