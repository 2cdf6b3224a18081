"""A pass that fails at an operator costs that operator: wherever an error is raised, results and gradients are those of eager.

Faults are thrown into every function of the passes that looks at an operator, as it begins: where Python calls it, so that no
function has to be replaced. A fault is there once, or each time, or only until no pass knows what the operator is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import streamfx.passes
from streamfx.errors import NotStreamedError, OverBudgetError
from streamfx.frontend.capture import initial_facts
from streamfx.ir.facts import Facts, StorageClass, known
from streamfx.passes import run_pipeline
from streamfx.passes.lowering import bodies, lowering_table
from streamfx.passes.ops.traits import producer_of
from streamfx.passes.partition import checkpoint_policy
from streamfx.runtime.restride import RestridedOperator
from streamfx.tools.report.fallback_reasons import obstacles
from tests.support.decoders.parts import VOCABULARY, WIDTH, SwiGLU
from tests.support.exactness import Recorded, assert_small, compare, value_errors
from tests.support.sorted_experts import SparseDecoder
from tests.support.spread import only

pytestmark = pytest.mark.compiled

PASSES = Path(streamfx.passes.__file__).resolve().parent
NOT_PASSES = ("__init__.py", "faults.py", "verifier.py", "whole.py")
LENGTH = 13


class Rows(nn.Module):
    """A function of rows, with weights that it may use as it likes."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.up, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def recurrence(m: Rows, x: Tensor) -> Tensor:
    """A state that is carried from row to row, in a loop."""
    state, rows = torch.zeros_like(x[:, 0]), []
    for row in m.up(x)[..., :WIDTH].unbind(1):
        state = (m.out(state) + row).tanh()
        rows.append(state)
    return torch.stack(rows, 1)


def convolution(m: Rows, x: Tensor) -> Tensor:
    """A causal convolution along the rows, and a running sum."""
    mixed = F.silu(m.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))
    made: Tensor = m.out(mixed + mixed.cumsum(1) / LENGTH)
    return made


MAKES: dict[str, Callable[[], nn.Module]] = {
    "attention": SwiGLU,
    "convolution": lambda: Rows(convolution),
    "recurrence": lambda: Rows(recurrence),
}


Place = tuple[CodeType, str]  # a function, and the name of the operator that it looks at


@dataclass
class Thrown:
    """Counts where passes look at operators, and throws an error at one such place, if it is given one."""

    place: Place | None = None
    how: str = "once"
    seen: dict[Place, None] = field(default_factory=dict)
    times: int = 0

    def listen(self) -> None:
        """Start again with the passes: Python drops a listener that raises an error."""
        if self.how != "once" or not self.times:
            sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_asked = code is self.place[0] if self.place is not None else code.co_argcount > 0 and is_pass(code.co_filename)
        node = looked_at(frame) if is_asked and event == "call" else None
        if node is None:
            return
        self.seen[code, node.name] = None
        is_there = (
            not self.times if self.how == "once" else self.how == "always" or not isinstance(node.target, RestridedOperator)
        )
        if (code, node.name) == self.place and is_there:
            self.times += 1
            raise ValueError(f"thrown into {code.co_name} at {node.name}")


@cache
def is_pass(file: str) -> bool:
    path = Path(file).resolve()
    return PASSES in path.parents and path.name not in NOT_PASSES


def looked_at(frame: FrameType) -> fx.Node | None:
    """The first operator among the arguments of a function of the passes."""
    code = frame.f_code
    given = (frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    node = next((value for value in given if isinstance(value, fx.Node) and value.op == "call_function"), None)
    return None if node is None else producer_of(node)


@dataclass
class Traced:
    """A model's joint graph, its values in eager mode, and all places where passes look at operators."""

    recorded: Recorded
    truth: list[Any]
    places: list[Place]

    @classmethod
    @cache
    def of(cls, name: str) -> Traced:
        torch.manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (2, LENGTH))
        model = SparseDecoder(MAKES[name]).double()
        options: dict[str, Any] = {"chunk_size": 5, "bodies": "eager", "gradients": "at once"}
        (recorded,) = compare(model, {"ids": ids, "labels": ids}, streams=None, **options).recorder.compilations
        places = Thrown()
        cls(recorded, [], []).planned(places)
        return cls(recorded, recorded.joint_values(), [*places.seen])

    def planned(self, thrown: Thrown) -> Facts:
        assert self.recorded.joint is not None
        num_primals, num_outputs, static = self.recorded.joint_arguments
        capture = partial(initial_facts, self.recorded.joint, num_primals, num_outputs, static)

        def again() -> Facts:
            sys.settrace(None)
            facts = capture()
            thrown.listen()
            return facts

        before = sys.gettrace()
        thrown.listen()
        try:
            return run_pipeline(again, self.recorded.options)
        finally:
            sys.settrace(before)

    def checked(self, place: Place, how: str) -> Facts:
        """What is known after a fault: it was thrown, and results and gradients are those of eager."""
        thrown = Thrown(next(own for own in self.places if own == place), how)
        facts = self.planned(thrown)
        assert thrown.times, f"{place} was not reached"
        found = self.recorded.streamed_values(known(facts.program))
        assert_small(value_errors(found, self.truth, self.recorded.joint_arguments[1]), 1e-12, "with a fault")
        return facts


