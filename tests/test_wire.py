"""`explain` counts the communication of a step without other ranks: by kind and stage, in loops and between them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

import streamfx
from streamfx.cost.comm import CallTraffic, traffic_of_call, traffic_of_node
from tests.support.collectives import GATHER, REDUCE, SCATTER, Step, data_of, step
from tests.support.engines import CHUNK, TOLERANCE, all_ranks, compiled, cut_layers, in_eager, twins
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded
from tests.support.spread import only
from tests.test_collectives import Two, ranks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.compiled

c10d, LAYERS = torch.ops._c10d_functional, 2


def explained(model: Any, length: int = 12, chunk: int = 4, **options: Any) -> streamfx.Explanation:
    torch._dynamo.reset()
    vocabulary = 11 if isinstance(model, Two) else 17
    return streamfx.explain(
        model, *data_of(0, length, vocabulary), options={"chunk_size": chunk, "loss_chunk_size": chunk, **options}
    )


# -- one call

WHOLE = torch.empty(8, 6, device="meta")
CALLS: list[tuple[Any, tuple[Any, ...], Any, CallTraffic | None]] = [
    (c10d.all_gather_into_tensor.default, (WHOLE[:2], 4, "0"), WHOLE, CallTraffic("gathers", 4, 144)),
    (c10d.all_gather_into_tensor_coalesced.default, ([WHOLE[:2]] * 2, 4, "0"), [WHOLE] * 2, CallTraffic("gathers", 4, 288)),
    (c10d.reduce_scatter_tensor.default, (WHOLE, "sum", 4, "0"), WHOLE[:2], CallTraffic("reductions", 4, 144)),
    (c10d.all_reduce.default, (WHOLE, "sum", "0"), WHOLE, CallTraffic("reductions", 4, 288)),
    (c10d.all_reduce_.default, (WHOLE, "sum", "0"), WHOLE, CallTraffic("reductions", 4, 288)),
    (c10d.all_to_all_single.default, (WHOLE, [2] * 4, [2] * 4, "0"), WHOLE, CallTraffic("exchanges", 4, 144)),
    (c10d.broadcast.default, (WHOLE, 0, "0"), WHOLE, CallTraffic("exchanges", 4, 144)),
    (c10d.wait_tensor.default, (WHOLE,), WHOLE, None),
    (torch.ops.aten.neg.default, (WHOLE,), WHOLE, None),
]


@pytest.mark.parametrize("ranks", [(4, 0)], indirect=True)
@pytest.mark.parametrize(("target", "args", "result", "sent"), CALLS, ids=lambda item: getattr(item, "__name__", ""))
def test_bytes_of_a_call(ranks: DeviceMesh, target: Any, args: tuple[Any, ...], result: Any, sent: CallTraffic | None) -> None:  # noqa: F811
    """Of 192 bytes on four ranks; the same for a node that holds what was traced."""
    assert traffic_of_call(target, args, {}, result) == sent
    graph = fx.Graph()
    given = args[0] if isinstance(args[0], list) else [args[0]]
    nodes = [graph.placeholder(f"x{i}") for i in range(len(given))]
    for node, value in zip(nodes, given, strict=True):
        node.meta["val"] = value
    call = graph.call_function(target, (nodes if isinstance(args[0], list) else nodes[0], *args[1:]))
    call.meta["val"] = result
    assert traffic_of_node(call) == sent


# -- a step


@pytest.mark.parametrize("ranks", [(2, 0), pytest.param((8, 0), marks=pytest.mark.long)], indirect=True, ids=["2", "8"])
def test_communication(ranks: DeviceMesh, golden: Callable[[str], None]) -> None:  # noqa: F811
    golden(f"{explained(sharded(Two(4), ranks))}\n")


def test_no_communication_is_not_shown() -> None:
    found = explained(Two())
    assert "wire" not in str(found) and found.summary()["wire"] is None
    assert all(stage["wire"] is None for stage in found.summary()["stages"])


@pytest.mark.parametrize("reshard", only(["auto"], ["auto", False]))
def test_the_communication_of_a_step_is_the_sum_over_stages(ranks: DeviceMesh, reshard: Any) -> None:  # noqa: F811
    """Counted by node in the outer graphs, and by operator as they run. Weights of two layers are alive at once."""
    model = Decoder(3)
    layer, rest = sum(own.nbytes for own in model.layers[0].parameters()), model.embed.weight.nbytes + model.head.weight.nbytes
    found = explained(sharded(model, ranks), reshard=reshard)
    wire, (cost,) = found.summary()["wire"], found.costs
    for half, kinds in (("forward", cost.forward_traffic), ("backward", cost.backward_traffic)):
        for kind in ("gathers", "reductions"):
            of_stages = [stage["wire"][half][kind] for stage in found.summary()["stages"]]
            assert wire[half][kind] == {name: sum(part[name] for part in of_stages) for name in ("calls", "bytes")}
            assert wire[half][kind] == {"calls": kinds[kind].calls, "bytes": kinds[kind].bytes}
    assert not reshard or layer < wire["whole_weights_bytes"] <= 2 * layer + rest


def test_the_communication_of_an_unchunked_graph_is_counted(ranks: DeviceMesh) -> None:  # noqa: F811
    """Without a sequence, AOTAutograd's halves run."""

    def step(x: Tensor, weight: Tensor) -> Tensor:
        world: Any = dist.group.WORLD
        return (x * c10d.wait_tensor(c10d.all_reduce(weight, "sum", world.group_name))).sum()

    wire = streamfx.explain(step, torch.ones(4, requires_grad=True), torch.ones(4)).summary()["wire"]
    assert wire["forward"]["reductions"] == {"calls": 1, "bytes": 16} == wire["eager"]["forward"]["reductions"]
    assert wire["early_reductions"] is None and not wire["eager"]["checkpointed"]


