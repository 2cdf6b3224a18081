"""Reductions over ranks inside loops, without other processes: where, how often, in which order; and between loops."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_reduce

import streamfx
from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.ir.facts import known
from streamfx.ir.joint import node_argument
from streamfx.ir.stage_plan import AutoChunk
from streamfx.node_meta import COLLECTIVE_TEXT
from streamfx.passes.analysis.access_roles import REDUCES_PAIRS
from streamfx.passes.lowering.collective_order import describe_order_between_loops
from streamfx.passes.lowering.compile_bodies import split
from streamfx.passes.ops.collectives import ELEMENTWISE, find_group_names
from streamfx.passes.ops.traits import only_moves_elements
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.collective_calls import begin, end
from tests.support.canonical import Case, graphs, targets
from tests.support.collectives import data_of
from tests.support.cut_by_hand import Summed
from tests.support.over_ranks import decoder, everybody, facts_of, one_of_many, reductions, text_of_ranks
from tests.support.sharded import Decoder, Layer
from tests.support.small import tokens
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.test_tensor_parallel import Gathered, Ulysses

pytestmark = pytest.mark.compiled

Function = Callable[..., Tensor]


@pytest.fixture
def ranks() -> Iterator[None]:
    with one_of_many():
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def causal(q: Tensor, *others: Tensor) -> Tensor:
    k, v = others or (q, q)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    return all_reduce(x, op, everybody())


def rows_and_weight(trained: bool = True) -> list[Tensor]:
    return [torch.randn(1, 2, 12, 4), torch.randn(4, 4, requires_grad=trained)]


# -- where reductions run


class CutEmbedding(nn.Module):
    """The vocabulary is cut over ranks: the input of the first layer is a sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = F.embedding(ids.remainder(4), self.inner.embed.weight) * (ids < 4)[..., None]
        return self.inner.of(Summed.apply(rows), labels)


def behind_the_embedding() -> tuple[Function, list[Tensor]]:
    model, labels = decoder(), data_of(0, 12)[1]
    return lambda x: model.of(x, labels), [torch.randn(1, 12, 32, requires_grad=True)]


def asked_for_twice(x: Tensor, weight: Tensor) -> Tensor:
    """Keys and values of all rows are recomputed in a loop before the backward loop."""
    k = Summed.apply(causal(x @ weight, x, x).sin())
    return causal(k.sin(), k.exp(), k.cos()).square().sum()


def sums(x: Tensor, weight: Tensor, op: str = "sum", other: str = "sum", reads: bool = False) -> Tensor:
    """Two reductions of rows that are added up; one may be read by itself."""
    h = causal(x @ weight, x, x)
    first, second = reduced(h.sin(), op), reduced(h.exp(), other)
    return (first + second).square().sum() + (first.sum() if reads else 0)


