"""Operators that carry a state of a user's own stream: the state goes from chunk to chunk, and its gradient back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import streamfx
from streamfx.ir.facts import known
from streamfx.runtime.custom_scan import Backward, Forward
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.later_sizes import compare_sizes
from tests.support.spread import only
from tests.support.stateful.averages import averages
from tests.support.stateful.blocks import BLOCK, blocks
from tests.support.stateful.delta_rule import delta_rule
from tests.support.stateful.selective import selective
from tests.support.stateful.windows import windows
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, compared, operators

pytestmark = pytest.mark.compiled

STATES = 4  # numbers that each channel of a selective scan carries


def stateful(report: Report) -> list[fx.Node]:
    return operators(report, Forward, Backward)


def learned(m: Mixed, x: Tensor) -> Tensor:
    return (m.first[:, None] * m.mu[:STATES]).expand(x.shape[0], WIDTH, STATES).clone()


def selected(m: Mixed, x: Tensor, first: Tensor | None = None, skips: bool = True) -> tuple[Tensor, Tensor]:
    """A selective scan as layers call it."""
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    decay = -m.cell.weight_hh[:WIDTH, :STATES].exp()
    return selective(x, m.gate(x).sigmoid(), decay, left, right, m.mu if skips else None, first)


def some_gradients(m: Mixed, x: Tensor) -> Tensor:
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    weights = -m.cell.weight_hh[:WIDTH, :STATES].detach().exp()
    return selective(x, m.gate(x).detach().sigmoid(), weights, left, right.detach())[0]


def last_state_for_all_rows(m: Mixed, x: Tensor) -> Tensor:
    y, last = selected(m, x)
    return m.out(y) + m.gate(last.sum(-1))[:, None]


def handed_on(m: Mixed, x: Tensor) -> Tensor:
    y, last = selected(m, x)
    return m.out(selected(m, y, last.tanh())[0])


def of_the_first_rows(m: Mixed, x: Tensor) -> Tensor:
    """In small chunks the last have no row of it, and its last state leaves an earlier one."""
    y, last = selected(m, x[:, :-3], learned(m, x))
    return m.out(F.pad(y, [0, 0, 0, 3])) + m.gate(last.sum(-1))[:, None]


def in_heads(m: Mixed, x: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (2, -1)) for part in m.up(x).chunk(3, -1)]


def attended(m: Mixed, x: Tensor, first: Tensor | None = None, asks: bool = False) -> tuple[Tensor, Tensor]:
    """Chunks begin where blocks do; the states that the kernel saves are made again."""
    return blocks(*in_heads(m, x), -m.gate(x)[..., :2].exp(), 0.5, first, asks)[:2]


def ruled(m: Mixed, x: Tensor, first: Tensor | None = None, asks: bool = False) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's operator, which is known by its name; no state is a tensor of nothing."""
    q, k, v = in_heads(m, x)
    return delta_rule(q, k, v, 0.1 * k, v.sin(), -q.exp(), first, asks)  # type: ignore[no-any-return]


def with_states(kind: Any, m: Mixed, x: Tensor) -> Tensor:
    """From a learned matrix for each head, and with the last one."""
    y, last = kind(m, x, (m.first.view(2, 4, 1) * m.mu[:4]).expand(x.shape[0], 2, 4, 4).clone(), asks=True)
    return m.out(y.flatten(2)) + m.gate(last.sum(-1).flatten(1))[:, None]


def convolved(m: Mixed, x: Tensor, width: int, first: Tensor | None = None) -> Tensor:
    y, last = windows(x.transpose(1, 2), m.cell.weight_ih[:WIDTH, :width], m.first, first)
    return m.out(y.transpose(1, 2)) + m.gate(last.sum(-1))[:, None]


def averaged(m: Mixed, x: Tensor) -> Tensor:
    """Two states; the number of rows is an argument."""
    return m.out(averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), None, None)[0])


def averaged_on_and_on(m: Mixed, x: Tensor) -> Tensor:
    """Learned states for all sequences: their numbers lie side by side, as where they are not repeated."""
    first = (item.expand(x.shape[0], WIDTH) for item in (m.first, m.mu.exp()))
    y, top, bottom, _ = averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), *first)
    return m.out(averages(x.shape[1], m.gate(y), x, m.mu.sigmoid(), top, bottom)[0])


