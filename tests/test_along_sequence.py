"""Rows joined to the sequence, norms along it, distances and head mixing between rows and keys: all in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.passes.rewrite.views.decompose_on_sequence import MOST
from tests.support.decoders.parts import HEAD, HEADS, WIDTH, Plain
from tests.support.exactness import compare, recorder
from tests.support.spread import only
from tests.support.used import attending, batch

pytestmark = pytest.mark.compiled

aten = torch.ops.aten
SIZES = (1, 30)


class Joined(Plain):
    """Learned rows in front of the sequence, or behind it, whose results nobody looks at; or between two more parts."""

    def __init__(self, parts: tuple[int, ...], own: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(1, rows, WIDTH) for rows in parts])
        self.own = own  # the position of the sequence among the parts

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        parts = [part.expand(ids.shape[0], -1, -1) for part in self.parts]
        before = sum(part.shape[1] for part in parts[: self.own])
        x = torch.cat((*parts[: self.own], self.embed(ids), *parts[self.own :]), 1)
        logits: Tensor = self.head(self.hidden(x)[:, before : before + ids.shape[1]])
        return logits


PARTS = [((3,), 0), ((3,), 1), ((1,), 1), ((4, 2), 1)]


@pytest.mark.parametrize(("parts", "own"), only(PARTS[3:], PARTS), ids=str)
def test_rows_joined_to_the_sequence(parts: tuple[int, ...], own: int) -> None:
    compare(Joined(parts, own).double(), batch(), also=SIZES, attention={"causal"})


def test_many_parts_stay_joined() -> None:
    """A padding for each would take as many bytes as the join for each of them."""
    report = compare(Joined((1,) * MOST, 0).double(), batch(), streams=None)
    assert any(node.target is aten.cat.default for node in report.facts[0].joint.nodes)


class Orthogonal(Plain):
    """Each attention's result loses what points along the residual stream, over all rows at once."""

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for attend, norm in zip(self.attend, self.norms, strict=False):
            unit = F.normalize(x.flatten(1), dim=-1)
            y = attend(norm(x)).flatten(1)
            x = x + (y - (y * unit).sum(-1, keepdim=True) * unit).unflatten(1, x.shape[1:])
        return x


def test_norm_over_all_rows() -> None:
    compare(Orthogonal().double(), batch(), also=SIZES, attention={"causal"})


def causal(scores: Tensor, more: int = 0) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + more)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)


class Memory(nn.Module):
    """Learned keys and values in front of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(1, HEADS, 3, HEAD)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((own.expand(q.shape[0], -1, -1, -1), x), 2) for own, x in ((self.keys, k), (self.values, v)))
        return causal(q @ k.mT, 3) @ v


class Talking(nn.Module):
    """A convolution of one tap mixes heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(HEADS, HEADS, 1), nn.Conv2d(HEADS, HEADS, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = self.after(causal(self.before(q @ k.mT))) @ v
        return mixed


class Slopes(nn.Module):
    """A buffer with a slope for each head: numbers, as long as they are. And one with a bias for each row and key."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.bias = nn.Buffer(torch.rand(HEADS, 1, 1)), nn.Buffer(torch.randn(HEADS, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(rows := q.shape[2])
        return causal(q @ k.mT - self.slopes * (position[:, None] - position) + self.bias[:, :rows, :rows]) @ v


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(-(torch.cdist(q, k) ** 2)) @ v


@pytest.mark.parametrize("mix", only([Memory, Talking, distances], [Memory, Talking, Slopes, distances]))
def test_causal_scores(mix: Any) -> None:
    compare(attending(mix, layers=1), batch(), also=SIZES, attention={"causal"})


def test_numbers_that_change() -> None:
    """What was found of a buffer is forgotten when it comes to hold what may stand in for infinity."""
    model, given = attending(Slopes, layers=1), batch()
    compiled = torch.compile(model, backend=recorder(chunk_size=7))
    torch.testing.assert_close(compiled(**given), model(**given))
    for number in (-torch.inf, 1e300):  # the first is no number at distance zero
        with torch.no_grad():
            model.attend[0].mixed.slopes[0] = number  # type: ignore[index,union-attr]
        torch.testing.assert_close(compiled(**given), model(**given), equal_nan=True)


class Images(Plain):
    """Rows from elsewhere take the places of some tokens, in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor, images: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        x = x.masked_scatter((ids == 0).unsqueeze(-1).expand_as(x), self.project(images))
        return F.cross_entropy(self.head(self.hidden(x)).flatten(0, 1), labels.flatten())


def test_rows_put_among_the_sequence() -> None:
    given: dict[str, Any] = batch()
    given["ids"] = given["ids"].clamp(1)
    given["ids"][0, 2:6] = given["ids"][1, 11:13] = 0
    given["images"] = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)  # one more than there are places
    compare(Images().double(), given, also=SIZES, attention={"causal"})
