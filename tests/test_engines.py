"""Engines around a model that `enable` has compiled: exact against one process, streaming, with eager's collectives.

Two processes talk by gloo, each with data and a tangent of its own. `tests/support/engines.py` has the models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import streamfx
from streamfx import IntegrationError, StaleOutputError
from streamfx.integrations import EnabledModules, enable
from streamfx.lazy import steps
from tests.support.allocations import Allocations
from tests.support.collectives import data_of, worst
from tests.support.engines import (
    LENGTH,
    Done,
    Masked,
    Nested,
    checkpointed,
    graphs_seen,
    layers_of,
    loss_of,
    one_process,
    step,
    twins,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder

CHUNK, TOLERANCE = 8, 1e-12
MODELS: dict[str, Callable[..., nn.Module]] = {"body and head": Nested, "a loop in the root": Decoder}
LONG = 32 * CHUNK
LARGE = {"width": 16, "vocabulary": 1031}  # logits are by far the largest tensor


def enabled(given: Any, **options: Any) -> EnabledModules:
    return enable(given, **{"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True, **options})


def wrapped(model: nn.Module, **policies: Any) -> nn.Module:
    """By FSDP2: each layer, and the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    return model


@dataclass(frozen=True)
class Measured:
    """The second step of a wrapped model, what the next one allocates, its graphs, and what `enable` says of it."""

    step: Done
    memory: Allocations
    graphs: list[list[str]]
    told: str


def measured(make: Callable[..., nn.Module], rank: int, streamed: bool) -> Measured:
    torch._dynamo.reset()
    model, truth = twins(partial(make, layers=2, **LARGE))
    if not streamed:
        checkpointed(model)
    wrapped(model)
    with graphs_seen() as graphs:
        done = enabled(model) if streamed else None
        model(*data_of(rank, LONG)).backward()  # compiles
    second = step(model, truth, rank, LONG)
    memory = Allocations.of(lambda: model(*data_of(rank, LONG)).backward())
    return Measured(second, memory, graphs, str(done))


def each_module(rank: int) -> dict[str, Any]:
    steps.LEAST = 1  # small logits would be made at once where a loss is no part of their graph
    found: dict[str, Any] = {name: measured(make, rank, streamed=True) for name, make in MODELS.items()}
    found["eager"] = measured(Nested, rank, streamed=False)
    found["labels outside"] = labels_outside(rank, reshard=True)
    found["unequal"] = unequal_layers(rank)
    return found


def labels_outside(rank: int, reshard: bool | None) -> list[tuple[float, str]]:
    """A loss on logits that the model has returned: errors, and what kind of tensor they were."""
    model, truth = twins()
    enabled(wrapped(model, reshard_after_forward=reshard))
    found = []
    for _ in range(2):
        one_process(truth, rank)
        model.zero_grad()
        ids, labels = data_of(rank, LENGTH)
        logits = model(ids)
        try:
            (loss_of(logits, labels) * (rank + 1)).backward()
        except StaleOutputError:
            return [(math.inf, "stale")]
        found.append((worst(model, truth), type(logits).__name__))
    if reshard is None:
        with pytest.raises(StaleOutputError, match="was freed"):
            logits.sum().item()
    return found


def unequal_layers(rank: int) -> tuple[float, int]:
    """Layers of one class with other numbers in attributes and buffers; and how many graphs there were."""
    torch._dynamo.reset()
    model, truth = twins(partial(Nested, layers=4, layer=Masked.make))
    wrapped(model)
    with graphs_seen() as graphs:
        enabled(model)
        model(*data_of(rank, LENGTH)).backward()  # compiles
    error = step(model, truth, rank).error
    return error, len([graph for graph in graphs if "scaled_dot_product_attention" in graph])


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    """What rank 0 has measured of FSDP2."""
    return on_ranks(each_module)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2_is_exact_with_the_collectives_of_eager(modules: dict[str, Any], name: str) -> None:
    own, eager = modules[name].step, modules["eager"].step
    assert own.error < TOLERANCE
    for mine, other in ((own.forward, eager.forward), (own.backward, eager.backward)):
        assert mine.keys() == other.keys() and all(mine[kind] <= other[kind] for kind in other)


