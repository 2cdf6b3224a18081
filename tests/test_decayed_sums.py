"""Products of blocks of rows with weights that decay stream, as Mamba 2 writes them; what only looks like one is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.frontend.backend import Compilation
from streamfx.ir.facts import StorageClass
from streamfx.options import Options
from streamfx.runtime.custom_scan import Backward, Forward
from streamfx.runtime.segment_sum import DECAYED_SUMS
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.later_sizes import compare_sizes
from tests.support.spread import only
from tests.test_recurrences import WIDTH, Mixed, Mixer

BLOCK, LENGTH = 3, 21
Totals = Callable[[Tensor], Tensor]


def kept(count: int, diagonal: int = 0) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril(diagonal)


def segment_sums(x: Tensor, strict: int = -1, diagonal: int = 0, hidden: float = -torch.inf) -> Tensor:
    """As Mamba 2 sums decays, if nothing else is asked for."""
    count = x.shape[-1]
    repeated = x[..., None].expand(*x.shape, count).masked_fill(~kept(count, strict), 0)
    return torch.cumsum(repeated, dim=-2).masked_fill(~kept(count, diagonal), hidden)


def differences(x: Tensor) -> Tensor:
    sums = x.cumsum(-1)
    return torch.where(kept(x.shape[-1]), sums.unsqueeze(-1) - sums[..., None, :], -torch.inf)


def blocks(m: Mixed, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays [b n h l] of each row, rows [b n l h d] and keys of them, for two heads; the end is padded to whole blocks."""
    more = -x.shape[1] % BLOCK
    decays, rows = F.pad(-F.softplus(m.gate(x)[..., :2]), (0, 0, 0, more)), F.pad(m.up(x), (0, 0, 0, more))
    decays = decays.unflatten(1, (-1, BLOCK)).transpose(2, 3)
    values, keys, _ = rows.unflatten(1, (-1, BLOCK)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(3)
    return decays, values, keys


def blended(
    m: Mixed, x: Tensor, totals: Totals = segment_sums, first: Tensor | None = None, last: bool = False, shift: int = 1
) -> Tensor:
    """Mamba 2 in few lines: within blocks, and by a state [h d k] per block."""
    decays, values, keys = blocks(m, x)
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


def from_a_learned_state(m: Mixed, x: Tensor) -> Tensor:
    return blended(m, x, first=m.first.view(2, 4, 1) * m.mu.view(2, 1, 4))


def with_the_last_state(m: Mixed, x: Tensor) -> Tensor:
    """All rows take in what is left behind the last."""
    return blended(m, x, last=True)


def of_differences(m: Mixed, x: Tensor) -> Tensor:
    return blended(m, x, differences)


def of_all_rows(m: Mixed, x: Tensor) -> Tensor:
    """A product over rows, as it is written without blocks: each row with those before it."""
    decays = -F.softplus(m.gate(x)[..., 0])
    return m.out(segment_sums(decays).exp() @ x)


def of_a_triangle(m: Mixed, x: Tensor) -> Tensor:
    """exp first, then zero above the diagonal; batch and width side by side in front."""
    decays = -F.softplus(m.gate(x)).transpose(1, 2)
    sums = torch.cumsum(decays, 2)
    weights = torch.tril(torch.exp(torch.sub(sums[..., :, None], sums.unsqueeze(2))))
    return m.out(torch.matmul(weights, x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2))


def rows_first(m: Mixed, x: Tensor) -> Tensor:
    """The other operand first, and the product as it is, one row more than there are."""
    decays = F.pad(-F.softplus(m.gate(x)[..., 0]), (1, 0))
    joined = F.pad(x, (0, 0, 1, 0))
    return m.out(torch.einsum("bzd, bcz -> bcd", joined, segment_sums(decays).exp())[:, 1:])


def behind_a_number(m: Mixed, x: Tensor) -> Tensor:
    decays = F.pad(-F.softplus(m.gate(x)[..., 0]), (1, 0))
    return m.out((segment_sums(decays).exp() @ F.pad(x, (0, 0, 1, 0), value=0.5))[:, :-1])


def behind_a_decay(m: Mixed, x: Tensor) -> Tensor:
    """One that is trained, and in no weight: its gradient is zero, and there."""
    decays = torch.cat([-m.mu[:1].exp().expand(x.shape[0], 1), -F.softplus(m.gate(x)[..., 0])], -1)
    return m.out((segment_sums(decays).exp() @ F.pad(x, (0, 0, 1, 0)))[:, :-1])


STREAMS: list[Mixer] = [
    blended,
    from_a_learned_state,
    with_the_last_state,
    of_differences,
    of_all_rows,
    of_a_triangle,
    rows_first,
    behind_a_number,
    behind_a_decay,
]
OFTEN: list[Mixer] = [blended, from_a_learned_state, of_all_rows, of_a_triangle, behind_a_number, behind_a_decay]


def compared(mixer: Mixer, length: int = LENGTH, batch: int = 2, layers: int = 1, **options: Any) -> Report:
    ids = layouts.tokens(23, batch, length, 0)
    return compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)


