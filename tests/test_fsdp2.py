"""FSDP2 around a model that `enable` has compiled: exact against one process, streaming, with eager's collectives.

Two processes talk by gloo, each with data and a tangent of its own.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import streamfx
from streamfx import StaleOutputError
from streamfx.errors import IntegrationError
from streamfx.frontend.backend import streambp
from streamfx.integrations import EnabledModules, enable
from streamfx.lazy import steps
from tests.support.collectives import data_of, one_process, step, worst
from tests.support.engines import (
    LENGTH,
    OPTIONS,
    TOLERANCE,
    Masked,  # noqa: F401  (in tests/tables)
    Nested,
    all_ranks,
    enabled,
    graphs_seen,
    layers_of,
    loss_of,
    trained,
    twins,
    wrapped,
)
from tests.support.over_ranks import one_of_many
from tests.support.ranks import on_ranks
from tests.support.sharded import Layer
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled


def labels_outside(rank: int, reshard: bool | None) -> float:
    """A loss on returned logits, which are not deferred if weights are freed."""
    model, truth = twins()
    enabled(wrapped(model, reshard_after_forward=reshard))
    found = []
    for _ in range(2):
        one_process(truth, LENGTH)
        model.zero_grad()
        ids, labels = data_of(rank, LENGTH)
        logits = model(ids)
        assert type(logits).__name__ == ("Tensor" if reshard else "DeferredTensor")
        try:
            (loss_of(logits, labels) * (rank + 1)).backward()
        except StaleOutputError:
            return math.inf
        found.append(worst(model, truth))
    if reshard is None:
        with pytest.raises(StaleOutputError, match="was freed"):
            logits.sum().item()
    return max(found)


def of_layers(rank: int, layer: Callable[[int, int], Layer], graphs_of_layers: int) -> float:
    """Equal layers share a graph; layers with other numbers in attributes and buffers do not."""
    model, truth = twins(partial(Nested, layers=4, layer=layer))
    wrapped(model)
    with graphs_seen() as graphs:
        told = str(enabled(model))
        error = step(model, model, truth, LENGTH).error
    assert "FSDP2 (fully_shard): 5 wrapped modules" in told and "model.body.layers.0 and 3 like it" in told
    assert sum("scaled_dot_product_attention" in graph for graph in graphs) == graphs_of_layers == len(graphs) - 3, graphs
    assert "linear" in graphs[-1] and "cross_entropy" in graphs[-1]  # the head and its loss
    return error


def under_checkpoints(rank: int) -> float:
    """As accelerate's `fsdp_activation_checkpointing` has it: a wrapper around each layer, in which that is sharded."""
    model, truth = twins()
    for name in [name for name, module in model.named_modules() if module in layers_of(model)]:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name), preserve_rng_state=False))
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    before = [wrapper.checkpoint_fn for wrapper in wrappers]
    enabled(wrapped(model)).disable()
    with torch._dynamo.config.patch(disable=True), enabled(model):  # nothing is compiled, so checkpoints stay
        assert [wrapper.checkpoint_fn for wrapper in wrappers] == before
    on = enabled(model)
    one_process(truth, LENGTH)
    (model(*data_of(rank, LENGTH)) * (rank + 1)).backward()
    gradients = zip(model.parameters(), truth.parameters(), strict=True)
    error = max(float((own.grad.full_tensor() - true.grad).abs().max()) for own, true in gradients)
    assert {calls.counts.compiled for name, calls in on.calls.items() if "_checkpoint_wrapped_module" in name} == {1}
    on.disable()
    assert all(wrapper.checkpoint_fn is kept for wrapper, kept in zip(wrappers, before, strict=True))
    return error


def fsdp2(model: nn.Module, before: bool = False, **policies: Any) -> nn.Module:
    """`before`: enabled before it is wrapped."""
    if before:
        enabled(model)
    wrapped(model, **policies)
    if not before:
        enabled(model)
    return model


def head_by_itself(model: nn.Module, reshard: bool | None) -> nn.Module:
    """Each layer, the norm with the head, and the rest."""
    head = [model.get_submodule("body.norm"), model.get_submodule("head")]
    for layer in layers_of(model):
        fully_shard(layer, mesh=all_ranks())
    fully_shard(head, mesh=all_ranks(), reshard_after_forward=reshard)
    fully_shard(model, mesh=all_ranks())
    made.append(enabled(model))
    return model


made: list[EnabledModules] = []


def head_that_is_kept(rank: int) -> float:
    error = stepped(rank, engine=head_by_itself, reshard=False)
    assert "a loss on deferred outputs of a wrapped module stays in chunks" in str(made[-1])
    return error


def mixed_precision(rank: int) -> float:
    """Against eager with the same policy, relative to its own error."""
    model, truth = twins()
    eager = copy.deepcopy(model)
    policy = partial(MixedPrecisionPolicy, param_dtype=torch.float32, reduce_dtype=torch.float64)
    for own in (model, eager):
        for layer in layers_of(own):
            fully_shard(layer, mesh=all_ranks(), mp_policy=policy())
        fully_shard(own, mesh=all_ranks(), mp_policy=policy(output_dtype=torch.float64))
    enabled(model)
    mine, other = (step(own, own, truth, LENGTH).error for own in (model, eager))
    assert 0 < mine < 1e-6
    return max(0.0, mine - 2 * other)


