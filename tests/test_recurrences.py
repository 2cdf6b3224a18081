"""Loops over rows, or over blocks of rows, that were traced operator by operator: they stream with a carried state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import Facts, StorageClass
from streamfx.runtime.chunked_recurrences import Recurrence
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.spread import spread

WIDTH, LENGTH = 8, 11

Mixer = Callable[["Mixed", Tensor], Tensor]


class Mixed(nn.Module):
    def __init__(self, mixer: Mixer, layers: int = 1) -> None:
        super().__init__()
        self.mixer, self.layers = mixer, layers
        self.embed, self.head = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 23, bias=False)
        self.up, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.mu, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.layers):
            x = x + self.mixer(self, F.rms_norm(x, (WIDTH,)))
            x = x + self.out(F.silu(self.gate(F.layer_norm(x, (WIDTH,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], WIDTH)


def written_row_by_row(m: Mixed, x: Tensor) -> Tensor:
    y, state = torch.zeros_like(x), zeros(x)
    decay = m.gate(x).sigmoid()
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        y[:, t] = state.tanh()
    return m.out(y)


def stacked(m: Mixed, x: Tensor) -> Tensor:
    rows, state = [], zeros(x)
    decay = m.gate(x).sigmoid()
    for t in range(x.shape[1]):
        state = decay[:, t] * state * m.mu + x[:, t]
        rows.append(state)
    return m.out(torch.stack(rows, 1))


def unbound(m: Mixed, x: Tensor) -> Tensor:
    rows, state = [], zeros(x)
    for row in m.gate(x).unbind(1):
        state = F.softmax(state + row, -1)
        rows.append(state)
    return m.out(torch.stack(rows, dim=1))


def gated_cell(m: Mixed, x: Tensor) -> Tensor:
    """A product in each step; the first state is learned."""
    rows, state = [], m.first.expand(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        rows.append(state)
    return m.out(torch.stack(rows, 1))


def constant_decay(m: Mixed, x: Tensor) -> Tensor:
    """Linear: the backward half needs no state of the forward half."""
    rows, state = [], zeros(x)
    for t in range(x.shape[1]):
        state = 0.9 * state + x[:, t]
        rows.append(state)
    return m.out(torch.stack(rows, 1))


def two_rows_back(m: Mixed, x: Tensor) -> Tensor:
    rows, one, two = [], zeros(x), zeros(x)
    for t in range(x.shape[1]):
        one, two = (m.mu * one - two * x[:, t]).sin(), one
        rows.append(one * two)
    return m.out(torch.stack(rows, 1))


def the_row_before(m: Mixed, x: Tensor) -> Tensor:
    """Row t of the result is the state before step t; the state takes in the row before."""
    rows, state, before = [], zeros(x), zeros(x)
    for t in range(x.shape[1]):
        rows.append(state)
        state = (state + before * m.mu).tanh()
        before = x[:, t]
    return m.out(torch.stack(rows, 1))


def running_maximum(m: Mixed, x: Tensor) -> Tensor:
    """As log-sum-exp is kept stable: a maximum, a numerator and a denominator; steps of several kinds."""
    y = torch.zeros_like(x)
    k, v, _ = m.up(x).chunk(3, -1)
    top, above, below = zeros(x) - 1e30, zeros(x), zeros(x)
    for t in range(x.shape[1]):
        largest = torch.maximum(top - m.mu, k[:, t])
        old, new = (top - m.mu - largest).exp(), (k[:, t] - largest).exp()
        above, below, top = old * above + new * v[:, t], old * below + new, largest
        y[:, t] = above / below
    return m.out(y)


def matrix_state(m: Mixed, x: Tensor) -> Tensor:
    """The state of a linear attention, one row at a time; rows in front."""
    q, k, v = m.up(x).transpose(0, 1).chunk(3, -1)
    rows, state = [], x.new_zeros(x.shape[0], WIDTH, WIDTH)
    for t in range(x.shape[1]):
        state = state * m.mu.sigmoid() + k[t, :, :, None] * v[t, :, None, :]
        rows.append((q[t, :, None] @ state)[:, 0])
    return m.out(torch.stack(rows).transpose(0, 1))


def first_row_apart(m: Mixed, x: Tensor) -> Tensor:
    """The first step is another than the others."""
    rows = [x[:, 0] * m.first]
    for t in range(1, x.shape[1]):
        rows.append((rows[-1] * m.mu + x[:, t]).tanh())
    return m.out(torch.stack(rows, 1))


CARRIED: list[Mixer] = [
    written_row_by_row,
    stacked,
    unbound,
    gated_cell,
    constant_decay,
    two_rows_back,
    the_row_before,
    running_maximum,
    matrix_state,
    first_row_apart,
]


def recurrences(facts: Facts) -> list[Any]:
    return [node for node in facts.joint.nodes if isinstance(node.target, Recurrence)]


def check(mixer: Mixer, length: int = LENGTH, layers: int = 1, count: int = 2, **options: Any) -> Report:
    ids = layouts.tokens(23, 2, length, 0)
    report = compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)
    (facts,) = report.facts
    found = recurrences(facts)
    assert len(found) == count
    if options.get("streams", True):
        assert all(StorageClass.ROWS in facts.demand.forms[node] for node in found)
    return report


@pytest.mark.parametrize("mixer", spread(CARRIED, 2), ids=lambda mixer: mixer.__name__)
def test_carries_a_state(mixer: Mixer) -> None:
    check(mixer, chunk_size=4, also=(1, 11))


def test_layers() -> None:
    check(written_row_by_row, 7, layers=2, count=4, chunk_size=3)


def test_two_loops_over_the_same_rows() -> None:
    """Their gradients meet in the rows, so that both become one."""
    check(lambda m, x: stacked(m, x) + written_row_by_row(m, x), 7, chunk_size=3)


def test_one_loop_after_the_other() -> None:
    check(lambda m, x: stacked(m, written_row_by_row(m, x)), 7, count=4, chunk_size=3)


def test_a_loop_over_the_rows_that_another_has_stacked() -> None:
    """Each row of the first loop's stack is read by itself, so that its gradient is put together of rows, too."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        first, second, state = [], [], zeros(x)
        for t in range(x.shape[1]):
            state = (m.gate(state) + x[:, t]).tanh()
            first.append(state)
        rows, state = torch.stack(first, 1), zeros(x)
        for t in range(x.shape[1]):
            state = state * 0.5 + m.gate(rows[:, t])
            second.append(state)
        return m.out(torch.stack(second, 1))

    check(mixer, 7, count=4, chunk_size=3, streams=None)


