"""Collectives of one kind are coalesced if no result is used before the last one begins; results stay equal."""

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

c10d, sin = torch.ops._c10d_functional, torch.ops.aten.sin.default
wait, gather = c10d.wait_tensor.default, c10d.all_gather_into_tensor.default
ONE, PLAIN = "all_reduce_coalesced", "all_reduce"


def reduced(call: Any, value: fx.Node, how: str = "sum", run: int | None = None) -> fx.Node:
    made: fx.Node = call(c10d.all_reduce.default, value, how, "0")
    return made if run is None else of_run(made, run)


def of_run(node: fx.Node, run: int) -> fx.Node:
    node.meta[REGION] = run
    return node


CASES: dict[str, tuple[Callable[..., list[fx.Node]], list[str]]] = {  # the results, and the collectives that run
    "one kind": (lambda call, a, b, c: [reduced(call, a), reduced(call, b), reduced(call, b)], [ONE]),
    "other operators, reductions, types": (
        lambda call, a, b, c: [reduced(call, a), reduced(call, a, "max"), reduced(call, c), call(gather, a, 1, "0")],
        [PLAIN, PLAIN, PLAIN, "all_gather_into_tensor"],
    ),
    "an operand of another": (  # the last begins before the first is waited for
        lambda call, a, b, c: [reduced(call, call(sin, call(wait, reduced(call, a)))), reduced(call, b)],
        [ONE, PLAIN],
    ),
    "a loop between": (lambda call, a, b, c: [reduced(call, a), of_run(call(sin, b), 1), reduced(call, b)], [PLAIN] * 2),
    "the graph's own": (lambda call, a, b, c: [reduced(call, a, run=0), reduced(call, b, run=0)], [PLAIN] * 2),
}


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
    graph.output(tuple(call(wait, node) for node in made))
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
