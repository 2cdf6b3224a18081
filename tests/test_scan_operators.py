"""PyTorch's `scan` over rows streams: its carry goes from chunk to chunk, and its gradient's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import streamfx
from streamfx.ir.facts import StorageClass
from streamfx.runtime.scan import ChunkedScan
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.scans import scan
from tests.support.spread import spread
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer, zeros

# PyTorch refuses a step one of whose results autograd keeps for another: what is carried on is made anew in each of these.


def decayed(m: Mixed, x: Tensor) -> Tensor:
    """Linear in its state; rows along dimension 1."""

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decay, own = row
        state = decay * state + own
        return state, state.tanh()

    return m.out(scan(step, zeros(x), (m.gate(x).sigmoid(), x), dim=1)[1])


def cell(m: Mixed, x: Tensor) -> Tensor:
    """A product in each step; weights that all rows are given, and a learned first state."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row), state * m.mu

    return m.out(scan(step, m.first.expand(x.shape[0], WIDTH).clone(), x, dim=1)[1])


def several_states(m: Mixed, x: Tensor) -> Tensor:
    """A matrix, a vector, and a number of another type that counts rows."""

    def step(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        outer, sums, count = state
        made = outer.sum(1) * row + sums / (count + 1)
        return (0.9 * outer + row.unsqueeze(2) * row.unsqueeze(1), sums + row, count + 1), made

    first = x.new_zeros(x.shape[0], WIDTH, WIDTH), zeros(x), torch.zeros(1, dtype=torch.float32)
    return m.out(scan(step, first, x, dim=1)[1])


def several_results(m: Mixed, x: Tensor) -> Tensor:
    """Of one the rows are those of an operand, of another all are the same."""

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        one, other = row
        state = (state * m.mu + one).sin()
        return state, (state.clone(), other.clone(), m.mu.exp())

    made = scan(step, zeros(x), (x, m.gate(x)), dim=1)[1]
    return m.out(made[0] * made[1] + made[2].t())


def normed_rows(m: Mixed, x: Tensor) -> Tensor:
    """Sums over the width in each step."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        raised = (state + row).exp()
        share = raised / raised.sum(-1, keepdim=True)
        return 0.5 * state + share, share * row

    return m.out(scan(step, zeros(x), x, dim=1)[1])


def one_after_the_other(m: Mixed, x: Tensor) -> Tensor:
    return decayed(m, cell(m, x))


def side_by_side(m: Mixed, x: Tensor) -> Tensor:
    return decayed(m, x) * cell(m, x)


STREAMS = [decayed, cell, several_states, several_results, normed_rows, one_after_the_other, side_by_side]


def scans(report: Report) -> list[fx.Node]:
    return [node for facts in report.facts for node in facts.joint.nodes if isinstance(node.target, ChunkedScan)]


def compared(mixer: Mixer, length: int = LENGTH, batch: int = 2, layers: int = 1, **options: Any) -> Report:
    ids = layouts.tokens(23, batch, length, 0)
    return compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)


@pytest.mark.parametrize("mixer", spread(STREAMS, 2), ids=lambda mixer: mixer.__name__)
def test_rows_follow_one_another(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 11))
    (facts,) = report.facts
    assert scans(report) and all(StorageClass.ROWS in facts.demand.forms[node] for node in scans(report))


def test_layers_and_as_many_sequences_as_rows() -> None:
    compared(cell, layers=2, length=7, batch=7, chunk_size=3, save="projections")


def test_the_last_state() -> None:
    """It leaves the loop when the last chunk has run, also where the loss needs nothing else."""

    def last(m: Mixed, x: Tensor) -> Tensor:
        state, rows = scan(lambda state, row: (0.5 * (state * m.mu + row).tanh(), row * state), zeros(x), x, dim=1)
        return m.out(rows) + m.gate(state)[:, None]

    assert len(scans(compared(last, chunk_size=3, also=(1,), streams=None))) == 2


def test_from_the_last_row_to_the_first() -> None:
    """In the forward half that runs whole, and is exact."""

    def reversed_rows(m: Mixed, x: Tensor) -> Tensor:
        return m.out(
            scan(lambda state, row: (0.5 * (state * m.mu + row).tanh(), state * row), zeros(x), x, dim=1, reverse=True)[1]
        )

    compared(reversed_rows, chunk_size=3, streams=False)


def test_a_loop_over_something_else() -> None:
    """Over the width: rows of the sequence are not carried."""

    def over_width(m: Mixed, x: Tensor) -> Tensor:
        return m.out(
            scan(lambda state, row: (0.5 * (state + row).tanh(), state * row), x[..., 0].clone(), x, dim=2)[1]
            .transpose(1, 2)
            .clone()
            .mT
        )

    compared(over_width, chunk_size=3, streams=None)


def test_what_a_step_draws_is_not_looked_into() -> None:
    def drawn(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(lambda state, row: (F.dropout(state, 0.5) + row, state * row), zeros(x), x, dim=1)[1])

    torch._dynamo.reset()
    ids = layouts.tokens(23, 2, 6, 0)
    explained = streamfx.explain(decoders.made(lambda: Mixed(drawn)), ids, ids, chunk_size=2)
    assert "scan calls functions that no rule looks into" in str(explained)


def test_what_a_step_reads_by_strides_is_not_looked_into() -> None:
    """In a chunk rows lie elsewhere than in the whole sequence."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.as_strided(row, (2, WIDTH), row.stride())
        return 0.5 * (state + row).tanh() + first.sum(0), state * first.mean(0)

    def strided(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(step, zeros(x), m.gate(x).sin(), dim=1)[1])

    assert not scans(compared(strided, batch=4, chunk_size=4, streams=None))


def test_signs_of_a_last_state_that_is_zero() -> None:
    """A sum over chunks would lose them."""

    def reset(m: Mixed, x: Tensor) -> Tensor:
        keep = torch.ones_like(x) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]
        last, made = scan(lambda s, r: ((0.9 * s + r[0]) * r[1], s * r[0]), zeros(x), (x, keep), dim=1)
        return m.out(made) + torch.copysign(m.mu, last)[:, None]

    assert len(scans(compared(reset, chunk_size=3, also=(1, LENGTH), streams=None))) == 2


@pytest.mark.parametrize("lengths", [(11, 7, 13)])
def test_other_lengths_later(lengths: tuple[int, ...]) -> None:
    """The second length compiles code for all of them."""
    torch._dynamo.reset()
    eager = decoders.made(lambda: Mixed(cell))
    own = decoders.made(lambda: Mixed(cell))
    model = torch.compile(own, backend="streambp", options={"chunk_size": 4, "loss_chunk_size": 4})
    for length in lengths:
        ids = layouts.tokens(23, 2, length, length)
        gradients = []
        for call, kind in ((eager, eager), (model, own)):
            kind.zero_grad()
            call(ids, ids).backward()
            gradients.append({name: each.grad for name, each in kind.named_parameters() if each.grad is not None})
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)


def test_what_all_rows_are_given_is_not_stacked() -> None:
    """PyTorch's backward reads a weight's transpose from a stack of as many as there are rows; here nobody makes it."""
    report = compared(cell, chunk_size=4)
    (facts,) = report.facts
    sizes = [value.numel() for node in facts.joint.nodes for value in _values(node)]
    assert max(sizes) < LENGTH * WIDTH * WIDTH


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, Tensor)]
