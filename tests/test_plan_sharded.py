"""`streamfx plan` for many devices: memory, communication and waiting per device; optimizers in the backward half."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import streamfx
from streamfx.cost.comm import Traffic, traffic_of_call
from streamfx.cost.meter import Meter
from streamfx.cost.work import Work
from streamfx.cost.workspaces import ALLOCATION_BLOCK
from streamfx.tools.planner.devices import device_by_name
from streamfx.tools.planner.models import build_model
from streamfx.tools.planner.overlap import Copies, OverlapInterval, Seconds, waiting_seconds
from tests.support.collectives import data_of
from tests.support.sharded import Decoder
from tests.support.spread import only
from tests.support.stages import descend, hooked
from tests.test_collectives import ranks  # noqa: F401  (a fixture)
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

LAYERS = 3
# parameters are most of the memory
DEEPER: dict[str, Any] = {**TINY, "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512}


def plan_of(world: int = 8, shard: str = "ddp", **arguments: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"seq": 128, "optimizer": "adamw", "baselines": False, "options": {"save": "inputs"}, **arguments}
    return streamfx.plan(DEEPER, world=world, shard=shard, **given).summary()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_model(DEEPER)


def numbers(model: nn.Module, within: str = "") -> int:
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if within in name)


SHARDS = [("ddp", 1, 1), ("zero1", 1, 8), ("zero2", 8, 8), ("zero3", 8, 8)]


@pytest.mark.parametrize(("shard", "parameters", "state"), only([SHARDS[3]], SHARDS))
def test_parameters_and_optimizer_states_are_sharded(shard: str, parameters: int, state: int, model: nn.Module) -> None:
    """Each gradient is reduced once. Each weight is gathered once, and in zero3 again, except for the last stage's.

    Gathered weights stay alive until their last use: all of them, because the embedding's is in the forward half; or those of two
    stages and an end.
    """
    found, whole, layer = plan_of(shard=shard), numbers(model), numbers(model, ".layers.0.")
    terms, wire, ends = found["peak_by_term"], found["wire"], whole - LAYERS * layer
    assert terms["parameters"] == pytest.approx(whole / parameters, rel=0.01)
    assert terms["optimizer"] == pytest.approx(2 * whole / state, rel=0.01)
    assert found["peak_bytes"] == sum(terms.values())
    assert 2 * 7 / 8 * whole * 0.98 <= wire["bytes"] <= (3 if shard == "zero3" else 2) * 7 / 8 * whole * 1.02
    assert (shard == "zero3") == (wire["bytes"] > 1.1 * 2 * 7 / 8 * whole)
    least, most = {"zero2": (layer * LAYERS, whole), "zero3": (1, 2 * layer + ends)}.get(shard, (0, 0))
    assert least <= wire.get("whole_weights_bytes", 0) <= 1.02 * most
    assert wire["seconds"] == wire["bytes"] / device_by_name("H100").near_and_far[0] and wire["far_bytes"] == 0
    assert 0 < wire["waited_seconds"] <= wire["seconds"] * 1.0001


# -- ranks that swap rows for heads

SMALL = {**TINY, "model_type": "qwen3", "num_attention_heads": 8, "head_dim": 8}


def context_plan(context: int, seq: int, **options: Any) -> dict[str, Any]:
    given = {"save": "inputs", **options}
    return streamfx.plan(SMALL, seq=seq, world=8, context=context, shard="zero3", baselines=False, options=given).summary()


def test_values_between_loops_have_their_own_categories() -> None:
    """The peak of a long sequence is in the gradient of attention."""
    seq, devices, tables = 1 << 17, 8, 2
    found = context_plan(devices, seq, chunk_size=64, loss_chunk_size=64, offload="inputs", keep_every=1)
    rows = seq // devices * 8 * 8 * 2  # of all heads: queries, and as many bytes of keys and of values, which are repeated
    terms = found["peak_by_term"]
    assert terms["exchanged rows"] == 4 * rows  # queries, keys, values, the gradient of the result
    kernel = (
        8 + 1
    ) * 4 * seq + 2 * ALLOCATION_BLOCK  # a sum of the queries' gradient in single precision, two numbers of a generator
    assert terms["whole attention"] == 4 * rows + 4 * seq + kernel  # the result with its log-sum-exps, three gradients
    assert terms["other"] <= tables * seq // devices * 8 * 2 + 1024  # cosines and sines of positions
    assert terms["stage inputs"] == seq // devices * 64 * 2  # of one layer: the other is on the host
    assert found["peak_bytes"] == sum(terms.values())


@pytest.mark.parametrize("ranks", [(64, 0), (64, 63)], indirect=True)
def test_traffic_spans_machines_if_its_group_does(ranks: DeviceMesh) -> None:  # noqa: F811
    world = dist.get_world_size()
    for size, apart, spans_machines in ((8, 1, 0), (4, 1, 0), (4, 2, 0), (4, 4, 1), (8, 8, 1), (2, 32, 1), (64, 1, 1)):
        own = dist.get_rank() // (size * apart) * size * apart + dist.get_rank() % apart
        group = dist.new_group(range(own, own + size * apart, apart), use_local_synchronization=True)
        sent = traffic_of_call(
            torch.ops._c10d_functional.all_reduce.default, (torch.ones(world), "sum", group.group_name), {}, None
        )
        assert sent is not None and (sent.ranks, sent.spans_machines) == (size, bool(spans_machines))


# -- communication overlaps with loops

TEN = Work(flops=10)


def of(size: int) -> Traffic:
    return Traffic(1, size)


def in_seconds(sent: float = 1.0) -> Seconds:
    """Seconds of a FLOP in loops, of a byte to other ranks, of a byte to the host and back."""
    return Seconds(lambda part: float(part.work.flops), lambda traffic: traffic.bytes * sent, float)


def test_a_stage_takes_the_longer_of_loops_and_communication() -> None:
    """Stages of 10 seconds; 1 byte takes a second."""
    forward = [OverlapInterval("forward", TEN, gathered=of(size)) for size in (3, 8, 14)]
    assert waiting_seconds(forward, in_seconds()) == (3 + 4, 0)
    sizes = ((0, 6), (8, 9), (5, 2))
    backward = [OverlapInterval("backward", TEN, gathered=of(gathered), reduced=of(reduced)) for gathered, reduced in sizes]
    assert waiting_seconds(backward, in_seconds()) == ((6 + 5 - 10) + 2, 0)
    assert waiting_seconds([*forward, *backward], in_seconds()) == (7 + 3, 0)
    assert waiting_seconds([OverlapInterval("forward", TEN, exposed=of(5))], in_seconds(0.5)) == (2.5, 0)
    assert waiting_seconds([], in_seconds()) == (0, 0)


def test_copies_to_the_host_wait_for_the_rest_of_a_stage() -> None:
    """Stage inputs go to the host during the next stage, and return during the backward half of that stage."""
    forward = [OverlapInterval("forward", TEN, copies=Copies(left=size)) for size in (12, 8, 3)]
    assert waiting_seconds(forward, in_seconds()) == (0, 2 + 3)
    backward = [OverlapInterval("backward", TEN, copies=Copies(fetched=size)) for size in (4, 17, 9)]
    assert waiting_seconds(backward, in_seconds()) == (0, 4 + 7)
    late = [OverlapInterval("backward", TEN), OverlapInterval("backward", TEN, gathered=of(15), copies=Copies(fetched=17))]
    assert waiting_seconds(late, in_seconds()) == (5, 2)


# -- optimizers in the backward half

WIDTH, VOCABULARY, LENGTH = 32, 18, 16
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8, "save": "inputs", "bodies": "eager"}
TOLERANCE = 0.05


def decoder() -> nn.Module:
    return Decoder(6, WIDTH, VOCABULARY, tied=True)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    ids, labels = (torch.empty(batch, length, dtype=torch.int64, device="meta") for _ in range(2))
    return {"ids": ids, "labels": labels}


def planned(inside: bool) -> int:
    """The peak beyond the memory before the step."""
    with torch.device("meta"):
        model = decoder()
    arguments: dict[str, Any] = {"seq": LENGTH, "optimizer": "sgd", "device": "here", "baselines": False, "options": OPTIONS}
    found = streamfx.plan(model, inputs=inputs, optimizer_in_backward=inside, **arguments).prediction
    return found.peak_bytes - sum(found.peak_by_term.get(name, 0) for name in ("parameters", "inputs", "optimizer"))


def measured(model: nn.Module) -> list[int]:
    """Peaks of a step with an optimizer without states inside of the backward half, and with none."""
    torch._dynamo.reset()
    data = data_of(0, LENGTH, VOCABULARY)
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


def test_the_predicted_peak_with_an_optimizer_in_backward_is_that_of_a_run() -> None:
    inside, after = measured(decoder())
    assert planned(True) == pytest.approx(inside, rel=TOLERANCE)
    assert planned(False) == pytest.approx(after, rel=TOLERANCE)
    assert inside < 0.6 * after  # two stages' gradients of seven