def test_equal_layers_share_a_graph(modules: dict[str, Any]) -> None:
    graphs, told = modules["body and head"].graphs, modules["body and head"].told
    assert sum("scaled_dot_product_attention" in graph for graph in graphs) == 1 and len(graphs) == 4, graphs
    assert "linear" in graphs[-1] and "cross_entropy" in graphs[-1]  # the head and its loss
    assert "FSDP2 (fully_shard): 3 wrapped modules" in told and "model.body.layers.0 and 1 like it" in told


def test_unequal_layers_do_not_share_a_graph(modules: dict[str, Any]) -> None:
    error, graphs = modules["unequal"]
    assert error < TOLERANCE and graphs == 3


@pytest.mark.parametrize("name", MODELS)
def test_no_logits_of_all_rows_exist(modules: dict[str, Any], name: str) -> None:
    streamed, eager = modules[name].memory, modules["eager"].memory
    logits = LONG * LARGE["vocabulary"] * 8
    assert eager.largest >= logits and streamed.largest <= logits / 4
    assert streamed.peak < eager.peak / 2


def test_what_needs_weights_that_are_freed_is_made_before(modules: dict[str, Any]) -> None:
    assert all(error < TOLERANCE and kind == "Tensor" for error, kind in modules["labels outside"])


# -- ways to set FSDP2 up


def accumulated(rank: int) -> list[float]:
    """Three micro-batches, reduced with the last."""
    model, truth = twins()
    enabled(wrapped(model))
    found = []
    for _ in range(2):
        one_process(truth, rank, micro=3)
        model.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)  # type: ignore[operator]
            (model(*data_of(2 * part + rank, LENGTH)) * (rank + 1)).backward()
        found.append(worst(model, truth))
    return found


def stepped(rank: int, make: Callable[[], nn.Module] = Nested, before: bool = False, **policies: Any) -> list[float]:
    """Steps of an optimizer; `before`: enabled before it is wrapped."""
    model, truth = twins(make)
    done = enabled(model) if before else None
    wrapped(model, **policies)
    done = done or enabled(model)
    optimizers = [torch.optim.AdamW(own.parameters(), 0.1) for own in (model, truth)]
    found = []
    for _ in range(3):
        found.append(step(model, truth, rank).error)
        for optimizer in optimizers:
            optimizer.step()
    assert "FSDP2" in str(done) and "3 wrapped" in str(done)
    return found


def mixed_precision(rank: int) -> list[float]:
    """Against eager with the same policy, relative to its own error."""
    model, truth = twins()
    eager = copy.deepcopy(model)
    types: dict[str, Any] = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
    for own in (model, eager):
        mesh = init_device_mesh("cpu", (2,))
        for layer in layers_of(own):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**types))
        fully_shard(own, mesh=mesh, mp_policy=MixedPrecisionPolicy(**types, output_dtype=torch.float64))
    enabled(model)
    mine, other = step(model, truth, rank).error, step(eager, truth, rank).error
    assert 0 < mine < 1e-6
    return [max(0.0, mine - 2 * other)]


def wrapped_head(model: nn.Module, reshard: bool | None) -> nn.Module:
    """By FSDP2: each layer, the norm with the head, and the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard([model.get_submodule("body.norm"), model.get_submodule("head")], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return model


def head_by_itself(rank: int, reshard: bool | None) -> list[float]:
    model, truth = twins()
    enabled(wrapped_head(model, reshard))
    return [step(model, truth, rank).error for _ in range(2)]


def memory_of_head_by_itself(rank: int) -> Allocations:
    steps.LEAST = 1
    model, _ = twins(partial(MODELS["body and head"], layers=2, **LARGE))
    done = enabled(wrapped_head(model, reshard=False))
    found = Allocations.of(lambda: model(*data_of(rank, LONG)).backward())  # the first step as well
    assert "a loss on deferred outputs of a wrapped module stays in chunks" in str(done)
    return found


def lengths(rank: int) -> list[float]:
    """Other lengths on each rank and in each step."""
    model, truth = twins()
    enabled(wrapped(model))
    found = []
    for given in ((20, 29), (31, 17), (12, 40), (40, 12)):
        truth.zero_grad()
        model.zero_grad()
        torch.stack([truth(*data_of(other, given[other])) for other in range(2)]).mean().backward()
        model(*data_of(rank, given[rank])).backward()
        found.append(worst(model, truth))
    return found


def undone(rank: int) -> list[float]:
    model, truth = twins()
    wrapped(model)
    keys = list(model.state_dict())
    with enabled(model) as done:
        found = [step(model, truth, rank).error]
        assert list(model.state_dict()) == keys and done.is_enabled
        with pytest.raises(IntegrationError, match="compiled already"):
            enabled(model.get_submodule("body.layers.0"))
    assert not done.is_enabled and all("forward" not in module.__dict__ for module in model.modules())
    counted = {name: calls.counts.compiled for name, calls in done.calls.items()}
    found.append(step(model, truth, rank).error)
    assert counted == {name: calls.counts.compiled for name, calls in done.calls.items()}
    return found


def outside(rank: int) -> list[float]:
    found = labels_outside(rank, None)
    assert all(kind == "DeferredTensor" for _, kind in found)
    return [error for error, _ in found]


WAYS: dict[str, Callable[[int], list[float]]] = {
    "accumulated": accumulated,
    "enabled before": partial(stepped, before=True),
    "whole weights are kept": partial(stepped, reshard_after_forward=False),
    "whole weights are freed": partial(stepped, reshard_after_forward=True),
    "offloaded": partial(stepped, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "mixed precision": mixed_precision,
    "a tied weight": partial(stepped, make=partial(Nested, tied=True)),
    "a head by itself": partial(head_by_itself, reshard=None),
    "a head by itself, kept": partial(head_by_itself, reshard=False),
    "lengths": lengths,
    "undone": undone,
    "labels outside": outside,
}


def some_ways(rank: int, names: list[str]) -> dict[str, list[float]]:
    steps.LEAST, found = 1, {}
    for name in names:
        torch._dynamo.reset()
        found[name] = WAYS[name](rank)
    return found


@pytest.mark.long
@pytest.mark.parametrize("third", range(3))
def test_ways_of_fsdp2(third: int) -> None:
    for errors in on_ranks(some_ways, list(WAYS)[third::3]):
        assert errors and all(error < TOLERANCE for name in errors for error in errors[name]), errors


@pytest.mark.long
def test_a_head_by_itself_makes_no_logits_of_all_rows() -> None:
    for found in on_ranks(memory_of_head_by_itself):
        assert found.largest <= LONG * LARGE["vocabulary"] * 8 / 4


# -- what is refused


def under_checkpoints(rank: int) -> tuple[float, set[int], list[bool]]:
    """As accelerate's `fsdp_activation_checkpointing` has it: a wrapper around each layer, in which that is sharded."""
    model, truth = twins()
    for name in [name for name, module in model.named_modules() if module in layers_of(model)]:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name), preserve_rng_state=False))
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    before = [wrapper.checkpoint_fn for wrapper in wrappers]
    on = enabled(wrapped(model))
    on.disable()
    with torch._dynamo.config.patch(disable=True), enabled(model):  # nothing is compiled, so checkpoints stay
        assert [wrapper.checkpoint_fn for wrapper in wrappers] == before
    on = enabled(model)
    one_process(truth, rank)
    (model(*data_of(rank, LENGTH)) * (rank + 1)).backward()
    gradients = zip(model.parameters(), truth.parameters(), strict=True)
    error = max(float((own.grad.full_tensor() - true.grad).abs().max()) for own, true in gradients)  # type: ignore[union-attr]
    counts = {calls.counts.compiled for name, calls in on.calls.items() if "_checkpoint_wrapped_module" in name}
    on.disable()
    return error, counts, [wrapper.checkpoint_fn is kept for wrapper, kept in zip(wrappers, before, strict=True)]


def test_a_checkpoint_around_a_wrapped_layer_does_not_run_it_twice() -> None:
    for error, counts, are_back in on_ranks(under_checkpoints):
        assert error < TOLERANCE
        assert counts == {1}
        assert are_back == [True, True]


def test_a_tensor_goes_through_parallel_wrappers() -> None:
    inner = nn.Linear(2, 2)
    done = enable(nn.DataParallel(inner))
    assert "DataParallel" in str(done) and done.targets[0].module is inner
    given: Tensor = inner(torch.ones(1, 2))
    assert given.shape == (1, 2)


def test_a_budget_is_recommended_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are small by default, whatever is free. On a CPU nothing is said."""
    model = torch.nn.Linear(2, 2)
    with streamfx.enable(model) as enabled:
        assert "recommended" not in str(enabled)
        monkeypatch.setattr(torch.nn.Module, "parameters", lambda self: iter([SimpleNamespace(device=torch.device("cuda"))]))
        assert 'recommended on a GPU: memory_budget="auto"' in str(enabled)
        with streamfx.configure(memory_budget="24GiB"):
            assert "recommended" not in str(enabled)
