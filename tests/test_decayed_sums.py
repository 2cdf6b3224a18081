"""Matmuls over blocks of rows with decaying weights stream, as Mamba 2 writes them; other matmuls fall back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from streamfx.dialect.decayed_sums import DECAYED_SUMS, SUMS_AFTER
from streamfx.runtime.custom_scan import Backward, Forward
from tests.support.exactness import Report
from tests.support.mixers import WIDTH, Mixed, Mixer, all_in_rows, compared, operators
from tests.support.spread import only

pytestmark = pytest.mark.compiled

BLOCK, LENGTH = 3, 21
Totals = Callable[[Tensor], Tensor]


def kept(count: int, diagonal: int = 0) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril(diagonal)


def segment_sums(x: Tensor, strict: int = -1, diagonal: int = 0, hidden: float = -torch.inf) -> Tensor:
    """As Mamba 2 sums decays, by default."""
    count = x.shape[-1]
    repeated = x[..., None].expand(*x.shape, count).masked_fill(~kept(count, strict), 0)
    return torch.cumsum(repeated, dim=-2).masked_fill(~kept(count, diagonal), hidden)


def differences(x: Tensor, other: Tensor) -> Tensor:
    return torch.where(kept(x.shape[-1]), x.cumsum(-1).unsqueeze(-1) - other.cumsum(-1)[..., None, :], -torch.inf)


def falling(m: Mixed, x: Tensor) -> Tensor:
    """A decay for each row."""
    return -F.softplus(m.gate(x)[..., 0])


def weighted(totals: Totals) -> Mixer:
    """Without blocks: a weighted sum of each row and all earlier ones."""
    return lambda m, x: m.out(totals(falling(m, x)).exp() @ x)


def written(m: Mixed, x: Tensor) -> Tensor:
    totals = segment_sums(falling(m, x))
    totals.mul_(2)
    return m.out(totals.exp() @ x)


def blended(m: Mixed, x: Tensor) -> Tensor:
    """Mamba 2 in few lines: within blocks of rows for two heads, and by a state [h d k] per block; the end is padded."""
    more = -x.shape[1] % BLOCK
    decays, rows = F.pad(-F.softplus(m.gate(x)[..., :2]), (0, 0, 0, more)), F.pad(m.up(x), (0, 0, 0, more))
    decays = decays.unflatten(1, (-1, BLOCK)).transpose(2, 3)
    values, keys, _ = rows.unflatten(1, (-1, BLOCK)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(3)
    sums = decays.cumsum(-1)
    inside = segment_sums(decays).exp() * torch.einsum("bclhk,bcshk->bchls", keys, keys)
    own = torch.einsum("bchls,bcshd->bclhd", inside, values)
    left = (sums[..., -1:] - sums).exp().transpose(2, 3)
    states = torch.einsum("bclhk,bclhd->bchdk", keys * left[..., None], values)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    weights = segment_sums(F.pad(sums[..., -1].transpose(1, 2), (1, 0))).exp().transpose(1, 3)
    before = torch.einsum("bzch,bzhdk->bchdk", weights, states)[:, :-1]
    out = own + torch.einsum("bclhk,bchdk->bclhd", keys, before) * sums.exp().transpose(2, 3)[..., None]
    return m.out(out.flatten(3).flatten(1, 2)[:, : x.shape[1]])


def with_first_row(decay: Callable[[Mixed, Tensor], Tensor], value: float = 0.0) -> Mixer:
    """One more row before the others."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        decays = torch.cat([decay(m, x).expand(x.shape[0], 1), falling(m, x)], -1)
        return m.out((segment_sums(decays).exp() @ F.pad(x, (0, 0, 1, 0), value=value))[:, :-1])

    return mixer


STREAMS: dict[str, Mixer] = {
    "blended": blended,
    "a number first": with_first_row(lambda m, x: x.new_zeros(1, 1), value=0.5),
    # a trained decay that is in no weight: it has a gradient, which is zero
    "a decay first": with_first_row(lambda m, x: -m.mu[:1].exp()),
    # minus infinity, and decays so large that no earlier row, or gradient of one, is left
    "infinite decays": weighted(lambda x: segment_sums(x.masked_fill(torch.arange(x.shape[-1]) % 4 == 2, -torch.inf))),
    "large decays": weighted(lambda x: segment_sums(-(x * 1e4).square())),
}


@pytest.mark.parametrize("name", only(["blended", "a number first", "a decay first"], STREAMS))
def test_sums_of_blocks_stream(name: str) -> None:
    report = compared(STREAMS[name], length=LENGTH, chunk_size=6, also=(1, 7, 64), streams=None)
    for kind in (Forward, Backward):
        assert all_in_rows(report, operators(report, kind))
    assert not report.facts[0].reasons()


# -- other matmuls


