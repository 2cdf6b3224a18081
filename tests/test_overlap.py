"""Reductions begin while others compute, and no engine's step takes more than its own in eager with checkpointing.

On two ranks that talk by gloo. Peaks are bytes that the allocator of a rank has given out at once, beyond those that were there
before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel as DDP

from streamfx.integrations import enable
from tests.support.collectives import data_of
from tests.support.engines import Nested, checkpointed, layers_of
from tests.support.overlap import Overlap, Taken, begin_noted, noted_mean, stages_of
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded
from tests.support.spread import only
from tests.test_engines import wrapped
from tests.test_tensor_parallel import cut

OPTIONS: dict[str, Any] = {"chunk_size": 16, "loss_chunk_size": 16}
LAYERS = 3
STAGES = LAYERS + 1  # with the head
SIZES: dict[str, dict[str, int]] = {  # of widths, vocabularies and sequences
    "activations are most": {"width": 16, "vocabulary": 256, "length": 256},
    "logits are most": {"width": 16, "vocabulary": 2048, "length": 128},
}
SHORT = ["DDP", "SimpleFSDP"]
FIRST, *LARGE = "activations are most", "logits are most"


def model_of(kind: Callable[..., nn.Module], streamed: bool, width: int, vocabulary: int) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind(layers=LAYERS, width=width, vocabulary=vocabulary).double()
    if not streamed:
        checkpointed(model)
    return model


def compiled(model: nn.Module, streamed: bool) -> Any:
    return torch.compile(model, backend="streambp", options=OPTIONS) if streamed else model


def ddp(rank: int, streamed: bool, length: int, **sizes: int) -> Taken:
    """With a bucket for each gradient."""
    torch._dynamo.config.optimize_ddp = False
    model = model_of(Decoder, streamed, **sizes)
    wrapper = DDP(compiled(model, streamed), bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    wrapper.register_comm_hook(None, noted_mean(stages_of(model)))
    return Taken.by(model, lambda: wrapper(*data_of(rank, length)))


def reduced_to_owners(rank: int, streamed: bool, length: int, **sizes: int) -> Taken:
    """As ZeRO does it: by a hook on each parameter, which frees the gradient on all ranks but one."""
    model = model_of(Decoder, streamed, **sizes)
    stages, works = stages_of(model), list[Any]()

    def reduce(parameter: Tensor, owner: int) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        begin_noted([stages[parameter]])
        works.append((dist.reduce(gradient, owner, async_op=True), gradient if owner == rank else None))

    def step(loss: Tensor) -> None:
        loss.backward()
        for work, _ in works:
            work.wait()
        works.clear()

    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(reduce, owner=number % 2))
    run = compiled(model, streamed)
    return Taken.by(model, lambda: run(*data_of(rank, length)), step)


def simple_fsdp(rank: int, streamed: bool, length: int, **sizes: int) -> Taken:
    model = sharded(model_of(Decoder, streamed, **sizes), init_device_mesh("cpu", (2,)))
    run = compiled(model, streamed)
    return Taken.by(model, lambda: run(*data_of(rank, length)))


def by_stage(model: nn.Module) -> nn.Module:
    """By FSDP2: a group for each stage, so that no gradient of the head waits for the embedding's."""
    mesh, (embed, norm, head) = init_device_mesh("cpu", (2,)), map(model.get_submodule, ("body.embed", "body.norm", "head"))
    first, *layers = layers_of(model)
    for group in ([embed, first], *([layer] for layer in layers), [norm, head]):
        fully_shard(group, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def fsdp2(rank: int, streamed: bool, length: int, wrap: Callable[[nn.Module], nn.Module] = wrapped, **sizes: int) -> Taken:
    model = wrap(model_of(Nested, streamed, **sizes))
    if streamed:
        enable(model, **OPTIONS)
    return Taken.by(model, lambda: model(*data_of(rank, length)))


def tensor_parallel(rank: int, streamed: bool, length: int, **sizes: int) -> Taken:
    with loss_parallel():
        model = cut(model_of(Decoder, streamed, **sizes))
        run = compiled(model, streamed)
        return Taken.by(model, lambda: run(*data_of(0, length)))


ENGINES: dict[str, Callable[..., Taken]] = {
    "DDP": ddp,
    "reduced to owners": reduced_to_owners,
    "SimpleFSDP": simple_fsdp,
    "FSDP2": fsdp2,
    "FSDP2, by stage": partial(fsdp2, wrap=by_stage),
    "tensor parallel": tensor_parallel,
}


def taken(rank: int, name: str, size: str) -> tuple[Taken, Taken]:
    """With streambp, and in eager with checkpointing."""
    return ENGINES[name](rank, True, **SIZES[size]), ENGINES[name](rank, False, **SIZES[size])


@cache
def measured(name: str, size: str) -> list[tuple[Taken, Taken]]:
    """Of each rank."""
    return on_ranks(taken, name, size)


@pytest.mark.parametrize("name", only(SHORT, [name for name in ENGINES if name != "FSDP2"]))
def test_reductions_of_all_stages_but_one_begin_before_the_last_product(name: str) -> None:
    for own, _ in measured(name, FIRST):
        assert own.overlap.share >= (STAGES - 1) / STAGES


@pytest.mark.long
def test_a_group_of_first_and_last_weights_waits_for_the_first() -> None:
    """As in eager: embedding, norm and head are one group where the model is wrapped by layer and as a whole."""
    for own, eager in measured("FSDP2", FIRST):
        assert own.overlap == eager.overlap == Overlap(LAYERS - 1, 2)


@pytest.mark.parametrize("size", only([FIRST], [FIRST, *LARGE]))
@pytest.mark.parametrize("name", only(SHORT, [name for name in ENGINES if name != "FSDP2, by stage"]))
def test_no_step_takes_more_than_in_eager_with_checkpointing(name: str, size: str) -> None:
    """Where activations or logits are most of it. (A head that FSDP2 has wrapped by itself makes logits of all rows.)"""
    for own, eager in measured(name, size):
        assert own.memory.peak <= eager.memory.peak
