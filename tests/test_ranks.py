"""What is reduced over ranks inside of loops, without other processes: where, how often, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_reduce

import streamfx
from streamfx.ir.facts import known
from streamfx.ir.joint import node_argument
from streamfx.ir.stage_plan import AutoChunk
from streamfx.node_meta import REDUCED
from streamfx.passes.analysis.access_roles import REDUCES_PAIRS
from streamfx.passes.lowering.compile_bodies import split
from streamfx.passes.ops.collectives import ELEMENTWISE
from streamfx.passes.ops.traits import is_moved_elements
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.collective_calls import ALL_REDUCE, begin, end
from streamfx.tools.report.printer import text_of
from tests.support.canonical import Case, graphs, targets
from tests.support.collectives import data_of
from tests.support.cut_by_hand import Summed
from tests.support.over_ranks import WORLD, bodies, decoder, everybody, facts_of, one_of_many, reductions, text_of_ranks
from tests.support.sharded import Decoder
from tests.test_tensor_parallel import cut


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


# -- where reductions run


def test_both_halves_of_a_layer_that_is_cut(ranks: None, golden: Callable[[str], None]) -> None:
    """One loop for each stage forward, and no more backward than one process has: layers, head and loss are cut."""
    from torch.distributed.tensor.parallel import loss_parallel

    model = cut(Decoder(1, width=32, vocabulary=16), WORLD)
    with loss_parallel():
        facts = facts_of(model, data_of(0, 12, 16), strict=True)
    golden(f"{text_of(facts, 'put back')}\n\n{text_of_ranks(facts)}")


def test_what_runs_does_not_depend_on_the_number_of_chunks(ranks: None) -> None:
    few, many = (facts_of(decoder(), data_of(0, length), chunk_size=rows) for length, rows in ((12, 12), (12, 4)))
    assert reductions(few) == reductions(many) == [2, 2, 0, 0, 3, 0, 3]


def product_of(node: fx.Node) -> fx.Node:
    """What is reduced, behind views."""
    node = node_argument(node)
    while is_moved_elements(node):
        node = node_argument(node)
    return node


def test_what_is_kept_is_not_reduced_again(ranks: None) -> None:
    """Nor are the products kept that it is made of."""
    assert reductions(facts_of(decoder(), data_of(0, 12), save="products"))[3:] == [0, 2, 0, 2]

    def bent(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        h = F.scaled_dot_product_attention(x @ one, x, x, is_causal=True)
        return F.scaled_dot_product_attention(Summed.apply(F.gelu(Summed.apply(h @ other))), x, x).sum()

    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    facts = facts_of(bent, [torch.randn(1, 2, 12, 4), *weights], save="products")
    kept = [node for nodes in facts.plan.kept for node in nodes]
    reduced = [node for node in kept if node.target is ALL_REDUCE]
    assert reduced and not any(product_of(node) in kept for node in reduced)


class CutEmbedding(nn.Module):
    """Words are cut over ranks: what the first layer gets is a sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = F.embedding(ids.remainder(4), self.inner.embed.weight) * (ids < 4)[..., None]
        return self.inner.of(Summed.apply(rows), labels)


def test_what_enters_the_first_layer_is_kept(ranks: None) -> None:
    facts = facts_of(CutEmbedding(), data_of(0, 12))
    assert reductions(facts) == [3, 0, 0, 3]


def test_stages_end_where_what_was_reduced_is_kept(ranks: None) -> None:
    """The result of a rank's own heads is smaller than the sum over all: behind it, a layer would be reduced once more."""
    model, labels = decoder(2), data_of(0, 12)[1]
    x = torch.randn(1, 12, 32, requires_grad=True)
    facts = facts_of(lambda x: model.of(x, labels), [x])
    assert reductions(facts) == [2, 2, 0, 0, 3, 0, 3]


def test_chunks_that_are_sized_by_themselves_move_enough(ranks: None) -> None:
    facts = facts_of(decoder(), data_of(0, 12), chunk_size="auto")
    layer, _, head = facts.plan.chunk_sizes
    assert isinstance(layer, AutoChunk) and layer.enough == (1 << 20) // (32 * 4)
    assert isinstance(head, int)


