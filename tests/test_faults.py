"""A pass that fails at an operator costs that operator: wherever an error is raised, results and gradients are those of eager.

Faults are thrown into every function of the passes that looks at an operator, as it begins: where Python calls it, so that no
function has to be replaced. A fault is there once, or each time, or only until no pass knows what the operator is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from streamfx.frontend.capture import captured
from streamfx.ir.facts import Facts, StorageClass, known
from streamfx.passes import run_pipeline
from streamfx.passes.lowering import bodies, donated_bodies
from streamfx.passes.ops.traits import producer_of
from streamfx.passes.partition import checkpoint_policy
from streamfx.runtime.restride import RestridedOperator
from streamfx.tools.report.fallback_reasons import obstacles
from tests.support.decoders.parts import VOCABULARY, WIDTH, SwiGLU
from tests.support.exactness import Recorded, assert_small, compare, value_errors
from tests.support.sorted_experts import SPELLINGS, SortedExperts, SparseDecoder

PASSES = Path(streamfx.passes.__file__).resolve().parent
NOT_PASSES = ("__init__.py", "faults.py", "verifier.py", "whole.py")
LENGTH = 13
SHORT = ("attention", "convolution")  # what a default run throws into


class Recurrent(nn.Module):
    """A state that is carried from row to row, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, rows = torch.zeros_like(x[:, 0]), []
        for row in self.inner(x).unbind(1):
            state = (self.outer(state) + row).tanh()
            rows.append(state)
        return torch.stack(rows, 1)


class Convolution(nn.Module):
    """A causal convolution along the rows, and a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))
        return self.out(mixed + mixed.cumsum(1) / LENGTH)


class Spelled(nn.Module):
    """Attention that is written out, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * WIDTH**-0.5).masked_fill(hidden, float("-inf"))
        weights: Tensor = scores.softmax(-1) @ v
        return weights


MAKES: dict[str, Callable[[], nn.Module]] = {
    "attention": SwiGLU,
    "spelled attention": Spelled,
    "recurrence": Recurrent,
    "experts": lambda: SortedExperts(SPELLINGS["rows added"]),
    "convolution": Convolution,
}


@dataclass
class Thrown:
    """Counts where passes look at operators, and throws an error at one such place, if it is given one."""

    seen: dict[tuple[CodeType, str], None] = field(default_factory=dict)
    place: tuple[CodeType, str] | None = None
    how: str = "once"
    times: int = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        self.listen()
        try:
            yield
        finally:
            sys.settrace(before)

    def listen(self) -> None:
        """Anew where passes begin again: Python drops a listener that raises an error."""
        if self.how != "once" or not self.times:
            sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        is_asked = frame.f_code is self.place[0] if self.place is not None else _is_of_passes(frame.f_code)
        node = _looked_at(frame) if is_asked and event == "call" else None
        if node is None:
            return
        place = (frame.f_code, node.name)
        self.seen[place] = None
        if place == self.place and self._is_there(node):
            self.times += 1
            raise ValueError(f"thrown into {frame.f_code.co_name} at {node.name}")

    def _is_there(self, node: fx.Node) -> bool:
        if self.how == "once":
            return self.times == 0
        return self.how == "always" or not isinstance(node.target, RestridedOperator)


def _is_of_passes(code: CodeType) -> bool:
    return code.co_argcount > 0 and _is_pass(code.co_filename)


@cache
def _is_pass(file: str) -> bool:
    path = Path(file).resolve()
    return PASSES in path.parents and path.name not in NOT_PASSES


def _looked_at(frame: FrameType) -> fx.Node | None:
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
    places: list[tuple[CodeType, str]]
    loops: int

    @classmethod
    @cache
    def of(cls, name: str) -> Traced:
        torch.manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (2, LENGTH))
        model = SparseDecoder(MAKES[name]).double()
        options: dict[str, Any] = {"chunk_size": 5, "bodies": "eager", "gradients": "at once"}
        (recorded,) = compare(model, {"ids": ids, "labels": ids}, streams=None, **options).recorder.compilations
        places = Thrown()
        with places.on():
            facts = cls(recorded, [], [], 0).planned(places)
        return cls(recorded, recorded.joint_values(), [*places.seen], len(known(facts.program).loops))

    def planned(self, thrown: Thrown) -> Facts:
        assert self.recorded.joint is not None
        num_primals, num_outputs, static = self.recorded.joint_arguments
        capture = partial(captured, self.recorded.joint, num_primals, num_outputs, static)

        def again() -> Facts:
            sys.settrace(None)
            facts = capture()
            thrown.listen()
            return facts

        with thrown.on():
            return run_pipeline(again, self.recorded.options)

    def check(self, facts: Facts) -> None:
        """Results and gradients are those of eager."""
        found = self.recorded.streamed_values(known(facts.program))
        assert_small(value_errors(found, self.truth, self.recorded.joint_arguments[1]), 1e-12, "with a fault")


def throw(name: str, number: int) -> tuple[Traced, Thrown, Facts]:
    """A fault in one place: a function by chance, and one of the operators that it looks at."""
    traced, chance = Traced.of(name), random.Random(f"{name} {number}")
    code = chance.choice([*dict.fromkeys(code for code, _ in traced.places)])
    place = chance.choice([place for place in traced.places if place[0] is code])
    thrown = Thrown(place=place, how=("once", "until unknown", "always")[number % 3])
    return traced, thrown, traced.planned(thrown)