@pytest.mark.parametrize("name", only(["convolution"], MAKES))
def test_a_failing_pass_costs_one_operator(name: str, caplog: pytest.LogCaptureFixture, request: Any) -> None:
    """A function by chance, and one of the operators that it looks at: six faults, 100 with --long."""
    traced = Traced.of(name)
    for number in range(100 if request.config.getoption("--long") else 6):
        chance = random.Random(f"{name} {number}")
        code = chance.choice([*dict.fromkeys(code for code, _ in traced.places)])
        place = chance.choice([place for place in traced.places if place[0] is code])
        facts = traced.checked(place, ("once", "until unknown", "always")[number % 3])
        assert "please report" not in caplog.text.lower(), f"number {number}"
        assert len(known(facts.program).loops) > 2, f"number {number}: too little streams"
        caplog.clear()


@pytest.mark.long
def test_a_recurrence_on_which_planning_fails_becomes_a_loop_again() -> None:
    Traced.of("recurrence").checked((checkpoint_policy._StageValues.is_attention.__code__, "recurrence"), "always")


def a_step(monkeypatch: pytest.MonkeyPatch, fails: Callable[[list[str], str], bool], **options: Any) -> Any:
    """The emitter of running sums fails at those that a function of their names so far, and their own, tells."""
    find_lowering, met = lowering_table.find_lowering, list[str]()

    def failing(node: fx.Node) -> Any:
        if str(node.target) == "aten.cumsum.default":
            met.extend([node.name] if node.name not in met else [])
            if fails(met, node.name):
                raise TypeError("no such argument")
        return find_lowering(node)

    monkeypatch.setattr(bodies, "find_lowering", failing)
    model, ids = SparseDecoder(MAKES["convolution"]).double(), torch.randint(0, VOCABULARY, (2, LENGTH))
    return compare(model, {"ids": ids, "labels": ids}, streams=None, chunk_size=5, bodies="eager", faults=True, **options)


def test_a_failure_is_reported_with_its_source_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One of two layers has an operator that runs whole."""
    (facts,) = a_step(monkeypatch, lambda met, name: name == met[0]).facts
    (why,) = facts.reasons()
    assert why == "aten.cumsum.default falls back, because the pass 'build_program' failed at it (TypeError: no such argument)"
    ((node, obstacle),) = obstacles(facts).items()
    assert "test_faults.py" in obstacle.where and "mixed.cumsum(1)" in obstacle.where
    assert f"{why}, in {obstacle.where}. The result is exact" in caplog.text
    assert len(known(facts.program).loops) > len(facts.access.reasons)
    others = [other for other in facts.joint.nodes if other.target == node.target and other is not node]
    assert others and all(facts.access.storage_class(other) is StorageClass.ROWS for other in others)


@pytest.mark.long
def test_a_second_failure_at_a_line_marks_the_whole_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a second operator of the same line fails, all of that line run whole."""
    (facts,) = a_step(monkeypatch, lambda met, name: True).facts
    assert facts.program is not None and len(facts.access.reasons) >= 2
    assert caplog.text.count("falls back, because the pass") <= 2


def test_strict_raises_if_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotStreamedError) as refused:
        a_step(monkeypatch, lambda met, name: True, strict=True)
    assert "the pass 'build_program' failed at aten.cumsum.default (TypeError: no such argument)" in refused.value.found
    assert "mixed.cumsum(1)" in refused.value.where


@pytest.mark.parametrize("budget", ["10GiB", "auto"])
def test_an_explicit_budget_is_refused_if_planning_fails(
    budget: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a plan, an explicit amount raises; "auto" falls back."""
    monkeypatch.setattr("streamfx.frontend.backend.may_fit_unchunked", lambda joint, budget: False)
    monkeypatch.setattr("streamfx.frontend.backend.find_fitting_lengths", lambda graph, inputs, budget: None)
    monkeypatch.setattr("streamfx.frontend.backend.run_pipeline", mock.Mock(side_effect=ValueError("no such axis")))
    model, ids = SparseDecoder(SwiGLU), torch.randint(0, VOCABULARY, (2, LENGTH))
    compiled = torch.compile(model, backend="streambp", options={"memory_budget": budget, "bodies": "eager"})
    with pytest.raises(OverBudgetError, match="no such axis") if budget != "auto" else nullcontext():
        compiled(ids, ids)
    assert budget != "auto" or "no such axis" in caplog.text