def test_the_last_state() -> None:
    """It leaves the loop when the last chunk has run."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        rows, state = [], zeros(x)
        for t in range(x.shape[1]):
            state = (state * m.mu + x[:, t]).tanh()
            rows.append(state * x[:, t])
        return m.out(torch.stack(rows, 1)) + m.gate(state)[:, None]

    check(mixer, 7, chunk_size=3, streams=None)


def test_from_the_end() -> None:
    """A state that comes from rows to come: not in a loop from the first chunk to the last."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        rows, state = [], zeros(x)
        for t in reversed(range(x.shape[1])):
            state = (state * m.mu + x[:, t]).tanh()
            rows.append(state)
        return m.out(torch.stack(rows[::-1], 1))

    check(mixer, 7, count=0, chunk_size=3, streams=False)


def test_a_state_that_grows() -> None:
    """All rows so far are kept: that is no state."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for t in range(x.shape[1]):
            rows.append(sum(rows, x[:, t]).tanh())
        return m.out(torch.stack(rows, 1))

    check(mixer, 9, count=0, chunk_size=3, streams=False)


def test_several_streams() -> None:
    """A loop over residual streams, each of which needs the first one: no loop over the sequence."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        streams = torch.stack([x, m.gate(x), x * m.mu, x.sin()])
        made = [streams[0]]
        for i in range(1, 4):
            made.append(streams[i] / made[0].norm(dim=-1, keepdim=True))
        return m.out(torch.stack(made).mean(0))

    check(mixer, 7, count=0, chunk_size=3)


