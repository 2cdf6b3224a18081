"""Behind which operator of a backward half gradients are handed over: never before all that reads them, or their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx

from streamfx.passes.lowering.gradient_release import deliveries, inputs_saved
from streamfx.runtime.in_place import scaled_once

aten = torch.ops.aten
Build = Callable[..., Sequence[fx.Node]]


def stretches(build: Build, saved: Sequence[Sequence[int]]) -> list[tuple[list[str], list[int]]]:
    """Operators and places of gradients, by stretch, of a graph of square matrices; `saved`: in which inputs' memory they lie."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("one", "two", "three", "tangent")]
    graph.output(tuple(build(graph.call_function, *given)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    found = deliveries(fx.GraphModule(torch.nn.Module(), graph), tuple(map(frozenset, saved)))
    return [([node.name for node in delivery.operators], sorted(delivery.gradients)) for delivery in found]


NOBODYS = [(), (), ()]


def test_a_gradient_is_handed_over_before_the_next_product() -> None:
    """But for one that the next product reads: its memory is not the accumulator's alone before that."""

    def independent(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (one, tangent))
        mm_1 = call(aten.mm.default, (two, tangent))
        return mm_1, call(aten.t.default, (mm,))

    def dependent(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (one, tangent))
        mm_1 = call(aten.mm.default, (two, mm))
        return mm_1, call(aten.t.default, (mm,))

    assert [places for _, places in stretches(independent, NOBODYS)] == [[1], [0]]
    assert [places for _, places in stretches(dependent, NOBODYS)] == [[0, 1]]


def test_a_gradient_is_handed_over_once_its_parameter_is_read() -> None:
    def both(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (one, tangent))
        mm_1 = call(aten.mm.default, (call(aten.t.default, (two,)), tangent))
        mm_2 = call(aten.mm.default, (three, tangent))
        return mm, mm_1, mm_2

    assert [places for _, places in stretches(both, NOBODYS)] == [[0], [1], [2]]
    assert [places for _, places in stretches(both, [(), (0,), ()])] == [[0, 1], [2]], "what is called two is a view of input 0"
    assert [places for _, places in stretches(both, [(), (), (0,)])] == [[1], [0, 2]]


def test_what_only_leads_to_gradients_runs_early() -> None:
    """The head's gradient is scaled, in place, before the loops."""

    def last(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (two, tangent))
        mm_1 = call(aten.mm.default, (three, tangent))
        return call(scaled_once, (one, tangent)), mm, mm_1

    assert [places for _, places in stretches(last, NOBODYS)] == [[0], [1], [2]]


def test_what_must_not_run_early_stays() -> None:
    """Random draws are in order, and so are collectives, and what waits for them."""

    def drawn(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (two, tangent))
        return call(aten.bernoulli.p, (one, 0.5)), mm

    def waiting(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (two, tangent))
        return call(torch.ops._c10d_functional.wait_tensor.default, (one,)), mm

    for build in (drawn, waiting):
        ((operators, places),) = stretches(build, NOBODYS)
        assert operators[0].startswith("mm") and places == [0, 1]


def test_a_graph_that_writes_is_left_alone() -> None:
    def writes(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        mm = call(aten.mm.default, (two, tangent))
        call(aten.copy_.default, (one, mm))
        return call(aten.mm.default, (three, tangent)), mm

    assert stretches(writes, NOBODYS) == []


@pytest.mark.parametrize(("view", "expected"), [(True, {0}), (False, set())])
def test_inputs_in_whose_memory_saved_values_lie(view: bool, expected: set[int]) -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    result = graph.call_function(aten.mm.default, (x, weight))
    graph.output((result, graph.call_function(aten.t.default if view else aten.clone.default, (weight,)), x))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    assert inputs_saved(graph, 1) == (frozenset(expected), frozenset({1}))


def test_a_chain_of_thousands_of_operators_can_run_early() -> None:
    def long(call: Any, one: Any, two: Any, three: Any, tangent: Any) -> Sequence[fx.Node]:
        value = one
        for _ in range(5000):
            value = call(aten.sin.default, (value,))
        return call(aten.mm.default, (two, tangent)), value

    (first, places), (_, others) = stretches(long, NOBODYS)
    assert len(first) == 5000 and (places, others) == ([1], [0])
