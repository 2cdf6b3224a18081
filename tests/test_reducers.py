"""Data parallel training: reductions overlap with the backward half, and gradients are those of one process with all data.

Two processes talk by gloo, with different data. One compilation serves all ways to set DDP up.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.collectives import PRODUCTS
from tests.support.exactness import Recorder, recorder
from tests.support.profiled import names_of
from tests.support.ranks import on_ranks
from tests.support.spread import only
from tests.support.stages import Layers, batch

SMALL, TOLERANCE, LAYERS = 1e-6, 1e-12, 3  # MiB: a bucket per parameter


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


def pair(make: Callable[[], nn.Module] = Layers, **options: Any) -> tuple[nn.Module, nn.Module, Any, Recorder]:
    """A model, its copy for eager, the compiled one, and what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = False  # it cuts the graph at buckets
    torch.manual_seed(0)
    model, backend = make().double(), recorder(chunk_size=5, loss_chunk_size=5, **options)
    return model, copy.deepcopy(model), torch.compile(model, backend=backend), backend


def error(rank: int, model: nn.Module, eager: nn.Module, run: Any, accumulate: bool = False) -> float:
    """How far gradients of two steps are from the means of all ranks' in eager, at most, relative to the largest.

    `accumulate`: gradients of three calls are reduced with the last one's.
    """
    worst = 0.0
    for step in range(2):
        run.zero_grad(set_to_none=step == 0)
        eager.zero_grad()
        for part in range(3 if accumulate else 1):
            data = batch(seed=10 * (3 * step + part) + rank)
            with nullcontext() if part == 2 or not accumulate else run.no_sync():
                run(*data).backward()
            eager(*data).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None and other.grad is not None:
                dist.all_reduce(other.grad)
                other.grad /= dist.get_world_size()
                worst = max(worst, float((one.grad - other.grad).abs().max() / other.grad.abs().max()))
    return worst


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients are views of buckets": {"gradient_as_bucket_view": True},
    "accumulated without reductions": {"accumulate": True},
    "unused parameters are looked for": {"find_unused_parameters": True},
    "the graph stays as it is": {"static_graph": True},
    "a communication hook": {"hook": summed},
    "accumulated in buckets": {"accumulate": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
}


def ways(rank: int, count: int, gradients: str) -> tuple[list[float], list[bool], list[int]]:
    """Errors of some ways, all with one compilation; which reductions are issued before the last product of the backward half;
    how many gradients each stretch of it hands over.
    """
    model, eager, function, backend = pair(partial(Layers, LAYERS), gradients=gradients)
    errors = []
    for options in list(WAYS.values())[:count]:
        own = {"bucket_cap_mb": SMALL, **options}
        hook, accumulate = own.pop("hook", None), own.pop("accumulate", False)
        wrapper = DDP(function, **own)
        if hook is not None:
            wrapper.register_comm_hook(None, lambda state, bucket, hook=hook: hook(state, bucket))  # DDP reads annotations
        errors.append(error(rank, model, eager, wrapper, accumulate))
        del wrapper
        gc.collect()
    wrapper = DDP(function, bucket_cap_mb=SMALL)
    wrapper(*batch(seed=rank)).backward()  # after the first step DDP makes new buckets
    names = [name for name in names_of(wrapper(*batch(seed=rank)).backward) if name in PRODUCTS or "allreduce" in name]
    last = max(position for position, name in enumerate(names) if name in PRODUCTS)
    chain = backend.compilations[0].chain
    assert len(backend.compilations) == 1
    early = [position < last for position, name in enumerate(names) if name not in PRODUCTS]
    return errors, early, [len(places) for places in chain.places] if chain is not None else []


@pytest.mark.parametrize("count", only([3], [3, len(WAYS)]))
def test_distributed_data_parallel(count: int) -> None:
    for errors, early, places in on_ranks(ways, count, "auto"):
        assert all(error <= TOLERANCE for error in errors) and len(errors) == count, errors
        assert sum(early) == sum(places[:-1]) and len(early) == sum(places)
        assert sum(early) / len(early) >= (LAYERS - 1) / LAYERS


def reduced_to_owners(rank: int, on_accumulators: bool) -> float:
    """Each gradient is reduced to one rank by a hook and freed on the others, as ZeRO does it."""
    model, eager, function, backend = pair(gradients="stagewise" if on_accumulators else "auto")
    works, kept, worst = list[Any](), list[Any](), 0.0

    def reduce(parameter: Tensor, true: Tensor, owner: int) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        works.append((dist.reduce(gradient, owner, async_op=True), true, gradient if owner == rank else None))

    for number, (parameter, true) in enumerate(zip(model.parameters(), eager.parameters(), strict=True)):
        hook: Any = partial(reduce, parameter, true, number % dist.get_world_size())
        accumulator: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        kept.append(accumulator)
        if on_accumulators:
            accumulator.register_hook(lambda *_, hook=hook: hook())
        else:
            parameter.register_post_accumulate_grad_hook(lambda _, hook=hook: hook())
    function(*batch(seed=rank)).backward()
    eager(*batch(seed=rank)).backward()
    for work, true, own in works:
        work.wait()
        dist.all_reduce(true.grad)
        if own is not None:
            worst = max(worst, float((own - true.grad).abs().max() / true.grad.abs().max()))
    chain = backend.compilations[0].chain
    assert chain is not None and chain.is_used and len(works) == len(list(model.parameters()))
    return worst


def compiled_around(rank: int, cut: bool) -> float:
    """DDP is compiled, rather than what it wraps; `cut`: as Dynamo has it by default."""
    model, eager, _, backend = pair()
    torch._dynamo.config.optimize_ddp = cut
    return error(rank, model, eager, torch.compile(DDP(model, bucket_cap_mb=25 if cut else SMALL), backend=backend))


def other_ways(rank: int) -> list[float]:
    model, eager, function, _ = pair(Unused)
    found = [error(rank, model, eager, DDP(function, bucket_cap_mb=SMALL, find_unused_parameters=True))]
    for case in (compiled_around, reduced_to_owners):
        found += [case(rank, False), case(rank, True)]
    return found


@pytest.mark.long
def test_other_ways() -> None:
    assert max(map(max, on_ranks(other_ways))) <= TOLERANCE


@pytest.mark.long
def test_at_once_no_reduction_overlaps() -> None:
    for errors, early, places in on_ranks(ways, 1, "at once"):
        assert max(errors) <= TOLERANCE
        assert not any(early) and len(early) == 2 + 4 * LAYERS and not places
