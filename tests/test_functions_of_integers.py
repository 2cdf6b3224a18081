"""A function that Dynamo compiles by itself runs in eager if it only computes with integers: there, it may return no mask."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from streamfx.integrations import enable
from streamfx.torch_private.eager_frames import compile_function
from tests.support.engines import all_ranks
from tests.test_plan_host import one_rank

pytestmark = pytest.mark.compiled


def is_traced(mask: Tensor) -> bool:
    import torch  # as libraries write it: a function without operators that Dynamo compiles nevertheless

    return torch.compiler.is_compiling()


def mask_of(x: Tensor, padding: Tensor | None) -> Tensor | None:
    """A dense mask if it is traced, as of transformers: only eager reads `padding`."""
    rows = torch.arange(x.shape[0])
    if padding is not None and (is_traced(padding) or not padding.all()):
        return (rows[:, None] >= rows) & padding
    return None if padding is not None or not is_traced(rows) else rows[:, None] >= rows


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorated
def mask_from_decorator(x: Tensor, padding: Tensor | None) -> Tensor | None:
    return mask_of(x, padding)


@decorated
def loss_of(x: Tensor) -> Tensor:
    return x.square().sum()


def test_only_functions_of_integers_run_in_eager() -> None:
    """Also in later calls, with other arguments; not another function of the same decorator, and not if they are inlined."""
    masks, graphs = list[Any](), list[int]()

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return module.forward

    def step(x: Tensor, padding: Tensor | None, breaks: bool) -> Tensor:
        mask = mask_from_decorator(x, padding)
        for _ in range(1):
            if breaks:
                torch._dynamo.graph_break()
            masks.append(mask)
        return loss_of(x)

    compiled = compile_function(step, backend)
    for padding in (None, torch.ones(4, dtype=torch.bool)) * 2:
        compiled(torch.randn(4, 4), padding, True)
    assert masks == [None] * 4 and graphs == [1]
    torch._dynamo.reset()  # else Dynamo leaves `step` alone
    compile_function(step, backend)(torch.randn(4, 4), None, False)
    assert masks[-1].shape == (4, 4) and len(graphs) == 2


class Decorator:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


def mask_and_settings(x: Tensor, settings: Settings) -> Tensor:
    return torch.arange(x.shape[0]) >= settings["first"]


def scaled(x: Tensor, settings: Settings) -> Tensor:
    return x * settings["first"]


def test_objects_that_are_called_like_functions_differ_by_their_functions() -> None:
    """Of a decorator that is a class; an argument whose attributes are its items has no `__code__`."""
    graphs, functions = list[int](), [Decorator(mask_and_settings), Decorator(scaled)]

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return module.forward

    def step(x: Tensor, settings: Settings) -> list[Tensor]:
        results = []
        for function in functions:
            torch._dynamo.graph_break()
            results.append(function(x, settings))
        return results

    compiled, cyclic = compile_function(step, backend), Settings(first=2)
    cyclic["self"] = cyclic
    for _ in range(2):
        mask, twice = compiled(torch.ones(4), cyclic)
    assert mask.tolist() == [False, False, True, True] and twice.tolist() == [2.0] * 4
    assert graphs == [1], "the function of floating-point values is compiled, once"


class GivenUp(nn.Module):
    """Dynamo gives up on `forward`, because of the break in its loop, and compiles `mask_of` by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.masks = nn.ModuleList([nn.Linear(4, 4)]), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        mask = mask_of(x, None)
        for layer in self.layers:
            torch._dynamo.graph_break()
            self.masks.append(mask)
            x = layer(x)
        return loss_of(x)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_enabled_models_get_no_mask(is_sharded: bool) -> None:
    model = GivenUp()
    with one_rank() if is_sharded else nullcontext():
        for module in (*model.layers, model) if is_sharded else ():
            fully_shard(module, mesh=all_ranks())
        with enable(model, chunk_size=8):
            model(torch.randn(16, 4)).backward()
    assert model.masks == [None]