def sums_without_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Ranks do not compare them: one may show a part of them, which others add up alone."""
    h = reduced(causal(x).sin())
    return reduced(h.sum()) + reduced(h.exp().sum())


def equal(x: Tensor, weight: Tensor) -> Tensor:
    """On other ranks, whose code may choose by rank, they need not be equal."""
    most = causal(x).amax()
    return reduced(most, "max") * reduced(most, "max")


DECODER = [2, 2, 0, 0, 3, 0, 3]  # reductions by loop
PLACES: dict[str, tuple[Callable[[], tuple[Function, Sequence[Tensor]]], dict[str, Any], list[int] | int, int | None]] = (
    named_cases("reductions of loops", globals())
)


@pytest.mark.parametrize("name", PLACES)
def test_how_often_loops_reduce(ranks: None, name: str) -> None:
    """By loop or in all, and how often between them."""
    make, options, in_loops, between = PLACES[name]
    function, inputs = make()
    facts = facts_of(lambda *given: function(*given), inputs, **options)
    found = reductions(facts)
    assert (found if isinstance(in_loops, list) else sum(found)) == in_loops
    assert between is None or text_of_ranks(facts).count("all_reduce") == between
    assert not any("failed at it" in reason for reason in facts.reasons())


def product_of(node: fx.Node) -> fx.Node:
    """Return the operand of a reduction, through views."""
    node = node_argument(node)
    while only_moves_elements(node):
        node = node_argument(node)
    return node


def test_operands_of_a_saved_sum_are_not_saved(ranks: None) -> None:
    def bent(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        h = causal(x @ one, x, x)
        return F.scaled_dot_product_attention(Summed.apply(F.gelu(Summed.apply(h @ other))), x, x).sum()

    facts = facts_of(bent, [*rows_and_weight(), torch.randn(4, 4, requires_grad=True)], save="products")
    kept = [node for nodes in facts.plan.kept for node in nodes]
    sent = [node for node in kept if node.target is ALL_REDUCE]
    assert sent and not any(product_of(node) in kept for node in sent)


def test_automatic_chunks_move_enough_bytes(ranks: None) -> None:
    layer, _, head = facts_of(decoder(), data_of(0, 12), chunk_size="auto").plan.chunk_sizes
    assert isinstance(layer, AutoChunk) and layer.busy_rows == (1 << 20) // (32 * 4)
    assert isinstance(head, int)


def two_reductions(x: Tensor, weight: Tensor) -> Tensor:
    """The one that begins first waits for attention, the other for nothing."""
    late, soon = reduced(causal(x @ weight, x, x)), reduced(x * 2, "max")
    return (late + (x + 1).exp() @ weight) * soon


def test_a_body_begins_reductions_in_the_order_of_the_graph_and_waits_where_a_sum_is_needed(ranks: None) -> None:
    spec = known(facts_of(two_reductions, rows_and_weight()).program).loops[0].spec
    nodes = list(spec.body.graph.nodes)
    for order in (nodes, [node for call in split(spec) for node in call.executed]):
        assert [str(node.meta[COLLECTIVE_TEXT]).split()[0] for node in order if node.target is begin] == ["sum", "max"]
    waits = [i for i, node in enumerate(nodes) if node.target is end]
    assert all(nodes[i + 1] in nodes[i].users or nodes[i + 1].target is end for i in waits)
    first = next(i for i, node in enumerate(nodes) if node.target is begin)
    assert any(node.target is torch.ops.aten.exp.default for node in nodes[first : waits[0]])


def test_values_of_other_ranks_are_not_static(ranks: None) -> None:
    """A mask that is reduced over ranks is in no program that is run once per step."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(12)[None, None, None] < reduced(lengths, "max")[:, None, None, None]
        return F.scaled_dot_product_attention(x * 2, x, x, attn_mask=mask).square().sum()

    facts = facts_of(function, [torch.randn(2, 2, 12, 4, requires_grad=True), torch.tensor([12, 5])])
    assert not any(node in facts.axes.static for node in facts.joint.graph.nodes if node.target is ALL_REDUCE)


def test_explain_waits_for_no_rank(ranks: None) -> None:
    with mock.patch("streamfx.distributed.rank_consensus.exchange_texts", side_effect=AssertionError):
        found = streamfx.explain(decoder(1), *data_of(0, 12), options={"chunk_size": 4})
    assert "every stage streams" in str(found)


# -- against eager


def by_element(x: Tensor, weight: Tensor, op: str) -> Tensor:
    h = causal(x @ weight)
    return reduced((h > 0).int() if op.startswith("b") else h, op) * 2


def spelled(x: Tensor, weight: Tensor) -> Tensor:
    """How many keys a chunk has is found from masks, which other ranks may have others of."""
    scores = reduced((x @ weight) @ x.transpose(-2, -1))
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x).square().sum()


def some_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Some rows are no rows of the first chunks."""
    h = causal(x @ weight, x, x)
    return h.sum() + Summed.apply(h[..., 6:, :].sin()).square().sum()


def step_by_step(x: Tensor, weight: Tensor) -> Tensor:
    """A recurrence recomputes steps in chunks, in an order that other ranks do not know."""
    x = causal(x)[0]
    state, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(reduced(state @ weight) + x[:, t])
        rows.append(state)
    return torch.stack(rows, 1).square().sum()


EXACT: dict[str, tuple[Function, int, str | None]] = {  # and how often loops reduce; why not
    **{op: (partial(by_element, op=op), 1, None) for op in ELEMENTWISE},
    "rows by keys": (spelled, 0, REDUCES_PAIRS),
    "chunks without rows": (some_rows, 1, None),
    "steps that ask other ranks": (step_by_step, 0, None),
}


@pytest.mark.parametrize("name", only(["sum", "rows by keys", "steps that ask other ranks"], EXACT))
def test_reduced_rows_equal_eager(alone: None, name: str) -> None:
    function, count, reason = EXACT[name]
    x, weight = torch.randn(1, 2, 12, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    weight.requires_grad_(name not in ELEMENTWISE)
    facts = facts_of(lambda x, weight: function(x, weight), [x, weight])
    assert sum(reductions(facts)) == count and (reason is None or reason in facts.reasons())
    assert not any(isinstance(node.target, Recurrence) for node in facts.joint.graph.nodes)
    compiled = torch.compile(lambda x, weight: function(x, weight), backend="streambp", options={"chunk_size": 4})
    results = [call(x, weight) for call in (compiled, function)]
    torch.testing.assert_close(*results)
    if weight.requires_grad:
        torch.testing.assert_close(*(torch.autograd.grad(result, weight) for result in results))


def test_a_reduction_with_a_factor_is_unchanged() -> None:
    """A reduction that is not known to be elementwise falls back."""
    reduce, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
    known_op, other = (Case(lambda x, op=op: wait(reduce(x, op, "0")), (torch.randn(4, 3),)) for op in ("sum", "premul_sum"))
    assert [ALL_REDUCE in targets(graphs(case)[1]) for case in (known_op, other)] == [True, False]


# -- values between the loops of a stage are recomputed in backward

LAYERS, WIDTH, ROWS, VOCABULARY = 4, 16, 256, 11


class Mixing(nn.Module):
    """Layers that mix rows by a function that no loop can run, and a residual stream that runs in loops."""

    def __init__(self, mix: Callable[..., Tensor], layers: int = LAYERS) -> None:
        super().__init__()
        self.mix, self.embed, self.head = mix, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.before, self.after = (
            nn.ModuleList(nn.Linear(*size) for _ in range(layers)) for size in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH))
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for before, after in zip(self.before, self.after, strict=True):
            x = x + after(self.mix(*F.gelu(before(x)).chunk(3, -1)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def to_keys(keys: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention to keys that something is done to, number by number."""
    return lambda q, k, v: F.scaled_dot_product_attention(q[:, None], keys(k[:, None].sort(2).values), v[:, None])[:, 0]


