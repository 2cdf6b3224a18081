"""`adjoints=T`: gradients of recurrences reach back T rows, rounded up to chunks (truncated adjoint sharding)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

import streamfx
from streamfx.errors import OptionError
from tests.support import decoders, layouts
from tests.support.scans import scan, with_states_of_constants
from tests.support.stateful.averages import averages
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer, zeros

State = Any
Step = Callable[[State, Any], tuple[State, Tensor]]
Runs = Callable[[Step, State, Sequence[Tensor]], Tensor]  # a step, the first state, what has rows: rows of results


# -- ways to run a recurrence


def row_by_row(step: Step, state: State, rows: Sequence[Tensor]) -> Tensor:
    made = []
    for t in range(rows[0].shape[1]):
        state, row = step(state, tuple(item[:, t] for item in rows))
        made.append(row)
    return torch.stack(made, 1)


def as_an_operator(step: Step, state: State, rows: Sequence[Tensor]) -> Tensor:
    return scan(step, state, tuple(rows), dim=1)[1]


def reaching_back(chunk_size: int, reach: int) -> Runs:
    """In eager: the rows of a chunk are made from a state without a gradient, as it was `reach` rows, in chunks, before."""
    before = -(-(reach - 1) // chunk_size) * chunk_size

    def run(step: Step, state: State, rows: Sequence[Tensor]) -> Tensor:
        length, states = rows[0].shape[1], [state]
        for t in range(length):
            states.append(step(states[-1], tuple(item[:, t] for item in rows))[0])
        made = []
        for begin in range(0, length, chunk_size):
            first = max(begin - before, 0)
            state = states[first].detach() if first else states[0]
            end = min(begin + chunk_size, length)
            made.append(row_by_row(step, state, [item[:, first:end] for item in rows])[:, begin - first :])
        return torch.cat(made, 1)

    return run


# -- what is run


def decayed(runs: Runs) -> Mixer:
    def mixer(m: Mixed, x: Tensor) -> Tensor:
        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            decay, own = row
            state = decay * state + own
            return state, state.tanh()

        return m.out(runs(step, m.first.expand(x.shape[0], WIDTH).clone(), (m.gate(x).sigmoid(), x)))

    return mixer


def weighted(runs: Runs) -> Mixer:
    """A product with a weight in each step, to whose gradient each row adds its part."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        def step(state: Tensor, row: tuple[Tensor]) -> tuple[Tensor, Tensor]:
            state = 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row[0])
            return state, state.tanh() * m.mu

        return m.out(runs(step, zeros(x), (x,)))

    return mixer


def summed_up(runs: Runs) -> Mixer:
    """The gradient of the state grows by plain sums, as that of a weight does."""

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        def step(state: Tensor, row: tuple[Tensor]) -> tuple[Tensor, Tensor]:
            state = state + row[0]
            return state, (state.tanh() * m.mu).sin()

        return m.out(runs(step, zeros(x), (m.gate(x),)))

    return mixer


RECURRENCES = [decayed, weighted, summed_up]


def gradients(mixer: Mixer, layers: int, options: dict[str, Any] | None) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    model = decoders.made(lambda: Mixed(mixer, layers))
    ids = layouts.tokens(23, 2, LENGTH, 0)
    run: Any = model if options is None else torch.compile(model, backend="streambp", options={"bodies": "eager", **options})
    return torch.autograd.grad(run(ids, ids), list(model.parameters()), materialize_grads=True)


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(((a - b).norm() / (b.norm() + 1e-3)).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("runs", "layers"), [(row_by_row, 1), (as_an_operator, 2)])
@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.__name__)
def test_gradients_reach_back_so_many_rows(recurrence: Callable[[Runs], Mixer], runs: Runs, layers: int) -> None:
    exact = gradients(recurrence(row_by_row), layers, None)
    for chunk_size, reach in ((1, 5), (3, 4), (4, 1)):
        options = {"chunk_size": chunk_size, "loss_chunk_size": chunk_size, "adjoints": reach, "check_passes": True}
        found = gradients(recurrence(runs), layers, options)
        assert error(found, gradients(recurrence(reaching_back(chunk_size, reach)), layers, None)) < 1e-12
        assert error(found, exact) > 1e-6


