"""No graph takes more memory than it would take without streamfx: measured on real steps, with default options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import streamfx
from streamfx.cost.meter import Meter
from streamfx.ir.joint import joint_graph
from streamfx.lazy import defer_outputs, rewrite
from streamfx.passes.partition.unchunked import bytes_at_least
from tests.never_more import of_random_decoder
from tests.random_decoders.found import FOUND
from tests.support.exactness import gradient_errors, outcome, recorder
from tests.support.peaks import TOLERATED, RealMeter, however_small, peak, peaks
from tests.support.spread import only, spread
from tests.test_deferral import dynamo_graph

Loss = Callable[[Any], Tensor]
IS_MADE_WHOLE = rewrite.is_made_whole  # other tests have small outputs deferred


@pytest.fixture(autouse=True)
def compares_all() -> Iterator[None]:
    with however_small():
        yield


def linear() -> tuple[nn.Module, Loss]:
    """One product and a sum: its gradient is expanded, which takes no memory."""
    x = torch.randn(1, 4000, 8, dtype=torch.float64)
    return nn.Linear(8, 8).double(), lambda model: model(x).sum()


def multilayer() -> tuple[nn.Module, Loss]:
    x = torch.randn(2, 100, 8, dtype=torch.float64)
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return layers.double(), lambda model: model(x).square().mean()


def convolutions() -> tuple[nn.Module, Loss]:
    x, labels = torch.randn(4, 3, 12, 12, dtype=torch.float64), torch.tensor([1, 0, 3, 2])
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(*layers).double(), lambda model: F.cross_entropy(model(x), labels)


class Attention(nn.Module):
    """A short decoder, whose chunks are as long as its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(30, 16), nn.Linear(16, 48), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def decoder() -> tuple[nn.Module, Loss]:
    ids = torch.randint(0, 30, (2, 12))
    return Attention().double(), lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def wide_head() -> tuple[nn.Module, Loss]:
    """Hidden values that are small beside what one row of the head takes."""
    x, labels = torch.randn(1, 40, 4, dtype=torch.float64), torch.randint(0, 900, (40,))
    return nn.Linear(4, 900).double(), lambda model: F.cross_entropy(model(x)[0], labels)


class Checkpoints(nn.Module):
    """Products that the user's code recomputes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([checkpoint(self.of, head, x, use_reentrant=False) for head in self.heads]).sum()

    @staticmethod
    def of(head: nn.Module, x: Tensor) -> Tensor:
        return head(x).prod(-1).mean()  # type: ignore[no-any-return]


def checkpoints() -> tuple[nn.Module, Loss]:
    x = torch.randn(1, 4096, 64)
    return Checkpoints(), lambda model: model(x)


class Solution(nn.Module):
    """Nothing of it can stream: a system of equations has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 100))

    def forward(self) -> Tensor:
        return torch.linalg.solve(self.w, self.u.sin().sin().sin().sin()).square().sum()


def no_sequence() -> tuple[nn.Module, Loss]:
    return Solution(), lambda model: model()


breaks_the_graph: Callable[[], None] = torch._dynamo.disable(lambda: None)


class Experts(nn.Module):
    """Graphs whose halves have equal peaks, and of which each runs while what the others keep is there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(32, 96, bias=False),
            nn.Linear(32, 96, bias=False),
            nn.Linear(96, 32, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.expert(x)
        return x.sum()

    def expert(self, x: Tensor) -> Tensor:
        breaks_the_graph()
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def experts() -> tuple[nn.Module, Loss]:
    x = torch.randn(20, 32)
    return Experts(), lambda model: model(x)


PROGRAMS = (linear, multilayer, checkpoints, no_sequence, experts, convolutions, decoder, wide_head)


@pytest.mark.parametrize("make", only(PROGRAMS[:5], PROGRAMS), ids=lambda make: make.__name__)
def test_no_more_than_without(make: Callable[[], tuple[nn.Module, Loss]]) -> None:
    torch.manual_seed(0)
    model, loss = make()
    assert peaks(model, loss).ratio <= TOLERATED


@pytest.mark.parametrize("place", spread(range(len(FOUND["recomputed"])), 2))
def test_no_more_than_with_checkpoints_around_attention(place: int) -> None:
    """A partitioner saves states of random numbers for them, with operators that are given the kernel."""
    assert of_random_decoder(FOUND["recomputed"][place]).ratio <= TOLERATED


def test_chunks_that_are_asked_for_are_made() -> None:
    model, loss = decoder()
    open_, asked = (streamfx.explain(lambda: loss(model), **options) for options in ({}, {"chunk_size": 4}))
    assert [stage.kind for stage in open_.stages] == ["whole"]
    assert {stage.kind for stage in asked.stages} == {"streamed"}
    (reason,) = open_.stages[0].reasons
    assert "as it stands takes" in reason and "chunk_size" in reason


def test_a_graph_that_stands_is_exact_and_holds_for_longer_calls() -> None:
    """Dynamic rows: the decision holds up to a length, beyond which the graph is compiled anew."""
    torch.manual_seed(0)
    model, backend = Attention().double(), recorder(bodies="eager")
    compiled = torch.compile(model, backend=backend)
    for rows in (12, 14, 16, 300):
        ids = torch.randint(0, 30, (2, rows))
        truth, found = outcome(model, model, (ids,)), outcome(compiled, model, (ids,))
        assert max(gradient_errors(found.gradients, truth.gradients).values()) < 1e-12
    assert [facts.stands is not None for facts in backend.facts] in ([True, True], [True, True, False])


def test_deferred_outputs_count_once_they_are_made() -> None:
    """What stands for them until then has no memory; what is made inside of them has."""
    ids = torch.randint(0, 300, (1, 100))
    compiled = torch.compile(nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300)), backend="streambp")
    with RealMeter() as meter:
        logits = compiled(ids)
        assert meter.live < logits.nbytes
        logits.flatten(0, 1).sum()
        assert logits.nbytes < meter.live < 2 * logits.nbytes


@torch.library.custom_op("streamfx_tests::by_columns", mutates_args=())
def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@by_columns.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("is_read", [False, True])
def test_small_outputs_are_deferred_only_beside_what_follows_from_them(is_read: bool) -> None:
    """The caller reads logits that nothing else was made of: deferred, they take what they are rebuilt from as well."""
    graph = dynamo_graph(Scored(is_read), torch.ones(2, 40, dtype=torch.int64))
    with mock.patch.object(rewrite, "is_made_whole", IS_MADE_WHOLE):
        assert (defer_outputs(graph) is not None) == is_read
        found = peaks(Scored(False), lambda model: model(torch.ones(2, 40, dtype=torch.int64)).exp().sum())
    assert found.ratio <= TOLERATED


class Scored(nn.Module):
    """A head that is not trained: its gradient needs nothing of what it reads."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.head, self.is_read = nn.Linear(16, 64).requires_grad_(False), is_read

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        logits = self.head(x + self.norm(x.sin()).cos())
        return (logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())) if self.is_read else logits


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(200))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * by_columns(x).view(-1)).sum()