def cut_head(model: nn.Module) -> nn.Module:
    """A head that is cut by words, and wrapped by itself."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], {"head": words})
    fully_shard(model.get_submodule("head"), mesh=mesh["data"], reshard_after_forward=False)
    enabled(wrapped(model, mesh["data"]))
    return model


def with_loss_parallel(rank: int) -> float:
    with loss_parallel():
        return trained(partial(Nested, vocabulary=18), cut_head, rank, groups=1)


def stepped(rank: int, engine: Any = fsdp2, **how: Any) -> float:
    return trained(Nested, partial(engine, **how), rank, kind=torch.optim.AdamW)


def offloaded_inputs(rank: int) -> float:
    def engine(model: nn.Module) -> nn.Module:
        wrapped(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        enable(model, **OPTIONS, offload="inputs")
        return model

    return trained(Nested, engine, rank, kind=torch.optim.AdamW)


WAYS: dict[str, Callable[[int], float]] = named_cases("ways", globals())


def some_ways(rank: int, names: list[str]) -> dict[str, float]:
    steps.MIN_NUMEL = 1  # else small logits are not deferred if the loss is outside their graph
    return {name: WAYS[name](rank) for name in names}


@pytest.mark.parametrize("first", only([0], range(0, len(WAYS), 4)))
def test_ways_of_fsdp2(first: int) -> None:
    for errors in on_ranks(some_ways, list(WAYS)[first : first + 4]):
        assert all(error < TOLERANCE for error in errors.values()), errors


# -- without other processes


def test_shards_of_a_dtensor_are_no_stale_graph() -> None:
    """`DTensor.from_local` marks the shard as it marks the full tensor. This raised StaleGraphError."""
    with one_of_many(2):
        x = torch.randn(1, 24, 8, requires_grad=True)
        sharded = DTensor.from_local(x * 2, all_ranks(), [Replicate()])
        torch.compile(lambda x: x.square().sum(), backend="streambp")(sharded).to_local().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_a_parameter_that_begins_to_train_is_detected() -> None:
    """Guards of Dynamo in torch 2.11 do not see `requires_grad_`: the backend's own function does."""
    made: list[Callable[..., Any]] = []
    frozen, trains = (torch.randn(8, 8, requires_grad=asks) for asks in (False, True))

    def backend(module: Any, given: Any) -> Any:
        made.append(streambp(module, given))
        return made[-1]

    torch.compile(lambda x, y: (x @ y).square().sum(), backend=backend)(frozen, trains)
    with pytest.raises(streamfx.StaleGraphError, match="requires_grad was switched on after compilation"):
        made[0](frozen.requires_grad_(), trains)


def test_a_budget_is_recommended_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default chunks are small. There is no such advice on a CPU."""
    with enable(nn.Linear(2, 2)) as done:
        assert "recommended" not in str(done)
        monkeypatch.setattr(nn.Module, "parameters", lambda self: iter([SimpleNamespace(device=torch.device("cuda"))]))
        assert 'recommended on a GPU: memory_budget="auto"' in str(done)
        with streamfx.configure(memory_budget="24GiB"):
            assert "recommended" not in str(done)


# -- DeepSpeed's ZeRO-3 is refused


class OfUser(nn.Module):
    """A module of user code: `compile` of a module of torch's own compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def compiled_in_place(model: nn.Module, x: Tensor) -> Any:
    """As DeepSpeed 0.19 does."""
    model.compile(backend="streambp")
    return model(x)


# functions, and the attribute that marks a parameter (`Init._convert_to_deepspeed_param`, DeepSpeed 0.19)
ZERO_3: dict[str, tuple[str, Callable[[nn.Module, Tensor], Any]]] = named_cases("zero 3", globals())


@pytest.mark.parametrize("way", ZERO_3)
def test_zero_3_is_refused(way: str) -> None:
    """Before anything runs: between calls a rank's weights are empty, and eager fails without the hooks."""
    model, (mark, call) = OfUser(), ZERO_3[way]
    setattr(model.inner.weight, mark, 0)
    if way in ("explain", "verify"):
        model.inner.weight.data = torch.empty(0)
    with pytest.raises(IntegrationError, match=f"streambp cannot compile a model of DeepSpeed's ZeRO-3\n.* {mark}:") as caught:
        call(model, torch.ones(3, 2))
    assert "ZeRO-2" in str(caught.value) and "fully_shard" in str(caught.value)
    assert way != "enable" or model._compiled_call_impl is None


def test_zero_3_after_enable_is_refused() -> None:
    model = nn.Linear(2, 2)
    enable(model)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(IntegrationError, match="ZeRO-3"):
        model(torch.ones(1, 2))
