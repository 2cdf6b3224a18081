"""`streamfx plan --offload parameters`: plans against steps of FSDP2 with `CPUOffloadPolicy` on one gloo rank, and times."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import streamfx
from streamfx.cost.meter import Meter
from streamfx.cost.work import Work
from streamfx.ir.facts import known
from streamfx.runtime.pinned import bytes_pinned_by_torch
from streamfx.tools.cli import parser
from streamfx.tools.planner.devices import HOST_BANDWIDTH, device_by_name
from streamfx.tools.planner.host_weights import HostWeights, Unit
from streamfx.tools.planner.models import build_model
from streamfx.tools.planner.overlap import Copies, OverlapInterval, Seconds
from streamfx.tools.planner.shards import ALONE, state_bytes
from tests.support.collectives import data_of, worst
from tests.support.engines import Nested, layers_of
from tests.support.spread import only
from tests.test_plan import TINY

TOLERANCE = 0.05
LAYERS, WIDTH, VOCABULARY, LENGTH = 4, 64, 101, 128
OPTIONS: dict[str, Any] = {"chunk_size": 32, "loss_chunk_size": 32, "save": "inputs", "bodies": "eager"}


class Devices(Meter):
    """Counts the device's bytes of an imitation on a CPU: what operators allocate, and unsharded weights, which FSDP2 resizes.

    Weights on the host exist before, and gradients there are freed by hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
        states = [module._get_fsdp_state() for module in modules]
        groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]  # 2.13: a list
        self.parameters = [parameter for of_state in groups for group in of_state for parameter in group.fsdp_params]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.restart_peak()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        whole = [value for parameter in self.parameters for value in getattr(parameter, "all_gather_outputs", ())]
        self.most = max(self.most, self.peak + sum(value.untyped_storage().nbytes() for value in whole))
        return out


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def decoder(adapters: bool) -> nn.Module:
    """With `adapters`, all weights but those of queries are frozen."""
    model = Nested(LAYERS, WIDTH, VOCABULARY)
    if adapters:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".q." in name)
    return model


def free(parameter: Tensor) -> None:
    parameter.grad = None


def measured(adapters: bool, offload: str) -> int:
    """The most bytes on the device in a step, with inputs; gradients are eager's."""
    torch._dynamo.reset()
    with one_rank():
        model = decoder(adapters)
        truth = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (1,))
        for module in (*layers_of(model), model):
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        data = data_of(0, LENGTH, VOCABULARY)
        with streamfx.enable(model, **OPTIONS, offload=offload):
            model(*data).backward()  # compiles
            truth(*data).backward()
            assert worst(model, truth) < 1e-5
            model.zero_grad()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(free)
            with Devices(model) as meter:
                model(*data).backward()
    assert meter.live == 0
    return meter.most + sum(value.nbytes for value in data)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    ids, labels = (torch.empty(batch, length, dtype=torch.int64, device="meta") for _ in range(2))
    return {"ids": ids, "labels": labels}


def planned(adapters: bool, offload: list[str]) -> Any:
    with torch.device("meta"):
        model = decoder(adapters)
    given: dict[str, Any] = {"seq": LENGTH, "optimizer": "adamw", "device": "here", "baselines": False, "options": OPTIONS}
    return streamfx.plan(model, inputs=inputs, offload=["parameters", *offload], **given).prediction


WAYS = [(False, "none"), (False, "inputs"), (True, "none"), (True, "inputs")]


@pytest.mark.compiled
@pytest.mark.parametrize(("adapters", "offload"), only(WAYS[1:2], WAYS))
def test_the_planned_bytes_are_those_of_fsdp2(adapters: bool, offload: str) -> None:
    found = planned(adapters, [] if offload == "none" else [offload])
    assert found.peak_bytes == pytest.approx(measured(adapters, offload), rel=TOLERANCE)
    assert found.peak_bytes == sum(found.peak_by_term.values())
    stream, parameters = 4 * LENGTH * WIDTH, list(decoder(adapters).parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    weights, waiting = sum(parameter.nbytes for parameter in parameters), LAYERS - adapters if offload == "inputs" else 0
    assert found.host_bytes == weights + 3 * trained + waiting * stream


# -- without a step


def bytes_of(model: nn.Module, within: str = "") -> int:
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if within in name)


