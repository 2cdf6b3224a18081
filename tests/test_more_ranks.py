"""Three, four and five ranks, and meshes of two by two: each engine is exact against one process.

Three and five divide no width, no vocabulary and no number of heads of the models here but where layers are cut by heads. Each
rank has data and a tangent of its own (those that share a sequence have it in common), and trains two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from streamfx.integrations import enable
from tests.support.collectives import data_of, worst
from tests.support.engines import Nested, layers_of
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, Layer, sharded
from tests.test_sequence_parallel import Gathered, Ulysses

pytestmark = pytest.mark.long

CHUNK, LENGTH, TOLERANCE, RATE = 8, 29, 1e-12, 0.5
OPTIONS: dict[str, Any] = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True}
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")

Engine = Callable[[nn.Module], nn.Module]


def trained(make: Callable[[], nn.Module], engine: Engine, rank: int, micro: int = 1, groups: int | None = None) -> float:
    """The largest error of a gradient in two steps of training, of `micro` batches each."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = make()
    model = copy.deepcopy(truth)
    run, world = engine(model), groups or dist.get_world_size()
    own, found = rank * world // dist.get_world_size(), list[float]()
    optimizers = [torch.optim.SGD(each.parameters(), RATE) for each in (run, truth)]
    for _ in range(2):
        for each in (run, truth):
            each.zero_grad()
        for part in range(micro):
            losses = [truth(*data_of(world * part + other, LENGTH)) * (other + 1) for other in range(world)]
            torch.stack(losses).mean().backward()
            (run(*data_of(world * part + own, LENGTH)) * (own + 1)).backward()
        found.append(worst(model, truth))
        for optimizer in optimizers:
            optimizer.step()
    return max(found)


def compiled(model: nn.Module, strict: bool = True) -> nn.Module:
    return torch.compile(model, backend="streambp", options={**OPTIONS, "strict": strict})  # type: ignore[return-value]


# -- engines of data


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    enable(model, **OPTIONS)
    return DDP(model, **options)


def simple_fsdp(model: nn.Module) -> nn.Module:
    return compiled(sharded(model, init_device_mesh("cpu", (dist.get_world_size(),))))


