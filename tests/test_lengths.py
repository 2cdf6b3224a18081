"""A plan holds up to a proven length; a longer call is planned like a first one."""

from typing import Any

import pytest
import sympy
import torch

from streamfx.cost.memory import cost_of
from streamfx.errors import OverBudgetError
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.passes.partition.budget_search import held_bytes
from tests.support.exactness import recorder
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled

CHEAP = {"keep_every": 1, "save": "inputs", "bodies": "eager"}  # one candidate


class Calls:
    """Training steps of one compiled model, with lengths that change."""

    def __init__(self, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.backend = Causal().double(), recorder(**options)
        self.compiled = torch.compile(self.model, backend=self.backend)

    def step(self, length: int) -> Facts | None:
        """What was found in the graph that this call was compiled to; None where it runs one that was there."""
        known, ids = len(self.backend.compilations), tokens(2, length)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        found, truth = (torch.autograd.grad(call(ids, ids), [*self.model.parameters()]) for call in (self.compiled, self.model))
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        compilations = self.backend.compilations[known:]
        return compilations[0].facts[-1] if compilations else None


def peak(facts: Facts | None) -> int:
    """Predicted bytes of a step, for the lengths of the call that it was compiled for."""
    assert facts is not None and facts.program is not None
    return cost_of(facts.program.forward, facts.program.backward, 1).peak + held_bytes(facts.program.forward.graph)


def most(facts: Facts | None) -> int:
    """The longest sequence that a plan holds for."""
    assert facts is not None
    (length,) = known(facts.lengths).numbers.values()
    return int(length)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few rows, as those of long sequences are, and few simulations."""
    monkeypatch.setattr("streamfx.passes.partition.budget_search.MIN_ROWS", 16)
    monkeypatch.setattr("streamfx.passes.partition.budget_search.EFFICIENT_TOKENS", 128)
    monkeypatch.setattr("streamfx.ir.dynamic_lengths.MAX_DOUBLINGS", 2)


def test_an_unchunked_plan_holds_up_to_a_length() -> None:
    """A short call first: the long one stays within the budget."""
    budget = 800 << 10
    calls = Calls(memory_budget=budget, **CHEAP)
    short = calls.step(32)
    assert short is not None and short.program is None
    assert 32 < most(short) < 1000
    assert calls.step(most(short)) is None
    again = calls.step(1000)
    assert peak(again) <= budget
    assert most(again) >= 1000
    assert calls.step(700) is None  # by the plan for longer ones


def test_a_length_that_fits_no_plan_is_refused_on_its_call() -> None:
    calls = Calls(memory_budget=100 << 10, chunk_size=8, loss_chunk_size=8, **CHEAP)
    calls.step(16)
    with pytest.raises(OverBudgetError, match="smallest possible peak is"):
        calls.step(4000)
    assert calls.step(20) is None


def test_values_saved_because_they_are_small_are_saved_up_to_a_length() -> None:
    """Results of attention are saved if they are small compared to the model, up to a length."""
    calls = Calls(chunk_size=8, loss_chunk_size=8)
    short = calls.step(9)
    assert short is not None and any(short.plan.kept)
    assert 9 < most(short) < 64
    assert calls.step(most(short)) is None
    beyond = calls.step(most(short) + 1)
    assert beyond is not None and not any(beyond.plan.kept)
    assert calls.step(64) is calls.step(8) is None


def test_joined_plans_hold_for_the_lengths_of_both() -> None:
    s, t = sympy.symbols("s t")
    assert Lengths({s: 5, t: 6}).intersection(Lengths({s: 7, t: 3})) == Lengths({s: 5, t: 3})
    assert Lengths({s: 5}).intersection(None) == Lengths({s: 5})
