"""A decoder whose rows are mixed by functions, and the comparison of it with eager."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.ir.facts import StorageClass
from tests.support import layouts
from tests.support.decoders import made
from tests.support.exactness import Report, compare

VOCABULARY, WIDTH, LENGTH = 23, 8, 11

Mixer = Callable[["Mixed", Tensor], Tensor]


class Mixed(nn.Module):
    """A layer for each function, which may use the weights as it likes. No attention unless a function has one."""

    def __init__(self, *mixers: Mixer) -> None:
        super().__init__()
        self.mixers = mixers
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.up, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.mu, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(self, F.rms_norm(x, (WIDTH,)))
            x = x + self.out(F.silu(self.gate(F.layer_norm(x, (WIDTH,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mixed(*mixers: Mixer) -> nn.Module:
    return made(lambda: Mixed(*mixers))


def tokens(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """Token ids, which are the labels, too."""
    ids = layouts.tokens(VOCABULARY, batch, length, 0)
    return {"ids": ids, "labels": ids}


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], WIDTH)


def compared(*mixers: Mixer, length: int = LENGTH, batch: int = 2, **options: Any) -> Report:
    return compare(mixed(*mixers), tokens(batch, length), **options)


def operators(report: Report, *kinds: type) -> list[fx.Node]:
    """The nodes whose target is of one of these kinds."""
    return [node for facts in report.facts for node in facts.joint.nodes if isinstance(node.target, kinds)]


def are_reversed(recurrences: Iterable[fx.Node]) -> list[bool]:
    """Whether each of these recurrences runs from the last row to the first."""
    return [node.target.reverse for node in recurrences]  # type: ignore[union-attr]


def all_in_rows(report: Report, found: Iterable[fx.Node]) -> bool:
    """Whether there are such nodes, and chunks compute their own rows of each."""
    (facts,), found = report.facts, list(found)
    return bool(found) and all(StorageClass.ROWS in facts.access.storage_classes[node] for node in found)
