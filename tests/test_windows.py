"""Operators that read a few earlier or later rows (short convolutions, token shifts), and running totals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support.exactness import Report, compare
from tests.support.mixers import WIDTH, Mixed, Mixer, compared, mixed
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

LENGTH = 19


def convolution(m: Mixed, x: Tensor, taps: int = 3, padding: int = 0, groups: int = 1, **how: Any) -> Tensor:
    """Of rows [b t d]."""
    weight = m.up.weight.view(WIDTH, 3, WIDTH).mT[:, : WIDTH // groups, :1].repeat_interleave(taps, 2)
    weight = weight * torch.arange(1.0, taps + 1).to(x)
    return F.conv1d(x.mT, weight, m.mu, padding=padding, groups=groups, **how).mT


def depthwise(m: Mixed, x: Tensor) -> Tensor:
    return convolution(m, x, 4, 3, WIDTH)[:, : x.shape[1]]


def convolved(m: Mixed, x: Tensor) -> Tensor:
    """Two convolutions, padded at both ends and cut."""
    return convolution(m, F.silu(depthwise(m, x)), 3, 2, 2)[:, : x.shape[1]] * m.gate(x)


def of_a_part(m: Mixed, x: Tensor) -> Tensor:
    """The first chunks have no row of it."""
    return F.pad(convolution(m, x[:, 11:], 1), (0, 0, 11, 0))


def before_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = (depthwise(m, y)[:, None] for y in (x, m.gate(x), x * m.mu))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def written_over_zeros(m: Mixed, x: Tensor) -> Tensor:
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return m.gate(before)


def after_a_row(m: Mixed, x: Tensor) -> Tensor:
    return m.up(torch.cat([m.gate(x.new_zeros(x.shape[0], 1, WIDTH)), m.gate(x)[:, :-1]], 1)).chunk(3, -1)[0]


def unfolded(m: Mixed, x: Tensor) -> Tensor:
    """A convolution with other weights for each row."""
    windows = F.pad(x.mT, (2, 0)).unfold(-1, 3, 1).flip(-1).transpose(1, 2)
    return (windows * m.up(x).unflatten(-1, (WIDTH, 3))).sum(-1)


def shifted(m: Mixed, x: Tensor) -> Tensor:
    return m.gate(torch.lerp(F.pad(x, (0, 0, 1, -1)), x, m.mu))


def inside_of_a_row(m: Mixed, x: Tensor) -> Tensor:
    """Each row chooses among several of its values; rows are the heads of an attention kernel."""
    values = torch.stack((x, m.gate(x), shifted(m, x)), -2)
    return F.scaled_dot_product_attention(m.mu.expand(*x.shape[:2], 1, -1), values, values).squeeze(-2)


def linear_attention(m: Mixed, x: Tensor) -> Tensor:
    """The state of each row, [b t d d], is a running sum."""
    q, k = m.gate(x).exp(), (x * m.mu).exp()
    state = (k[..., None] * x[..., None, :]).cumsum(1)
    return (q[..., None, :] @ state)[..., 0, :] / (q * k.cumsum(1)).sum(-1, keepdim=True)  # type: ignore[no-any-return]


def two_sums(m: Mixed, x: Tensor) -> Tensor:
    """The second sum is of a convolution of the first."""
    return depthwise(m, F.silu(x.cumsum(1))).cumsum(1)


DECODERS: dict[str, list[Mixer]] = named_cases("decoders", globals())


def check(*mixers: Mixer, **options: Any) -> Report:
    report = compared(*mixers, length=LENGTH, **options)
    assert all(known(facts.axes.sequence).length == LENGTH for facts in report.facts)
    return report


@pytest.mark.parametrize("name", DECODERS)
def test_earlier_rows(name: str) -> None:
    check(*DECODERS[name], chunk_size=5, also=(1, 16))


def test_later_rows() -> None:
    """Each layer has its own loop: a chunk knows no later rows."""
    check(lambda m, x: convolution(m, x, 3, 1), chunk_size=5, also=(1, 16))


def test_a_total_from_the_end_falls_back() -> None:
    """Chunks run from the first to the last."""
    report = check(lambda m, x: m.gate(x.flip(1).cumsum(1).flip(1)), chunk_size=5, streams=False)
    reasons = [reason for facts in report.facts for reason in facts.reasons()]
    assert sorted(reason.split()[0] for reason in reasons) == ["aten.cumsum.default", "streamfx.reverse_cumsum.default"]


def test_layers_that_read_earlier_rows_are_stages() -> None:
    """Without attention, too: else a loop over chunks from the last to the first would need the rows of all layers."""
    (facts,) = check(convolved, convolved, convolved, chunk_size=5, also=(1, LENGTH)).facts
    assert len(facts.stages) == 4


# -- blocks


def padded_into_blocks(m: Mixed, x: Tensor, size: int = 4) -> Tensor:
    return F.pad(shifted(m, x), (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def inside_of_blocks(m: Mixed, x: Tensor) -> Tensor:
    blocks = padded_into_blocks(m, x)
    mixed = (blocks @ blocks.mT).tril().softmax(-1) @ blocks
    return m.gate(mixed.flatten(1, 2)[:, : x.shape[1]])


def of_two_sizes(m: Mixed, x: Tensor) -> Tensor:
    means = [padded_into_blocks(m, x, size).cumsum(2).flatten(1, 2)[:, : x.shape[1]] for size in (2, 3)]
    return m.gate(means[0] * means[1])


def test_blocks_of_two_sizes() -> None:
    """Of a padded sequence. Chunks are multiples of both block sizes."""
    check(of_two_sizes, chunk_size=3, also=(1, 8, 16))


class Streams(nn.Module):
    """Of given rows, as after a graph break: two streams side by side, whose sum is cut into blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.weight = mixed(inside_of_blocks), nn.Linear(2 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.weight(x).sigmoid()
        own = (x.unflatten(-1, (2, WIDTH)) * shares[..., None]).sum(-2)
        made = inside_of_blocks(self.mixed, own)  # type: ignore[arg-type]
        return x + (made[..., None, :] * shares[..., None]).flatten(-2)


def test_blocks_and_decomposed_features() -> None:
    """Blocks do not decompose the rows of an input, but its features are decomposed."""
    x = torch.randn(2, LENGTH, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
    compare(Streams().double(), {"x": x}, chunk_size=3, also=(1, 8, 16))


def test_one_block_falls_back() -> None:
    """Blocks longer than half of the sequence leave no two chunks."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        return m.gate(padded_into_blocks(m, x, 12).cumsum(2).flatten(1, 2)[:, : x.shape[1]])

    report = check(mixer, chunk_size=3, streams=False)
    assert all("into blocks of 12 rows" in reason for facts in report.facts for reason in facts.reasons())
