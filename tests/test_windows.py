"""Operators that look a few rows back (or ahead): short convolutions, token shifts; and those that carry a total along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import Facts, known
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.spread import only

WIDTH, TAPS, LENGTH = 8, 4, 19

Mixer = Callable[["Mixed", Tensor], Tensor]


class Mixed(nn.Module):
    """Embedding, layers of a mixer over the rows and an MLP, head and loss. No attention unless the mixer has one."""

    def __init__(self, mixer: Mixer, layers: int = 1) -> None:
        super().__init__()
        self.mixer, self.layers = mixer, layers
        self.embed, self.head = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 23, bias=False)
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH, padding=TAPS - 1)
        self.valid = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH, bias=False)
        self.full = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)
        self.grouped = nn.Conv1d(WIDTH, WIDTH, 3, groups=2, padding=2)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)
        self.turned = nn.ConvTranspose1d(WIDTH, WIDTH, 3)
        self.mu = nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.layers):
            x = x + self.mixer(self, F.rms_norm(x, (WIDTH,)))
            x = x + self.down(F.silu(self.up(F.layer_norm(x, (WIDTH,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def padded_then_cut(m: Mixed, x: Tensor) -> Tensor:
    return F.silu(m.depthwise(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2) * m.gate(x)


def padded_on_the_left(m: Mixed, x: Tensor) -> Tensor:
    return m.valid(F.pad(x.transpose(1, 2), (TAPS - 1, 0))).transpose(1, 2)


def gated_on_both_sides(m: Mixed, x: Tensor) -> Tensor:
    before, after, value = m.up(x).transpose(1, 2).chunk(3, dim=1)
    return m.down(torch.cat([after * m.depthwise(before * value)[..., : x.shape[1]]] * 3, 1).transpose(1, 2))


def dilated(m: Mixed, x: Tensor) -> Tensor:
    return m.full(F.pad(x.transpose(1, 2), (4, 0))).transpose(1, 2)


def in_groups(m: Mixed, x: Tensor) -> Tensor:
    return m.grouped(x.mT)[..., :-2].mT


def one_after_the_other(m: Mixed, x: Tensor) -> Tensor:
    length = x.shape[1]
    return m.grouped(F.gelu(m.depthwise(x.mT)[..., :length]))[..., :length].mT


def of_one_tap(m: Mixed, x: Tensor) -> Tensor:
    return m.point(x.mT).mT


def of_one_tap_on_a_part(m: Mixed, x: Tensor) -> Tensor:
    """Chunks in front have no row of it."""
    return F.pad(m.point(x[:, 11:].mT), (11, 0)).mT


def turned_around(m: Mixed, x: Tensor) -> Tensor:
    return m.turned(x.mT)[..., : x.shape[1]].mT


def beside_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = (m.depthwise(y.mT)[..., : x.shape[1]].mT[:, None] for y in (x, m.gate(x), x * m.mu))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def shifted_by_concatenation(m: Mixed, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return m.gate(x * m.mu + before * (1 - m.mu))


def shifted_by_padding(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(torch.lerp(F.pad(x, (0, 0, 1, -1)), x, m.mu))


def shifted_by_a_padding_layer(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(x - nn.ZeroPad2d((0, 0, 2, -2))(x))


def shifted_slices(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(F.pad(x[:, 1:] * x[:, :-1], (0, 0, 1, 0)))


def written_over_zeros(m: Mixed, x: Tensor) -> Tensor:
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return m.gate(before)


def behind_a_learned_row(m: Mixed, x: Tensor) -> Tensor:
    before = torch.cat([m.mu.expand(x.shape[0], 1, WIDTH), x[:, :-1]], 1)
    return m.gate(x + before * m.mu)


def behind_a_projected_row(m: Mixed, x: Tensor) -> Tensor:
    return m.up(torch.cat([m.gate(x.new_zeros(x.shape[0], 1, WIDTH)), m.gate(x)[:, :-1]], 1)).chunk(3, -1)[0]


def unfolded(m: Mixed, x: Tensor) -> Tensor:
    """A convolution with weights of its own for each row."""
    windows = F.pad(x.mT, (2, 0)).unfold(-1, 3, 1).flip(-1).transpose(1, 2)
    return (windows * m.up(x).unflatten(-1, (WIDTH, 3))).sum(-1)


def attention_inside_of_a_row(m: Mixed, x: Tensor) -> Tensor:
    """Each row chooses among several values of its own; rows are the heads of an attention kernel."""
    values = torch.stack((x, m.gate(x), shifted_by_padding(m, x)), -2)
    return F.scaled_dot_product_attention(m.mu.expand(*x.shape[:2], 1, -1), values, values).squeeze(-2)


CAUSAL: list[Mixer] = [
    behind_a_learned_row,
    behind_a_projected_row,
    padded_then_cut,
    padded_on_the_left,
    gated_on_both_sides,
    dilated,
    in_groups,
    one_after_the_other,
    of_one_tap_on_a_part,
    of_one_tap,
    turned_around,
    beside_attention,
    shifted_by_concatenation,
    shifted_by_padding,
    shifted_by_a_padding_layer,
    shifted_slices,
    written_over_zeros,
    unfolded,
    attention_inside_of_a_row,
]


def running_sum(m: Mixed, x: Tensor) -> Tensor:
    return m.gate((x * m.mu).cumsum(1))


def running_mean(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def linear_attention(m: Mixed, x: Tensor) -> Tensor:
    """The state of each row, [b t d d], is a running sum."""
    q, k = m.gate(x).exp(), (x * m.mu).exp()
    state = (k[..., None] * x[..., None, :]).cumsum(1)
    return (q[..., None, :] @ state)[..., 0, :] / (q * k.cumsum(1)).sum(-1, keepdim=True)  # type: ignore[no-any-return]


def running_log_sum(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(x).logcumsumexp(1)


def time_first(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(x.transpose(0, 1).cumsum(0)).transpose(0, 1)


def two_sums(m: Mixed, x: Tensor) -> Tensor:
    """The second sum runs over what a convolution makes of the first."""
    return m.depthwise(F.silu(x.cumsum(1)).mT)[..., : x.shape[1]].mT.cumsum(1)


SCANS: list[Mixer] = [running_sum, running_mean, linear_attention, running_log_sum, time_first, two_sums]


def check(mixer: Mixer, length: int = LENGTH, **options: Any) -> Report:
    ids = layouts.tokens(23, 2, length, 0)
    report = compare(decoders.made(lambda: Mixed(mixer)), {"ids": ids, "labels": ids}, **options)
    assert all(sequence_length(facts) == length for facts in report.facts)
    return report


def sequence_length(facts: Facts) -> Any:
    return known(facts.axes.sequence).length


@pytest.mark.parametrize("mixer", CAUSAL, ids=lambda mixer: mixer.__name__)
def test_looks_back(mixer: Mixer) -> None:
    check(mixer, chunk_size=5, also=(1, 16))


@pytest.mark.parametrize("mixer", SCANS, ids=lambda mixer: mixer.__name__)
def test_carries_a_total(mixer: Mixer) -> None:
    check(mixer, chunk_size=5, also=(1, 16))


def test_layers_in_a_row() -> None:
    ids = layouts.tokens(23, 2, LENGTH, 0)
    model = decoders.made(lambda: Mixed(linear_attention, 3))
    compare(model, {"ids": ids, "labels": ids}, chunk_size=5)


OF_ANY_LENGTH = [padded_then_cut, shifted_by_concatenation, linear_attention]


@pytest.mark.parametrize("mixer", only([linear_attention], OF_ANY_LENGTH), ids=lambda m: m.__name__)
def test_any_length(mixer: Mixer) -> None:
    """The length is a symbol."""
    ids = layouts.tokens(23, 2, LENGTH, 0)
    with torch._dynamo.config.patch(assume_static_by_default=False):
        report = compare(decoders.made(lambda: Mixed(mixer)), {"ids": ids, "labels": ids}, chunk_size=5, also=(1, 16))
    assert not any(isinstance(sequence_length(facts), int) for facts in report.facts)


def padded_into_blocks(m: Mixed, x: Tensor, size: int = 4) -> Tensor:
    return F.pad(shifted_by_padding(m, x), (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def inside_of_blocks(m: Mixed, x: Tensor) -> Tensor:
    blocks = padded_into_blocks(m, x)
    mixed = (blocks @ blocks.mT).tril().softmax(-1) @ blocks
    return m.gate(mixed.flatten(1, 2)[:, : x.shape[1]])


def padded_in_front(m: Mixed, x: Tensor) -> Tensor:
    """A block of nothing before the first one, so that each block sees the one before it."""
    blocks = F.pad(x, (0, 0, 4, -x.shape[1] % 4)).unflatten(1, (-1, 4))
    mixed = (blocks[:, 1:] @ blocks[:, :-1].mT).softmax(-1) @ blocks[:, :-1]
    return m.gate(mixed.flatten(1, 2)[:, : x.shape[1]])


def of_two_sizes(m: Mixed, x: Tensor) -> Tensor:
    means = [padded_into_blocks(m, x, size).cumsum(2).flatten(1, 2)[:, : x.shape[1]] for size in (2, 3)]
    return m.gate(means[0] * means[1])


def scanned_in_blocks(m: Mixed, x: Tensor) -> Tensor:
    """A linear attention with decay as Mamba 2 has it: scores inside of blocks, states between them by one small product."""
    q, k, v = (padded_into_blocks(m, y) for y in (x, m.gate(x), x * m.mu))
    decay = padded_into_blocks(m, -m.gate(x).exp())[..., :1].cumsum(2)
    inside = (decay - decay.mT).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf")).exp()
    states = (k * (decay[:, :, -1:] - decay).exp()).mT @ v
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    total = F.pad(decay[:, :, -1, 0], (1, 0)).cumsum(1)
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    before = torch.einsum("bcz,bzij->bcij", between, states)[:, :-1]
    mixed = (q @ k.mT * inside) @ v + (q @ before) * decay.exp()
    return m.gate(mixed.flatten(1, 2)[:, : x.shape[1]])


@pytest.mark.parametrize("length", only([19], [16, 19]))
@pytest.mark.parametrize("mixer", [inside_of_blocks, of_two_sizes], ids=lambda mixer: mixer.__name__)
def test_blocks(mixer: Mixer, length: int) -> None:
    """What happens inside of blocks streams, whether or not the sequence has to be padded for it: chunks hold whole blocks."""
    check(mixer, length, chunk_size=3, also=(1, 8, 16))


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


@pytest.mark.parametrize("length", [16, 19])
def test_blocks_that_see_the_one_before(length: int) -> None:
    """Rows of blocks that stand one block apart are not known to be rows of the sequence again: exact, and whole."""
    check(padded_in_front, length, chunk_size=3, also=(8,), streams=False)


@pytest.mark.parametrize("length", only([19], [16, 19]))
def test_blocks_that_hand_on_states(length: int) -> None:
    """The states between blocks are found from all of them, and nothing else is."""
    report = check(scanned_in_blocks, length, chunk_size=3, also=(8,), streams=False)
    (facts,) = report.facts
    assert known(facts.axes.sequence).granule == 4
    assert {reason.split(" ", 1)[1] for reason in facts.reasons()} == {"mixes blocks of rows of the sequence"}
    wide = [node for node in facts.demand.reasons if node.meta["val"].numel() > 2 * length * WIDTH * WIDTH // 3]
    assert not wide


def test_one_block() -> None:
    """Blocks longer than half of the sequence give no chunks: they run whole, and all around them streams."""
    report = check(
        lambda m, x: m.gate(padded_into_blocks(m, x, 12).cumsum(2).flatten(1, 2)[:, : x.shape[1]]),
        19,
        chunk_size=3,
        streams=False,
    )
    assert all("into blocks of 12 rows" in reason for facts in report.facts for reason in facts.reasons())


@pytest.mark.long
def test_blocks_of_any_length() -> None:
    ids = layouts.tokens(23, 2, LENGTH, 0)
    with torch._dynamo.config.patch(assume_static_by_default=False):
        compare(
            decoders.made(lambda: Mixed(inside_of_blocks)), {"ids": ids, "labels": ids}, chunk_size=3, also=(16,), streams=None
        )


def test_a_total_from_the_end() -> None:
    """A loop from the first chunk to the last cannot know it: that operator runs whole, and all around it streams."""
    report = check(lambda m, x: m.gate(x.flip(1).cumsum(1).flip(1)), chunk_size=5, streams=False)
    reasons = [reason for facts in report.facts for reason in facts.reasons()]
    assert sorted(reason.split()[0] for reason in reasons) == ["aten.cumsum.default", "streamfx.reverse_cumsum.default"]


@pytest.mark.parametrize("mixer", [running_sum, linear_attention], ids=lambda mixer: mixer.__name__)
def test_totals_in_chunks_of_two_sizes(mixer: Mixer) -> None:
    """Scores that are returned are a cut: the loss' own backward loops start from states of another stage's chunks."""

    class Scores(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            x = self.embed(ids)
            scores = self.head(x + self.mixer(self, F.rms_norm(x, (WIDTH,))))
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores

    ids = layouts.tokens(23, 2, LENGTH, 0)
    compare(decoders.made(lambda: Scores(mixer)), {"ids": ids, "labels": ids}, chunk_size=5, loss_chunk_size=3, outputs="dense")


@pytest.mark.parametrize("length", only([3, 5], [3, 4, 5]))
@pytest.mark.parametrize("mixer", [padded_then_cut, padded_on_the_left, shifted_by_padding], ids=lambda mixer: mixer.__name__)
def test_shorter_than_the_window(mixer: Mixer, length: int) -> None:
    check(mixer, length, chunk_size=2, also=(1,))


def test_looks_ahead() -> None:
    """Streams in one loop more for each layer: nothing is known of rows to come."""
    check(lambda m, x: m.same(x.mT).mT, chunk_size=5, also=(1, 16))


def test_layers_that_look_back_are_stages() -> None:
    """Without attention, too: else a loop from the last chunk on is given what all look back at. Two in a row are one."""
    ids = layouts.tokens(23, 2, LENGTH, 0)

    def twice(m: Mixed, x: Tensor) -> Tensor:
        return padded_on_the_left(m, padded_then_cut(m, x))

    report = compare(decoders.made(lambda: Mixed(twice, 3)), {"ids": ids, "labels": ids}, chunk_size=5, also=(1, LENGTH))
    (facts,) = report.facts
    assert len(facts.stages) == 4