# -- against a real step


def counted(rank: int) -> list[tuple[Step, dict[str, Any], Step]]:
    """A step in the profiler, its communication in `explain`, and eager's step with checkpointing."""
    found = []
    for engine, groups in ((sharded, None), (cut_layers, 1)):
        plain, truth = twins(partial(Decoder, layers=LAYERS))
        model = engine(plain, all_ranks())
        wire = explained(model, 4 * CHUNK, CHUNK).summary()["wire"]
        torch._dynamo.reset()
        run = compiled(model)
        run(*data_of(0, 4 * CHUNK)).backward()  # compiles
        found.append((step(run, model, truth, 4 * CHUNK, groups), wire, in_eager(model, truth, groups)))
    return found


@pytest.fixture(scope="module")
def steps() -> list[tuple[Step, dict[str, Any], Step]]:
    return on_ranks(counted)[0]  # type: ignore[no-any-return]


def test_explain_agrees_with_the_profiler(steps: list[tuple[Step, dict[str, Any], Step]]) -> None:
    """On two ranks: half of a gather's bytes twice, half of a reduce-scatter's, all of an all-reduce's."""
    for own, wire, eager in steps:
        for said, seen in ((wire, own), (wire["eager"], eager)):
            for half, real in (("forward", seen.forward), ("backward", seen.backward)):
                assert said[half]["gathers"]["calls"] == real.calls[GATHER]
                assert said[half]["gathers"]["bytes"] == real.bytes[GATHER]
                reductions = [said[half]["reductions"], said[half]["in_loops"]]
                assert sum(part["calls"] for part in reductions) == real.calls[SCATTER] + real.calls[REDUCE]
                assert sum(part["bytes"] for part in reductions) == real.bytes[SCATTER] // 2 + real.bytes[REDUCE]


def test_collectives_are_at_most_those_of_eager_with_checkpointing(steps: list[tuple[Step, dict[str, Any], Step]]) -> None:
    """In bytes; in calls, one per stage: the embedding is gathered and reduced with the first layer. All reductions but the last
    begin while stages compute.
    """
    own, _, eager = steps[0]
    assert max(own.loss_error, own.error) < TOLERANCE
    parameters = len(list(Decoder(LAYERS).parameters()))
    assert eager.forward.calls[GATHER] == eager.backward.calls[SCATTER] == parameters
    assert own.forward.calls == {GATHER: LAYERS, SCATTER: 0, REDUCE: 0}
    assert own.backward.calls == {GATHER: LAYERS - 1, SCATTER: 1 + LAYERS, REDUCE: 0}
    assert own.forward.bytes == eager.forward.bytes
    assert all(own.backward.bytes[kind] <= eager.backward.bytes[kind] for kind in (GATHER, SCATTER))
    assert own.backward.early == LAYERS / (1 + LAYERS)


def test_cut_layers_reduce_no_more_bytes_than_in_eager(steps: list[tuple[Step, dict[str, Any], Step]]) -> None:
    """The gradients from queries, keys and values are summed before one reduction: four fewer in two layers."""
    own, _, eager = steps[1]
    assert max(own.loss_error, own.error) < TOLERANCE
    assert own.forward.bytes[REDUCE] == eager.forward.bytes[REDUCE]
    assert own.backward.bytes[REDUCE] == eager.backward.bytes[REDUCE] - 4 * (4 * CHUNK) * 8 * 8  # rows of 8 numbers
    assert own.forward.calls[REDUCE] == 4 * eager.forward.calls[REDUCE]
    assert own.backward.calls[REDUCE] == 4 * (eager.backward.calls[REDUCE] - 4)
