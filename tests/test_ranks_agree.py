"""Ranks that reduce rows compare their programs and make the same decision; the texts that they exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from streamfx.distributed.rank_consensus import FAILED, OTHER_CHUNKS, OTHER_LOOPS, SEVERAL_GROUPS
from streamfx.errors import NotStreamedError, OverBudgetError, RanksDifferError
from streamfx.frontend.weight_ids import weight_ids
from streamfx.torch_private.ranks import RankChangedError, RanksMissingError, _Board
from tests.support.collectives import data_of
from tests.support.cut_by_hand import Shared
from tests.support.over_ranks import decoder, everybody, facts_of, one_of_many, reductions, text_of_ranks
from tests.support.sharded import Decoder, sharded, whole

pytestmark = pytest.mark.compiled

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with one_of_many():
        yield


class Others:
    """Ranks that say something else, in turn, or the same."""

    def __init__(self, *say: str | None) -> None:
        self.say, self.heard, self.subjects, self.about = list(say), list[tuple[str, str, bool]](), set[str](), list[str | None]()

    def __call__(self, text: str, group: str, subject: str, waits: bool = True, about: str | None = None) -> list[str]:
        self.heard.append((text, group, waits))
        self.subjects.add(subject)
        self.about.append(about)
        other = self.say.pop(0) if waits and self.say else None
        if other == "nothing":
            raise RanksMissingError("nothing from rank 1 within 600 seconds")
        if other == "changed":
            raise RankChangedError("all_gather of two weights\nreduce_scatter of them")
        return [text, text if other is None else other]


def of_decoder(others: Others, length: int = 12, **options: Any) -> Any:
    return facts_of(decoder(), data_of(0, length), others, **options)


def causal(x: Tensor, q: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(x if q is None else q, x, x, is_causal=True)


def rows(length: int = 12) -> list[Tensor]:
    return [torch.randn(1, 2, length, 4, requires_grad=True)]


def sums_of_a_sharded_weight() -> Function:
    """Rows that all ranks reduce, computed with a weight that some ranks share."""
    weight = distribute_tensor(torch.randn(4, 4), DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"), [Shard(0)])
    weight.requires_grad_()
    return lambda x: all_reduce(causal(x, x @ whole(weight)), "sum", everybody()).exp().sum()  # type: ignore[arg-type]


# -- agreement


@pytest.mark.parametrize(
    ("say", "in_loops", "reasons"),
    [
        ((), 10, []),
        (("other chunks",), 0, [OTHER_CHUNKS]),
        (("other chunks", "another order"), None, [OTHER_LOOPS]),
    ],
    ids=["the same", "other chunks", "another order, too"],
)
def test_decisions_of_ranks(say: tuple[str, ...], in_loops: int | None, reasons: list[str]) -> None:
    """Reduce in loops, reduce between loops, or run the original graph."""
    others = Others(*say)
    facts = of_decoder(others)
    assert facts.reasons() == reasons and not others.say
    assert (facts.program is None) if in_loops is None else (sum(reductions(facts)) == in_loops)
    assert say or [text for text, *_ in others.heard] == [text_of_ranks(facts)]


@pytest.mark.parametrize(
    ("make", "say", "words"),
    [
        (decoder, (f"{FAILED}ValueError: no\nwait",), "another rank does not run"),
        (decoder, ("nothing",), "nothing from rank 1"),
        (sums_of_a_sharded_weight, (None, "something else"), "something else on its rank 1"),
        # whether the others run that one or the new one it could not know
        (sums_of_a_sharded_weight, (None, "changed"), "began with all_gather of two weights"),
    ],
    ids=["a failure", "nothing", "another order", "another order than before"],
)
def test_a_disagreement_is_an_error(make: Callable[[], Function], say: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(RanksDifferError, match=words):
        facts_of(make(), data_of(0, 12) if make is decoder else rows(), Others(*say))


def test_a_failing_rank_reports_it() -> None:
    others, heard = Others(), Others()
    with (
        mock.patch("streamfx.frontend.backend.run_pipeline", side_effect=ValueError("no")),
        pytest.raises(RanksDifferError, match="this rank could not"),
    ):
        of_decoder(others)
    ((text, *how),) = others.heard
    assert text.startswith(f"{FAILED}ValueError: no\nplease report this") and how == [everybody().group_name, False]
    of_decoder(heard, 13)
    assert heard.subjects == others.subjects  # the same for all lengths, because the graph is not analyzed yet


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "do"),
    [({"memory_budget": "1KiB", "chunk_size": "auto"}, "raise the budget"), ({"strict": True}, "drop strict=True")],
)
def test_a_refusal_reaches_all_ranks_with_its_remedy(options: dict[str, Any], do: str) -> None:
    model, others = decoder(), Others()
    model.layers[0].forward = lambda x: x + x.sort(1)[0]  # type: ignore[method-assign]
    with pytest.raises((OverBudgetError, NotStreamedError)):
        facts_of(model, data_of(0, 12), others, **options)
    text, _, waits = others.heard[-1]
    assert text.startswith(FAILED) and do in text and "report" not in text and not waits


def test_ranks_of_several_groups_reduce_between_loops() -> None:
    """No group can agree for all groups; each compares its own order."""
    half = dist.new_group([0, 1])

    def function(x: Tensor) -> Tensor:
        return all_reduce(all_reduce(causal(x), "sum", half).exp(), "sum", everybody()).square().sum()

    others, names = Others(), [half.group_name, everybody().group_name]
    facts = facts_of(function, rows(), others)
    assert not any(reductions(facts)) and facts.reasons() == [SEVERAL_GROUPS]
    assert [group for _, group, _ in others.heard] == 2 * names
    with pytest.raises(RanksDifferError, match="in the same order"):
        facts_of(function, rows(), Others(None, "another order"))
    handed_on = Others(None, None, f"{FAILED}ValueError: no\nwait")  # a rank of this group has another one that does not agree
    with pytest.raises(RanksDifferError, match="ValueError: no"):
        facts_of(function, rows(), handed_on)
    left = [(text, group) for text, group, waits in handed_on.heard if not waits]
    assert left == [(f"{FAILED}ValueError: no\nwait", group) for group in names]


def test_scalar_sums_need_no_agreement() -> None:
    """Ranks whose lengths differ compile in different steps, and add up their losses."""
    others = Others()
    facts = facts_of(lambda x: all_reduce(causal(x).square().sum(), "sum", everybody()), rows(), others)
    assert facts.program is not None and not others.heard


OPTIONS: list[dict[str, Any]] = [{}, {"chunk_size": 8}, {"chunk_size": "auto"}, {"save": "products"}]


def test_messages_contain_chunks_and_order() -> None:
    model = decoder(1)
    texts = {text_of_ranks(facts_of(model, data_of(0, length), **options)) for length in (12, 13) for options in OPTIONS}
    assert len(texts) == 2 * len(OPTIONS)
    assert text_of_ranks(facts_of(model, data_of(0, 12))) in texts
    other = facts_of(lambda x: all_reduce(Shared.apply(x) @ x.mT @ x, "max", everybody()), [torch.randn(1, 12, 4)])
    assert text_of_ranks(other) not in texts


def test_names_of_other_groups_are_not_compared() -> None:
    """Ranks with parts of the same layers may be in different groups otherwise."""

    def text() -> str:
        half = dist.new_group([0, 1])
        return text_of_ranks(
            facts_of(lambda x: all_reduce(all_reduce(causal(x), "sum", everybody()).exp().sum(), "sum", half), rows())
        )

    assert text() == text()


def test_messages_about_weights_depend_on_no_length() -> None:
    function, heard = sums_of_a_sharded_weight(), []
    for length in (12, 13):
        others = Others()
        facts_of(function, rows(length), others)
        heard.append([text for text, *_ in others.heard][:2])
    (first, weights), (second, other_weights) = heard
    assert first != second and weights == other_weights
    assert "all_gather" in weights and "reduce_scatter" in weights


# -- earlier agreements


def known_of(model: Function, length: int, **options: Any) -> list[str | None]:
    """Return the keys under which a rank keeps agreements."""
    others = Others()
    facts_of(model, data_of(0, length), others, **options)
    assert others.about and all(others.about)
    return others.about


def gathered_decoder() -> nn.Module:
    torch.manual_seed(0)
    return sharded(Decoder(2, width=32), DeviceMesh.from_group(everybody(), "cpu"))


def test_an_agreement_holds_for_all_lengths_and_chunks() -> None:
    """Otherwise a rank would wait for ranks that do not recompile."""
    model = gathered_decoder()
    first = known_of(model, 12)
    assert known_of(model, 13) == known_of(model, 1) == first
    assert known_of(model, 12, chunk_size=8, bodies="eager", loss_chunk_size=2) == first
    assert known_of(model, 12, save="products") != first
    with torch.no_grad():  # all ranks run a prompt, and then one token after the other, where nothing streams
        prompt, token = known_of(model, 12), known_of(model, 1)
    assert prompt != token


def test_two_models_have_different_keys() -> None:
    """They send the same values from the same lines, possibly in another order."""
    first, second = gathered_decoder(), gathered_decoder()
    assert known_of(first, 12) != known_of(second, 12)
    assert len(set(weight_ids([*first.parameters(), *second.parameters()]))) == 2 * len(list(first.parameters()))
    assert weight_ids(first.parameters()) == weight_ids(first.parameters())


# -- texts that ranks exchange


ALL, FAILS_ALONE, FAILS = "all", "fails alone", "fails"
KINDS = some.sampled_from((ALL, FAILS, FAILS_ALONE))


def within(seconds: float) -> mock._patch[timedelta]:
    return mock.patch("streamfx.torch_private.ranks.WAIT_LIMIT", timedelta(seconds=seconds))


def board(store: HashStore, rank: int, subject: str = "graph", world: int = 2) -> _Board:
    return _Board(store, "texts", tuple(range(world)), rank, subject)


def heard(store: HashStore, rank: int, world: int, graphs: list[tuple[str, int]]) -> list[list[str] | None]:
    """Return the texts that a rank receives for each graph.

    All ranks compile it; or rank `who` fails at it, or at another graph that it compiles alone.
    """
    found: list[list[str] | None] = []
    for number, (kind, who) in enumerate(graphs):
        own = board(store, rank, f"graph{number}" if kind != FAILS_ALONE else "old", world)
        fails = kind != ALL and who % world == rank
        if fails:
            own.leave("failed")
        found.append(None if fails or kind == FAILS_ALONE else own.exchange(f"order {number}"))
    return found


@within(60)
@settings(max_examples=100, deadline=None)
@given(some.integers(2, 3), some.lists(some.tuples(KINDS, some.integers(0, 2)), max_size=6))
def test_texts_of_one_graph_meet(world: int, graphs: list[tuple[str, int]]) -> None:
    store = HashStore()
    with ThreadPoolExecutor(world) as threads:
        every = list(threads.map(lambda rank: heard(store, rank, world, graphs), range(world)))
    for number, (kind, who) in enumerate(graphs):
        failed = who % world if kind == FAILS else None
        texts = ["failed" if rank == failed else f"order {number}" for rank in range(world)]
        for rank, found in enumerate(every):
            assert found[number] == (None if kind == FAILS_ALONE or rank == failed else texts)


def test_a_timeout_names_the_missing_ranks() -> None:
    store = HashStore()
    board(store, 1, "other", 3).leave("failed")
    with within(0.3), pytest.raises(RanksMissingError, match="nothing from rank 1, 2 within"):
        board(store, 0, "graph", 3).exchange("an order")


@within(20)
def test_a_failure_is_received_once() -> None:
    """All ranks try again, with a smaller batch: the lines of code are the same."""
    store = HashStore()
    first, second = (board(store, rank) for rank in range(2))
    first.leave("failed")
    assert second.exchange("an order") == ["failed", "an order"]
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(second.exchange, "an order")
        time.sleep(0.1)  # it looks before the first one has written
        assert first.exchange("an order") == later.result() == ["an order"] * 2


def test_agreements_are_known_by_subject() -> None:
    own = board(HashStore(), 0, world=1)
    own.agree("values", "an order")
    assert own.agreed("values") == "an order" and own.agreed("other values") is None
