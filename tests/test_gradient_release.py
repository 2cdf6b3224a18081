"""The operator after which a gradient is released: never before all that read it, or its parameter."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx

from streamfx.passes.lowering.gradient_release import release_segments
from streamfx.runtime.in_place import scale_saved_in_place

aten = torch.ops.aten
mm, t = aten.mm.default, aten.t.default
Build = Callable[..., Sequence[fx.Node]]
NO_VIEWS: Sequence[Sequence[int]] = ((), (), ())


def stretches(build: Build, saved: Sequence[Sequence[int]] = NO_VIEWS) -> list[tuple[list[str], list[int]]]:
    """Return operators and positions of gradients, by release, in a graph of square matrices; `saved`: aliased inputs."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("one", "two", "three", "tangent")]
    graph.output(tuple(build(lambda target, *args: graph.call_function(target, args), *given)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    found = release_segments(fx.GraphModule(torch.nn.Module(), graph), tuple(map(frozenset, saved)))
    return [([node.name for node in delivery.operators], sorted(delivery.gradients)) for delivery in found]


def three_products(call: Any, a: Any, b: Any, c: Any, g: Any) -> Sequence[fx.Node]:
    return call(mm, a, g), call(mm, call(t, b), g), call(mm, c, g)


PLACES: dict[str, tuple[Build, Any, list[list[int]]]] = {
    "before the next product": (
        lambda call, a, b, c, g: [made := call(mm, a, g), call(mm, b, g), call(t, made)][1:],
        NO_VIEWS,
        [[1], [0]],
    ),
    "after the next product, which reads it": (
        lambda call, a, b, c, g: [made := call(mm, a, g), call(mm, b, made), call(t, made)][1:],
        NO_VIEWS,
        [[0, 1]],
    ),
    "no parameters": (three_products, NO_VIEWS, [[0], [1], [2]]),
    "the second is a view of input 0": (three_products, ((), (0,), ()), [[0, 1], [2]]),
    "the third is a view of input 0": (three_products, ((), (), (0,)), [[1], [0, 2]]),
    "the head's, scaled in place, before the loops": (
        lambda call, a, b, c, g: [call(mm, b, g), call(mm, c, g), call(scale_saved_in_place, a, g)],
        NO_VIEWS,
        [[2], [0], [1]],
    ),
    "a graph that writes is unchanged": (
        lambda call, a, b, c, g: [call(aten.copy_.default, a, call(mm, b, g)), call(mm, c, g)],
        NO_VIEWS,
        [],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_when_a_gradient_is_released(name: str) -> None:
    build, saved, expected = PLACES[name]
    assert [places for _, places in stretches(build, saved)] == expected


WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.mark.parametrize("target", [aten.bernoulli.p, WAIT])
def test_random_draws_and_collectives_stay_in_order(target: Any) -> None:
    """Random draws, collectives, and their waits stay in order."""
    more = () if target is WAIT else (0.5,)
    ((operators, places),) = stretches(lambda call, a, b, c, g: [call(mm, b, g), call(target, a, *more)])
    assert operators[0].startswith("mm") and places == [0, 1]


def test_a_chain_of_thousands_of_operators_can_run_early() -> None:
    def long(call: Any, a: Any, b: Any, c: Any, g: Any) -> Sequence[fx.Node]:
        for _ in range(5000):
            a = call(aten.sin.default, a)
        return call(mm, b, g), a

    (first, places), (_, others) = stretches(long)
    assert len(first) == 5000 and (places, others) == ([1], [0])
