"""Where collectives on weights run, in a fake process group that only computes shapes, and what they send."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

import streamfx
from streamfx.cost.comm import CallTraffic, traffic_of_call, traffic_of_node
from streamfx.ir.facts import Facts
from streamfx.ir.joint import trained_sources
from streamfx.tools.report.printer import text_of
from tests.support.collectives import GATHER, REDUCE, SCATTER, Step, data_of, step
from tests.support.engines import CHUNK, TOLERANCE, all_ranks, compiled, cut_layers, in_eager, twins
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, sharded
from tests.support.spread import only, spread
from tests.support.tables import listed_cases

pytestmark = pytest.mark.compiled

Golden = Callable[[str], None]
GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """A mesh of `world` ranks; this process is rank 0 or the requested one."""
    world, rank = getattr(request, "param", (2, 0))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield init_device_mesh("cpu", (world,))
    dist.destroy_process_group()


class Two(nn.Module):
    """Two layers of attention, each with one weight, and a head: every collective of theirs shows in the text."""

    def __init__(self, layers: int = 2, width: int = 4, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        for layer in self.layers:
            x = x + F.scaled_dot_product_attention(layer(x), x, x, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 2), labels.flatten())


def texts_of(model: nn.Module, length: int = 12, **options: Any) -> dict[str, str]:
    """Return the text of each pass's facts for a step of a model."""
    found: dict[str, str] = {}

    def noted(step: Any, facts: Facts) -> None:
        found[step.name] = text_of(facts, step.name)

    given = {"chunk_size": 4, "loss_chunk_size": 4, "strict": True, "check_passes": True, **options}
    torch._dynamo.reset()
    with mock.patch("streamfx.frontend.backend.show_product", noted):
        torch.compile(model, backend="streambp", options=given)(*data_of(0, length, 11)).backward()
    return found


def halves(texts: dict[str, str]) -> list[list[str]]:
    """Return the loops and collectives of the forward and of the backward, in order."""
    collectives = r"all_gather\w+|reduce_scatter\w+|wait\w+"
    pattern = rf"= (?:_c10d_functional\.)?(\w+_(?:forward|backward|again)\w*|{collectives})\("
    return [re.findall(pattern, half) for half in texts["reinsert_collectives"].split("\nbackward(")]


def test_both_halves(ranks: DeviceMesh, golden: Golden) -> None:
    texts = texts_of(sharded(Two(), ranks))
    golden(texts["unshard"] + "\n" + texts["reinsert_collectives"])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(256, 255)], indirect=True)
def test_collectives_depend_on_no_length_and_no_rank(ranks: DeviceMesh) -> None:
    """The last of many ranks holds no rows of some weights, and pads them."""
    model = sharded(Two(), ranks)
    forward, backward = found = halves(texts_of(model, 61))
    assert found == halves(texts_of(model, 12, chunk_size=12))
    assert forward.count(GATHERS) == backward.count(SCATTERS) == 4


@pytest.mark.long
def test_a_weight_that_is_also_read_as_a_shard_is_unchanged(ranks: DeviceMesh) -> None:
    class Shown(Two):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            shard: Any = self.layers[0]._parameters["weight"]
            return super().forward(ids, labels) + shard.to_local().square().sum()

    found = texts_of(sharded(Shown(), ranks), strict=False)
    assert found["unshard"].count("weight primals") == 3 and found["unshard"].count("gradient of") >= 3


class GathersMask(nn.Module):
    mask: Tensor

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.layer = change, nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(12, 12).tril())

    def forward(self, x: Tensor) -> Tensor:
        everybody: Any = dist.group.WORLD
        hidden = all_gather_tensor(self.change(self.mask), 0, everybody) == 0
        q = self.layer(x)
        return (q @ q.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1) @ q


CHANGES: list[Callable[[Tensor], Tensor]] = listed_cases("changes", globals())


