"""Small graphs before and after canonicalization, on numbers that are drawn to hurt."""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.passes.rewrite.canonicalize import canonicalize

INF, NAN = float("inf"), float("nan")
Function: TypeAlias = "Callable[..., Any]"


def special(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of which some are zeros of both signs, infinite, or none."""
    numbers = torch.tensor([1.5, -0.0, 0.0, -2.25, INF, -INF, NAN, 3e-300, -0.0, 7.0], dtype=torch.float64)
    count = torch.Size(shape).numel()
    return numbers.repeat(count // len(numbers) + 1)[:count].reshape(shape).to(dtype)


def plain(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def scores(*shape: int) -> Tensor:
    """Rows that see nothing, one key, an infinite one, and something that is no number."""
    made = plain(*shape)
    made[..., 0, :], made[..., 1, 1:], made[..., 2, 0], made[..., 3, 1] = -INF, -INF, INF, NAN
    made[..., 4, :] = torch.finfo(torch.float64).min
    made[..., 5, :2] = 9.0  # two that are the largest
    return made


@dataclass(frozen=True)
class Case:
    """A function of tensors; whether it is rewritten, and whether it then has the very same bits."""

    function: Function
    inputs: tuple[Tensor, ...]
    changes: bool = True
    bits: bool = True


Table: TypeAlias = "dict[str, tuple[Any, ...]]"  # a function and its inputs, by name


def cases(table: Table, changes: bool = True, bits: bool = True) -> dict[str, Case]:
    return {name: Case(function, tuple(inputs), changes, bits) for name, (function, *inputs) in table.items()}


def graphs(case: Case) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the traced graph, and the canonicalized one. Outputs are multiplied by one, else they are not replaced."""

    def function(*tensors: Tensor) -> list[Tensor]:
        made = case.function(*tensors)
        return [item * 1 for item in (made if isinstance(made, (list, tuple)) else [made])]

    before = make_fx(function, tracing_mode="fake")(*case.inputs)
    graph = copy.deepcopy(before.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    canonicalize(graph)
    return before, fx.GraphModule(before, graph)


def same(actual: Tensor, truth: Tensor, bits: bool) -> None:
    close = 0 if bits else 8 * torch.finfo(truth.dtype).eps
    torch.testing.assert_close(actual, truth, rtol=16 * close, atol=close, equal_nan=True)
    assert not bits or torch.equal((actual.signbit() | actual.isnan()), (truth.signbit() | truth.isnan())), (actual, truth)


def targets(module: fx.GraphModule) -> set[Any]:
    """Return the set of operators; counts differ because equal operators are merged."""
    return {node.target for node in module.graph.nodes if node.op == "call_function"} - {operator.getitem}


def check(case: Case) -> None:
    before, after = graphs(case)
    assert (targets(before) != targets(after)) is case.changes, targets(after)
    truth = before(*[item.clone() for item in case.inputs])
    for actual, wanted in zip(after(*[item.clone() for item in case.inputs]), truth, strict=True):
        same(actual, wanted, case.bits)
