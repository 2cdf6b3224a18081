"""`streamfx plan --optimizer-in-backward`: gradients are freed where they are used, and the peak is that of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import streamfx
from streamfx.cost.meter import Meter
from tests.support.collectives import data_of
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded
from tests.support.spread import only
from tests.support.stages import descend, hooked

LAYERS, WIDTH, VOCABULARY, LENGTH = 6, 32, 18, 16
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8, "save": "inputs", "bodies": "eager"}
TOLERANCE = 0.05


def decoder(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(LAYERS, WIDTH, VOCABULARY, tied=tied)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    ids, labels = (torch.empty(batch, length, dtype=torch.int64, device="meta") for _ in range(2))
    return {"ids": ids, "labels": labels}


def planned(tied: bool, inside: bool, **given: Any) -> int:
    """The peak, but for what is there before the step."""
    with torch.device("meta"):
        model = decoder(tied)
    arguments: dict[str, Any] = {"seq": LENGTH, "optimizer": "sgd", "device": "here", "baselines": False, "options": OPTIONS}
    found = streamfx.plan(model, inputs=inputs, optimizer_in_backward=inside, **arguments, **given).prediction
    return found.peak_bytes - sum(found.peak_by_term.get(name, 0) for name in ("parameters", "inputs", "optimizer"))


def measured(model: nn.Module, rank: int = 0) -> list[int]:
    """The peak of a step with an optimizer that takes no memory of its own inside of the backward pass, and with none."""
    torch._dynamo.reset()
    data = data_of(rank, LENGTH, VOCABULARY)
    run, peaks = torch.compile(model, backend="streambp", options=OPTIONS), []
    for inside in (True, False):
        with hooked(list(model.parameters()) if inside else [], descend):
            run(*data).backward()  # compiles
            model.zero_grad()
            with Meter() as meter:
                run(*data).backward()
            model.zero_grad()
        peaks.append(meter.peak)
    return peaks


@pytest.mark.parametrize("tied", only([True], [False, True]))
def test_the_peak_is_that_of_a_run(tied: bool) -> None:
    inside, behind = measured(decoder(tied))
    assert planned(tied, True) == pytest.approx(inside, rel=TOLERANCE)
    assert planned(tied, False) == pytest.approx(behind, rel=TOLERANCE)
    assert inside < 0.6 * behind  # two stages' gradients of seven


def of_a_rank(rank: int) -> list[int]:
    return measured(sharded(decoder(), init_device_mesh("cpu", (2,))), rank)


@pytest.mark.long
def test_the_peak_of_a_rank_is_that_of_a_run() -> None:
    inside, behind = on_ranks(of_a_rank)[0]
    assert planned(False, True, world=2, shard="zero3") == pytest.approx(inside, rel=TOLERANCE)
    assert planned(False, False, world=2, shard="zero3") == pytest.approx(behind, rel=TOLERANCE)
    assert inside < 0.8 * behind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "none"}, "one of sgd, adamw, adamw8bit"),
        ({"optimizer": "adamw", "world": 8, "shard": "zero1"}, "plan with ddp, zero2 or zero3"),
    ],
)
def test_optimizers_that_cannot_run_there(given: dict[str, Any], said: str) -> None:
    with pytest.raises(streamfx.PlanError, match=said):
        streamfx.plan("Qwen3-8B", optimizer_in_backward=True, **given)
