"""`adjoints=T`: gradients of recurrences reach back T rows, rounded up to chunks (truncated adjoint sharding)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils._pytree import tree_map

import streamfx
from streamfx.errors import OptionError
from tests.support.mixers import Mixed, Mixer, mixed, tokens, zeros
from tests.support.scans import ALONG, scan, with_states_of_constants
from tests.support.spread import only
from tests.support.stateful.averages import averages
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

Step = Callable[[Any, Any], tuple[Any, Tensor]]
Runs = Callable[[Step, Any, Sequence[Tensor]], Tensor]  # a step, the first state, what has rows: rows of results
Written = Callable[[Mixed, Tensor, Runs], Tensor]


# -- ways to run a recurrence


def row_by_row(step: Step, state: Any, rows: Sequence[Tensor]) -> Tensor:
    made = []
    for t in range(rows[0].shape[1]):
        state, row = step(state, tuple(item[:, t] for item in rows))
        made.append(row)
    return torch.stack(made, 1)


def as_an_operator(step: Step, state: Any, rows: Sequence[Tensor]) -> Tensor:
    return scan(step, state, tuple(rows), dim=1)[1]


def reaching_back(chunk_size: int, reach: int) -> Runs:
    """In eager: each chunk starts from a detached state, which is `reach` rows before it, rounded up to chunks."""
    before = -(-(reach - 1) // chunk_size) * chunk_size

    def run(step: Step, state: Any, rows: Sequence[Tensor]) -> Tensor:
        length, states = rows[0].shape[1], [state]
        for t in range(length):
            states.append(step(states[-1], tuple(item[:, t] for item in rows))[0])
        made = []
        for begin in range(0, length, chunk_size):
            first = max(begin - before, 0)
            state = tree_map(torch.detach, states[first]) if first else states[0]
            end = min(begin + chunk_size, length)
            made.append(row_by_row(step, state, [item[:, first:end] for item in rows])[:, begin - first :])
        return torch.cat(made, 1)

    return run


# -- what is run


def weighted(m: Mixed, x: Tensor, runs: Runs) -> Tensor:
    """A product with a weight in each step, to whose gradient each row adds its part."""

    def step(state: Tensor, row: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        state = 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row[0])
        return state, state.tanh() * m.mu

    return m.out(runs(step, zeros(x), (x,)))


def summed_up(m: Mixed, x: Tensor, runs: Runs) -> Tensor:
    """The gradient of the state is a plain sum, like a weight's gradient."""

    def step(state: Tensor, row: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        state = state + row[0]
        return state, (state.tanh() * m.mu).sin()

    return m.out(runs(step, zeros(x), (m.gate(x),)))


def averaged(m: Mixed, x: Tensor, runs: Runs) -> Tensor:
    decay = m.mu.sigmoid()

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = state * decay + torch.stack([row[0] * row[1], row[0]])
        return state, state[0] / state[1]

    return m.out(runs(step, torch.stack([zeros(x), torch.ones_like(zeros(x))]), (m.gate(x).exp(), x)))


def counted(m: Mixed, x: Tensor, runs: Runs) -> Tensor:
    """A state of three dtypes: a count and a flag pass from row to row, too."""

    def step(state: tuple[Tensor, Tensor, Tensor], row: tuple[Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        total, count, is_odd = state
        total = torch.where(is_odd, 0.5, 0.9) * total + (m.gate(row[0]) + total).tanh()
        return (total, count + 1, ~is_odd), total / (1 + count)

    begin = zeros(x), torch.zeros((), dtype=torch.int16), torch.zeros((), dtype=torch.bool)
    return m.out(runs(step, begin, (x,)))


def averaged_by_an_operator(m: Mixed, x: Tensor) -> Tensor:
    """The declared gradient of its state is truncated; its weights' gradients are sums of all rows."""
    return m.out(averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), zeros(x), torch.ones_like(zeros(x)))[0])


def linear(m: Mixed, x: Tensor, runs: Runs) -> Tensor:
    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = row[0] * state + row[1]
        return state, state

    return m.out(runs(step, zeros(x), (m.gate(x).sigmoid(), x)))


def linear_by_a_tree(m: Mixed, x: Tensor) -> Tensor:
    rows = m.gate(x).sigmoid(), x
    return m.out(associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), rows, 1, combine_mode="generic")[1])