def of_frozen_decays(m: Mixed, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = segment_sums(falling(m, x)).exp()
    return m.out(weights @ x)


def of_differences_turned(m: Mixed, x: Tensor) -> Tensor:
    """Rows and columns change places, the triangle stays."""
    sums = falling(m, x).cumsum(-1)
    weights = (sums[..., None, :] - sums[..., None]).masked_fill(~kept(sums.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bzc,bzd->bcd", weights, x))


def of_heads(m: Mixed, x: Tensor) -> Tensor:
    decays = -F.softplus(m.gate(x)).mT
    repeated = decays[..., None].expand(*decays.shape, decays.shape[-1]).masked_fill(~kept(decays.shape[-1], -1), 0)
    weights = repeated.cumsum(1).masked_fill(~kept(decays.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bhcz,bzh->bch", weights, x))


def turned_in_memory(m: Mixed, x: Tensor) -> Tensor:
    """The result is stored by columns, and viewed so."""
    made = x.mT @ segment_sums(falling(m, x)).exp().transpose(1, 2)
    return m.out(made.view(x.shape[0], -1).view(made.shape).mT)


def of_bits(x: Tensor) -> Tensor:
    """~1 is -2, which is true as well: everything is hidden."""
    count = x.shape[-1]
    turned = (~torch.ones(count, count, dtype=torch.int8).tril()).bool()
    repeated = x[..., None].expand(*x.shape, count).masked_fill(~kept(count, -1), 0)
    return repeated.cumsum(-2).masked_fill(turned, -torch.inf)


OTHERS: dict[str, Mixer] = {
    "one more row in each sum": weighted(lambda x: segment_sums(x, strict=0)),
    "the next row is seen": weighted(lambda x: segment_sums(x, diagonal=1)),
    "small weights above the diagonal": weighted(lambda x: segment_sums(x, hidden=-20.0)),
    "zeros below the diagonal": weighted(
        lambda x: (x.cumsum(-1)[..., None] - x.cumsum(-1)[..., None, :]).masked_fill(kept(x.shape[-1]), -torch.inf)
    ),
    "differences the other way round": of_differences_turned,
    "sums over heads": of_heads,
    "sums of two decays": weighted(lambda x: differences(x, 2 * x)),
    "a triangle with inverted bits": weighted(of_bits),
    "weights that are written": written,
    "weights without a gradient": of_frozen_decays,
    "a narrow type": lambda m, x: m.out((segment_sums(falling(m, x).bfloat16()).exp() @ x.bfloat16()).to(x.dtype)),
    "another order in memory": turned_in_memory,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_matmuls_do_not_match(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tolerance = 5e-2 if "narrow" in name else 1e-12
    report = compared(OTHERS[name], length=9, chunk_size=4, streams=None, tolerance=tolerance)
    assert "the search for those with weights that decay failed" not in caplog.text
    assert not found(report)


def found(report: Report) -> list[Any]:
    nodes = [node for facts in report.facts for node in facts.joint.nodes]
    return [node for node in nodes if isinstance(node.target, (Forward, Backward)) or node.target is DECAYED_SUMS]


# -- numbers


def test_weights_that_may_grow_fall_back() -> None:
    """The first row's weight is zero after the second row, and one after the third."""

    def growing(m: Mixed, x: Tensor) -> Tensor:
        decays = 0 * m.gate(x)[..., 0] + 800 * torch.tensor([0.0, -1, 1, 0, 0]).to(x.dtype)
        return m.out(segment_sums(decays).exp() @ x)

    report = compared(growing, length=5, chunk_size=2, streams=False)
    assert any("decays that may be above zero" in reason for reason in report.facts[0].reasons())
    assert not operators(report, Forward, Backward)


def test_the_first_decay_is_in_no_weight() -> None:
    """Not even if exp of it is infinite."""
    grows = weighted(lambda x: segment_sums(torch.cat([x[:, :1] + 800.0, x[:, 1:]], 1)))
    compared(grows, length=LENGTH, chunk_size=6, also=(1, 7), streams=None)


# -- the operators alone


def test_it_checks_shapes_and_counts_flops() -> None:
    with pytest.raises(ValueError, match="incompatible shapes"):
        DECAYED_SUMS(torch.zeros(1, 3), torch.zeros(2, 3, 4), None)
    decays, rows = (torch.zeros(shape, requires_grad=True) for shape in ((2, 3, 5), (2, 3, 5, 4)))
    with FlopCounterMode(display=False) as counter:
        DECAYED_SUMS(decays, rows, None)[0].sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 3) * 5 * 5 * 4


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("operator", [DECAYED_SUMS, SUMS_AFTER])
def test_the_operator_equals_the_matmul(count: int, is_first: bool, operator: Any) -> None:
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    decays, rows, first = draw(2, 3, count), draw(2, 3, count, 4), draw(2, 3, 4) if is_first else None
    inputs = [decays, rows, *([first] if first is not None else [])]
    front = torch.zeros_like(rows[..., :1, :]) if first is None else first.unsqueeze(-2)
    made = segment_sums(F.pad(decays, (1, 0))).exp() @ torch.cat([front, rows], -2)
    sums = made[..., :-1, :] if operator is DECAYED_SUMS else made[..., 1:, :]
    truth, own = (sums, made[..., -1, :]), operator(decays, rows, first)
    torch.testing.assert_close(own, truth, rtol=1e-13, atol=1e-13)
    for used in (slice(0, 1), slice(1, 2), slice(0, 2)):
        weighted = [[(part * part.detach().cos()).sum() for part in parts[used]] for parts in (own, truth)]
        one, other = (torch.autograd.grad(parts, inputs, retain_graph=True, materialize_grads=True) for parts in weighted)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
