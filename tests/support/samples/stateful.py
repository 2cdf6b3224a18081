"""Sample calls of operators with a state, and of their backwards: a scan whose state is given, and one whose state is not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.ir.scan_schema import backward_plan, forward_plan
from streamfx.passes.ops.rules.stateful import STATEFUL
from streamfx.runtime.custom_scan import Backward, Forward
from tests.support.samples.registry import Sizes, sample
from tests.support.stateful.selective import selective

SCAN = selective._opoverload.name()


def operands(s: Sizes) -> dict[str, Tensor]:
    rows, few = (s.b, s.t, s.d), (s.b, s.t, s.k)
    return {
        "x": s.draw(*rows),
        "dt": s.positive(*rows),
        "a": -s.positive(s.d, s.k),
        "b": s.draw(*few),
        "c": s.draw(*few),
        "d": s.draw(s.d),
    }


@sample(Forward)
def scan(s: Sizes) -> tuple[Any, ...]:
    given = operands(s)
    plan, _ = forward_plan(STATEFUL[SCAN], {**given, "first": None}, (0, 1))
    return Forward(plan), *given.values()


@sample(Forward)
def scan_from_a_state(s: Sizes) -> tuple[Any, ...]:
    given = {**operands(s), "first": s.draw(s.b, s.d, s.k)}
    plan, _ = forward_plan(STATEFUL[SCAN], given, (0, 1))
    return Forward(plan), *given.values()


@sample(Backward)
def scan_backward(s: Sizes) -> tuple[Any, ...]:
    given = {**operands(s), "first": s.draw(s.b, s.d, s.k)}
    plan, results = forward_plan(STATEFUL[SCAN], given, (0, 1))
    given = {"dy": s.draw(s.b, s.t, s.d), "dlast": s.draw(s.b, s.d, s.k), **given}
    own, _ = backward_plan(STATEFUL[SCAN], plan, given, results, range(7))
    return Backward(own), *given.values()
