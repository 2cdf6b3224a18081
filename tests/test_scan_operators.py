"""PyTorch's `scan` over rows streams: its carry goes from chunk to chunk, and its gradient's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import streamfx
from streamfx.runtime.scan import ChunkedScan
from tests.support import decoders, layouts
from tests.support.later_sizes import compare_sizes
from tests.support.scans import scan
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, compared, operators, zeros

pytestmark = pytest.mark.compiled

# PyTorch refuses a step one of whose results autograd keeps for another: what is carried on is made anew in each of these.


def decayed(m: Mixed, x: Tensor) -> Tensor:
    """Linear in its state; rows along dimension 1."""

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = row[0] * state + row[1]
        return state, state.tanh()

    return m.out(scan(step, zeros(x), (m.gate(x).sigmoid(), x), dim=1)[1])


def cell(m: Mixed, x: Tensor) -> Tensor:
    """A product in each step; weights that all rows are given, and a learned first state."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row), state * m.mu

    return m.out(scan(step, m.first.expand(x.shape[0], WIDTH).clone(), x, dim=1)[1])


def several(m: Mixed, x: Tensor) -> Tensor:
    """States: a matrix, a vector, and a number of another type that counts rows. Of one result the rows are those of an operand,
    of another all are the same.
    """

    def step(states: tuple[Tensor, ...], rows: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        (outer, sums, count), (row, other) = states, rows
        made = (outer.sum(1) * row + sums / (count + 1)).softmax(-1)
        states = 0.9 * outer + row.unsqueeze(2) * row.unsqueeze(1), (sums * m.mu + row).sin(), count + 1
        return states, (made, other.clone(), m.mu.exp())

    first = x.new_zeros(x.shape[0], WIDTH, WIDTH), zeros(x), torch.zeros(1, dtype=torch.float32)
    made = scan(step, first, (x, m.gate(x)), dim=1)[1]
    return m.out(made[0] * made[1] + made[2].t())


def side_by_side(m: Mixed, x: Tensor) -> Tensor:
    return decayed(m, x) * cell(m, x)


@pytest.mark.parametrize("mixer", [side_by_side, several], ids=lambda mixer: mixer.__name__)
def test_rows_follow_one_another(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 11))
    assert all_in_rows(report, operators(report, ChunkedScan))
    if mixer is side_by_side:  # PyTorch's backward reads a weight's transpose from a stack of as many as there are rows
        found = tree_leaves([node.meta.get("val") for node in report.facts[0].joint.nodes])
        assert max(item.numel() for item in found if isinstance(item, Tensor)) < LENGTH * WIDTH * WIDTH


def turned(m: Mixed, x: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * (state + row).tanh(), row * state

    found: tuple[Tensor, Tensor] = scan(step, x[..., 0].clone() if how["dim"] == 2 else zeros(x), x, **how)
    return found


def test_the_last_state() -> None:
    """It leaves the loop when the last chunk has run, also where the loss needs nothing else."""

    def last(m: Mixed, x: Tensor) -> Tensor:
        state, rows = turned(m, x, dim=1)
        return m.out(rows) + m.gate(state)[:, None]

    assert len(operators(compared(last, chunk_size=3, also=(1,), streams=None), ChunkedScan)) == 2


@pytest.mark.long
@pytest.mark.parametrize("how", [{"dim": 1, "reverse": True}, {"dim": 2}], ids=["from the last row", "over the width"])
def test_what_carries_nothing_from_chunk_to_chunk_is_exact(how: dict[str, Any]) -> None:
    compared(lambda m, x: m.out(turned(m, x, **how)[1].clone()), chunk_size=3, streams=None)


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

    assert not operators(compared(strided, batch=4, chunk_size=4, streams=None), ChunkedScan)


def test_signs_of_a_last_state_that_is_zero() -> None:
    """A sum over chunks would lose them."""

    def reset(m: Mixed, x: Tensor) -> Tensor:
        keep = torch.ones_like(x) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]
        last, made = scan(lambda s, r: ((0.9 * s + r[0]) * r[1], s * r[0]), zeros(x), (x, keep), dim=1)
        return m.out(made) + torch.copysign(m.mu, last)[:, None]

    assert len(operators(compared(reset, chunk_size=3, also=(1, LENGTH), streams=None), ChunkedScan)) == 2


@pytest.mark.long
def test_other_lengths_later() -> None:
    """The second length compiles code for all of them."""
    options = {"chunk_size": 4, "loss_chunk_size": 4}
    compare_sizes(lambda: decoders.made(lambda: Mixed(cell)), "streambp", ((2, 11), (2, 7), (2, 13)), options=options)