def test_what_lies_otherwise_than_it_was_traced_is_measured() -> None:
    x = torch.randn(10, 20)
    found = peaks(Columns(), lambda model: model(x))
    assert min(found.others) >= 2 * x.nbytes and found.ratio <= TOLERATED


class Packed(nn.Module):
    """Attention within documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(30, 64), nn.Linear(64, 192), nn.Linear(64, 30)

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, torch.zeros(seen.shape).masked_fill(~seen, float("-inf")))
        return F.cross_entropy(self.head(x + mixed.transpose(1, 2).flatten(-2)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("lengths", [(128,), (100, 28), (20, 90, 18), (3, 122, 3), (32, 32, 32, 32)], ids=str)
def test_no_documents_take_more_than_was_predicted(lengths: tuple[int, ...]) -> None:
    """What rows see is cut into pieces: the gradients of one are there beside the sums over all."""
    ids, options = torch.randint(0, 30, (1, 128)), {"chunk_size": 32, "loss_chunk_size": 8}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    model = Packed()
    predicted = streamfx.explain(model, ids, documents, **options).summary()["peak_bytes"]
    real = peak(model, lambda compiled: compiled(ids, documents), "streambp", options={"bodies": "eager", **options})
    assert real <= TOLERATED * predicted


class Parts(nn.Module):
    """Parts of any length, which add up to all: no call has more in each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = x.split(sizes)
        return torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)]).square().sum()


def test_lengths_that_no_call_exceeds() -> None:
    model, backend = Parts(), recorder(bodies="eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    x = torch.randn(12, 10, 16)
    torch._dynamo.mark_static(x)
    for sizes in ([4, 5, 3], [6, 2, 4]):
        compiled(x, sizes).backward()
    assert [facts.stands is not None for facts in backend.facts] == [True]


def test_evaluation_runs_the_smaller_forward_half() -> None:
    x = torch.randn(1, 400, 8)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    with torch.no_grad():
        peaks = []
        for compiled in (model, torch.compile(model, backend="streambp", options={"bodies": "eager"})):
            compiled(x)
            with Meter() as meter:
                compiled(x)
            peaks.append(meter.peak)
    assert peaks[1] <= TOLERATED * peaks[0]


@pytest.mark.parametrize("way", ["product", "mask", "recomputed"])
def test_what_any_run_in_one_piece_holds(way: str) -> None:
    """A product's operands and result; results that operators on gradients read, and gradients that exist by then. Not results
    of which the forward half may keep a mask, or which the backward half recomputes.
    """
    graph = torch.fx.Graph()
    x, w, g = (graph.placeholder(name) for name in "xwg")
    for node, shape in ((x, (10, 4)), (w, (4, 5)), (g, (10, 5))):
        node.meta["val"] = torch.empty(shape, device="meta")

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda item: item.meta["val"]))
        return node

    ys = [call(torch.ops.aten.mm.default, x, w) for _ in range(3)]
    out = call(torch.ops.aten.cat.default, ys)
    dy = g
    for y in ys:
        if way == "recomputed":
            y.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        dy = call(torch.ops.aten.mul.Tensor, dy, call(torch.ops.aten.gt.Scalar, y, 0) if way == "mask" else y)
    dw = call(torch.ops.aten.mm.default, call(torch.ops.aten.t.default, x), dy)
    graph.output([out, None, dw])
    joint = joint_graph(graph, 2, 1)
    product = 4 * (50 + 20)  # an operand that is computed, and a result
    assert bytes_at_least(joint) == (4 * 3 * 50 if way == "product" else product)