def found(report: Report, *kinds: type) -> list[fx.Node]:
    nodes = [node for facts in report.facts for node in facts.joint.nodes]
    return [node for node in nodes if isinstance(node.target, kinds or (Forward, Backward))]


@pytest.mark.parametrize("mixer", only(OFTEN, STREAMS), ids=lambda mixer: mixer.__name__)
def test_blocks_hand_on_what_is_left(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=6, also=(1, 7, 64), streams=None if mixer is with_the_last_state else True)
    (facts,) = report.facts
    assert found(report, Forward) and found(report, Backward)
    assert all(StorageClass.ROWS in facts.demand.forms[node] for node in found(report))


def test_the_end_is_padded_and_layers_follow() -> None:
    compared(blended, length=LENGTH - 1, layers=2, chunk_size=6, also=(1, 7, 64))


def test_one_block_is_all_there_is() -> None:
    compared(blended, length=2, chunk_size=1, streams=None)


# -- what is none


def totalled(totals: Totals) -> Mixer:
    return lambda m, x: m.out(totals(-F.softplus(m.gate(x)[..., 0])).exp() @ x)


def written(m: Mixed, x: Tensor) -> Tensor:
    totals = segment_sums(-F.softplus(m.gate(x)[..., 0]))
    totals.mul_(2)
    return m.out(totals.exp() @ x)