def test_what_is_there_already_is_reduced_once(ranks: None) -> None:
    """An input has all of its rows: in chunks it would be reduced for each of them, and again for the backward half."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(all_reduce(x, "sum", everybody()) @ weight, x, x, is_causal=True).sum()

    facts = facts_of(function, [torch.randn(1, 2, 12, 4), torch.randn(4, 4, requires_grad=True)], strict=True)
    assert not any(reductions(facts)) and text_of_ranks(facts).count("all_reduce") == 1


def test_a_sum_that_two_loops_ask_for_is_reduced_once(ranks: None) -> None:
    """Keys and values of all rows, and what lies under them, are made in a loop before the one that goes back."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        h = F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
        k = Summed.apply(h.sin())
        return F.scaled_dot_product_attention(k.sin(), k.exp(), k.cos(), is_causal=True).square().sum()

    facts = facts_of(function, [torch.randn(1, 2, 12, 4), torch.randn(4, 4, requires_grad=True)], save="inputs")
    assert sum(reductions(facts)) == 1


# -- bodies


def two_reductions(x: Tensor, weight: Tensor) -> Tensor:
    """The one that begins first waits for attention, the other for nothing."""
    late = all_reduce(F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True), "sum", everybody())
    soon = all_reduce(x * 2, "max", everybody())
    return (late + (x + 1).exp() @ weight) * soon


def of_two(**options: Any) -> list[fx.Graph]:
    x, weight = torch.randn(1, 2, 12, 4), torch.randn(4, 4, requires_grad=True)
    return bodies(facts_of(two_reductions, [x, weight], **options))


def begun(nodes: Sequence[fx.Node]) -> list[str]:
    return [str(node.meta[REDUCED]).split()[0] for node in nodes if node.target is begin]


def test_reductions_begin_in_the_order_of_the_graph_whoever_runs_the_body(ranks: None) -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(1, 2, 12, 4), torch.randn(4, 4, requires_grad=True)
    facts = facts_of(two_reductions, [x, weight])
    first = known(facts.program).loops[0].spec
    calls = [node for call in split(first) for node in call.stands_for]
    assert begun(list(first.body.graph.nodes)) == begun(calls) == ["sum", "max"]


def test_a_body_waits_where_a_sum_is_needed(ranks: None) -> None:
    nodes = list(of_two()[0].nodes)
    waits = [i for i, node in enumerate(nodes) if node.target is end]
    assert all(nodes[i + 1] in nodes[i].users or nodes[i + 1].target is end for i in waits)
    first = next(i for i, node in enumerate(nodes) if node.target is begin)
    assert any(node.target is torch.ops.aten.exp.default for node in nodes[first : waits[0]])


# -- the rule


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_rows_are_reduced_in_a_loop(alone: None, op: str) -> None:
    def function(x: Tensor) -> Tensor:
        h = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return all_reduce((h > 0).int() if op.startswith("b") else h, op, everybody()) * 2

    x = torch.randn(2, 3, 13, 4, dtype=torch.float64)
    facts = facts_of(function, [x], strict=True)
    assert reductions(facts) == [1]
    torch.testing.assert_close(torch.compile(function, backend="streambp", options={"chunk_size": 4})(x), function(x))


def test_a_reduction_with_a_factor_is_left_as_it_is() -> None:
    """Whatever is not known to go element by element runs whole."""
    reduce, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
    known_op, other = (Case(lambda x, op=op: wait(reduce(x, op, "0")), (torch.randn(4, 3),)) for op in ("sum", "premul_sum"))
    assert [ALL_REDUCE in targets(graphs(case)[1]) for case in (known_op, other)] == [True, False]


def spelled(x: Tensor, weight: Tensor) -> Tensor:
    scores = all_reduce((x @ weight) @ x.transpose(-2, -1), "sum", everybody())
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x).square().sum()


