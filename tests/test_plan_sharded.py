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
from streamfx.cost.comm import Traffic, sent_by
from streamfx.cost.work import Work
from streamfx.cost.workspaces import GRANULE
from streamfx.runtime.pinned import bytes_pinned
from streamfx.tools.cli import main
from streamfx.tools.planner.devices import device_called
from streamfx.tools.planner.host_memory import Copies
from streamfx.tools.planner.models import built
from streamfx.tools.planner.overlap import OverlapInterval, Seconds, waited
from tests.support.sharded import sharded
from tests.test_collectives import Two, ranks  # noqa: F401  (a fixture)
from tests.test_plan import TINY
from tests.test_wire import explained

LAYERS = 3
DEEPER: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 512,
}  # parameters are most of the memory


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


@pytest.mark.long
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
    rate, _ = device_called("H100").near_and_far
    for found in plans.values():
        wire = found["wire"]
        assert wire["seconds"] == wire["bytes"] / rate and wire["far_bytes"] == 0
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
    assert found["wire"]["far_bytes"] == found["wire"]["bytes"] > fewer["wire"]["bytes"]  # between machines
    assert found["wire"]["seconds"] > 5 * fewer["wire"]["seconds"]


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
    for part in ("on each of 8 devices, zero3", "whole weights", "each device sends", "of published rates in one direction"):
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


TEN = Work(flops=10)


def of(size: int) -> Traffic:
    return Traffic(1, size)


def in_seconds(sent: float = 1.0) -> Seconds:
    """Of a FLOP in loops, of a byte to others, of a byte to the host and back."""
    return Seconds(lambda part: float(part.work.flops), lambda traffic: traffic.bytes * sent, float)


def test_a_stage_takes_the_longer_of_loops_and_wire() -> None:
    """Stages of 10 seconds; 1 byte takes a second."""
    forward = [OverlapInterval("forward", TEN, gathered=of(size)) for size in (3, 8, 14)]
    assert waited(forward, in_seconds()) == (3 + 4, 0)
    sizes = ((0, 6), (8, 9), (5, 2))
    backward = [OverlapInterval("backward", TEN, gathered=of(gathered), reduced=of(reduced)) for gathered, reduced in sizes]
    assert waited(backward, in_seconds()) == ((6 + 5 - 10) + 2, 0)
    assert waited([*forward, *backward], in_seconds()) == (7 + 3, 0)
    assert waited([OverlapInterval("forward", TEN, alone=of(5))], in_seconds(0.5)) == (2.5, 0)
    assert waited([], in_seconds()) == (0, 0)


def test_copies_take_what_loops_and_wire_leave_over() -> None:
    """Inputs of stages go to the host while the next stage runs, and come back while the one after them runs."""
    forward = [OverlapInterval("forward", TEN, copies=Copies(left=size)) for size in (12, 8, 3)]
    assert waited(forward, in_seconds()) == (0, 2 + 3)
    backward = [OverlapInterval("backward", TEN, copies=Copies(fetched=size)) for size in (4, 17, 9)]
    assert waited(backward, in_seconds()) == (0, 4 + 7)
    late = [OverlapInterval("backward", TEN), OverlapInterval("backward", TEN, gathered=of(15), copies=Copies(fetched=17))]
    assert waited(late, in_seconds()) == (5, 2)


def test_groups_inside_of_a_machine_send_at_its_rate() -> None:
    """Ranks that divide a sequence swap rows near, and gather weights from all the others."""
    found = plan_of(64, "zero3", seq=1024, context=4, optimizer="none")["wire"]
    near, far = found["bytes_per_second"]["near"], found["bytes_per_second"]["far"]
    exchanged = sum(found[half]["exchanges"]["bytes"] for half in ("forward", "backward"))
    assert 0 < exchanged == found["bytes"] - found["far_bytes"]
    assert found["seconds"] == pytest.approx(exchanged / near + found["far_bytes"] / far)
    assert near > far


@pytest.mark.parametrize("ranks", [(64, 0), (64, 63)], indirect=True)
def test_which_groups_lie_inside_of_a_machine(ranks: DeviceMesh) -> None:  # noqa: F811
    world = dist.get_world_size()
    for size, apart, is_far in (
        (8, 1, False),
        (4, 1, False),
        (4, 2, False),
        (4, 4, True),
        (8, 8, True),
        (2, 32, True),
        (64, 1, True),
    ):
        own = dist.get_rank() // (size * apart) * size * apart + dist.get_rank() % apart
        group = dist.new_group(range(own, own + size * apart, apart), use_local_synchronization=True)
        sent = sent_by(torch.ops._c10d_functional.all_reduce.default, (torch.ones(world), "sum", group.group_name), {}, None)
        assert sent is not None and (sent.ranks, sent.is_far) == (size, is_far)


def test_copies_to_the_host_take_time() -> None:
    options = {"save": "inputs", "offload": "inputs", "keep_every": 1, "chunk_size": 64}
    found = streamfx.plan(DEEPER, seq=512, baselines=False, options=options).summary()
    host, rate = found["host"], device_called("H100").to_host
    assert rate is not None and host["bytes"] == (LAYERS - 1) * 512 * 256 * 2  # the last is needed at once
    assert host["copied_bytes"] == 2 * host["bytes"] and host["seconds"] == host["copied_bytes"] / rate
    assert 0 < host["waited_seconds"] <= host["seconds"]
    assert (
        found["seconds"]
        > streamfx.plan(DEEPER, seq=512, baselines=False, options={**options, "offload": "none"}).summary()["seconds"]
    )


def test_results_of_attention_wait_on_the_host() -> None:
    """Each is copied beside loops, and takes whole pages; the device has those of two stages at most, and runs attention once."""
    length, options = 500, {"keep_every": 1, "chunk_size": 64, "loss_chunk_size": 64}
    found, kept = (
        streamfx.plan(DEEPER, seq=length, baselines=False, options={**options, **own}).summary()
        for own in ({"offload": "attention"}, {"save": "attention"})
    )
    stream = length * DEEPER["hidden_size"] * 2
    stage = [stream, length * DEEPER["num_attention_heads"] * 4]  # the result, and a log-sum-exp for each row and head
    on_host = LAYERS * sum(map(bytes_pinned, stage)) + (LAYERS - 1) * bytes_pinned(stream)
    assert found["host"]["bytes"] == on_host > LAYERS * sum(stage) + (LAYERS - 1) * stream
    assert found["host"]["copied_bytes"] == 2 * (LAYERS * sum(stage) + (LAYERS - 1) * stream)
    assert found["flops"] == kept["flops"]
    assert found["peak_by_term"].get("stage inputs", 0) <= 2 * (sum(map(rounded, stage)) + rounded(stream))


def rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE
