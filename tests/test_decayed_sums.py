"""Matmuls over blocks of rows with decaying weights stream, as Mamba 2 writes them; other matmuls fall back. Early sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import streamfx
from streamfx.dialect.decayed_sums import DECAYED_SUMS, SUMS_AFTER
from streamfx.passes.partition.hoisted_reductions import hoisted_reductions
from streamfx.runtime.custom_scan import StatefulRecurrence
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.mixers import WIDTH, Mixed, Mixer, all_in_rows, are_reversed, compared, operators
from tests.support.spread import only
from tests.support.tables import named_cases

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


STREAMS: dict[str, Mixer] = named_cases("streams", globals())


@pytest.mark.parametrize("name", only(["blended", "a number first", "a decay first"], STREAMS))
def test_sums_of_blocks_stream(name: str) -> None:
    report = compared(STREAMS[name], length=LENGTH, chunk_size=6, also=(1, 7, 64), streams=None)
    nodes = operators(report, StatefulRecurrence)
    assert all_in_rows(report, nodes) and {*are_reversed(nodes)} == {False, True}
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


OTHERS: dict[str, Mixer] = named_cases("others", globals())


@pytest.mark.parametrize("name", OTHERS)
def test_other_matmuls_do_not_match(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tolerance = 5e-2 if "narrow" in name else 1e-12
    report = compared(OTHERS[name], length=9, chunk_size=4, streams=None, tolerance=tolerance)
    assert "the search for those with weights that decay failed" not in caplog.text
    assert not found(report)


def found(report: Report) -> list[Any]:
    nodes = [node for facts in report.facts for node in facts.joint.nodes]
    return [node for node in nodes if isinstance(node.target, StatefulRecurrence) or node.target is DECAYED_SUMS]


# -- numbers


def test_weights_that_may_grow_fall_back() -> None:
    """The first row's weight is zero after the second row, and one after the third."""

    def growing(m: Mixed, x: Tensor) -> Tensor:
        decays = 0 * m.gate(x)[..., 0] + 800 * torch.tensor([0.0, -1, 1, 0, 0]).to(x.dtype)
        return m.out(segment_sums(decays).exp() @ x)

    report = compared(growing, length=5, chunk_size=2, streams=False)
    assert any("decays that may be above zero" in reason for reason in report.facts[0].reasons())
    assert not operators(report, StatefulRecurrence)


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


# -- reductions over forward values that backward needs before its first loop are computed by the forward loops

LAYERS, XLSTM_BLOCK, VOCABULARY, BATCH = 2, 11, 23, 2


def xlstm() -> nn.Module:
    """A tiny xLSTM of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": LAYERS, "num_blocks": LAYERS, "use_cache": False}
    config = transformers.AutoConfig.for_model("xlstm", **sizes, num_heads=2, mode="train", chunk_size=XLSTM_BLOCK)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    return model


def test_a_recurrent_layer_has_one_backward_loop() -> None:
    """The last step with a gradient reads one row of each value, and no extra loop recomputes them. Nor is the last
    product of a layer recomputed: FLOPs are at most those of checkpointing.
    """
    ids = layouts.tokens(VOCABULARY, BATCH, 4 * XLSTM_BLOCK, 0)
    model, batch = decoders.made(xlstm), {"input_ids": ids, "labels": ids}
    compare(model, batch, chunk_size=XLSTM_BLOCK, also=(2 * XLSTM_BLOCK,), tolerance=1e-11)
    found = streamfx.explain(model, **batch, chunk_size=XLSTM_BLOCK, loss_chunk_size=XLSTM_BLOCK).summary()
    assert [stage["loops"] for stage in found["stages"]] == [2] * LAYERS + [1]
    assert found["flops"] <= found["checkpointing_flops"]


class Scaled(torch.autograd.Function):
    """Sums over later rows scale its gradient, and a table of rows scales the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (given,), (x, weight) = gradients, ctx.saved_tensors
        total = (x.flip(1).cumsum(1).flip(1).sin() * x).sum(1, keepdim=True)
        entries = (x[..., 0].flatten() * 100).abs().long() % 512
        table = x.new_zeros(512, x.shape[-1]).index_add(0, entries, x.flatten(0, 1))
        return given * weight * total, (given * x).sum((0, 1)) * table.square().mean(0)


class Convolved(nn.Module):
    """A sequence of convolutions, and a loss with a running sum."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.embed, self.head, self.scaled = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), scaled
        self.weight = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 4) for _ in range(LAYERS + 1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = Scaled.apply(x, self.weight) if self.scaled else x
            x = x + layer(F.pad(x.mT, (3, 0))).mT.sin()
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(ids).cumsum(1).mean()


@pytest.mark.parametrize("scaled", [False, True])
def test_each_layer_is_a_stage_if_the_loss_has_a_running_sum(scaled: bool) -> None:
    """A cut at a running sum of losses is smaller than a cut between layers. No forward loop computes a
    reversed running sum over rows, and no value keeps a table that no loop waits for.
    """
    model = decoders.made(lambda: Convolved(scaled))
    ids = layouts.tokens(VOCABULARY, BATCH, 24, 0)
    compare(model, {"ids": ids, "labels": ids}, chunk_size=8, also=(1, 5))
    explained = streamfx.explain(model, ids, ids, chunk_size=8)
    (facts,) = (graph.facts for graph in explained.call.graphs)
    assert not any(hoisted_reductions(number, facts) for number in range(len(facts.stages)))
    loops = [stage["loops"] for stage in explained.summary()["stages"]]
    assert len(loops) > LAYERS + 1 and max(loops) <= 5, loops