seen: list[int] = []


@torch.library.custom_op("streamfx_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    seen.append(len(seen))
    return x + len(seen)


noted.register_fake(lambda x: torch.empty_like(x))
noted.register_autograd(lambda ctx, gradient: gradient)


def test_an_unknown_operator_is_not_recomputed() -> None:
    options: dict[str, Any] = {"save": "inputs", "chunk_size": 8, "loss_chunk_size": 8}
    model = torch.compile(Mixing(to_keys(noted)), backend="streambp", options=options)
    model(tokens(2, 37))
    seen.clear()
    model(tokens(2, 37)).backward()
    assert len(seen) == LAYERS


def test_values_between_loops_are_live_for_one_layer_at_a_time() -> None:
    """A layer saves its input, keys and values; sorted keys are recomputed."""
    options = {"chunk_size": 32, "loss_chunk_size": 32, "save": "inputs"}
    models = (Mixing(to_keys(lambda k: k), layers) for layers in (3, 6))
    few, many = (streamfx.explain(model, tokens(2, ROWS), options=options).summary()["peak_bytes"] for model in models)
    stream, weights = 2 * ROWS * WIDTH * 4, 4 * (4 * WIDTH * WIDTH + 4 * WIDTH)
    assert many - few <= 3 * (3 * stream + weights)


# -- between ranks


def parallel(kind: type[Layer], layers: int = LAYERS) -> Decoder:
    model = Decoder(layers=layers, width=2 * WIDTH)
    for layer in model.layers:
        layer.__class__ = kind
    return model


NO_GATHER = pytest.mark.skipif(torch.__version__[:4] == "2.12", reason="Dynamo of 2.12 traces no `all_gather_tensor` along rows")
KINDS = [pytest.param(Gathered, marks=NO_GATHER), Ulysses]


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_parallel_takes_no_more_than_checkpointing(ranks: None, kind: type[Layer]) -> None:
    options = {"chunk_size": 32, "loss_chunk_size": 32}
    found = streamfx.explain(parallel(kind), *data_of(0, 2 * ROWS), options=options)
    assert found.summary()["peak_bytes"] <= found.summary()["checkpointing_peak_bytes"]
    assert len(found.stages) == LAYERS + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_exchanges_depends_on_no_size(ranks: None, kind: type[Layer]) -> None:
    """Not from lengths, chunks, budgets, or the bytes of weights: other ranks have others."""

    def text(rows: int, **options: Any) -> str:
        facts = facts_of(parallel(kind, 2), data_of(0, rows), lambda text, *_, **__: [text], **options)
        (group,) = find_group_names(facts.joint.graph.nodes)
        assert facts.program is not None
        return describe_order_between_loops(facts, group)

    first = text(64)
    assert {text(512, chunk_size=100), text(64, memory_budget="1GiB")} == {first}
    again = [line for line in set(first.splitlines()) if first.splitlines().count(line) == 2]
    assert len(again) == 2 * (2 if kind is Gathered else 4)


def test_values_of_a_single_stage_are_saved(ranks: None) -> None:
    """It would be there at once, and be sent twice."""
    facts = facts_of(parallel(Ulysses, 1), data_of(0, ROWS), lambda text, *_, **__: [text])
    assert not facts.plan.recomputed
