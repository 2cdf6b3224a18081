"""The operator after which a gradient is released: never before all that read it, or its parameter; coalesced collectives."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import fx

from streamfx.node_meta import REGION
from streamfx.passes.lowering.buckets import coalesce_collectives
from streamfx.passes.lowering.gradient_release import release_segments
from streamfx.runtime.in_place import scale_saved_in_place  # noqa: F401  (in tests/tables)
from tests.support.tables import named_cases

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


PLACES: dict[str, tuple[Build, Any, list[list[int]]]] = named_cases("places", globals())


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


# -- collectives of one kind are coalesced if no result is used before the last one begins

c10d, sin = torch.ops._c10d_functional, torch.ops.aten.sin.default
gather = c10d.all_gather_into_tensor.default
ONE, PLAIN = "all_reduce_coalesced", "all_reduce"


def reduced(call: Any, value: fx.Node, how: str = "sum", run: int | None = None) -> fx.Node:
    made: fx.Node = call(c10d.all_reduce.default, value, how, "0")
    return made if run is None else of_run(made, run)


def of_run(node: fx.Node, run: int) -> fx.Node:
    node.meta[REGION] = run
    return node


CASES: dict[str, tuple[Callable[..., list[fx.Node]], list[str]]] = named_cases("collectives", globals())


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_coalesced_collectives(name: str) -> None:
    build, expected = CASES[name]
    graph, given = fx.Graph(), [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2, dtype=torch.float64)]

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    made = build(call, *(graph.placeholder(name) for name in "abc"))
    graph.output(tuple(call(WAIT, node) for node in made))
    tell_values(graph, given)
    module = fx.GraphModule(torch.nn.Module(), graph)
    before = module(*given)
    coalesce_collectives(graph)
    graph.lint()
    module.recompile()
    assert all(map(torch.equal, before, module(*given)))
    names = [str(node.target).split(".")[1] for node in graph.nodes if "c10d" in str(node.target)]
    assert [name for name in names if name != "wait_tensor"] == expected


def tell_values(graph: fx.Graph, given: Sequence[torch.Tensor]) -> None:
    """Let each node know its value."""
    values = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(values)
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args)
