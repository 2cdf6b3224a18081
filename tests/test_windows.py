"""Operators that look a few rows back (or ahead): short convolutions, token shifts; and those that carry a total along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare

pytestmark = pytest.mark.compiled

WIDTH, TAPS, LENGTH = 8, 4, 19

Mixer = Callable[["Mixed", Tensor], Tensor]


class Mixed(nn.Module):
    """Embedding, layers of a mixer over the rows and an MLP, head and loss. No attention unless a mixer has one."""

    def __init__(self, *mixers: Mixer) -> None:
        super().__init__()
        self.mixers = mixers
        self.embed, self.head = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 23, bias=False)
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH, padding=TAPS - 1)
        self.full = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)
        self.grouped = nn.Conv1d(WIDTH, WIDTH, 3, groups=2, padding=2, bias=False)
        self.same, self.point = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.turned = nn.ConvTranspose1d(WIDTH, WIDTH, 3)
        self.mu = nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(self, F.rms_norm(x, (WIDTH,)))
            x = x + self.down(F.silu(self.up(F.layer_norm(x, (WIDTH,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def convolved(m: Mixed, x: Tensor) -> Tensor:
    """Padded at both ends and cut, one behind the other."""
    return m.grouped(F.silu(m.depthwise(x.mT)[..., : x.shape[1]]))[..., : x.shape[1]].mT * m.gate(x)


def of_a_part(m: Mixed, x: Tensor) -> Tensor:
    """Chunks in front have no row of it."""
    return F.pad(m.point(x[:, 11:].mT), (11, 0)).mT


def beside_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = (m.depthwise(y.mT)[..., : x.shape[1]].mT[:, None] for y in (x, m.gate(x), x * m.mu))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def written_over_zeros(m: Mixed, x: Tensor) -> Tensor:
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return m.gate(before)


def behind_a_row(m: Mixed, x: Tensor) -> Tensor:
    return m.up(torch.cat([m.gate(x.new_zeros(x.shape[0], 1, WIDTH)), m.gate(x)[:, :-1]], 1)).chunk(3, -1)[0]


def unfolded(m: Mixed, x: Tensor) -> Tensor:
    """A convolution with weights of its own for each row."""
    windows = F.pad(x.mT, (2, 0)).unfold(-1, 3, 1).flip(-1).transpose(1, 2)
    return (windows * m.up(x).unflatten(-1, (WIDTH, 3))).sum(-1)


def shifted(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(torch.lerp(F.pad(x, (0, 0, 1, -1)), x, m.mu))


def inside_of_a_row(m: Mixed, x: Tensor) -> Tensor:
    """Each row chooses among several values of its own; rows are the heads of an attention kernel."""
    values = torch.stack((x, m.gate(x), shifted(m, x)), -2)
    return F.scaled_dot_product_attention(m.mu.expand(*x.shape[:2], 1, -1), values, values).squeeze(-2)


def linear_attention(m: Mixed, x: Tensor) -> Tensor:
    """The state of each row, [b t d d], is a running sum."""
    q, k = m.gate(x).exp(), (x * m.mu).exp()
    state = (k[..., None] * x[..., None, :]).cumsum(1)
    return (q[..., None, :] @ state)[..., 0, :] / (q * k.cumsum(1)).sum(-1, keepdim=True)  # type: ignore[no-any-return]


def two_sums(m: Mixed, x: Tensor) -> Tensor:
    """The second sum runs over what a convolution makes of the first."""
    return m.depthwise(F.silu(x.cumsum(1)).mT)[..., : x.shape[1]].mT.cumsum(1)


DECODERS: dict[str, list[Mixer]] = {  # layers one behind the other
    "convolutions": [
        convolved,
        lambda m, x: m.full(F.pad(x.transpose(1, 2), (4, 0))).transpose(1, 2),
        lambda m, x: m.turned(x.mT)[..., : x.shape[1]].mT,
        unfolded,
    ],
    "shifts": [shifted, written_over_zeros, behind_a_row, of_a_part],
    "attention": [beside_attention, inside_of_a_row],
    "totals": [linear_attention, lambda m, x: m.gate(x).logcumsumexp(1), two_sums],
}


def check(*mixers: Mixer, length: int = LENGTH, **options: Any) -> Report:
    ids = layouts.tokens(23, 2, length, 0)
    report = compare(decoders.made(lambda: Mixed(*mixers)), {"ids": ids, "labels": ids}, **options)
    assert all(known(facts.axes.sequence).length == length for facts in report.facts)
    return report


@pytest.mark.parametrize("name", DECODERS)
def test_looks_back(name: str) -> None:
    check(*DECODERS[name], chunk_size=5, also=(1, 16))


def padded_into_blocks(m: Mixed, x: Tensor, size: int = 4) -> Tensor:
    return F.pad(shifted(m, x), (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def inside_of_blocks(m: Mixed, x: Tensor) -> Tensor:
    blocks = padded_into_blocks(m, x)
    mixed = (blocks @ blocks.mT).tril().softmax(-1) @ blocks
    return m.gate(mixed.flatten(1, 2)[:, : x.shape[1]])


def of_two_sizes(m: Mixed, x: Tensor) -> Tensor:
    means = [padded_into_blocks(m, x, size).cumsum(2).flatten(1, 2)[:, : x.shape[1]] for size in (2, 3)]
    return m.gate(means[0] * means[1])


def test_blocks() -> None:
    """What happens inside of blocks streams, whether or not the sequence has to be padded for it: chunks hold whole blocks."""
    check(of_two_sizes, chunk_size=3, also=(1, 8, 16))


class Streams(nn.Module):
    """Rows that are given, as behind a break in a model: two streams side by side, of which a sum goes into blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.weight = decoders.made(lambda: Mixed(inside_of_blocks)), nn.Linear(2 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.weight(x).sigmoid()
        own = (x.unflatten(-1, (2, WIDTH)) * shares[..., None]).sum(-2)
        made = inside_of_blocks(self.mixed, own)  # type: ignore[arg-type]
        return x + (made[..., None, :] * shares[..., None]).flatten(-2)


def test_blocks_beside_features_that_are_taken_apart() -> None:
    """Rows stay single where they are cut into blocks; features that an input has side by side are taken apart all the same."""
    x = torch.randn(2, LENGTH, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
    compare(Streams().double(), {"x": x}, chunk_size=3, also=(1, 8, 16))


def test_one_block() -> None:
    """Blocks longer than half of the sequence give no chunks: they run whole, and all around them streams."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        return m.gate(padded_into_blocks(m, x, 12).cumsum(2).flatten(1, 2)[:, : x.shape[1]])

    report = check(mixer, chunk_size=3, streams=False)
    assert all("into blocks of 12 rows" in reason for facts in report.facts for reason in facts.reasons())


def test_a_total_from_the_end() -> None:
    """A loop from the first chunk to the last cannot know it: that operator runs whole, and all around it streams."""
    report = check(lambda m, x: m.gate(x.flip(1).cumsum(1).flip(1)), chunk_size=5, streams=False)
    reasons = [reason for facts in report.facts for reason in facts.reasons()]
    assert sorted(reason.split()[0] for reason in reasons) == ["aten.cumsum.default", "streamfx.reverse_cumsum.default"]


def test_looks_ahead() -> None:
    """Streams in one loop more for each layer: nothing is known of rows to come."""
    check(lambda m, x: m.same(x.mT).mT, chunk_size=5, also=(1, 16))


def test_layers_that_look_back_are_stages() -> None:
    """Without attention, too: else a loop from the last chunk on is given what all look back at. Two in a row are one."""
    (facts,) = check(convolved, convolved, convolved, chunk_size=5, also=(1, LENGTH)).facts
    assert len(facts.stages) == 4