def fsdp2(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    fully_shard(model, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    enable(model, **OPTIONS)
    return model


def by_owner(model: nn.Module) -> nn.Module:
    """As ZeRO-1 and 2 do it: gradients are reduced by hooks, here to all ranks, as soon as each is there."""
    enable(model, **OPTIONS)

    def mean(parameter: Any) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(mean)
    return model


def of_data(rank: int) -> dict[str, float]:
    tied = partial(Nested, tied=True)
    return {
        "DDP": trained(Decoder, ddp, rank, micro=2),
        "DDP, a bucket each": trained(Decoder, partial(ddp, bucket_cap_mb=1e-6, gradient_as_bucket_view=True), rank),
        "DDP, a static graph": trained(partial(Decoder, tied=True), partial(ddp, static_graph=True), rank),
        "reduced by hooks": trained(Decoder, by_owner, rank),
        "SimpleFSDP": trained(Decoder, simple_fsdp, rank, micro=2),
        "SimpleFSDP, a tied weight": trained(partial(Decoder, tied=True), simple_fsdp, rank),
        "FSDP2": trained(Nested, fsdp2, rank, micro=2),
        "FSDP2, a tied weight": trained(tied, partial(fsdp2, reshard_after_forward=False), rank),
        "FSDP1": fsdp1(rank),
    }


def fsdp1(rank: int) -> float:
    """Against the same engine in eager, whose shards lie as its own do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Nested()
    pair = [model, copy.deepcopy(model)]
    for i, each in enumerate(pair):
        by_layer, device = ModuleWrapPolicy({Layer}), torch.device("cpu")
        pair[i] = FullyShardedDataParallel(each, auto_wrap_policy=by_layer, device_id=device, use_orig_params=True)  # type: ignore[call-overload]
    enable(pair[0], **OPTIONS)
    for each in pair:
        (each(*data_of(rank, LENGTH)) * (rank + 1)).backward()
    gradients = [[p.grad for p in each.parameters() if p.grad is not None and p.numel()] for each in pair]
    assert len(gradients[0]) == len(gradients[1]) > 0
    scale = max(gradient.abs().max().item() for gradient in gradients[1])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True)) / scale


# -- layers and sequences that ranks share


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Layers by heads and columns; embedding, head and loss by words, which no number of ranks here divides."""
    words: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    words["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(cut_layers(model, mesh), mesh, words)


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in layers_of(model):
        parallelize_module(layer, mesh, plan)
    return model


def tensor_parallel(rank: int) -> dict[str, float]:
    """A head of attention for each rank."""
    world = dist.get_world_size()
    make = partial(Decoder, layers=2, width=4 * world, vocabulary=6 * world)
    with loss_parallel():
        error = trained(make, lambda model: compiled(cut(model, init_device_mesh("cpu", (world,)))), rank, groups=1)
    return {"tensor parallel": error}


def sequence_parallel(rank: int, kind: type[Layer], width: int) -> float:
    """Each rank has the loss of its own rows of one sequence."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    truth, world = Decoder(layers=2, width=width), dist.get_world_size()
    model = copy.deepcopy(truth)
    for layer in model.layers:
        layer.__class__ = kind
    data, run = data_of(0, 20 * world), compiled(model, strict=False)  # what all ranks exchange at once runs whole
    truth(*data).backward()
    (run(*[part.chunk(world, 1)[rank] for part in data]) / world).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


def of_models(rank: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    width = 4 * dist.get_world_size()  # as many heads as ranks
    parts = {f"sequence parallel, {kind.__name__}": sequence_parallel(rank, kind, width) for kind in (Gathered, Ulysses)}
    return {**tensor_parallel(rank), **parts}


# -- two by two


def two_by_two(rank: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    data, model_ranks = mesh["data"], mesh["model"]
    sizes = partial(Decoder, layers=2, width=8, vocabulary=18)

    def copies_of_shards(model: nn.Module) -> nn.Module:
        return compiled(sharded(model, mesh, [Replicate(), Shard(0)]))

    def cut_and_copied(model: nn.Module) -> nn.Module:
        """Layers cut over one dimension; gradients are means over the other, by hooks."""

        def mean(parameter: Any) -> None:
            given = parameter.grad
            gradient = given.to_local() if isinstance(given, DTensor) else given
            dist.all_reduce(gradient, group=data.get_group())
            gradient /= 2

        run = compiled(cut(model, model_ranks))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(mean)
        return run

    def cut_and_sharded(model: nn.Module) -> nn.Module:
        """Layers cut over one dimension, and all of the model sharded over the other by FSDP2."""
        return fsdp2(cut_layers(model, model_ranks), data)

    with loss_parallel():
        copied = trained(sizes, cut_and_copied, rank, groups=2)
    both = trained(partial(Nested, width=8), cut_and_sharded, rank, groups=2)
    return {
        "SimpleFSDP, copies of shards": trained(Decoder, copies_of_shards, rank),
        "FSDP2, copies of shards": trained(Nested, partial(fsdp2, mesh=mesh), rank),
        "tensor parallel, copies": copied,
        "tensor parallel, FSDP2": both,
    }


CASES = {
    "data, 3": (of_data, 3),
    "data, 4": (of_data, 4),
    "data, 5": (of_data, 5),
    "models, 3": (of_models, 3),
    "models, 4": (of_models, 4),
    "models, 5": (of_models, 5),
    "2 x 2": (two_by_two, 4),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_each_engine_is_exact(case: str) -> None:
    function, world = CASES[case]
    found = on_ranks(function, world=world, limit=900.0)
    wrong = {name: error for own in found for name, error in own.items() if not error < TOLERANCE}
    assert not wrong and all(found)
