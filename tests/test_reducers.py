"""Data parallel training: reductions overlap with the backward half, and gradients are those of one process with all data.

Two processes talk by gloo, with different data. One compilation serves all ways to set DDP up.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.exactness import Recorder, recorder
from tests.support.profiled import names_of
from tests.support.ranks import on_ranks
from tests.support.spread import only
from tests.support.stages import Layers, batch

SMALL = 1e-6  # MiB: a bucket per parameter
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
TOLERANCE, LAYERS = 1e-12, 3


class Unused(Layers):
    """One parameter is not used, another one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.qkv[0].bias.requires_grad_(False)


def summed(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook: the mean, as DDP makes it."""
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused parameters are looked for": {"find_unused_parameters": True},
    "the graph stays as it is": {"static_graph": True},
    "gradients are views of buckets": {"gradient_as_bucket_view": True},
    "a communication hook": {"hook": summed},
    "accumulated without reductions": {"accumulate": True},
    "accumulated in buckets": {"accumulate": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
}
EVERY_TIME = ["plain", "gradients are views of buckets", "accumulated without reductions"]


def compiled_for(model: nn.Module, **options: Any) -> tuple[Any, Recorder]:
    torch._dynamo.config.optimize_ddp = False  # it cuts the graph at buckets
    backend = recorder(chunk_size=5, loss_chunk_size=5, **options)
    return torch.compile(model, backend=backend), backend


@contextmanager
def wrapped(model: nn.Module, hook: Any = None, accumulate: bool = False, **options: Any) -> Iterator[DDP]:
    wrapper = DDP(model, **{"bucket_cap_mb": SMALL, **options})
    if hook is not None:
        wrapper.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # DDP reads annotations
    yield wrapper
    del wrapper
    gc.collect()


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(seed=10 * step + rank)


def error(model: nn.Module, eager: nn.Module) -> float:
    """How far gradients are from the means of all ranks' in eager, at most, relative to the largest."""
    worst = 0.0
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            mean = other.grad.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            worst = max(worst, float((one.grad - mean).abs().max() / mean.abs().max()))
    return worst


def both(rank: int, wrapper: DDP, eager: nn.Module, accumulate: bool, call: Callable[..., Any] | None = None) -> float:
    """The error after two steps by `call`; `accumulate`: gradients of several calls are reduced with the last one's."""
    worst = 0.0
    run: Callable[..., Any] = wrapper if call is None else call
    for step in range(2):
        wrapper.zero_grad(set_to_none=step == 0)
        eager.zero_grad()
        for part in range(3 if accumulate else 1):
            with nullcontext() if part == 2 or not accumulate else wrapper.no_sync():
                run(*data(rank, 3 * step + part)).backward()
            eager(*data(rank, 3 * step + part)).backward()
        worst = max(worst, error(wrapper.module, eager))
    return worst


def models(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make().double()
    return model, copy.deepcopy(model)


def ways(rank: int, names: list[str], gradients: str) -> tuple[dict[str, float], tuple[int, int], list[int]]:
    """Errors by way, all with one compilation; reductions issued before the last product of the backward half, and all; how many
    gradients each stretch of it hands over.
    """
    model, eager = models(lambda: Layers(LAYERS))
    function, backend = compiled_for(model, gradients=gradients)
    errors = {}
    for name in names:
        with wrapped(function, **WAYS[name]) as wrapper:
            errors[name] = both(rank, wrapper, eager, WAYS[name].get("accumulate", False))
    with wrapped(function) as wrapper:
        overlap = early_reductions(rank, wrapper)
    chain = backend.compilations[0].chain
    assert len(backend.compilations) == 1
    return errors, overlap, [len(places) for places in chain.places] if chain is not None else []


def early_reductions(rank: int, wrapper: DDP) -> tuple[int, int]:
    wrapper(*data(rank, 0)).backward()  # after the first step DDP makes new buckets
    wrapper.zero_grad()
    loss = wrapper(*data(rank, 1))
    names = [name for name in names_of(loss.backward) if name in PRODUCTS or "allreduce" in name]
    last = max(position for position, name in enumerate(names) if name in PRODUCTS)
    reductions = [position for position, name in enumerate(names) if name not in PRODUCTS]
    return sum(position < last for position in reductions), len(reductions)


@pytest.mark.parametrize("which", only(["some"], ["some", "all"]))
def test_distributed_data_parallel(which: str) -> None:
    names = EVERY_TIME if which == "some" else list(WAYS)
    for errors, (early, reductions), places in on_ranks(ways, names, "auto"):
        assert all(error <= TOLERANCE for error in errors.values()) and len(errors) == len(names), errors
        assert early == sum(places[:-1]) and reductions == sum(places)
        assert early / reductions >= (LAYERS - 1) / LAYERS


@pytest.mark.long
def test_at_once_no_reduction_overlaps() -> None:
    for errors, (early, reductions), places in on_ranks(ways, ["plain"], "at once"):
        assert errors["plain"] <= TOLERANCE
        assert early == 0 and reductions == 2 + 4 * LAYERS and not places


def unused(rank: int) -> float:
    model, eager = models(Unused)
    with wrapped(compiled_for(model)[0], find_unused_parameters=True) as wrapper:
        return both(rank, wrapper, eager, accumulate=False)


def compiled_around(rank: int, cut: bool) -> float:
    """DDP is compiled, rather than what it wraps; `cut`: as Dynamo has it by default."""
    model, eager = models(Layers)
    wrapper = DDP(model, bucket_cap_mb=25 if cut else SMALL)
    function, _ = compiled_for(wrapper)
    torch._dynamo.config.optimize_ddp = cut
    return both(rank, wrapper, eager, accumulate=False, call=function)


def reduced_to_owners(rank: int, on_accumulators: bool) -> float:
    """Each gradient is reduced to one rank by a hook and freed on the others, as ZeRO does it."""
    model, eager = models(Layers)
    function, backend = compiled_for(model, gradients="stagewise" if on_accumulators else "auto")
    parameters, works, kept = list(model.parameters()), list[Any](), list[Any]()

    def reduce(parameter: Tensor, owner: int) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        works.append((dist.reduce(gradient, owner, async_op=True), parameter, gradient if owner == rank else None))

    for number, parameter in enumerate(parameters):
        hook: Any = partial(reduce, parameter, number % dist.get_world_size())
        accumulator: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        kept.append(accumulator)
        if on_accumulators:
            accumulator.register_hook(lambda *_, hook=hook: hook())
        else:
            parameter.register_post_accumulate_grad_hook(lambda _, hook=hook: hook())
    function(*data(rank, 0)).backward()
    eager(*data(rank, 0)).backward()
    twins, worst = dict(zip(map(id, parameters), eager.parameters(), strict=True)), 0.0
    for work, parameter, own in works:
        work.wait()
        gradient = twins[id(parameter)].grad
        assert gradient is not None
        total = gradient.clone()
        dist.all_reduce(total)
        if own is not None:
            worst = max(worst, float((own - total).abs().max() / total.abs().max()))
    chain = backend.compilations[0].chain
    assert chain is not None and chain.is_used and len(works) == len(parameters)
    return worst


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "argument"),
    [(unused, None), (compiled_around, False), (compiled_around, True), (reduced_to_owners, False), (reduced_to_owners, True)],
)
def test_other_ways(case: Callable[..., float], argument: bool | None) -> None:
    for error_of_rank in on_ranks(case, *([] if argument is None else [argument])):
        assert error_of_rank <= TOLERANCE
