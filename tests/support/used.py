"""Decoders with a given use of hidden rows, or a given attention, for tables of variants."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.parts import VOCABULARY, Decoder, Heads, Plain, made

Use = Callable[["Used", Tensor, Tensor], Tensor]  # of the decoder, hidden rows [b t d] and labels [b t]: a loss
Mix = Callable[[Tensor], Tensor]


class Used(Plain):
    """A causal decoder of one layer, or more."""

    def __init__(self, use: Use, layers: int = 1) -> None:
        super().__init__(layers)
        self.use: Any = use

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.use(self, self.hidden(self.embed(ids)), labels)
        return loss


class Mixed(nn.Module):
    """A use: something of all rows is added to them in front of the head."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix: Any = mix

    def forward(self, model: Used, x: Tensor, labels: Tensor) -> Tensor:
        return labelled(model, x + self.mix(x), labels)


def labelled(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def used(use: Use, layers: int = 1) -> nn.Module:
    return made(lambda: Used(use, layers))


def batch(length: int = 19, rows: int = 2) -> dict[str, Tensor]:
    ids, labels = torch.randint(0, VOCABULARY, (2, rows, length), generator=torch.Generator().manual_seed(5))
    return {"ids": ids, "labels": labels}


class Attending(Heads):
    """Attention is a function, or a module, of q, k and v [b h t d]."""

    def __init__(self, mixed: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mixed: Any = mixed() if isinstance(mixed, type) else mixed

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = self.mixed(q, k, v)
        return mixed


def attending(mixed: Callable[..., Any], layers: int = 2) -> nn.Module:
    """A decoder with the given attention: a function, or a type of modules."""
    return made(lambda: type("Own", (Decoder,), {"attention": lambda self: Attending(mixed)})(layers))
