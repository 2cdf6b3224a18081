"""Collectives run as one where they are of one kind and nobody needs the first before the last begins: with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor, fx

from streamfx.node_meta import RUN
from streamfx.passes.lowering.buckets import put_together

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Build = Callable[..., Sequence[fx.Node]]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def collectives_in(build: Build) -> list[str]:
    """What runs over the ranks once those that can run as one do; results are those of the graph as it was."""
    graph, given = fx.Graph(), [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2, dtype=torch.float64)]
    graph.output(tuple(build(graph.call_function, *(graph.placeholder(name) for name in "abc"))))
    _run(graph, given)
    module = fx.GraphModule(torch.nn.Module(), graph)
    before = module(*given)
    put_together(graph)
    graph.lint()
    module.recompile()
    assert all(map(torch.equal, before, module(*given)))
    return [
        node.target.__name__.removesuffix(".default")
        for node in graph.nodes
        if "c10d" in str(node.target) and "wait" not in str(node)
    ]


def _run(graph: fx.Graph, given: Sequence[Tensor]) -> None:
    """Let each node know its value."""
    values = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(values)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def waited(call: Any, *nodes: fx.Node) -> list[fx.Node]:
    return [call(c10d.wait_tensor.default, (node,)) for node in nodes]


def reduced(call: Any, value: fx.Node, how: str = "sum") -> fx.Node:
    made: fx.Node = call(c10d.all_reduce.default, (value, how, "0"))
    return made


def test_those_of_one_kind_run_as_one() -> None:
    def build(call: Any, a: Any, b: Any, c: Any) -> Sequence[fx.Node]:
        return waited(call, reduced(call, a), reduced(call, b), reduced(call, b))

    assert collectives_in(build) == ["all_reduce_coalesced"]


def test_those_of_other_kinds_do_not() -> None:
    """Other operators, other reductions, other types."""

    def build(call: Any, a: Any, b: Any, c: Any) -> Sequence[fx.Node]:
        gathered = call(c10d.all_gather_into_tensor.default, (a, 1, "0"))
        return waited(call, reduced(call, a), reduced(call, a, "max"), reduced(call, c), gathered)

    assert collectives_in(build) == ["all_gather_into_tensor"] + ["all_reduce"] * 3


def test_what_is_made_of_another_comes_after_it() -> None:
    def build(call: Any, a: Any, b: Any, c: Any) -> Sequence[fx.Node]:
        (first,) = waited(call, reduced(call, a))
        one, other = waited(call, reduced(call, call(aten.sin.default, (first,))), reduced(call, b))
        return one, other

    assert collectives_in(build) == ["all_reduce_coalesced", "all_reduce"], "the last begins before the first is waited for"


def test_a_loop_stands_between() -> None:
    def build(call: Any, a: Any, b: Any, c: Any) -> Sequence[fx.Node]:
        first = reduced(call, a)
        loop = call(aten.sin.default, (b,))
        loop.meta[RUN] = 1
        return waited(call, first, reduced(call, b), loop)

    assert collectives_in(build) == ["all_reduce", "all_reduce"]


def test_what_the_graph_itself_reduces_stays() -> None:
    def build(call: Any, a: Any, b: Any, c: Any) -> Sequence[fx.Node]:
        made = [reduced(call, a), reduced(call, b)]
        for node in made:
            node.meta[RUN] = 0
        return waited(call, *made)

    assert collectives_in(build) == ["all_reduce", "all_reduce"]
