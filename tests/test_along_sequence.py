"""Rows joined to the sequence, norms along it, distances and head mixing between rows and keys: all in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.passes.rewrite.views.decompose_on_sequence import MOST
from tests.support.decoders import HEAD, HEADS, VOCABULARY, WIDTH, Decoder, Heads
from tests.support.exactness import compare, recorder
from tests.support.spread import only

aten = torch.ops.aten
SIZES = (1, 30)


def batch(length: int = 19) -> dict[str, Tensor]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels}


class CausalHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Joined(Decoder):
    """Learned rows in front of the sequence, or behind it, whose results nobody looks at; or between two more parts."""

    attention = CausalHeads

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


class MemoryHeads(Heads):
    """Learned keys and values in front of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(1, HEADS, 3, HEAD)) for _ in range(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((own.expand(q.shape[0], -1, -1, -1), x), 2) for own, x in ((self.keys, k), (self.values, v)))
        scores = q @ k.transpose(-1, -2)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(4)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Memory(Decoder):
    attention = MemoryHeads


def test_keys_joined_to_the_keys() -> None:
    compare(Memory().double(), batch(), also=SIZES, attention={"causal"})


class Rolled(Decoder):
    """Rows that are shifted, and come in again at the other end; so do channels."""

    attention = CausalHeads

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        x = super().hidden(x, **more)
        return x + (x.roll(self.shift, 1) * x.roll(1, -1)).sin()


@pytest.mark.parametrize("shift", [1, -3, 19])
def test_rows_that_come_in_again(shift: int) -> None:
    compare(Rolled(shift).double(), batch(), also=SIZES, attention={"causal"})


class WrittenOver(Decoder):
    """Some rows are replaced by others, of another place; what stood there may be anything."""

    attention = CausalHeads

    def __init__(self, first: int, count: int, source: int) -> None:
        super().__init__()
        self.place, self.source = slice(first, first + count), slice(source, source + count)

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        x = super().hidden(x, **more)
        at = torch.arange(x.shape[1])[:, None]
        inside = (at >= self.place.start) & (at < self.place.stop)
        y = x.masked_fill(inside, torch.inf)
        y[:, self.place] = x[:, self.source].sin()
        return x + y


PLACES = [(3, 9, 1), (0, 4, 0), (1, 18, 0), (15, 4, 9), (2, 5, 11), (7, 1, 0)]


@pytest.mark.parametrize(("first", "count", "source"), only(PLACES[:1], PLACES))
def test_rows_that_are_written_over(first: int, count: int, source: int) -> None:
    report = compare(WrittenOver(first, count, source).double(), batch(), also=SIZES, streams=None)
    assert not any(node.target is aten.slice_scatter.default for node in report.facts[0].joint.nodes)


class Orthogonal(Decoder):
    """Each attention's result loses what points along the residual stream, over all rows at once."""

    attention = CausalHeads

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for attend, norm in zip(self.attend, self.norms, strict=False):
            unit = F.normalize(x.flatten(1), dim=-1)
            y = attend(norm(x)).flatten(1)
            x = x + (y - (y * unit).sum(-1, keepdim=True) * unit).unflatten(1, x.shape[1:])
        return x


def test_norm_over_all_rows() -> None:
    compare(Orthogonal().double(), batch(), also=SIZES, attention={"causal"})


class TalkingHeads(Heads):
    """A convolution of one tap mixes heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(HEADS, HEADS, 1), nn.Conv2d(HEADS, HEADS, 1, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.before(q @ k.transpose(-1, -2))
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed: Tensor = self.after(scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)) @ v
        return mixed


class DistanceHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = -(torch.cdist(q, k) ** 2)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


class SlopeHeads(Heads):
    """A buffer with a slope for each head: numbers, as long as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(HEADS, 1, 1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        position = torch.arange(scores.shape[-1])
        scores = scores - self.slopes * (position[:, None] - position)  # type: ignore[operator]
        return scores.masked_fill(position[:, None] < position, torch.finfo(scores.dtype).min).softmax(-1) @ v


class BiasHeads(SlopeHeads):
    """A buffer with a bias for each head, row and key."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(HEADS, 32, 32))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        scores = q @ k.transpose(-1, -2) + self.bias[:, :length, :length]  # type: ignore[index]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


class RowByRowHeads(Heads):
    """A mask of a window, written row by row."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf, dtype=q.dtype)
        for row in range(q.shape[-2]):
            mask[row, max(row - 4, 0) : row + 1] = 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def decoder_of(heads: type[nn.Module]) -> nn.Module:
    return type("Own", (Decoder,), {"attention": heads})(1).double()


SPELLED_OUT = [TalkingHeads, DistanceHeads, SlopeHeads, BiasHeads]


@pytest.mark.parametrize("heads", only([TalkingHeads, DistanceHeads], SPELLED_OUT), ids=lambda heads: heads.__name__)
def test_causal_scores(heads: type[nn.Module]) -> None:
    compare(decoder_of(heads), batch(), also=SIZES, attention={"causal"})


def test_mask_made_row_by_row() -> None:
    compare(decoder_of(RowByRowHeads), batch(), also=(5,), attention={"window(5)"})


def test_numbers_that_change() -> None:
    """What was found of a buffer is forgotten when it comes to hold what may stand in for infinity."""
    model, given = decoder_of(SlopeHeads), batch()
    backend = recorder(chunk_size=7)
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(**given), model(**given))
    with torch.no_grad():
        for heads in model.attend:  # type: ignore[union-attr]
            heads.slopes[0] = -torch.inf  # not a number at distance zero  # type: ignore[index]
    torch.testing.assert_close(compiled(**given), model(**given), equal_nan=True)
    with torch.no_grad():
        for heads in model.attend:  # type: ignore[union-attr]
            heads.slopes[0] = 1e300  # type: ignore[index]
    torch.testing.assert_close(compiled(**given), model(**given))


class Images(Decoder):
    """Rows from elsewhere take the places of some tokens, in the order in which they come."""

    attention = CausalHeads

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor, images: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        places = (ids == 0).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(places, self.project(images))
        return F.cross_entropy(self.head(self.hidden(x)).flatten(0, 1), labels.flatten())


def test_rows_put_among_the_sequence() -> None:
    given: dict[str, Any] = batch()
    given["ids"] = given["ids"].clamp(1)
    given["ids"][0, 2:6] = given["ids"][1, 11:13] = 0
    given["images"] = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)  # one more than there are places
    compare(Images().double(), given, also=SIZES, attention={"causal"})