def test_rows_that_are_made_of_the_state_before_them() -> None:
    """Gradients of rows reach as far as ever; those of weights begin with the row that a state is first seen in: the next one."""

    def before(runs: Runs) -> Mixer:
        def mixer(m: Mixed, x: Tensor) -> Tensor:
            def step(state: Tensor, row: tuple[Tensor]) -> tuple[Tensor, Tensor]:
                return 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row[0]), state * m.mu

            return m.out(runs(step, zeros(x), (x,)))

        return mixer

    names = [name for name, _ in Mixed(before(row_by_row)).named_parameters()]
    of_the_step = [name.startswith("gate") for name in names]
    for reach in (1, 4):
        found = gradients(before(row_by_row), 1, {"chunk_size": 1, "loss_chunk_size": 1, "adjoints": reach})
        rows, weights = (gradients(before(reaching_back(1, rows)), 1, None) for rows in (reach, reach + 1))
        expected = [both[is_own] for both, is_own in zip(zip(rows, weights, strict=True), of_the_step, strict=True)]
        assert error(found, expected) < 1e-12


@pytest.mark.parametrize("runs", [row_by_row, as_an_operator], ids=lambda runs: runs.__name__)
def test_as_many_rows_as_there_are_is_exact(runs: Runs) -> None:
    exact = gradients(weighted(row_by_row), 1, None)
    for reach in (LENGTH - 1, LENGTH):  # the first in 3 chunks: rounded up, these are all
        assert error(gradients(weighted(runs), 1, {"chunk_size": 4, "adjoints": reach}), exact) < 1e-12


def test_an_operator_with_a_state() -> None:
    """What was declared as the gradient of its state is truncated; its weights' gradients are sums of all rows."""

    def operator(m: Mixed, x: Tensor) -> Tensor:
        top, bottom = zeros(x), torch.ones_like(zeros(x))
        return m.out(averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), top, bottom)[0])

    def written(runs: Runs) -> Mixer:
        def mixer(m: Mixed, x: Tensor) -> Tensor:
            weights, decay = m.gate(x).exp(), m.mu.sigmoid()

            def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                state = state * decay + torch.stack([row[0] * row[1], row[0]])
                return state, state[0] / state[1]

            return m.out(runs(step, torch.stack([zeros(x), torch.ones_like(zeros(x))]), (weights, x)))

        return mixer

    exact = gradients(operator, 1, None)
    assert error(exact, gradients(written(row_by_row), 1, None)) < 1e-12
    for chunk_size, reach in ((1, 4), (3, 4), (4, 1)):
        found = gradients(operator, 1, {"chunk_size": chunk_size, "adjoints": reach})
        assert error(found, gradients(written(reaching_back(chunk_size, reach)), 1, None)) < 1e-12
        assert error(found, exact) > 1e-6


def test_an_associative_scan() -> None:
    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def tree(m: Mixed, x: Tensor) -> Tensor:
        return m.out(associative_scan(combine, (m.gate(x).sigmoid(), x), 1, combine_mode="generic")[1])

    def written(runs: Runs) -> Mixer:
        def mixer(m: Mixed, x: Tensor) -> Tensor:
            def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                state = row[0] * state + row[1]
                return state, state

            return m.out(runs(step, zeros(x), (m.gate(x).sigmoid(), x)))

        return mixer

    exact = gradients(tree, 1, None)
    for chunk_size, reach in ((1, 4), (3, 4), (4, 1)):
        found = gradients(tree, 1, {"chunk_size": chunk_size, "loss_chunk_size": chunk_size, "adjoints": reach})
        assert error(found, gradients(written(reaching_back(chunk_size, reach)), 1, None)) < 1e-12
        assert error(found, exact) > 1e-6


# -- the paper


