"""Sharded models on two ranks: exact, streaming, with at most the collectives of eager with checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from streamfx.errors import RanksDifferError
from tests.support.collectives import GATHER, REDUCE, SCATTER, Step, data_of, of_any_length, step, worst
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded

pytestmark = pytest.mark.long

CHUNK, LAYERS = 8, 2


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    given = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True, **options}
    return torch.compile(model, backend="streambp", options=given)  # type: ignore[return-value]


def twins(**arguments: Any) -> tuple[Decoder, Decoder]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = Decoder(**arguments)
    return copy.deepcopy(truth), truth


def in_eager(model: nn.Module, truth: nn.Module, groups: int | None = None, length: int = 4 * CHUNK) -> Step:
    """A step with checkpointed layers."""
    for own in (model, truth):
        own.is_checkpointed = True  # type: ignore[assignment]
    return step(model, model, truth, length, groups)


def simple_fsdp() -> dict[str, Step]:
    """Steps of 1, 4 and 16 chunks by one compiled function, and of eager with checkpointing."""
    model, truth = twins(layers=LAYERS)
    sharded(model, init_device_mesh("cpu", (2,)))
    run = of_any_length(compiled(model, strict=True))
    run(*data_of(0, 4 * CHUNK - 3)).backward()  # compiles
    found = {f"{chunks} chunks": step(run, model, truth, chunks * CHUNK - 3) for chunks in (1, 4, 16)}
    return {**found, "eager": in_eager(model, truth)}


def plans_of_ranks(rank: int) -> list[str]:
    """What ranks say that keep other weights, twice, and what they say then of plans that are the same."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    return [said_by(mesh, reshard=rank == 0), said_by(mesh, reshard=rank == 0), said_by(mesh)]


def failure_of_a_rank(rank: int) -> str:
    fault = (
        mock.patch("streamfx.frontend.backend.run_pipeline", side_effect=ValueError("no such axis")) if rank else nullcontext()
    )
    with fault:
        return said_by(DeviceMesh.from_group(dist.new_group(), "cpu"))


def said_by(mesh: DeviceMesh, layers: int = 1, **options: Any) -> str:
    torch._dynamo.reset()
    model, _ = twins(layers=layers)
    try:
        compiled(sharded(model, mesh), **options)(*data_of(0, 4 * CHUNK)).backward()
    except RanksDifferError as error:
        return str(error)
    return "no error"


def measured(rank: int) -> dict[str, Any]:
    return {"steps": simple_fsdp(), "plans": plans_of_ranks(rank), "failure": failure_of_a_rank(rank)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank has measured."""
    return on_ranks(measured)


@pytest.fixture(scope="module")
def steps(found: list[dict[str, Any]]) -> dict[str, Step]:
    """Those of rank 0."""
    steps: dict[str, Step] = found[0]["steps"]
    return steps


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_gradients_are_those_of_one_process(steps: dict[str, Step], chunks: int) -> None:
    """Ranks have data and tangents of their own."""
    own = steps[f"{chunks} chunks"]
    assert own.loss_error < 1e-12 and own.error < 1e-12


def test_collectives_do_not_depend_on_the_number_of_chunks(steps: dict[str, Step]) -> None:
    one, four, sixteen = (steps[f"{chunks} chunks"] for chunks in (1, 4, 16))
    assert (one.forward, one.backward) == (four.forward, four.backward) == (sixteen.forward, sixteen.backward)


def test_collectives_are_at_most_those_of_eager_with_checkpointing(steps: dict[str, Step]) -> None:
    """In bytes; in calls there is one per stage: the embedding's weights are gathered with those of the first layer, and reduced
    with them.
    """
    own, eager = steps["4 chunks"], steps["eager"]
    parameters = len(list(Decoder(LAYERS).parameters()))
    assert eager.forward.calls[GATHER] == eager.backward.calls[SCATTER] == parameters
    assert own.forward.calls == {GATHER: LAYERS, SCATTER: 0, REDUCE: 0}
    assert own.backward.calls == {GATHER: LAYERS - 1, SCATTER: 1 + LAYERS, REDUCE: 0}
    for kind in (GATHER, SCATTER):
        assert own.forward.bytes[kind] == eager.forward.bytes[kind]
        assert own.backward.bytes[kind] <= eager.backward.bytes[kind]


def test_reductions_begin_while_others_compute(steps: dict[str, Step]) -> None:
    """All but those of the stage that comes last in the backward half: the first layer's and the embedding's."""
    assert steps["4 chunks"].backward.early == LAYERS / (1 + LAYERS)


def test_ranks_that_would_run_other_collectives_say_so(found: list[dict[str, Any]]) -> None:
    for own in found:
        first, second, same = own["plans"]
        assert "the same collectives in the same order" in first and first == second and same == "no error"


def test_ranks_hear_that_another_has_failed(found: list[dict[str, Any]]) -> None:
    here, there = (own["failure"] for own in found)
    assert "another rank does not run this graph" in here and "this rank could not analyse" in there
    assert "ValueError: no such axis" in here and "ValueError: no such axis" in there


# -- more ranks, other meshes


def uneven(rank: int) -> list[Step]:
    """Three ranks, which divide none of the sizes; a weight that is used twice."""
    found = []
    for tied in (False, True):
        torch._dynamo.reset()
        model, truth = twins(layers=1, tied=tied)
        sharded(model, init_device_mesh("cpu", (3,)))
        found.append(step(compiled(model, strict=True), model, truth, 4 * CHUNK))
    return found


def copies_of_shards(rank: int) -> list[Step]:
    """A mesh of two copies of two shards, with and without all whole weights kept."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for options in ({"reshard": True}, {"reshard": False}, {"keep_every": 2}):
        torch._dynamo.reset()
        model, truth = twins(layers=2)
        sharded(model, mesh, [Replicate(), Shard(0)])
        found.append(step(compiled(model, strict=True, **options), model, truth, 4 * CHUNK))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("case", "world"), [(uneven, 3), (copies_of_shards, 4)], ids=["uneven", "copies_of_shards"])
def test_other_meshes_are_exact(case: Callable[[int], list[Step]], world: int) -> None:
    for own in on_ranks(case, world=world)[0]:
        assert own.loss_error < 1e-12 and own.error < 1e-12


def lengths_of_ranks(rank: int) -> list[float]:
    """Each rank has another number of rows in each step, and compiles when it has to."""
    model, truth = twins(layers=1)
    sharded(model, init_device_mesh("cpu", (2,)))
    run, found = compiled(model, strict=True), []
    for lengths in ((16, 40), (24, 16), (40, 61)):
        model.zero_grad()
        truth.zero_grad()
        torch.stack([truth(*data_of(other, length)) / 2 for other, length in enumerate(lengths)]).sum().backward()
        run(*data_of(rank, lengths[rank])).backward()
        found.append(worst(model, truth))
    return found


@pytest.mark.long
def test_ranks_may_have_other_lengths() -> None:
    assert max(on_ranks(lengths_of_ranks)[0]) < 1e-12
