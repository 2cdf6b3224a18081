"""Loops over rows, or over blocks of rows, that were traced operator by operator: they stream with a carried state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.ir.facts import StorageClass
from streamfx.runtime.chunked_recurrences import Recurrence
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.spread import only

pytestmark = pytest.mark.compiled

WIDTH, LENGTH = 8, 11

Mixer = Callable[["Mixed", Tensor], Tensor]


class Mixed(nn.Module):
    """A decoder whose rows a function mixes, with weights that it may use as it likes."""

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


def compared(mixer: Mixer, length: int = LENGTH, batch: int = 2, layers: int = 1, **options: Any) -> Report:
    ids = layouts.tokens(23, batch, length, 0)
    return compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)


def operators(report: Report, *kinds: type) -> list[fx.Node]:
    """The nodes whose target is of one of these kinds."""
    return [node for facts in report.facts for node in facts.joint.nodes if isinstance(node.target, kinds)]


def all_in_rows(report: Report, found: list[fx.Node]) -> bool:
    (facts,) = report.facts
    return bool(found) and all(StorageClass.ROWS in facts.access.storage_classes[node] for node in found)


def looped(step: Callable[..., tuple[Tensor, ...]], states: tuple[Tensor, ...], *rows: Tensor) -> Tensor:
    """Rows of results, stacked: the last of what a step makes; the others are the states that it leaves."""
    made = []
    for t in range(rows[0].shape[1]):
        *states, y = step(*states, *(item[:, t] for item in rows))  # type: ignore[assignment]
        made.append(y)
    return torch.stack(made, 1)


def kept(state: Tensor) -> tuple[Tensor, Tensor]:
    """What is left to the next row is the row of the result, too."""
    return state, state


def written(m: Mixed, x: Tensor) -> Tensor:
    y, state, decay = torch.zeros_like(x), zeros(x), m.gate(x).sigmoid()
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        y[:, t] = state.tanh()
    return m.out(y)


def stacked(m: Mixed, x: Tensor) -> Tensor:
    return m.out(looped(lambda s, decay, row: kept(decay * s * m.mu + row), (zeros(x),), m.gate(x).sigmoid(), x))


def running_maximum(m: Mixed, x: Tensor) -> Tensor:
    """As log-sum-exp is kept stable: a maximum, a numerator and a denominator; steps of several kinds."""

    def step(top: Tensor, above: Tensor, below: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        largest = torch.maximum(top - m.mu, k)
        old, new = (top - m.mu - largest).exp(), (k - largest).exp()
        above, below = old * above + new * v, old * below + new
        return largest, above, below, above / below

    return m.out(looped(step, (zeros(x) - 1e30, zeros(x), zeros(x)), *m.up(x).chunk(3, -1)[:2]))


CARRIED: dict[str, Mixer] = {
    "written row by row": written,
    "a cell from a learned state": lambda m, x: m.out(
        looped(lambda s, row: kept(m.cell(row, s)), (m.first.expand(x.shape[0], WIDTH),), x)
    ),
    "two rows back": lambda m, x: m.out(
        looped(lambda a, b, row: ((m.mu * a - b * row).sin(), a, (m.mu * a - b * row).sin() * a), (zeros(x), zeros(x)), x)
    ),
    "the state before, which takes in the row before": lambda m, x: m.out(
        looped(lambda s, before, row: ((s + before * m.mu).tanh(), row, s), (zeros(x), zeros(x)), x)
    ),
    "a running maximum": running_maximum,
    "two over the same rows": lambda m, x: stacked(m, x) + written(m, x),
}


@pytest.mark.parametrize("name", only(["written row by row"], CARRIED))
def test_carries_a_state(name: str) -> None:
    report = compared(CARRIED[name], chunk_size=4, also=(1, 11))
    found = operators(report, Recurrence)
    assert len(found) == 2 and all_in_rows(report, found)


def of_the_first_stack(m: Mixed, x: Tensor) -> Tensor:
    """Each row of the first loop's stack is read by itself, so that its gradient is put together of rows, too."""
    rows = looped(lambda s, row: kept((m.gate(s) + row).tanh()), (zeros(x),), x)
    return m.out(looped(lambda s, row: kept(s * 0.5 + m.gate(row)), (zeros(x),), rows))


