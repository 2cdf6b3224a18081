"""FSDP2 around a head that is cut by words, with `loss_parallel`; who asks for gradients, where a graph gets parts of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import streamfx
from streamfx.frontend.backend import streambp
from tests.support.collectives import data_of, worst
from tests.support.engines import Nested, layers_of, twins
from tests.support.over_ranks import one_of_many
from tests.support.ranks import on_ranks
from tests.test_tensor_parallel import COLUMNS, ROWS

pytestmark = pytest.mark.long

LENGTHS = (24, 40)
LAYERS_TOO, HEAD_BY_ITSELF = "the layers are cut, too", "the head is wrapped by itself"
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("the head alone is cut", LAYERS_TOO)]


def enabled(rank: int, way: str) -> list[tuple[float, float]]:
    """By length, the errors of the loss and of the gradients."""
    model, truth = twins(partial(Nested, layers=2, vocabulary=18))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], {"head": words})
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in layers_of(model):
        if way == LAYERS_TOO:
            parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"])
    if way == HEAD_BY_ITSELF:
        fully_shard(model.get_submodule("head"), mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["data"])
    streamfx.enable(model, chunk_size=8, loss_chunk_size=8, check_passes=True)
    with loss_parallel():
        return [errors(model, truth, length) for length in LENGTHS]


def errors(model: nn.Module, truth: nn.Module, length: int) -> tuple[float, float]:
    losses: list[Any] = []
    for call in (model, truth):
        call.zero_grad()  # before the forward pass, which leaves FSDP's gathered parameters in the root
        losses.append(call(*data_of(0, length)))
        losses[-1].backward()
    own = losses[0].full_tensor() if isinstance(losses[0], DTensor) else losses[0]
    return (own - losses[1]).abs().item(), worst(model, truth)


@pytest.mark.parametrize("way", [HEAD_BY_ITSELF, *LONG])
def test_gradients_are_those_of_one_process(way: str) -> None:
    assert max(map(max, on_ranks(enabled, way)[0])) < 1e-12


# -- who asks for gradients


def test_parts_of_sharded_tensors_ask_for_nothing() -> None:
    """`DTensor.from_local` marks the part as it marks the whole, which a graph for the whole knows of; this raised StaleGraphError."""
    with one_of_many(2):
        mesh = init_device_mesh("cpu", (2,))
        x = torch.randn(1, 24, 8, requires_grad=True)
        sharded = DTensor.from_local(x * 2, mesh, [Replicate()])
        assert sharded._local_tensor.requires_grad
        torch.compile(lambda x: x.square().sum(), backend="streambp")(sharded).to_local().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach())


def kept_graph(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Any]:
    """What the backend has made of a function, without the guards of Dynamo, which in torch 2.11 do not see `requires_grad_`."""
    made: list[Callable[..., Any]] = []

    def backend(module: Any, given: Any) -> Any:
        made.append(streambp(module, given))
        return made[-1]

    torch.compile(call, backend=backend)(*inputs)
    return made[0]


def test_a_parameter_that_begins_to_train_is_noticed() -> None:
    frozen, trained = (torch.randn(8, 8, requires_grad=asks) for asks in (False, True))
    run = kept_graph(lambda x, y: (x @ y).square().sum(), frozen, trained)
    run(frozen, trained)
    with pytest.raises(streamfx.StaleGraphError, match="requires_grad was switched on after compilation"):
        run(frozen.requires_grad_(), trained)
