"""Products of blocks of rows with weights that decay stream, as Mamba 2 writes them; what only looks like one is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from streamfx.runtime.custom_scan import Backward, Forward
from streamfx.runtime.segment_sum import DECAYED_SUMS, SUMS_BEHIND
from tests.support.exactness import Report
from tests.support.spread import only
from tests.test_recurrences import WIDTH, Mixed, Mixer, all_in_rows, compared, operators

pytestmark = pytest.mark.compiled

BLOCK, LENGTH = 3, 21
Totals = Callable[[Tensor], Tensor]


def kept(count: int, diagonal: int = 0) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril(diagonal)


def segment_sums(
    x: Tensor, strict: int = -1, diagonal: int = 0, hidden: float = -torch.inf, along: int = -2, columns: bool = False
) -> Tensor:
    """As Mamba 2 sums decays, if nothing else is asked for."""
    count = x.shape[-1]
    repeated = (x[..., None, :] if columns else x[..., None]).expand(*x.shape, count).masked_fill(~kept(count, strict), 0)
    return torch.cumsum(repeated, dim=along).masked_fill(~kept(count, diagonal), hidden)


def differences(x: Tensor, other: Tensor) -> Tensor:
    return torch.where(kept(x.shape[-1]), x.cumsum(-1).unsqueeze(-1) - other.cumsum(-1)[..., None, :], -torch.inf)


def falling(m: Mixed, x: Tensor) -> Tensor:
    """A decay for each row."""
    return -F.softplus(m.gate(x)[..., 0])


def totalled(totals: Totals) -> Mixer:
    """A product over rows, as it is written without blocks: each row with those before it."""
    return lambda m, x: m.out(totals(falling(m, x)).exp() @ x)


def written(m: Mixed, x: Tensor) -> Tensor:
    totals = segment_sums(falling(m, x))
    totals.mul_(2)
    return m.out(totals.exp() @ x)


def blended(
    m: Mixed, x: Tensor, totals: Totals = segment_sums, first: Tensor | None = None, last: bool = False, shift: int = 1
) -> Tensor:
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
    start = torch.zeros_like(states[:, :1]) if first is None else first.expand(x.shape[0], 1, *first.shape)
    states = torch.cat([start] * shift + [states], dim=1)
    weights = totals(F.pad(sums[..., -1].transpose(1, 2), (shift, 0))).exp().transpose(1, 3)
    made = torch.einsum("bzch,bzhdk->bchdk", weights, states)
    before, after = made[:, :-shift], made[:, -1]
    out = own + torch.einsum("bclhk,bchdk->bclhd", keys, before) * sums.exp().transpose(2, 3)[..., None]
    rows = out.flatten(3).flatten(1, 2)[:, : x.shape[1]]
    return m.out(rows + after.flatten(1)[:, None, :WIDTH] if last else rows)


def of_a_triangle(m: Mixed, x: Tensor) -> Tensor:
    """exp first, then zero above the diagonal; batch and width side by side in front."""
    sums = torch.cumsum(-F.softplus(m.gate(x)).transpose(1, 2), 2)
    weights = torch.tril(torch.exp(torch.sub(sums[..., :, None], sums.unsqueeze(2))))
    return m.out(torch.matmul(weights, x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2))


def behind(decay: Callable[[Mixed, Tensor], Tensor], value: float = 0.0) -> Mixer:
    """A row more, in front of the others."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        decays = torch.cat([decay(m, x).expand(x.shape[0], 1), falling(m, x)], -1)
        return m.out((segment_sums(decays).exp() @ F.pad(x, (0, 0, 1, 0), value=value))[:, :-1])

    return mixer


STREAMS: dict[str, Mixer] = {
    "blended": blended,
    "from a learned state": lambda m, x: blended(m, x, first=m.first.view(2, 4, 1) * m.mu.view(2, 1, 4)),
    "with the last state for all rows": lambda m, x: blended(m, x, last=True),
    "behind two rows": lambda m, x: blended(m, x, shift=2),
    "of differences": lambda m, x: blended(m, x, lambda sums: differences(sums, sums)),
    "of all rows": totalled(segment_sums),
    "of a triangle": of_a_triangle,
    "behind a number": behind(lambda m, x: x.new_zeros(1, 1), value=0.5),
    # one that is trained, and in no weight: its gradient is zero, and there
    "behind a decay": behind(lambda m, x: -m.mu[:1].exp()),
    # minus infinity, and numbers so large that nothing is left of the rows before, also of gradients
    "what ends all": totalled(lambda x: segment_sums(x.masked_fill(torch.arange(x.shape[-1]) % 4 == 2, -torch.inf))),
    "what leaves nothing": totalled(lambda x: segment_sums(-(x * 1e4).square())),
}


@pytest.mark.parametrize("name", only(["blended", "behind a number", "behind a decay"], STREAMS))
def test_blocks_hand_on_what_is_left(name: str) -> None:
    report = compared(STREAMS[name], LENGTH, chunk_size=6, also=(1, 7, 64), streams=None)
    for kind in (Forward, Backward):
        assert all_in_rows(report, operators(report, kind))
    assert not report.facts[0].reasons() or name in ("with the last state for all rows", "behind two rows")


@pytest.mark.long
@pytest.mark.parametrize(("length", "chunk"), [(LENGTH - 1, 6), (2, 1)])
def test_a_block_that_is_not_full(length: int, chunk: int) -> None:
    compared(blended, length, layers=2, chunk_size=chunk, also=(1, 7), streams=None)