STREAMS: dict[str, Mixer] = {
    "of a package": lambda m, x: m.out(ruled(m, x)[0].flatten(2)),
    "of a package, with states": lambda m, x: with_states(ruled, m, x),
    "in blocks": lambda m, x: m.out(attended(m, x)[0].flatten(2)),
    "in blocks, with states": lambda m, x: with_states(attended, m, x),
    "averaged": averaged,
    "averaged on and on": averaged_on_and_on,
    "last state for all rows": last_state_for_all_rows,
    "of the first rows": of_the_first_rows,
    "of some rows": lambda m, x: m.out(F.pad(selected(m, x[:, 3:])[0], [0, 0, 3, 0])),
    "some gradients": lambda m, x: m.out(some_gradients(m, x)),
    "first state of all rows": lambda m, x: m.out(selected(m, x, m.gate(x.mean(1))[..., None] * m.mu[:STATES], False)[0]),
    "handed to the next": handed_on,
    "the same twice": lambda m, x: m.out(selected(m, x)[0] + selected(m, x)[0].tanh()),
    "checkpointed": lambda m, x: checkpoint(lambda x: last_state_for_all_rows(m, x), x, use_reentrant=False),
    "convolved": lambda m, x: convolved(m, x, 3),
    "convolved, without a state": lambda m, x: convolved(m, x, 1),
    "convolved in chunks that are shorter than the state": lambda m, x: convolved(
        m, x, 5, m.up.weight[:WIDTH, :4].expand(x.shape[0], WIDTH, 4).clone()
    ),
}
OFTEN = ("of a package", "in blocks", "averaged", "averaged on and on", "last state for all rows", "of the first rows")


@pytest.mark.parametrize("name", only(OFTEN, STREAMS))
def test_rows_follow_one_another(name: str) -> None:
    report = compared(STREAMS[name], chunk_size=4, also=(1, 3, LENGTH), streams=None)
    (facts,) = report.facts
    for kind in (Forward, Backward):
        assert all_in_rows(report, operators(report, kind))
    assert not facts.reasons(), facts.reasons()
    assert all(loop.spec.chunk_size % BLOCK == 0 for loop in known(facts.program).loops) or "blocks" not in name


@pytest.mark.long
@pytest.mark.parametrize("how", [{"save": "attention"}, {"keep_every": 2}], ids=str)
def test_however_it_is_run(how: dict[str, Any]) -> None:
    """Three layers, and as many sequences as rows."""
    assert stateful(compared(last_state_for_all_rows, length=7, batch=7, layers=3, chunk_size=3, streams=None, **how))


@pytest.mark.long
def test_the_loss_sees_nothing_but_the_last_state() -> None:
    """Which is a result, too: the caller differentiates it as well."""

    class Last(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            last = selected(self, F.rms_norm(self.embed(ids), (WIDTH,)))[1]
            return F.cross_entropy(self.head(last.sum(-1)), labels[:, 0]), last

    ids = layouts.tokens(23, 2, LENGTH, 0)
    report = compare(decoders.made(lambda: Last(averaged)), {"ids": ids, "labels": ids}, chunk_size=4, also=(1,), streams=None)
    assert len(stateful(report)) == 2


def test_rows_lie_as_they_did_when_they_were_traced() -> None:
    """Rows of a chunk out of what the caller gives have gaps between sequences, which the kernel does not take."""

    class Given(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            return F.cross_entropy(self.head(convolved(self, ids, 3)).flatten(0, 1), labels.flatten())

    features = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()
    inputs = {"ids": features, "labels": layouts.tokens(23, 2, LENGTH, 0)}
    report = compare(decoders.made(lambda: Given(averaged)), inputs, chunk_size=4, also=(1, 3), streams=None)
    assert len(stateful(report)) == 2


def test_inside_of_blocks_it_runs_whole() -> None:
    """Rows from the third on: chunks would begin where the operator's blocks do not. From the fifth on they do."""

    def later(start: int) -> Mixer:
        return lambda m, x: m.out(F.pad(attended(m, x[:, start:])[0].flatten(2), [0, 0, start, 0]))

    (facts,) = compared(later(3), chunk_size=4, also=(3,), streams=False).facts
    assert any("takes 4 rows together" in reason for reason in facts.reasons())
    (facts,) = compared(later(4), chunk_size=4, also=(3,)).facts
    assert not facts.reasons()


@pytest.mark.long
def test_states_of_a_wider_type() -> None:
    """In float32 beside rows in bfloat16 the carry loses nothing: chunks differ from eager by what their rounding does."""

    def narrow(m: Mixed, x: Tensor) -> Tensor:
        return m.out(averages(x.shape[1], m.gate(x).bfloat16(), x.bfloat16(), m.mu.float().sigmoid(), None, None)[0].to(x.dtype))

    assert len(stateful(compared(narrow, chunk_size=4, also=(1,), streams=None, tolerance=0.02))) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["in blocks, with states", "averaged on and on"])
def test_other_lengths_later(name: str) -> None:
    """The second length compiles code for all of them."""
    options, sizes = {"chunk_size": 4, "loss_chunk_size": 4}, ((2, 11), (3, 7), (5, 13))
    compare_sizes(lambda: decoders.made(lambda: Mixed(STREAMS[name])), "streambp", sizes, options=options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["of some rows", "in blocks, with states", "averaged on and on"])
def test_it_is_explained(name: str) -> None:
    """On fake values, chunks without rows among them."""
    ids = layouts.tokens(23, 2, LENGTH, 0)
    found = streamfx.explain(decoders.made(lambda: Mixed(STREAMS[name])), ids, ids, chunk_size=1, loss_chunk_size=1)
    assert {stage.kind for stage in found.stages} == {"streamed"}, str(found)