def test_rows_by_keys_are_reduced_whole(alone: None) -> None:
    """How many keys a chunk has is found from masks, which other ranks may have others of."""
    x, weight = torch.randn(2, 12, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    facts = facts_of(spelled, [x, weight])
    assert REDUCES_PAIRS in facts.reasons() and not any(reductions(facts))
    compiled = torch.compile(spelled, backend="streambp", options={"chunk_size": 4})
    torch.testing.assert_close(*(torch.autograd.grad(call(x, weight), weight) for call in (compiled, spelled)))


def test_what_other_ranks_count_does_not_follow_from_this_one(ranks: None) -> None:
    """A mask that is reduced over ranks is in no program that is run once per step."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        longest = all_reduce(lengths, "max", everybody())
        mask = torch.arange(12)[None, None, None] < longest[:, None, None, None]
        return F.scaled_dot_product_attention(x * 2, x, x, attn_mask=mask).square().sum()

    facts = facts_of(function, [torch.randn(2, 2, 12, 4, requires_grad=True), torch.tensor([12, 5])])
    assert not any(node in facts.axes.static for node in facts.joint.graph.nodes if node.target is ALL_REDUCE)


def after(x: Tensor) -> Tensor:
    """Some rows are no rows of the first chunks."""
    h = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return h.sum() + all_reduce(h[..., 6:, :].sin(), "sum", everybody()).square().sum()


def test_chunks_without_rows(alone: None) -> None:
    x = torch.randn(1, 2, 13, 4, dtype=torch.float64)
    assert sum(reductions(facts_of(after, [x], strict=True))) == 1
    compiled = torch.compile(after, backend="streambp", options={"chunk_size": 4})
    torch.testing.assert_close(compiled(x), after(x))


def test_to_look_at_a_model_asks_nobody(ranks: None) -> None:
    with mock.patch("streamfx.distributed.rank_consensus.written_by_all", side_effect=AssertionError):
        found = streamfx.explain(decoder(1), *data_of(0, 12), options={"chunk_size": 4})
    assert "every stage streams" in str(found)


def sums(op: str, other: str, reads: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Two reductions of rows that are added up; one may be read by itself."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        h = F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
        first, second = all_reduce(h.sin(), op, everybody()), all_reduce(h.exp(), other, everybody())
        return (first + second).square().sum() + (first.sum() if reads else 0)

    return function


@pytest.mark.parametrize(
    ("how", "count"), [(("sum", "sum"), 1), (("max", "max"), 2), (("sum", "avg"), 2), (("sum", "sum", True), 2)], ids=str
)
def test_sums_that_are_added_up_are_sent_once(ranks: None, how: Any, count: int) -> None:
    assert sum(reductions(facts_of(sums(*how), [torch.randn(1, 2, 12, 4), torch.randn(4, 4)]))) == count


def test_sums_without_rows_stay_two(ranks: None) -> None:
    """Ranks do not compare them: one may show a part of them, which others add up alone."""

    def function(x: Tensor) -> Tensor:
        h = all_reduce(F.scaled_dot_product_attention(x, x, x, is_causal=True).sin(), "sum", everybody())
        return all_reduce(h.sum(), "sum", everybody()) + all_reduce(h.exp().sum(), "sum", everybody())

    facts = facts_of(function, [torch.randn(1, 2, 12, 4)])
    assert text_of_ranks(facts).count("all_reduce") == 2 and sum(reductions(facts)) == 1


def test_equal_reductions_stay_two(ranks: None) -> None:
    """On other ranks, whose code may choose by rank, they need not be equal."""

    def function(x: Tensor) -> Tensor:
        most = F.scaled_dot_product_attention(x, x, x, is_causal=True).amax()
        return all_reduce(most, "max", everybody()) * all_reduce(most, "max", everybody())

    facts = facts_of(function, [torch.randn(1, 2, 12, 4)])
    assert sum(node.target is ALL_REDUCE for node in facts.joint.graph.nodes) == 2


def step_by_step(x: Tensor, weight: Tensor) -> Tensor:
    x = F.scaled_dot_product_attention(*(x[:, None],) * 3, is_causal=True)[:, 0]
    state, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(all_reduce(state @ weight, "sum", everybody()) + x[:, t])
        rows.append(state)
    return torch.stack(rows, 1).square().sum()


def test_steps_that_ask_other_ranks_are_no_recurrence(alone: None) -> None:
    """A recurrence makes steps again, in chunks: of what it runs, ranks would not know the order."""
    x, weight = torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    facts = facts_of(step_by_step, [x, weight])
    assert not any(isinstance(node.target, Recurrence) for node in facts.joint.graph.nodes)
    compiled = torch.compile(step_by_step, backend="streambp", options={"chunk_size": 4})
    torch.testing.assert_close(*(torch.autograd.grad(call(x, weight), weight) for call in (compiled, step_by_step)))
