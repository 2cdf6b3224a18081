"""`streamfx plan --world N --shard ...`: what each of many devices holds and sends, traced without any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import streamfx
from streamfx.cli import main
from streamfx.planner.devices import device_called
from streamfx.planner.models import built
from streamfx.planner.overlap import Stretch, waited
from tests.support.sharded import sharded
from tests.test_collectives import Two, ranks  # noqa: F401  (a fixture)
from tests.test_plan import TINY
from tests.test_wire import explained

LAYERS = 3
DEEPER = {**TINY, "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512}  # parameters are most of the memory


def plan_of(world: int = 8, shard: str = "ddp", **arguments: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"seq": 128, "optimizer": "adamw", "baselines": False, "options": {"save": "inputs"}, **arguments}
    return streamfx.plan(DEEPER, world=world, shard=shard, **given).summary()


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    return {shard: plan_of(shard=shard) for shard in ("ddp", "zero1", "zero2", "zero3")}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return built(DEEPER)


def numbers(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def layer_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if ".layers.0." in name)


def test_what_is_divided(plans: dict[str, dict[str, Any]], model: nn.Module) -> None:
    whole = numbers(model)
    for shard, parameters, state in (("ddp", 1, 1), ("zero1", 1, 8), ("zero2", 8, 8), ("zero3", 8, 8)):
        terms = plans[shard]["peak_by_term"]
        assert terms["parameters"] == pytest.approx(whole / parameters, rel=0.01)
        assert terms["optimizer"] == pytest.approx(2 * whole / state, rel=0.01)
        assert plans[shard]["peak_bytes"] == sum(terms.values())


def test_whole_weights(plans: dict[str, dict[str, Any]], model: nn.Module) -> None:
    """All until their last use, which the embedding has in the forward half; or those of two stages, an end among them."""
    ends = numbers(model) - LAYERS * layer_of(model)
    assert "whole weights" not in {**plans["ddp"]["peak_by_term"], **plans["zero1"]["peak_by_term"]}
    assert numbers(model) - ends <= plans["zero2"]["wire"]["whole_weights_bytes"] <= 1.02 * numbers(model)
    assert 0 < plans["zero3"]["wire"]["whole_weights_bytes"] <= 1.02 * (2 * layer_of(model) + ends)


def test_each_takes_less_than_the_one_before(plans: dict[str, dict[str, Any]]) -> None:
    peaks = [plans[shard]["peak_bytes"] for shard in ("ddp", "zero1", "zero2", "zero3")]
    assert peaks[0] > peaks[1] > peaks[3] and peaks[1] > peaks[2] >= peaks[3]


def test_what_is_sent(plans: dict[str, dict[str, Any]], model: nn.Module) -> None:
    """Each gradient is reduced once; each weight is gathered once, and but for the last stage's once more."""
    part = 7 / 8 * numbers(model)
    for shard in ("ddp", "zero1"):
        assert plans[shard]["wire"]["bytes"] == pytest.approx(2 * part, rel=0.01)
    assert plans["zero2"]["wire"]["bytes"] == pytest.approx(2 * part, rel=0.02)
    assert 2 * part < plans["zero3"]["wire"]["bytes"] <= 1.02 * 3 * part


def test_time_on_the_wire(plans: dict[str, dict[str, Any]]) -> None:
    rate = device_called("H100").wire(8)
    for found in plans.values():
        wire = found["wire"]
        assert wire["seconds"] == wire["bytes"] / rate
        assert 0 < wire["waited_seconds"] <= wire["seconds"] * 1.0001
    assert plans["zero1"]["wire"]["waited_seconds"] >= plans["ddp"]["wire"]["seconds"] / 2


@pytest.mark.parametrize("world", [64, pytest.param(256, marks=pytest.mark.long)])
def test_more_devices_hold_less_each(world: int, plans: dict[str, dict[str, Any]], model: nn.Module) -> None:
    found, fewer = plan_of(world, "zero3"), plans["zero3"]
    terms = found["peak_by_term"]
    rows = sum(parameter.nbytes // parameter.shape[0] for parameter in model.parameters())  # each is padded to the world
    assert numbers(model) / world <= terms["parameters"] <= numbers(model) / world + rows + 1024
    assert found["peak_bytes"] < fewer["peak_bytes"] and found["flops"] == fewer["flops"]
    assert [stage["chunk_size"] for stage in found["stages"]] == [stage["chunk_size"] for stage in fewer["stages"]]
    assert found["wire"]["bytes_per_second"] < fewer["wire"]["bytes_per_second"]  # between machines


def test_models_are_left_alone_by_divided_plans() -> None:
    model: nn.Module = built(TINY)
    kinds = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    streamfx.plan(model, seq=64, world=8, shard="zero3", baselines=False)
    assert [type(module) for module in model.modules()] == kinds and not dist.is_initialized()
    assert all(own is other for own, other in zip(model.parameters(), parameters, strict=True))


def test_a_budget_is_that_of_each_device(plans: dict[str, dict[str, Any]], model: nn.Module) -> None:
    """What does not hold parameters and state of a model alone has room for a step where they are divided."""
    budget = int(plans["zero3"]["peak_bytes"] * 1.05)
    assert budget < 3 * numbers(model)
    assert plan_of(shard="zero3", memory=budget, options={})["fits"]


def test_the_text_says_what_is_sent_and_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    given = ["plan", str(tmp_path), "--seq", "64", "--no-baselines", "--world", "8", "--shard", "zero3"]
    assert main(given) == 0
    text = capsys.readouterr().out
    for part in ("on each of 8 devices, zero3", "whole weights", "sent by each device", "of published rates in one direction"):
        assert part in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"world": 0}, "world cannot be 0"),
        ({"world": 8, "shard": "zero4"}, "nothing is divided as 'zero4'"),
        ({"world": 1, "shard": "zero3"}, "zero3 divides a step among devices"),
    ],
)
def test_worlds_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(streamfx.PlanError, match=said):
        streamfx.plan(TINY, **given)


def test_ranks_are_not_imagined_among_others(ranks: DeviceMesh) -> None:  # noqa: F811
    with pytest.raises(streamfx.PlanError, match="a process group, which this process belongs to"):
        streamfx.plan(TINY, seq=64, world=8)


def test_shards_on_the_meta_device_are_explained_as_others(ranks: DeviceMesh) -> None:  # noqa: F811
    wires = []
    for to in ("cpu", "meta"):
        with torch.device(to):
            model = sharded(Two(), ranks)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        wires.append(explained(model).summary()["wire"])
    assert wires[0] == wires[1]


# -- what computes meanwhile


def test_a_stage_takes_the_longer_of_loops_and_wire() -> None:
    """Stages of 10 seconds; 1 byte takes a second."""

    def seconds(part: Stretch) -> float:
        return float(part.flops)

    forward = [Stretch("forward", 10, 0, 0, gathered, 0) for gathered in (3, 8, 14)]
    assert waited(forward, seconds, 1.0) == 3 + 4
    backward = [Stretch("backward", 10, 0, 0, gathered, reduced) for gathered, reduced in ((0, 6), (8, 9), (5, 2))]
    assert waited(backward, seconds, 1.0) == (6 + 5 - 10) + 2
    assert waited([*forward, *backward], seconds, 1.0) == 7 + 3
    assert waited([Stretch("forward", 10, 0, 0, 0, 0, alone=5)], seconds, 2.0) == 2.5
    assert waited([], seconds, 1.0) == 0
