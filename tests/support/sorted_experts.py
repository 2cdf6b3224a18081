"""Mixtures of experts as libraries write them for a grouped matmul: rows are sorted by expert, multiplied, and restored."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe  # noqa: F401  (defines the grouped product that has float64)

from tests.support.decoders.parts import WIDTH, Plain
from tests.support.tables import named_cases

EXPERTS, CHOSEN = 4, 2


@dataclass(frozen=True)
class Spelling:
    """One way to write each step; comments give arguments and results."""

    order: Callable[[Tensor], Tensor] = lambda ids: torch.sort(ids)[1]  # group [s] -> order [s]
    token: Callable[[Tensor, int], Tensor] = lambda order, n: order // CHOSEN  # order [s], tokens -> token of each row [s]
    count: Callable[[Tensor], Tensor] = lambda ids: torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1)  # group [s] -> [e]
    back: Callable[[Tensor, Tensor, int], Tensor] = lambda y, order, n: _inverse(order)(y).view(n, CHOSEN, -1).sum(1)


def _inverse(order: Tensor) -> Callable[[Tensor], Tensor]:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return lambda y: y[inverse]


def _written(y: Tensor, order: Tensor, n: int) -> Tensor:
    out = torch.zeros_like(y)
    out[order] = y
    return out.view(n, CHOSEN, -1).sum(1)


def _tokens(n: int) -> Tensor:
    return torch.arange(n).unsqueeze(1).expand(n, CHOSEN).reshape(-1)


def _added(y: Tensor, order: Tensor, n: int) -> Tensor:
    return torch.zeros(n, y.shape[1], dtype=y.dtype).index_add(0, order // CHOSEN, y)


def _scattered(y: Tensor, order: Tensor, n: int) -> Tensor:
    index = (order // CHOSEN).unsqueeze(1).expand_as(y)
    return torch.zeros(n, y.shape[1], dtype=y.dtype).scatter_add(0, index, y)


SPELLINGS = named_cases("spellings", globals())


class SortedExperts(nn.Module):
    def __init__(self, spelling: Spelling, bias: bool = True) -> None:
        super().__init__()
        self.spelling = spelling
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH)) if bias else None

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers [n CHOSEN] of the experts of each token."""
        return self.router(x).softmax(-1).topk(CHOSEN, -1)  # type: ignore[return-value]

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(0, -2)
        shares, chosen = self.groups(x)
        ids = chosen.reshape(-1)
        order = self.spelling.order(ids)
        ends = self.spelling.count(ids).cumsum(0).to(torch.int32)
        y = self.between(x[self.spelling.token(order, len(x))], order, ends, ids)
        y = y * shares.reshape(-1)[order].unsqueeze(1)
        return self.spelling.back(y, order, len(x)).view_as(inputs)

    def between(self, rows: Tensor, order: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        """The experts' computation on sorted rows [s d]."""
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(rows, self.up, ends)
        if self.bias is not None:
            y = y + self.bias[ids[order]]
        result: Tensor = product(F.silu(y), self.down.transpose(1, 2), ends)
        return result


class SparseDecoder(Plain):
    """A decoder with experts instead of MLPs."""

    def __init__(self, make: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__(layers)
        self.mlp = nn.ModuleList(make() for _ in range(layers))
