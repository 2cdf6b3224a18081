"""PyTorch's `scan` over rows streams: its carry goes from chunk to chunk, its gradient back. A `while_loop` falls back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves

import streamfx
from streamfx.ir.facts import known
from streamfx.runtime.scan import ChunkedScan
from tests.support.exactness import assert_small, errors, outcome, recorder
from tests.support.mixers import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, compared, mixed, operators, tokens, zeros
from tests.support.scans import if_aliases_compile, scan

pytestmark = pytest.mark.compiled

# PyTorch refuses a step if autograd saves one of its results for another: each step here returns a new state.


def decayed(m: Mixed, x: Tensor) -> Tensor:
    """Linear in its state; rows along dimension 1."""

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = row[0] * state + row[1]
        return state, state.tanh()

    return m.out(scan(step, zeros(x), (m.gate(x).sigmoid(), x), dim=1)[1])


def cell(m: Mixed, x: Tensor) -> Tensor:
    """A product in each step, with weights that all rows share, and a learned first state."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row), state * m.mu

    return m.out(scan(step, m.first.expand(x.shape[0], WIDTH).clone(), x, dim=1)[1])


def several(m: Mixed, x: Tensor) -> Tensor:
    """A matrix, a vector, and a row counter of another type. One result repeats an operand, another is equal for all rows."""

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


@pytest.mark.parametrize("mixer", [side_by_side, pytest.param(several, marks=if_aliases_compile)])
def test_a_scan_streams(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 11))
    assert all_in_rows(report, operators(report, ChunkedScan))
    if mixer is side_by_side:  # PyTorch's backward reads a weight's transpose from a stack with one for each row
        found = tree_leaves([node.meta.get("val") for node in report.facts[0].joint.nodes])
        assert max(item.numel() for item in found if isinstance(item, Tensor)) < LENGTH * WIDTH * WIDTH


def the_last_state(m: Mixed, x: Tensor) -> Tensor:
    """It leaves the loop after the last chunk."""
    state, rows = scan(lambda state, row: (0.5 * (state + row).tanh(), row * state), zeros(x), x, dim=1)
    return m.out(rows) + m.gate(state)[:, None]


def signs(m: Mixed, x: Tensor) -> Tensor:
    """The last state is a zero with a sign, which a sum over chunks would lose."""
    keep = torch.ones_like(x) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]
    last, made = scan(lambda s, r: ((0.9 * s + r[0]) * r[1], s * r[0]), zeros(x), (x, keep), dim=1)
    return m.out(made) + torch.copysign(m.mu, last)[:, None]


@pytest.mark.parametrize("mixer", [the_last_state, signs], ids=lambda mixer: mixer.__name__)
def test_a_last_state(mixer: Mixer) -> None:
    assert len(operators(compared(mixer, chunk_size=3, also=(1, LENGTH), streams=None), ChunkedScan)) == 2


def test_a_step_that_draws_random_numbers_falls_back() -> None:
    def drawn(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(lambda state, row: (F.dropout(state, 0.5) + row, state * row), zeros(x), x, dim=1)[1])

    torch._dynamo.reset()
    explained = streamfx.explain(mixed(drawn), **tokens(length=6), chunk_size=2)
    assert "scan calls functions, for which no rule exists" in str(explained)


def test_a_step_that_reads_by_strides_falls_back() -> None:
    """Rows of a chunk have other strides than rows of the full sequence."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.as_strided(row, (2, WIDTH), row.stride())
        return 0.5 * (state + row).tanh() + first.sum(0), state * first.mean(0)

    def strided(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(step, zeros(x), m.gate(x).sin(), dim=1)[1])

    assert not operators(compared(strided, batch=4, chunk_size=4, streams=None), ChunkedScan)


def turned(m: Mixed, x: Tensor) -> Tensor:
    """The loop carries all rows of the result, too; its inputs may not share memory."""
    rows, length = m.gate(x).clone(), x.shape[1]

    def turn(t: Tensor, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = (0.9 * state + rows.index_select(1, t.view(1)).squeeze(1)).tanh()
        return t + 1, torch.where((torch.arange(length) == t)[None, :, None], state.unsqueeze(1), made), 1.0 * state

    start = torch.zeros((), dtype=torch.int64), torch.zeros_like(x), zeros(x)
    return m.out(while_loop(lambda t, *_: t < length, turn, start)[1])


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_a_while_loop_falls_back_and_the_rest_streams(chunk: int | str) -> None:
    """The number of iterations is known only at run time, and the chunk size is chosen before."""
    own, eager = mixed(turned), mixed(turned)
    backend = recorder(chunk_size=chunk, loss_chunk_size=chunk)
    truth = outcome(eager, eager, tokens())
    compiled = torch.compile(own, backend=backend, fullgraph=True)  # without, AOTAutograd itself refuses it
    assert_small(errors(outcome(compiled, own, tokens()), truth), 1e-11, "while_loop")
    (facts,) = backend.facts
    assert not facts.analysis_error and len(known(facts.program).loops) > 2
    assert any("while_loop" in reason for reason in facts.reasons())