def named(name: str) -> Any:
    return pytest.param(name, marks=() if name in SHORT else pytest.mark.long)


@pytest.mark.parametrize("name", map(named, MAKES))
def test_a_pass_that_fails_costs_what_it_looked_at(name: str, caplog: pytest.LogCaptureFixture, request: Any) -> None:
    """Six faults in each of two models; 100 in each of five with --long."""
    for number in range(100 if request.config.getoption("--long") else 6):
        traced, thrown, facts = throw(name, number)
        assert thrown.times, f"number {number} was not thrown"
        traced.check(facts)
        assert "please report" not in caplog.text.lower(), f"number {number}"
        assert len(known(facts.program).loops) > 2, f"number {number}: too little streams"
        caplog.clear()


def test_an_operator_that_a_pass_has_written_costs_that_pass() -> None:
    """What scales the head's gradient is no traced operator: without the pass that wrote it the rest streams."""
    traced = Traced.of("spelled attention")
    code = donated_bodies._rewrite.__code__
    thrown = Thrown(place=next(place for place in traced.places if place == (code, "mul_tensor_1")), how="always")
    facts = traced.planned(thrown)
    assert thrown.times
    assert any("'loss gradient' is left out, as 'rewrite' failed" in fault for fault in facts.faults), facts.faults
    traced.check(facts)


def test_a_recurrence_that_no_plan_can_look_at_is_a_loop_again() -> None:
    traced = Traced.of("recurrence")
    place = next(place for place in traced.places if place == (checkpoint_policy._Saving.is_attention.__code__, "recurrence"))
    thrown = Thrown(place=place, how="always")
    traced.check(traced.planned(thrown))
    assert thrown.times


def refused_in(monkeypatch: pytest.MonkeyPatch, target: str, number: int | None) -> None:
    """Let the emitter of operators fail, at the n-th of one kind that it meets in a graph or at all of them."""
    emitter_of, met = bodies.emitter_of, list[str]()

    def failing(node: fx.Node) -> Any:
        if str(node.target) == target:
            met.extend([node.name] if node.name not in met else [])
            if number is None or met[number : number + 1] == [node.name]:
                raise TypeError("no such argument")
        return emitter_of(node)

    monkeypatch.setattr(bodies, "emitter_of", failing)


def a_step(monkeypatch: pytest.MonkeyPatch, number: int | None = 0, **options: Any) -> Any:
    refused_in(monkeypatch, "aten.cumsum.default", number)
    torch.manual_seed(0)
    model, ids = SparseDecoder(Convolution).double(), torch.randint(0, VOCABULARY, (2, LENGTH))
    return compare(model, {"ids": ids, "labels": ids}, streams=None, chunk_size=5, bodies="eager", faults=True, **options)


def test_what_failed_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One of two layers has an operator that runs whole."""
    (facts,) = a_step(monkeypatch).facts
    (why,) = facts.reasons()
    assert why == "aten.cumsum.default runs whole, as the pass 'rewrite' failed at it (TypeError: no such argument)"
    ((node, obstacle),) = obstacles(facts).items()
    assert "test_faults.py" in obstacle.where and "mixed.cumsum(1)" in obstacle.where
    assert f"{why}, in {obstacle.where}. The result is exact" in caplog.text
    assert len(known(facts.program).loops) > len(facts.demand.reasons)
    others = [other for other in facts.joint.nodes if other.target == node.target and other is not node]
    assert others and all(facts.demand.form(other) is StorageClass.ROWS for other in others)


def test_layers_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where a second operator of the same line fails, all of that line run whole."""
    (facts,) = a_step(monkeypatch, number=None).facts
    assert facts.program is not None and len(facts.demand.reasons) >= 2
    assert caplog.text.count("runs whole, as the pass") <= 2


def test_strict_refuses_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotStreamedError) as refused:
        a_step(monkeypatch, strict=True)
    assert "the pass 'rewrite' failed at aten.cumsum.default (TypeError: no such argument)" in refused.value.found
    assert "mixed.cumsum(1)" in refused.value.where


@pytest.mark.parametrize("budget", ["10GiB", "auto"])
def test_a_budget_is_not_forgotten(budget: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where no plan can be made, an amount that was asked for is refused; what is free is asked for by nobody."""
    monkeypatch.setattr("streamfx.frontend.backend.may_fit_whole", lambda joint, budget: False)
    monkeypatch.setattr("streamfx.frontend.backend.fits_by_far", lambda graph, inputs, budget: None)
    monkeypatch.setattr("streamfx.frontend.backend.run_pipeline", mock.Mock(side_effect=ValueError("no such axis")))
    model, ids = SparseDecoder(SwiGLU), torch.randint(0, VOCABULARY, (2, LENGTH))
    compiled = torch.compile(model, backend="streambp", options={"memory_budget": budget, "bodies": "eager"})
    if budget == "auto":
        compiled(ids, ids).backward()
        assert "no such axis" in caplog.text
        return
    with pytest.raises(OverBudgetError, match="no such axis"):
        compiled(ids, ids)
