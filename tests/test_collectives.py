"""Where collectives on weights run, in a fake process group that only computes shapes."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

import streamfx
from streamfx.ir.facts import Facts
from streamfx.ir.joint import trained_sources
from streamfx.tools.report.printer import text_of
from tests.support.collectives import data_of
from tests.support.sharded import sharded
from tests.support.spread import spread

pytestmark = pytest.mark.compiled

Golden = Callable[[str], None]
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


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
    assert forward.count(GATHER) == backward.count(SCATTER) == 4


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


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda k: torch.cat((k[6:], k[:6])),
    lambda k: k.t().contiguous(),
    lambda k: (k.flip(0) != 0).to(torch.uint8),
]


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
    assert [backward.count(GATHER) for _, backward in (auto, always, never)] == [2, 3, 0]
    assert [forward.count(GATHER) for forward, _ in (auto, always, never)] == [4, 4, 4]
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