class StateSpace(nn.Module):
    """Adjoint sharding, section 3.1: A, B and C are functions of a token; the state is one vector."""

    def __init__(self, width: int = 5, states: int = 3) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, states), nn.Linear(width, states * width), nn.Linear(width, width * states)
        self.width, self.states = width, states

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A^t as a diagonal, B^t x^t, and C^t."""
        b, c = self.b(x).unflatten(-1, (self.states, self.width)), self.c(x).unflatten(-1, (self.width, self.states))
        return self.a(x).sigmoid(), (b @ x.unsqueeze(-1)).squeeze(-1), c

    def forward(self, x: Tensor, runs: Runs = row_by_row) -> Tensor:
        a, u, c = self.parts(x)

        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            state = row[0] * state + row[1]
            return state, state.clone()

        return (c @ runs(step, x.new_zeros(len(x), self.states), (a, u)).unsqueeze(-1)).squeeze(-1)


def equation_7(model: StateSpace, x: Tensor, dy: Tensor, reach: int) -> tuple[Tensor, ...]:
    """Its sums, term by term: for each row t the vjp of C^t, and those of A^i and B^i for the last `reach` rows i."""
    a, u, c = model.parts(x)
    states = [x.new_zeros(len(x), model.states)]
    for t in range(x.shape[1]):
        states.append((a[:, t] * states[-1] + u[:, t]).detach())
    terms = []
    for t in range(x.shape[1]):
        terms.append((dy[:, t] * (c[:, t] @ states[t + 1].unsqueeze(-1)).squeeze(-1)).sum())  # dl/dy (x) h^t
        adjoint = (c[:, t].mT @ dy[:, t].unsqueeze(-1)).squeeze(-1).detach()  # dl/dy lambda^{t,t}
        for i in range(t, max(t - reach, -1), -1):
            terms.append((adjoint * (a[:, i] * states[i] + u[:, i])).sum())  # (x) h^{i-1}, (x) x^i
            adjoint = (adjoint * a[:, i]).detach()  # lambda^{t,i-1}
    return torch.autograd.grad(torch.stack(terms).sum(), list(model.parameters()))


@pytest.mark.parametrize("runs", [row_by_row, as_an_operator], ids=lambda runs: runs.__name__)
def test_equation_7_of_the_paper(runs: Runs) -> None:
    torch.manual_seed(0)
    model, x, dy = StateSpace().double(), torch.randn(2, 12, 5).double(), torch.randn(2, 12, 5).double()
    for reach in (1, 2, 5, 12, 40):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="streambp", options={"chunk_size": 1, "adjoints": reach, "bodies": "eager"})
        found = torch.autograd.grad((compiled(x, runs) * dy).sum(), list(model.parameters()))
        assert error(found, equation_7(model, x, dy, reach)) < 1e-12
    assert error(found, torch.autograd.grad((model(x) * dy).sum(), list(model.parameters()))) < 1e-12


# -- what it costs, and what a person is told


def explained(**options: Any) -> Any:
    ids = layouts.tokens(23, 2, 32, 0)
    return streamfx.explain(decoders.made(lambda: Mixed(weighted(as_an_operator))), ids, ids, bodies="eager", **options)


def test_memory_and_work_grow_by_the_carries_that_are_on_their_way() -> None:
    ways: dict[Any, Any] = {
        reach: explained(chunk_size=4, adjoints=reach).summary(with_baseline=False) for reach in (1, 5, 9, 13)
    }
    ways["exact"] = explained(chunk_size=4).summary(with_baseline=False)
    flops = [ways[reach]["flops"] for reach in (1, 5, 9, 13)]
    assert ways["exact"]["flops"] == flops[0]
    one, two, three = (after - before for before, after in pairwise(flops))
    assert one == two == three > 0  # a chunk's steps once more for each chunk that is reached back over
    (graph,) = explained(chunk_size=4, adjoints=13).call.graphs
    (node,) = graph.facts.truncations
    peaks = [ways[reach]["peak_bytes"] for reach in (1, 5, 9, 13)]
    assert 0 <= peaks[-1] - ways["exact"]["peak_bytes"] <= 6 * node.target.carried


def test_the_report_says_so() -> None:
    text = str(explained(chunk_size=4, adjoints=6))
    assert "adjoints=6: gradients are not eager's, those of 1 recurrence reach back 6 rows, rounded up to chunks" in text
    assert "adjoints" not in str(explained(chunk_size=4))
    assert "no recurrence is truncated" in str(explained(chunk_size=32, loss_chunk_size=32, adjoints=6))  # all rows are a chunk
    assert "adjoints=64: no recurrence is truncated, gradients are exact" in str(explained(chunk_size=4, adjoints=64))


@with_states_of_constants
def test_verify_says_why_gradients_differ() -> None:
    ids = layouts.tokens(23, 2, 32, 0)
    model = decoders.made(lambda: Mixed(weighted(as_an_operator)))
    differs = streamfx.verify(model, ids, ids, bodies="eager", chunk_size=4, adjoints=6)
    assert not differs.ok and "are to reach back few rows (adjoints=6)" in str(differs)
    same = streamfx.verify(model, ids, ids, bodies="eager", chunk_size=4, adjoints=30)
    assert same.ok and "adjoints" not in str(same)


def test_attention_and_running_sums_are_exact() -> None:
    def mixer(m: Mixed, x: Tensor) -> Tensor:
        q, k, v = m.up(x).chunk(3, -1)
        return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True) + x.cumsum(1))

    assert error(gradients(mixer, 2, {"chunk_size": 4, "adjoints": 1}), gradients(mixer, 2, None)) < 1e-12


@pytest.mark.parametrize("value", [0, -3, True, 2.5, "auto", None])
def test_what_is_no_number_of_rows_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="give a whole number of rows, 1 or more, or 'exact'"):
        streamfx.Options(adjoints=value)