@pytest.mark.long
def test_copies_and_the_optimizers_step_take_time() -> None:
    given: dict[str, Any] = {"seq": 128, "optimizer": "adamw", "baselines": False, "offload": "parameters,inputs"}
    found, model = streamfx.plan(TINY, **given).summary(), build_model(TINY)
    host, rate = found["host"], known(device_by_name("H100").to_host)
    size, layers = bytes_of(model), bytes_of(model, ".layers.")
    assert host["bytes"] == sum(host["by_term"].values()) > 1 << 20
    with pytest.raises(streamfx.OverBudgetError) as caught:
        streamfx.plan(TINY, host_memory="1MiB", **given)
    assert caught.value.asked.endswith(" tokens does not fit into 1.0 MiB of host memory per device")
    assert caught.value.on_host == host["bytes"]
    assert "this fits: adamw8bit instead of adamw" in str(caught.value)
    assert host["copied_bytes"] == 2 * size + layers + 2 * 2 * 128 * 64 * 2  # the inputs of two layers, twice
    assert host["seconds"] == host["copied_bytes"] / rate and (size + layers) / rate < host["waited_seconds"] <= host["seconds"]
    assert host["step_seconds"] == host["step_waited_seconds"] == (3 * size + 4 * size) / HOST_BANDWIDTH


def test_pinned_memory_is_rounded_and_gradients_are_freed_by_an_optimizer_in_the_backward_pass() -> None:
    model = build_model(TINY)
    pinned = sum(bytes_pinned_by_torch(parameter.nbytes) for parameter in model.parameters())
    state = state_bytes(model, "adamw_master", ALONE)
    after, inside = (HostWeights.of(model, state, in_backward, is_pinned=True).host for in_backward in (False, True))
    assert after == {"parameters": pinned, "gradients": pinned, "optimizer": 6 * bytes_of(model)}
    assert inside == {**after, "gradients": max(2 * bytes_of(model, ".layers.0."), bytes_of(model) - bytes_of(model, ".layers."))}


def test_the_command_takes_several_values() -> None:
    lines = {
        "--offload": ["inputs"],
        "--offload parameters,inputs": ["parameters,inputs"],
        "--offload parameters --offload": None,
    }
    for line, values in lines.items():
        assert parser().parse_args(["plan", "Qwen3-8B", *line.split()]).offload == (values or ["parameters", "inputs"])
    with pytest.raises(streamfx.OptionError, match="one value besides 'parameters'"):
        streamfx.plan(TINY, offload="inputs,attention")
    with pytest.raises(streamfx.OptionError, match="option 'offload'"):
        streamfx.plan(TINY, offload="parameter")


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(streamfx.PlanError, match="without a list of layers"):
        HostWeights.of(nn.Linear(2, 2), 0, in_backward=False, is_pinned=False)
    with pytest.raises(streamfx.PlanError, match="no loop of the step"):
        HostWeights.of(decoder(False), 0, in_backward=False, is_pinned=False).places(())


TEN = Work(flops=10)


def test_the_device_waits_for_weights_and_for_slow_gradients() -> None:
    """Loops take 10 seconds, a byte a second: 2 x 2 layers of 3 and the rest of 1, gradients of 12 and 2."""
    seconds = Seconds(lambda interval: float(interval.work.flops), lambda traffic: 0.0, float)
    layers = {"a": Unit(3, 12, 3), "b": Unit(3, 12, 3)}
    intervals = [OverlapInterval("forward", TEN, copies=Copies(left=11), stage=name) for name in ("a.x", "b")]
    intervals += [OverlapInterval("backward", TEN, copies=Copies(fetched=4), stage=name) for name in ("b", "a.x")]
    for in_backward, gradients in ((False, 2), (True, 12)):
        weights = HostWeights(layers, Unit(1, 2, 1), 0, 0, {}, 26, in_backward)
        assert weights.waiting_seconds(intervals, seconds) == 4 * 3 + 1 + 2 * 1 + 2 * 4 + gradients + 12 + 2
    assert weights.step_seconds(intervals, seconds, 1.0) == (26, 6)
    assert weights.step_seconds(intervals, seconds, 2.0) == (13, 1)
