"""Sample calls of operators, over sizes b t d k v that may be equal; `samples.txt` lists them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.attention import ATTENTION
from streamfx.runtime import implementations  # noqa: F401  (samples are run)
from tests.support.laws import Call
from tests.support.tables import read

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Batch, sequence, width, another width, vocabulary; and the seed of the values. Its methods draw arguments of samples."""

    b: int
    t: int
    d: int
    k: int
    v: int
    seed: int = 0

    @staticmethod
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    @staticmethod
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device="meta")

    @staticmethod
    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64) + 0.1

    @staticmethod
    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape)

    @staticmethod
    def booleans(*shape: int) -> Tensor:
        return torch.rand(shape) < 0.5

    @staticmethod
    def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse deviation, as a layer norm returns them."""
        return x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)

    def spectrum(self) -> Tensor:
        return torch.complex(self.draw(self.b, self.t, self.d), self.draw(self.b, self.t, self.d))

    def attended(self, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """t queries with two heads; k keys and values."""
        return self.draw(self.b, 2, self.t, 4), self.draw(self.b, heads, self.k, 4), self.draw(self.b, heads, self.k, 4)

    def attended_back(self, heads: int = 2, **how: Any) -> tuple[Any, ...]:
        """Arguments of attention's backward."""
        inputs = self.attended(heads)
        out, lse = ATTENTION(*inputs, **how)
        return self.draw(*out.shape), *inputs, out, lse, how

    def likelihoods(self, *middle: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and labels of t rows."""
        batch = (self.b,) if middle else ()
        shape = (*batch, self.v, *middle, self.t) if middle else (self.t, self.v)
        return self.draw(*shape), self.integers(self.v, *batch, *middle, self.t)


SIZES = [field.name for field in fields(Sizes)]
DRAWS = [name for name in vars(Sizes) if not name.startswith("_") and name not in SIZES]
Table = dict[Any, list[CodeType]]  # arguments of an operator, as Python of sizes


def table_in(file: str) -> tuple[Table, set[Any]]:
    """Return a file's calls by operator, and the operators whose results are random."""
    found: Table = {}
    random = set[Any]()
    for names, arguments in read(Path(__file__).parent / file, 2)[""]:
        for name in names.removeprefix("~").split():
            operator = attrgetter(name if name.startswith("streamfx.") else f"aten.{name}")(torch.ops)
            found.setdefault(operator, []).append(compile(f"({arguments},)", f"{file}: {name}", "eval"))
            random |= {operator} if names.startswith("~") else set()
    return found, random


SAMPLES, RANDOM = table_in("samples.txt")


def calls(target: Any, sizes: Sizes, table: Table = SAMPLES) -> Iterator[Call]:
    names = {name: getattr(sizes, name) for name in (*SIZES, *DRAWS)}
    for code in table[target]:
        torch.manual_seed(sizes.seed)
        args = eval(code, {"torch": torch, "aten": aten, **names})
        if target is aten.convolution_backward.default:
            args = gradient_of_weight(sizes, *args)
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        yield Call(target, args[:-1] if kwargs else args, kwargs, target in RANDOM)


def gradient_of_weight(sizes: Sizes, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Any, ...]:
    """Arguments of the backward that returns a convolution's gradient of its weight."""
    y = aten.convolution(x, weight, None, *others)
    return sizes.draw(*y.shape), x, weight, None, *others, [False, True, False]