# -- what is none


def of_frozen_decays(m: Mixed, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = segment_sums(falling(m, x)).exp()
    return m.out(weights @ x)


def of_differences_turned(m: Mixed, x: Tensor) -> Tensor:
    """Rows stand where columns stood, and the triangle where it was."""
    sums = falling(m, x).cumsum(-1)
    weights = (sums[..., None, :] - sums[..., None]).masked_fill(~kept(sums.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bzc,bzd->bcd", weights, x))


def of_heads(m: Mixed, x: Tensor) -> Tensor:
    decays = -F.softplus(m.gate(x)).mT
    repeated = decays[..., None].expand(*decays.shape, decays.shape[-1]).masked_fill(~kept(decays.shape[-1], -1), 0)
    weights = repeated.cumsum(1).masked_fill(~kept(decays.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bhcz,bzh->bch", weights, x))


def turned_in_memory(m: Mixed, x: Tensor) -> Tensor:
    """What is made lies in memory by columns, and is viewed so."""
    made = x.mT @ segment_sums(falling(m, x)).exp().transpose(1, 2)
    return m.out(made.view(x.shape[0], -1).view(made.shape).mT)


def of_bits(x: Tensor) -> Tensor:
    """~1 is -2, which is true as well: all is hidden, where no number takes the place of the first column."""
    count = x.shape[-1]
    turned = (~torch.ones(count, count, dtype=torch.int8).tril()).bool()
    repeated = x[..., None].expand(*x.shape, count).masked_fill(~kept(count, -1), 0)
    return repeated.cumsum(-2).masked_fill(turned, -torch.inf)


OTHERS: dict[str, Mixer] = {
    "a row more in each sum": totalled(lambda x: segment_sums(x, strict=0)),
    "the row after is seen": totalled(lambda x: segment_sums(x, diagonal=1)),
    "above the diagonal little, and not nothing": totalled(lambda x: segment_sums(x, hidden=-20.0)),
    "below the diagonal nothing": totalled(
        lambda x: (x.cumsum(-1)[..., None] - x.cumsum(-1)[..., None, :]).masked_fill(kept(x.shape[-1]), -torch.inf)
    ),
    "differences the other way round": of_differences_turned,
    "sums over something else": of_heads,
    "sums of two": totalled(lambda x: differences(x, 2 * x)),
    "a triangle of numbers whose bits are turned": totalled(of_bits),
    "weights that are written": written,
    "weights without a gradient": of_frozen_decays,
    "a narrow type": lambda m, x: m.out((segment_sums(falling(m, x).bfloat16()).exp() @ x.bfloat16()).to(x.dtype)),
    "another order in memory": turned_in_memory,
}
ALSO: dict[str, Mixer] = {
    "the row itself is not seen": totalled(lambda x: segment_sums(x, diagonal=-1)),
    "a narrow type on the way": totalled(lambda x: segment_sums(x).bfloat16().to(x.dtype)),
    "sums of columns": totalled(lambda x: segment_sums(x, along=-1)),
    "decays in columns": totalled(lambda x: segment_sums(x, columns=True)),
    "the other way round": lambda m, x: m.out(torch.einsum("bcz,bcd->bzd", segment_sums(falling(m, x)).exp(), x)),
}


@pytest.mark.parametrize("name", only(OTHERS, OTHERS | ALSO))
def test_what_only_looks_like_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tolerance = 5e-2 if "narrow" in name else 1e-12
    report = compared((OTHERS | ALSO)[name], length=9, chunk_size=4, streams=None, tolerance=tolerance)
    assert "the search for those with weights that decay failed" not in caplog.text
    assert not found(report)


def found(report: Report) -> list[Any]:
    nodes = [node for facts in report.facts for node in facts.joint.nodes]
    return [node for node in nodes if isinstance(node.target, (Forward, Backward)) or node.target is DECAYED_SUMS]


# -- numbers


def test_what_may_grow_is_summed_in_one_piece() -> None:
    """What is left of the first row is nothing at all after the second, and all of it after the third."""

    def growing(m: Mixed, x: Tensor) -> Tensor:
        decays = 0 * m.gate(x)[..., 0] + 800 * torch.tensor([0.0, -1, 1, 0, 0]).to(x.dtype)
        return m.out(segment_sums(decays).exp() @ x)

    report = compared(growing, length=5, chunk_size=2, streams=False)
    assert any("not proven to be at most zero" in reason for reason in report.facts[0].reasons())
    assert not operators(report, Forward, Backward)


def test_the_first_decay_is_in_no_weight() -> None:
    """Whatever it is, it does not count: not even what grows beyond all numbers."""
    grows = totalled(lambda x: segment_sums(torch.cat([x[:, :1] + 800.0, x[:, 1:]], 1)))
    compared(grows, LENGTH, chunk_size=6, also=(1, 7), streams=None)


# -- the operators by themselves


def test_it_repeats_nothing_and_its_products_are_counted() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        DECAYED_SUMS(torch.zeros(1, 3), torch.zeros(2, 3, 4), None)
    decays, rows = (torch.zeros(shape, requires_grad=True) for shape in ((2, 3, 5), (2, 3, 5, 4)))
    with FlopCounterMode(display=False) as counter:
        DECAYED_SUMS(decays, rows, None)[0].sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 3) * 5 * 5 * 4


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("operator", [DECAYED_SUMS, SUMS_BEHIND])
def test_the_operator_is_the_product(count: int, is_first: bool, operator: Any) -> None:
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
