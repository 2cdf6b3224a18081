"""Sharded models on two ranks: exact, streaming, with at most the collectives of eager with checkpointing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamfx.errors import RanksDiffer
from tests.support.collectives import GATHER, REDUCE, SCATTER, Step, data_of, step, worst
from tests.support.engines import CHUNK, TOLERANCE, all_ranks, compiled, in_eager, twins
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded

pytestmark = pytest.mark.long

LAYERS = 2


def simple_fsdp() -> dict[int, Step]:
    """Steps of 1, 4 and 16 chunks by one compiled function, and of eager with checkpointing."""
    model, truth = twins(partial(Decoder, layers=LAYERS))
    call = compiled(sharded(model, all_ranks()), strict=True)

    def run(*parts: Tensor) -> Tensor:
        for part in parts:
            torch._dynamo.maybe_mark_dynamic(part, 1)
        return call(*parts)  # type: ignore[no-any-return]

    run(*data_of(0, 4 * CHUNK - 3)).backward()  # compiles
    found = {chunks: step(run, model, truth, chunks * CHUNK - 3) for chunks in (1, 4, 16)}
    return {**found, 0: in_eager(model, truth)}


def said_by(mesh: DeviceMesh, **options: Any) -> str:
    model, _ = twins(partial(Decoder, layers=1))
    try:
        compiled(sharded(model, mesh), **options)(*data_of(0, 4 * CHUNK)).backward()
    except RanksDiffer as error:
        return str(error)
    return "no error"


def lengths_of_ranks(rank: int) -> list[float]:
    """Each rank has another number of rows in each step, and compiles when it has to."""
    model, truth = twins(partial(Decoder, layers=1))
    run, found = compiled(sharded(model, all_ranks()), strict=True), []
    for lengths in ((16, 40), (24, 16), (40, 61)):
        model.zero_grad()
        truth.zero_grad()
        torch.stack([truth(*data_of(other, length)) / 2 for other, length in enumerate(lengths)]).sum().backward()
        run(*data_of(rank, lengths[rank])).backward()
        found.append(worst(model, truth))
    return found


def measured(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    plans = [said_by(mesh, reshard=rank == 0), said_by(mesh, reshard=rank == 0), said_by(mesh)]
    return {"steps": simple_fsdp(), "plans": plans, "lengths": lengths_of_ranks(rank)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank has measured."""
    return on_ranks(measured)


def test_gradients_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """Ranks have data and tangents of their own, and lengths."""
    assert all(max(own.loss_error, own.error) < TOLERANCE for own in found[0]["steps"].values())
    assert max(found[0]["lengths"]) < TOLERANCE


def test_collectives_are_at_most_those_of_eager_with_checkpointing(found: list[dict[str, Any]]) -> None:
    """In bytes; in calls there is one per stage, whatever the number of chunks: the embedding's weights are gathered with those of
    the first layer, and reduced with them. All other reductions begin while stages compute.
    """
    eager, one, own, sixteen = (found[0]["steps"][chunks] for chunks in (0, 1, 4, 16))
    assert (one.forward, one.backward) == (own.forward, own.backward) == (sixteen.forward, sixteen.backward)
    parameters = len(list(Decoder(LAYERS).parameters()))
    assert eager.forward.calls[GATHER] == eager.backward.calls[SCATTER] == parameters
    assert own.forward.calls == {GATHER: LAYERS, SCATTER: 0, REDUCE: 0}
    assert own.backward.calls == {GATHER: LAYERS - 1, SCATTER: 1 + LAYERS, REDUCE: 0}
    for kind in (GATHER, SCATTER):
        assert own.forward.bytes[kind] == eager.forward.bytes[kind]
        assert own.backward.bytes[kind] <= eager.backward.bytes[kind]
    assert own.backward.early == LAYERS / (1 + LAYERS)


def test_ranks_that_would_run_other_collectives_say_so(found: list[dict[str, Any]]) -> None:
    for own in found:
        first, second, same = own["plans"]
        assert "the same collectives in the same order" in first and first == second and same == "no error"