def by(written: Written, runs: Runs) -> Mixer:
    return lambda m, x: written(m, x, runs)


TRUNCATED: dict[str, tuple[Mixer, Written]] = named_cases("truncated", globals())


def gradients(mixer: Mixer, options: dict[str, Any] | None = None) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    model = mixed(mixer)
    run: Any = model if options is None else torch.compile(model, backend="streambp", options={"bodies": "eager", **options})
    return torch.autograd.grad(run(**tokens()), list(model.parameters()), materialize_grads=True)


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(((a - b).norm() / (b.norm() + 1e-3)).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", only(["weighted, by scan", "summed up, row by row"], TRUNCATED))
def test_gradients_reach_back_as_many_rows_as_asked(name: str) -> None:
    if name == "weighted, by scan" and not ALONG:
        pytest.skip("eager scans of 2.11 lose gradients through states if the first one needs none")
    mixer, written = TRUNCATED[name]
    exact = gradients(by(written, row_by_row))
    for chunk_size, reach in ((1, 5), (3, 4), (4, 1)):
        options = {"chunk_size": chunk_size, "loss_chunk_size": chunk_size, "adjoints": reach, "check_passes": True}
        found = gradients(mixer, options)
        assert error(found, gradients(by(written, reaching_back(chunk_size, reach)))) < 1e-12
        assert error(found, exact) > 1e-6


def attention_and_a_sum(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = m.up(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True) + x.cumsum(1))


def test_attention_and_running_sums_are_never_truncated() -> None:
    assert error(gradients(attention_and_a_sum, {"chunk_size": 4, "adjoints": 1}), gradients(attention_and_a_sum)) < 1e-12


def total_after_the_loop(m: Mixed, x: Tensor) -> Tensor:
    """The gradient of the total is one operand of all steps: it reaches the first row, but passes through no carry."""
    state, total, made = zeros(x), zeros(x), []
    for t in range(x.shape[1]):
        state = (state * m.mu + x[:, t]).tanh()
        total = total + state
        made.append(state)
    return m.out(torch.stack(made, 1)) + total[:, None]


def test_a_gradient_that_passes_to_all_rows_at_once_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot limit the gradient of a state, or of a sum of states"):
        gradients(total_after_the_loop, {"chunk_size": 4, "adjoints": 5})


# -- costs and reports


def asked(tool: Callable[..., Any], chunk_size: int = 4, **options: Any) -> Any:
    model = mixed(by(weighted, as_an_operator))
    return tool(model, **tokens(length=32), bodies="eager", chunk_size=chunk_size, loss_chunk_size=chunk_size, **options)


@pytest.mark.long
def test_costs_grow_with_the_chunks_that_gradients_reach_over() -> None:
    """A chunk's steps run once more for each such chunk, and a carry is alive for each."""
    exact, *ways = (asked(streamfx.explain, adjoints=reach) for reach in ("exact", 1, 5, 9, 13))
    least, *costs = (way.summary(with_baseline=False) for way in (exact, *ways))
    assert least["flops"] == costs[0]["flops"]
    one, two, three = (after["flops"] - before["flops"] for before, after in pairwise(costs))
    assert one == two == three > 0
    (node,) = ways[-1].call.graphs[0].facts.truncations
    assert 0 <= costs[-1]["peak_bytes"] - least["peak_bytes"] <= 6 * node.target.carried


@pytest.mark.long
@with_states_of_constants
def test_reports_of_truncation() -> None:
    text = str(asked(streamfx.explain, adjoints=6))
    assert "adjoints=6: gradients are not eager's, those of 1 recurrence reach back 6 rows, rounded up to chunks" in text
    assert "adjoints" not in str(asked(streamfx.explain))
    assert "no recurrence is truncated" in str(asked(streamfx.explain, chunk_size=32, adjoints=6))  # all rows are a chunk
    assert "adjoints=64: no recurrence is truncated, gradients are exact" in str(asked(streamfx.explain, adjoints=64))
    differs = asked(streamfx.verify, adjoints=6)
    assert not differs.ok and "are truncated by adjoints=6" in str(differs)
    same = asked(streamfx.verify, adjoints=30)
    assert same.ok and "adjoints" not in str(same)


@pytest.mark.parametrize("value", [0, -3, True, 2.5, "auto", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="give a whole number of rows, 1 or more, or 'exact'"):
        streamfx.Options(adjoints=value)
