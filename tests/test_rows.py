"""Uses of rows: single ones, rows that are mixed, concatenated, sorted, written over, or chosen by data.

One table has the uses that stream, another one those that fall back, with the reason in the report.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.passes.rewrite.views.decompose_on_sequence import MAX_CONCAT_OPERANDS
from tests.support.decoders.parts import WIDTH, Plain, loss_of, made
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.used import Mix, Mixed, Use, Used, batch, labelled, used

pytestmark = pytest.mark.compiled

aten = torch.ops.aten
LENGTH = 19


# -- single rows: the chunk that holds one computes it


def two_rows_and_all(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    summary = x[:, 3] * x[:, -2].tanh()
    return labelled(model, x * summary.unsqueeze(1), labels)


def signs(kept: bool) -> Use:
    """The last rows are zeros of both signs, which a sum over chunks would lose."""

    def use(model: Used, x: Tensor, labels: Tensor) -> Tensor:
        shown = x * (torch.arange(x.shape[1]) < x.shape[1] - 1).to(x.dtype)[:, None]
        last = shown[:, -1:] if kept else shown[:, -1].unsqueeze(1)
        return labelled(model, shown + torch.copysign(model.head.weight.mean(0), last), labels)

    return use


def phases(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """A sum of complex numbers with a factor, even of one, mixes both parts."""
    phase = torch.complex(1 + x.exp(), x * 0.0)[:, -1].acos().imag  # on the cut of acos: the sign of zero decides
    return labelled(model, x * (1 + phase[:, None]), labels)


SINGLE: dict[str, Use] = named_cases("uses of single rows", globals())


# -- rows that the layers mix with the sequence


class Joined(Plain):
    """Learned rows in several parts before and after the sequence, at the given position; the loss ignores their results."""

    def __init__(self, parts: tuple[int, ...], position: int) -> None:
        super().__init__()
        self.parts, self.position = nn.ParameterList([torch.randn(1, rows, WIDTH) for rows in parts]), position

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        parts = [part.expand(ids.shape[0], -1, -1) for part in self.parts]
        start = sum(part.shape[1] for part in parts[: self.position])
        x = torch.cat((*parts[: self.position], self.embed(ids), *parts[self.position :]), 1)
        logits: Tensor = self.head(self.hidden(x)[:, start : start + ids.shape[1]])
        return logits


class Images(Plain):
    """Rows of another input replace those of some tokens, in order; there are more rows than tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x.masked_scatter((labels % 5 == 0).unsqueeze(-1).expand_as(x), self.head.weight.cos())
        return loss_of(self.head(self.hidden(x)), ids)


@pytest.mark.parametrize(
    "make", [partial(Joined, (4, 2), 1), Images, pytest.param(partial(Joined, (3,), 1), marks=pytest.mark.long)]
)
def test_rows_beside_the_sequence_stream(make: Callable[[], nn.Module]) -> None:
    compare(made(make), batch(), also=(1, 30), attention={"causal"})


def test_many_parts_stay_concatenated() -> None:
    """A padding for each would take as many bytes as the concatenation."""
    report = compare(made(lambda: Joined((1,) * MAX_CONCAT_OPERANDS, 0)), batch(), streams=None)
    assert any(node.target is aten.cat.default for node in report.facts[0].joint.nodes)


# -- features and rows that are mixed


def along(pool: Mix) -> Mix:
    """Along the sequence."""
    return lambda x: pool(x.transpose(1, 2)).transpose(1, 2)


def mean_of(mix: Mix) -> Mix:
    return lambda x: mix(x).mean(1, keepdim=True)


def filtered(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=-1, norm="ortho")
    return torch.fft.irfft(spectrum * torch.arange(spectrum.shape[-1]), n=WIDTH, dim=-1, norm="ortho")


def pooled(x: Tensor) -> Tensor:
    """Features as images of 2 x 6."""
    pooled = F.avg_pool2d(x.unflatten(-1, (2, 6)).flatten(0, 1)[:, None], 2).square().sum((1, 2, 3))
    return pooled.unflatten(0, x.shape[:2])[..., None] * x


