"""No graph takes more memory than it would take without streamfx: measured on real steps, with default options."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import streamfx
from streamfx.ir.joint import joint_graph
from streamfx.lazy import defer_outputs, rewrite
from streamfx.passes.partition.unchunked import min_live_bytes
from tests.random_decoders.checking import peaks_of
from tests.random_decoders.found import FOUND
from tests.support.exactness import gradient_errors, outcome, recorder
from tests.support.peaks import TOLERANCE, RealMeter, however_small, peak, peaks
from tests.support.spread import only, spread
from tests.support.tables import named_cases
from tests.test_deferral import dynamo_graph

pytestmark = pytest.mark.compiled

IS_TOO_SMALL = rewrite.is_too_small_for_chunks  # other tests have small outputs deferred


@pytest.fixture(autouse=True)
def compares_all() -> Iterator[None]:
    with however_small():
        yield


class Model(nn.Module):
    """A function of a model with such parts, and of inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def attended(m: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    x = m.embed(ids)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return m.head(x + mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def decoder(width: int = 16, function: Callable[..., Tensor] = attended) -> Model:
    """A short decoder, whose chunks are as long as its sequence."""
    embed, qkv, head = nn.Embedding(30, width), nn.Linear(width, 3 * width), nn.Linear(width, 30)
    return Model(function, embed=embed, qkv=qkv, head=head)


breaks_the_graph: Callable[[], None] = torch._dynamo.disable(lambda: None)


def expert(m: Any, x: Tensor) -> Tensor:
    breaks_the_graph()
    return m.down(F.silu(m.gate(x)) * m.up(x))  # type: ignore[no-any-return]


def experts(m: Any, x: Tensor) -> Tensor:
    """Graphs whose halves have equal peaks; each runs while the values saved by the others are live."""
    for _ in range(4):
        x = expert(m, x)
    return x.sum()


def solution(m: Any) -> Tensor:
    """Nothing of it can stream: a system of equations has no sequence."""
    return torch.linalg.solve(m.w, m.u.sin().sin().sin().sin()).square().sum()


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


Step = tuple[nn.Module, Callable[[Any], Tensor]]


def on(model: nn.Module, *inputs: Tensor, then: Callable[[Any], Tensor] = lambda made: made) -> Step:
    return model, lambda compiled: then(compiled(*inputs))


IDS = torch.arange(24).view(2, 12) * 7 % 30
PROGRAMS: dict[str, Callable[[], Step]] = named_cases("programs", globals())


@pytest.mark.parametrize("name", only(["no_sequence", "experts"], PROGRAMS))
def test_a_step_takes_no_more_memory_than_without_streamfx(name: str) -> None:
    assert peaks(*PROGRAMS[name]()).ratio <= TOLERANCE


@pytest.mark.parametrize("place", spread(range(len(FOUND["recomputed"])), len(FOUND["recomputed"])))
def test_a_step_takes_no_more_memory_than_with_checkpoints(place: int) -> None:
    """A partitioner saves states of random numbers for them, with operators that are given the kernel."""
    assert peaks_of(FOUND["recomputed"][place]).ratio <= TOLERANCE


def test_requested_chunks_are_used() -> None:
    model, loss = PROGRAMS["decoder"]()
    open_, asked = (streamfx.explain(lambda: loss(model), **options) for options in ({}, {"chunk_size": 4}))
    assert [stage.kind for stage in open_.stages] == ["whole"]
    assert {stage.kind for stage in asked.stages} == {"streamed"}
    (reason,) = open_.stages[0].reasons
    assert "unchunked, the graph takes" in reason and "chunk_size" in reason


@pytest.mark.long
def test_an_unchunked_graph_is_exact_up_to_a_length() -> None:
    """Rows are dynamic; beyond that length, the graph is compiled anew."""
    model, backend = decoder().double(), recorder(bodies="eager")
    compiled = torch.compile(model, backend=backend)
    for rows in (12, 14, 16, 300):
        ids = torch.randint(0, 30, (2, rows))
        truth, found = outcome(model, model, (ids,)), outcome(compiled, model, (ids,))
        assert max(gradient_errors(found.gradients, truth.gradients).values()) < 1e-12
    assert [facts.unchunked_reason is not None for facts in backend.facts] in ([True, True], [True, True, False])


def test_an_unchunked_graph_holds_for_parts_of_any_length() -> None:
    """Parts of any length, which add up to all: no call has more in each."""

    def parts(m: Any, x: Tensor, sizes: list[int]) -> Tensor:
        pairs = zip(m.heads, x.split(sizes), strict=True)
        return torch.cat([head(part) for head, part in pairs]).square().sum()

    backend, x = recorder(bodies="eager"), torch.randn(12, 10, 16)
    compiled = torch.compile(Model(parts, heads=nn.ModuleList(linear(16, 16) for _ in range(3))), backend=backend, dynamic=True)
    torch._dynamo.mark_static(x)
    for sizes in ([4, 5, 3], [6, 2, 4]):
        compiled(x, sizes).backward()
    assert [facts.unchunked_reason is not None for facts in backend.facts] == [True]


def test_deferred_outputs_take_memory_after_their_first_use() -> None:
    """A placeholder has no memory; the computed values have."""
    ids = torch.randint(0, 300, (1, 100))
    compiled = torch.compile(nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300)), backend="streambp")
    with RealMeter() as meter:
        logits = compiled(ids)
        assert meter.live < logits.nbytes
        logits.flatten(0, 1).sum()
        assert logits.nbytes < meter.live < 2 * logits.nbytes