def the_last_state(m: Mixed, x: Tensor) -> Tensor:
    """It leaves the loop when the last chunk has run."""
    rows, state = [], zeros(x)
    for t in range(x.shape[1]):
        state = (state * m.mu + x[:, t]).tanh()
        rows.append(state * x[:, t])
    return m.out(torch.stack(rows, 1)) + m.gate(state)[:, None]


def all_rows_so_far(m: Mixed, x: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for t in range(x.shape[1]):
        rows.append(sum(rows, x[:, t]).tanh())
    return m.out(torch.stack(rows, 1))


def residual_streams(m: Mixed, x: Tensor) -> Tensor:
    """A loop over residual streams, each of which needs the first one: no loop over the sequence."""
    streams = torch.stack([x, m.gate(x), x * m.mu, x.sin()])
    return m.out(torch.stack([streams[0], *(other / streams[0].norm(dim=-1, keepdim=True) for other in streams[1:])]).mean(0))


def from_the_end(m: Mixed, x: Tensor) -> Tensor:
    return m.out(looped(lambda s, row: kept((s * m.mu + row).tanh()), (zeros(x),), x.flip(1)).flip(1))


# the loops that are found, whether all streams
FOUND: dict[str, tuple[Mixer, int, bool | None]] = {
    "over the rows that another has stacked": (of_the_first_stack, 4, None),
    "the last state": (the_last_state, 2, None),
    "from the end": (from_the_end, 0, False),
    "a state that grows": (all_rows_so_far, 0, False),
    "over residual streams": (residual_streams, 0, True),
}


@pytest.mark.parametrize("name", only(["the last state"], FOUND))
def test_which_loops_are_found(name: str) -> None:
    mixer, count, streams = FOUND[name]
    assert len(operators(compared(mixer, length=9, chunk_size=3, streams=streams), Recurrence)) == count


def states(x: Tensor, step: Callable[[int, list[Tensor]], Tensor]) -> list[Tensor]:
    made: list[Tensor] = [torch.zeros_like(x[:, 0])]
    for t in range(x.shape[1]):
        made.append(step(t, made))
    return made[1:]


def shared_by_all_rows(m: Mixed, x: Tensor) -> Tensor:
    total = x.square().mean((1, 2), keepdim=True)[:, 0]
    made = states(x, lambda t, s: 0.5 * s[-1] + x[:, t] / (1 + total))
    return torch.stack(made, 1) * made[-1].unsqueeze(1).tanh()


HARD: dict[str, Mixer] = {
    "looking ahead": lambda m, x: torch.stack(states(x, lambda t, s: 0.5 * s[-1] + x[:, min(t + 1, x.shape[1] - 1)]), 1),
    "out of order": lambda m, x: torch.stack(states(x, lambda t, s: torch.tanh(s[-1] + x[:, t])), 1).roll(-1, 1),
    "starting anew": lambda m, x: torch.stack(states(x, lambda t, s: (0.0 if t % 5 == 0 else 0.5) * s[-1] + x[:, t]), 1),
    "shared by all rows": shared_by_all_rows,
}


@pytest.mark.parametrize("name", only([], HARD))
def test_hard_loops_are_exact(name: str) -> None:
    """Whether they stream does not matter; there are as many sequences as rows."""
    compared(HARD[name], batch=LENGTH, chunk_size=4, also=(1, 3, LENGTH), streams=None)


def test_a_counter_beside_the_state_is_compiled_in_no_time() -> None:
    """It is read twice in each step: what asks of each value whether it is cheap must not ask of its operands again and again."""

    def counted(m: Mixed, x: Tensor) -> Tensor:
        count = torch.zeros(x.shape[0], dtype=torch.int64)
        above = (x[..., 0] > 0.5).detach()

        def step(s: Tensor, c: Tensor, row: Tensor, begins: Tensor) -> tuple[Tensor, ...]:
            c = torch.where(begins, 0, c + 1)
            return s * 0.5 + row, c, (s * 0.5 + row) * (c % 3)[:, None]

        return m.out(looped(step, (zeros(x), count), x, above))

    compared(counted, length=24, streams=None)