@pytest.mark.parametrize("change", spread(CHANGES, 3))
def test_a_mask_that_is_gathered_is_not_that_of_its_shard(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """The known values of a buffer say nothing about the shards of other ranks."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = GathersMask(change).double()
        x = torch.randn(2, 12, 4, dtype=torch.float64, requires_grad=True)
        compiled = torch.compile(model, backend="streambp", options={"chunk_size": 4})
        torch.testing.assert_close(
            *(torch.autograd.grad(call(x).square().sum(), [x, *model.parameters()]) for call in (compiled, model))
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_when_weights_are_regathered(ranks: DeviceMesh) -> None:
    """`reshard` decides, and by default the code; a budget does not, because ranks may have different ones."""
    model = sharded(Two(), ranks)
    auto, always, never = (halves(texts_of(model, reshard=value)) for value in ("auto", True, False))
    assert [backward.count(GATHERS) for _, backward in (auto, always, never)] == [2, 3, 0]
    assert [forward.count(GATHERS) for forward, _ in (auto, always, never)] == [4, 4, 4]
    saved = sharded(Two(), ranks, policy=CheckpointPolicy.MUST_SAVE)
    assert halves(texts_of(saved)) == halves(texts_of(saved, reshard=False))
    texts = texts_of(model, chunk_size="auto", loss_chunk_size="auto", memory_budget="1MiB")
    assert "1048576 bytes" in texts["budget_search"] and halves(texts) == auto


def test_a_frozen_weight_has_no_gradient(ranks: DeviceMesh) -> None:
    """It is two inputs, shard and mesh, and a single None among the gradients. In torch 2.11 the mesh is no input."""
    model = Two()
    model.embed.weight.requires_grad_(False)
    model.layers[0].weight.requires_grad_(False)
    found = streamfx.explain(sharded(model, ranks), *data_of(0, 12, 11), options={"chunk_size": 4})
    joint = found.call.graphs[0].facts.joint
    meshes = [primal for primal in joint.primals if not isinstance(primal.meta["val"], Tensor)]
    assert bool(meshes) != torch.__version__.startswith("2.11.")
    assert (len(joint.gradients) < len(joint.primals)) == bool(meshes)
    assert [primal.meta["desc"].base.idx for _, primal, _ in joint.trained] == [3, 4]
    assert trained_sources(joint) == {*joint.tangents, *(primal for _, primal, _ in joint.trained)}
    text = text_of(found.call.graphs[0].facts, "unshard")
    assert [f"gradient of {primal.name} =" in text for _, primal, _ in joint.trained] == [True, True]


@pytest.mark.long
def test_outputs_are_plain(ranks: DeviceMesh) -> None:
    """A use of a deferred output would gather its weights, and wait for ranks that do not use it."""

    class Logits(Two):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            x = self.head(self.embed(ids))
            return F.cross_entropy(x.flatten(0, 1), labels.flatten()), x

    _, logits = torch.compile(sharded(Logits(), ranks), backend="streambp")(*data_of(0, 12, 11))
    assert type(logits) is Tensor


# -- `explain` counts the communication of a step without other ranks: by kind and stage, in loops and between them

c10d, LAYERS = torch.ops._c10d_functional, 2


def explained(model: Any, length: int = 12, chunk: int = 4, **options: Any) -> streamfx.Explanation:
    torch._dynamo.reset()
    vocabulary = 11 if isinstance(model, Two) else 17
    return streamfx.explain(
        model, *data_of(0, length, vocabulary), options={"chunk_size": chunk, "loss_chunk_size": chunk, **options}
    )


# -- one call

WHOLE = torch.empty(8, 6, device="meta")
CALLS: list[tuple[Any, tuple[Any, ...], Any, CallTraffic | None]] = listed_cases("calls", globals())


@pytest.mark.parametrize("ranks", [(4, 0)], indirect=True)
@pytest.mark.parametrize(("target", "args", "result", "sent"), CALLS, ids=lambda item: getattr(item, "__name__", ""))
def test_bytes_of_a_call(ranks: DeviceMesh, target: Any, args: tuple[Any, ...], result: Any, sent: CallTraffic | None) -> None:
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
def test_communication(ranks: DeviceMesh, golden: Callable[[str], None]) -> None:
    golden(f"{explained(sharded(Two(4), ranks))}\n")


def test_no_communication_is_not_shown() -> None:
    found = explained(Two())
    assert "wire" not in str(found) and found.summary()["wire"] is None
    assert all(stage["wire"] is None for stage in found.summary()["stages"])


@pytest.mark.parametrize("reshard", only(["auto"], ["auto", False]))
def test_the_communication_of_a_step_is_the_sum_over_stages(ranks: DeviceMesh, reshard: Any) -> None:
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


def test_the_communication_of_an_unchunked_graph_is_counted(ranks: DeviceMesh) -> None:
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