def scored(is_read: bool) -> Model:
    """A frozen head: its gradient does not need its input."""

    def function(m: Any, ids: Tensor) -> Any:
        x = m.embed(ids)
        logits = m.head(x + m.norm(x.sin()).cos())
        return (logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())) if is_read else logits

    head = nn.Linear(16, 64).requires_grad_(False)
    return Model(function, embed=nn.Embedding(30, 16), norm=nn.Linear(16, 16), head=head)


@pytest.mark.parametrize("is_read", [False, True])
def test_small_outputs_are_deferred_only_if_other_outputs_use_them(is_read: bool) -> None:
    """A deferred output that only the caller reads would also keep its inputs live."""
    graph = dynamo_graph(scored(is_read), torch.ones(2, 40, dtype=torch.int64))
    with mock.patch.object(rewrite, "is_too_small_for_chunks", IS_TOO_SMALL):
        assert (defer_outputs(graph) is not None) == is_read
        found = peaks(scored(False), lambda model: model(torch.ones(2, 40, dtype=torch.int64)).exp().sum())
    assert found.ratio <= TOLERANCE


@torch.library.custom_op("streamfx_tests::by_columns", mutates_args=())
def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


by_columns.register_fake(torch.empty_like)


def test_copies_for_unexpected_strides_are_measured() -> None:
    x, model = torch.randn(10, 20), Model(lambda m, x: (m.w * by_columns(x).view(-1)).sum(), w=nn.Parameter(torch.randn(200)))
    found = peaks(model, lambda model: model(x))
    assert min(found.others) >= 2 * x.nbytes and found.ratio <= TOLERANCE


def in_documents(m: Any, ids: Tensor, documents: Tensor) -> Tensor:
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    logits = attended(m, ids, torch.zeros(seen.shape).masked_fill(~seen, float("-inf")))
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("lengths", only([[20, 90, 18]], [[128], [20, 90, 18], [32, 32, 32, 32]]), ids=str)
def test_packed_documents_take_no_more_than_predicted(lengths: list[int]) -> None:
    """Masks are split into tiles: the gradients of one tile are live together with the sums over all."""
    ids, options = torch.randint(0, 30, (1, 128)), {"chunk_size": 32, "loss_chunk_size": 8}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    model = decoder(64, in_documents)
    predicted = streamfx.explain(model, ids, documents, **options).summary()["peak_bytes"]
    real = peak(model, lambda compiled: compiled(ids, documents), "streambp", options={"bodies": "eager", **options})
    assert real <= TOLERANCE * predicted


@pytest.mark.parametrize("way", ["product", "mask", "recomputed"])
def test_the_lower_bound_of_an_unchunked_run_is_its_saved_values(way: str) -> None:
    """A product's operands and result; results that operators on gradients read, and gradients that exist by then. Not results
    of which the forward half may keep a mask, or which the backward half recomputes.
    """
    graph, aten = torch.fx.Graph(), torch.ops.aten
    x, w, g = (graph.placeholder(name) for name in "xwg")
    for node, shape in ((x, (10, 4)), (w, (4, 5)), (g, (10, 5))):
        node.meta["val"] = torch.empty(shape, device="meta")

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda item: item.meta["val"]))
        return node

    ys = [call(aten.mm.default, x, w) for _ in range(3)]
    out, dy = call(aten.cat.default, ys), g
    for y in ys:
        if way == "recomputed":
            y.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        dy = call(aten.mul.Tensor, dy, call(aten.gt.Scalar, y, 0) if way == "mask" else y)
    graph.output([out, None, call(aten.mm.default, call(aten.t.default, x), dy)])
    product = 4 * (50 + 20)  # an operand that is computed, and a result
    assert min_live_bytes(joint_graph(graph, 2, 1)) == (4 * 3 * 50 if way == "product" else product)