def test_dropout_inside() -> None:
    def mixer(m: Mixed, x: Tensor) -> Tensor:
        rows, state = [], zeros(x)
        for t in range(x.shape[1]):
            state = F.dropout(state, 0.5) + x[:, t]
            rows.append(state)
        return m.out(torch.stack(rows, 1))

    ids = layouts.tokens(23, 2, 5, 0)
    model = torch.compile(decoders.made(lambda: Mixed(mixer)), backend="streambp", options={"chunk_size": 2})
    model(ids, ids).backward()


# -- loops that are easy to get wrong: whether they stream does not matter here


def _states(m: Mixed, x: Tensor, step: Callable[[int, list[Tensor]], Tensor]) -> list[Tensor]:
    states: list[Tensor] = [torch.zeros_like(x[:, 0])]
    for t in range(x.shape[1]):
        states.append(step(t, states))
    return states[1:]


def of_the_row_before_last(m: Mixed, x: Tensor) -> Tensor:
    return torch.stack(_states(m, x, lambda t, s: 0.5 * s[max(t - 1, 0)] + m.gate(x)[:, t].tanh()), 1)


def looking_ahead(m: Mixed, x: Tensor) -> Tensor:
    return torch.stack(_states(m, x, lambda t, s: 0.5 * s[-1] + x[:, min(t + 1, x.shape[1] - 1)]), 1)


def from_the_end(m: Mixed, x: Tensor) -> Tensor:
    return torch.stack(_states(m, x, lambda t, s: 0.5 * s[-1] + x[:, -1 - t])[::-1], 1)


def out_of_order(m: Mixed, x: Tensor) -> Tensor:
    states = _states(m, x, lambda t, s: torch.tanh(s[-1] + x[:, t]))
    return torch.stack(states[1:] + states[:1], 1)


def starting_anew(m: Mixed, x: Tensor) -> Tensor:
    return torch.stack(_states(m, x, lambda t, s: (0.0 if t % 5 == 0 else 0.5) * s[-1] + x[:, t]), 1)


def shared_by_all_rows(m: Mixed, x: Tensor) -> Tensor:
    total = x.square().mean((1, 2), keepdim=True)[:, 0]
    states = _states(m, x, lambda t, s: 0.5 * s[-1] + x[:, t] / (1 + total))
    return torch.stack(states, 1) * states[-1].unsqueeze(1).tanh()


HARD = (of_the_row_before_last, looking_ahead, from_the_end, out_of_order, starting_anew, shared_by_all_rows)


@pytest.mark.parametrize("mixer", HARD, ids=lambda mixer: mixer.__name__)
def test_hard_loops_are_exact(mixer: Mixer) -> None:
    model = decoders.made(lambda: Mixed(mixer))
    ids = layouts.tokens(23, LENGTH, LENGTH, 0)  # as many sequences as rows
    compare(model, {"ids": ids, "labels": ids}, chunk_size=4, also=(1, 3, LENGTH), streams=None)


def test_a_counter_beside_the_state_is_compiled_in_no_time() -> None:
    """It is read twice in each step: what asks of each value whether it is cheap must not ask of its operands again and again."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(11, 8, dtype=torch.float64), nn.Linear(8, 11, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y, h, c, rows = self.embed(ids), 0.0, torch.zeros(ids.shape[0], dtype=torch.int64), []
            for t in range(ids.shape[1]):
                c = torch.where(ids[:, t] == 3, 0, c + 1)
                h = h * 0.5 + y[:, t]
                rows.append(h * (c % 3)[:, None])
            return F.cross_entropy(self.head(torch.stack(rows, 1)).flatten(0, 1), ids.flatten())

    compare(Counted(), {"ids": torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(1))}, streams=None)