def of_frozen_decays(m: Mixed, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = segment_sums(-F.softplus(m.gate(x)[..., 0])).exp()
    return m.out(weights @ x)


def of_decays_in_part(m: Mixed, x: Tensor) -> Tensor:
    """From the product's point of view all is computed under the same mode; what it reads was not."""
    decays = -F.softplus(m.gate(x)[..., 0])
    with torch.no_grad():
        repeated = decays[..., None].expand(*decays.shape, decays.shape[-1]).masked_fill(~kept(decays.shape[-1], -1), 0)
    return m.out(repeated.cumsum(-2).masked_fill(~kept(decays.shape[-1]), -torch.inf).exp() @ x)


def in_a_narrow_type(m: Mixed, x: Tensor) -> Tensor:
    decays = -F.softplus(m.gate(x)[..., 0]).bfloat16()
    return m.out((segment_sums(decays).exp() @ x.bfloat16()).to(x.dtype))


def narrowed_on_the_way(m: Mixed, x: Tensor) -> Tensor:
    decays = -F.softplus(m.gate(x)[..., 0])
    return m.out(segment_sums(decays).bfloat16().to(x.dtype).exp() @ x)


def between_columns(m: Mixed, x: Tensor) -> Tensor:
    """The running sum goes the other way."""
    decays = -F.softplus(m.gate(x)[..., 0])
    count = decays.shape[-1]
    repeated = decays[..., None].expand(*decays.shape, count).masked_fill(~kept(count, -1), 0)
    return m.out(repeated.cumsum(-1).masked_fill(~kept(count), -torch.inf).exp() @ x)


def of_columns(m: Mixed, x: Tensor) -> Tensor:
    """Decays stand in columns, and are summed over rows."""
    decays = -F.softplus(m.gate(x)[..., 0])
    count = decays.shape[-1]
    repeated = decays[..., None, :].expand(*decays.shape, count).masked_fill(~kept(count, -1), 0)
    return m.out(repeated.cumsum(-2).masked_fill(~kept(count), -torch.inf).exp() @ x)


def of_differences_turned(m: Mixed, x: Tensor) -> Tensor:
    """Rows stand where columns stood, and the triangle where it was."""
    sums = (-F.softplus(m.gate(x)[..., 0])).cumsum(-1)
    weights = (sums[..., None, :] - sums[..., None]).masked_fill(~kept(sums.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bzc,bzd->bcd", weights, x))


def of_heads(m: Mixed, x: Tensor) -> Tensor:
    decays = -F.softplus(m.gate(x)).mT
    repeated = decays[..., None].expand(*decays.shape, decays.shape[-1]).masked_fill(~kept(decays.shape[-1], -1), 0)
    weights = repeated.cumsum(1).masked_fill(~kept(decays.shape[-1]), -torch.inf).exp()
    return m.out(torch.einsum("bhcz,bzh->bch", weights, x))


def backwards(m: Mixed, x: Tensor) -> Tensor:
    return m.out(torch.einsum("bcz,bcd->bzd", segment_sums(-F.softplus(m.gate(x)[..., 0])).exp(), x))


def turned_in_memory(m: Mixed, x: Tensor) -> Tensor:
    """What is made lies in memory by columns, and is viewed so."""
    made = x.mT @ segment_sums(-F.softplus(m.gate(x)[..., 0])).exp().transpose(1, 2)
    return m.out(made.view(x.shape[0], -1).view(made.shape).mT)


def of_bits(m: Mixed, x: Tensor) -> Tensor:
    """~1 is -2, which is true as well: all is hidden, where no number takes the place of the first column."""
    decays = -F.softplus(m.gate(x)[..., 0])
    count = decays.shape[-1]
    turned = (~torch.ones(count, count, dtype=torch.int8).tril()).bool()
    repeated = decays[..., None].expand(*decays.shape, count).masked_fill(~kept(count, -1), 0)
    return m.out(repeated.cumsum(-2).masked_fill(turned, -torch.inf).exp() @ x)


def of_all_heads(m: Mixed, x: Tensor) -> Tensor:
    """One decay for all heads, repeated for each of them as it is for the columns."""
    b, n, w = x.shape
    repeated = -F.softplus(m.gate(x)[..., :1]).mT.unsqueeze(-1).expand(b, 2, n, n).masked_fill(~kept(n, -1), 0)
    weights = repeated.cumsum(-2).masked_fill(~kept(n), -torch.inf).exp()
    return m.out((weights @ x.view(b, n, 2, w // 2).transpose(1, 2)).transpose(1, 2).reshape(b, n, w))


OTHERS: dict[str, Mixer] = {
    "a row more in each sum": totalled(lambda x: segment_sums(x, strict=0)),
    "a row less in each sum": totalled(lambda x: segment_sums(x, strict=-2)),
    "the row after is seen": totalled(lambda x: segment_sums(x, diagonal=1)),
    "the row itself is not seen": totalled(lambda x: segment_sums(x, diagonal=-1)),
    "above the diagonal little, and not nothing": totalled(lambda x: segment_sums(x, hidden=-20.0)),
    "below the diagonal nothing": totalled(
        lambda x: (x.cumsum(-1)[..., None] - x.cumsum(-1)[..., None, :]).masked_fill(kept(x.shape[-1]), -torch.inf)
    ),
    "something is added above the diagonal": totalled(lambda x: torch.logaddexp(segment_sums(x), x[..., None] - 20)),
    "differences the other way round": of_differences_turned,
    "sums over something else": of_heads,
    "sums of two": totalled(
        lambda x: (x.cumsum(-1)[..., None] - (2 * x).cumsum(-1)[..., None, :]).masked_fill(~kept(x.shape[-1]), -torch.inf)
    ),
    "a triangle of numbers whose bits are turned": of_bits,
    "weights that are written": written,
    "weights without a gradient": of_frozen_decays,
    "weights without a gradient in part": of_decays_in_part,
    "a narrow type": in_a_narrow_type,
    "a narrow type on the way": narrowed_on_the_way,
    "sums of columns": between_columns,
    "decays in columns": of_columns,
    "the other way round": backwards,
    "another order in memory": turned_in_memory,
    "one decay for all heads": of_all_heads,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tolerance = {"a narrow type": 5e-2, "a narrow type on the way": 5e-2}.get(name, 1e-12)
    report = compared(OTHERS[name], length=9, chunk_size=4, streams=None, tolerance=tolerance)
    assert "the search for those with weights that decay failed" not in caplog.text
    assert not found(report)
    assert not [node for facts in report.facts for node in facts.joint.nodes if node.target is DECAYED_SUMS]


def rows_of_all_heads(m: Mixed, x: Tensor) -> Tensor:
    b, n, w = x.shape
    decays = -F.softplus(m.gate(x)[..., :2]).mT
    rows = x.detach().view(b, n, 1, w).transpose(1, 2).expand(b, 2, n, w)
    return m.out((segment_sums(decays).exp() @ rows).mean(1)) + x


def test_what_is_repeated_before() -> None:
    compared(rows_of_all_heads, length=9, chunk_size=4, streams=None, also=(1, 7))


def test_two_rows_in_front() -> None:
    """Then all rows are summed, and of what is made the last ones are left out."""
    report = compared(lambda m, x: blended(m, x, shift=2), chunk_size=6, streams=None)
    assert found(report)


# -- numbers


def test_what_may_grow_is_summed_in_one_piece() -> None:
    """What is left of the first row is nothing at all after the second, and all of it after the third."""

    def growing(m: Mixed, x: Tensor) -> Tensor:
        decays = 0 * m.gate(x)[..., 0] + 800 * torch.tensor([0.0, -1, 1, 0, 0]).to(x.dtype)
        return m.out(segment_sums(decays).exp() @ x)

    report = compared(growing, length=5, chunk_size=2, streams=False)
    (facts,) = report.facts
    assert any("not proven to be at most zero" in reason for reason in facts.reasons())
    assert not found(report)


def test_what_ends_all() -> None:
    """Minus infinity: nothing is left of the rows before, also of gradients."""

    def ending(m: Mixed, x: Tensor) -> Tensor:
        ends = (torch.arange(x.shape[1]) % 4 == 2) & (x[..., 0] < 9)
        return m.out(segment_sums((-F.softplus(m.gate(x)[..., 0])).masked_fill(ends, -torch.inf)).exp() @ x)

    assert found(compared(ending, chunk_size=6, also=(1, 7)))


def test_numbers_so_large_that_nothing_is_left() -> None:
    def vanishing(m: Mixed, x: Tensor) -> Tensor:
        return m.out(segment_sums(-(m.gate(x)[..., 0] * 1e4).square()).exp() @ x)

    assert found(compared(vanishing, chunk_size=6, also=(1, 7)))


def test_the_first_decay_is_in_no_weight() -> None:
    """Whatever it is, it does not count: not even what grows beyond all numbers."""

    def first_grows(m: Mixed, x: Tensor) -> Tensor:
        decays = -F.softplus(m.gate(x)[..., 0])
        return m.out(segment_sums(torch.cat([decays[:, :1] + 800.0, decays[:, 1:]], 1)).exp() @ x)

    compared(first_grows, chunk_size=6, also=(1, 7), streams=None)


def test_what_may_grow_is_no_product_of_steps() -> None:
    """Down beyond the smallest number, and up again: of the sum of both something is left, of one after the other nothing."""

    def down_and_up(m: Mixed, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        decays = -F.softplus(m.gate(x)[..., 0]) * 0.01 - 740.0 * (at == 5) + 700.0 * (at == 6)
        rows = x * ((at != 5) & (at != 6))[:, None]
        return m.out(F.normalize(segment_sums(decays).exp() @ rows + 1e-300, dim=-1, eps=1e-200))

    compared(down_and_up, chunk_size=6, also=(1, 7), streams=None)


# -- transformers


@pytest.mark.parametrize("length", [21, 24])
def test_the_blocks_of_transformers(length: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "vocab_size": 23}
    config = transformers.Mamba2Config(**sizes, num_hidden_layers=2, chunk_size=4, use_cache=False)
    model: nn.Module = decoders.made(lambda: transformers.Mamba2ForCausalLM(config))
    ids = layouts.tokens(23, 2, length, 0)
    report = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=8, also=(1, 7, 64))
    assert len(found(report, Forward)) == len(found(report, Backward)) == 2
    (facts,) = report.facts
    assert len(facts.stages) == 3  # each layer has a convolution, and is a stage of its own


def test_other_lengths_and_batches_later() -> None:
    compilations: list[Compilation] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        compilations.append(Compilation(module, Options(chunk_size=4, loss_chunk_size=4, strict=True)))
        return compilations[-1].compile(inputs)

    compare_sizes(lambda: decoders.made(lambda: Mixed(of_all_rows)), backend, ((2, 11), (2, 7), (3, 9)))
    assert all(any(isinstance(node.target, Forward) for node in each.facts[-1].joint.nodes) for each in compilations)