class Normed(nn.Module):
    """Heads of all rows in one batch, normed as groups, as in RWKV-7."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.view_as(x)


def projected(x: Tensor) -> Tensor:
    """Without its component along another vector; both of them are all rows of a sequence."""
    unit = F.normalize(x.flatten(1), dim=-1)
    y = x.sin().flatten(1)
    return (y - (y * unit).sum(-1, keepdim=True) * unit).view_as(x)


def outer(x: Tensor) -> Tensor:
    return x[..., :, None] * x[..., None, :]


def joined(parts: Callable[[Tensor], list[Tensor]]) -> Mix:
    return lambda x: torch.cat(parts(x), 1)[:, : x.shape[1]].cumsum(1).sin()


MIXED: dict[str, Mix] = named_cases("mixes", globals())
STREAMS = SINGLE | {name: Mixed(mix) for name, mix in MIXED.items()}
IN_DEFAULT_RUNS = [
    *("two rows and all", "time first", "signs of a row that is zero", "signs of a kept row that is zero"),
    *("both parts of complex rows", "images", "a diagonal above"),
    *("a norm of groups", "a norm over all rows", "a filter", "rolled", "parts of two values in place"),
]


@pytest.mark.parametrize("name", only(IN_DEFAULT_RUNS, STREAMS))
def test_a_use_streams(name: str) -> None:
    compare(used(STREAMS[name]), batch(LENGTH), chunk_size=5, also=(1, 7, LENGTH), attention={"causal"})


POOLED = "falls back: adjacent windows stream"
FALL_BACK: dict[str, tuple[Mix, str]] = named_cases("fallbacks", globals())


@pytest.mark.parametrize("name", only(["windows in steps", "the largest of windows", "memory in another order"], FALL_BACK))
def test_a_use_falls_back(name: str) -> None:
    mix, why = FALL_BACK[name]
    report = compare(used(Mixed(mix)), batch(LENGTH), chunk_size=5, also=(1, 7), streams=None)
    assert any(why in reason for facts in report.facts for reason in facts.reasons())


ELSEWHERE: dict[str, Callable[[Tensor], list[Tensor]]] = {  # parts of 18 rows that are not in order
    "swapped": lambda x: [x[:, 9:].sin(), x[:, :9]],
    "one row twice": lambda x: [x[:, :9].sin(), x[:, 8:14], x[:, 14:]],
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_parts_elsewhere_are_exact(name: str) -> None:
    compare(used(Mixed(joined(ELSEWHERE[name])), layers=2), batch(18), also=(1, 64), streams=None)


# -- rows that are sorted, put back, or written over


def test_sorted_rows_are_restored_with_the_signs_of_zeros() -> None:
    """Rows are written, and not added to zeros."""

    def sign(x: Tensor, hashes: Tensor) -> Tensor:
        order = hashes.argsort(1)
        rows = x.gather(1, order[..., None].expand_as(x)).cumsum(1) * 0.0
        inverse = torch.zeros_like(order).scatter(1, order, torch.arange(order.shape[1]).expand_as(order))
        return torch.copysign(torch.ones_like(x), rows.gather(1, inverse[..., None].expand_as(x)))

    given = torch.randn(2, 24, 6), torch.randint(0, 5, (2, 24))
    with torch.no_grad():
        compiled = torch.compile(sign, backend="streambp", options={"chunk_size": 5})
        assert torch.equal(compiled(*given), sign(*given))


def test_rows_that_are_scattered_over_others() -> None:
    """Other rows keep their values: no sum over chunks."""

    def use(model: Used, x: Tensor, labels: Tensor) -> Tensor:
        order = labels.argsort(1)[:, :12, None].expand(-1, -1, x.shape[-1])
        return labelled(model, torch.ones_like(x).scatter(1, order, x[:, :12].sin()) * x, labels)

    compare(used(use), batch(24), also=(1, 7, 64), streams=None)


@pytest.mark.parametrize(("first", "count", "source"), only([(3, 9, 1)], [(3, 9, 1), (0, 4, 0), (15, 4, 9), (2, 5, 11)]))
def test_rows_that_are_overwritten(first: int, count: int, source: int) -> None:
    """By rows of another place; the old values may be infinite."""

    def mix(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])[:, None]
        y = x.masked_fill((at >= first) & (at < first + count), torch.inf)
        y[:, first : first + count] = x[:, source : source + count].sin()
        return y

    report = compare(used(Mixed(mix)), batch(LENGTH), also=(1, 30), streams=None)
    assert not any(node.target is aten.slice_scatter.default for node in report.facts[0].joint.nodes)


# -- rows chosen by data: layers stream, and operators after the unknown number of rows fall back


def taken_twice(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    taken = labels % 3 > 0
    return F.cross_entropy(model.head(x[taken]), labels[taken])


@pytest.mark.parametrize("budget", only(["120K"], [None, "120K"]))
def test_layers_stream_before_rows_of_an_unknown_number(budget: str | None) -> None:
    model = used(taken_twice, layers=2)
    sizes: dict[str, Any] = {"chunk_size": 5} if budget is None else {"chunk_size": "auto", "memory_budget": budget}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = compare(model, batch(13), streams=None, attention={"causal"}, bodies="eager", **sizes)
        assert any(facts.program is not None for facts in report.facts)
        found = str(explain(model, **batch(13), chunk_size=5))
    assert "1 graph, no graph breaks" in found and "ignore_index" in found


def test_rows_chosen_by_data_break_the_graph_and_explain_names_the_remedy() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        assert "xk, yk = x[k], y[k]" in str(explain(used(taken_twice), **batch(13), chunk_size=5))


class Reads(Plain):
    """A number of the data (`.item()`) is a factor or a bound, known only at run time."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x * (1 + x.sum().item())
        n = ids[0, 0].item() % 5 + 2
        torch._check(n >= 2)
        torch._check(n <= 7)
        x = self.hidden(x.masked_fill((torch.arange(ids.shape[1]) < n)[:, None], 0.5))
        return loss_of(self.head(x * ids.max().item() / (1 + x.detach().abs().amax().item())), labels)


def test_numbers_read_from_data_do_not_prevent_streaming() -> None:
    model = made(Reads)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = compare(model, batch(13), streams=None, attention={"causal"}, chunk_size=5)
        assert report.facts and all(facts.program is not None and not facts.faults for facts in report.facts)
        found = explain(model, **batch(13), chunk_size=5)
    assert found.summary()["graphs"] == 1 and found.summary()["peak_bytes"] > 0
