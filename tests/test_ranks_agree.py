"""Ranks that reduce rows compare what they will run, and decide alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from streamfx.distributed.rank_consensus import DIFFER, FAILED, SEVERAL, STAND
from streamfx.errors import NotStreamedError, OverBudgetError, RanksDifferError
from streamfx.frontend.weight_ids import numbers_of_weights
from streamfx.torch_private.ranks import RankChangedError, RanksMissingError
from tests.support.collectives import data_of
from tests.support.cut_by_hand import Shared
from tests.support.over_ranks import decoder, everybody, facts_of, one_of_many, reductions, text_of_ranks
from tests.support.sharded import Decoder, sharded, whole


@pytest.fixture
def ranks() -> Iterator[None]:
    with one_of_many():
        yield


# -- agreement


class Others:
    """Ranks that say the same, or something else, in turn."""

    def __init__(self, *say: str | None) -> None:
        self.say, self.heard, self.subjects = list(say), list[tuple[str, str, bool]](), set[str]()

    def __call__(self, text: str, group: str, subject: str, waits: bool = True, about: str | None = None) -> list[str]:
        self.heard.append((text, group, waits))
        self.subjects.add(subject)
        other = self.say.pop(0) if waits else None
        if other == "nothing":
            raise RanksMissingError("nothing from rank 1 within 600 seconds")
        return [text, text if other is None else other]


def test_ranks_that_say_the_same_reduce_in_loops(ranks: None) -> None:
    others = Others(None)
    facts = facts_of(decoder(), data_of(0, 12), others)
    assert sum(reductions(facts)) == 10 and [text for text, *_ in others.heard] == [text_of_ranks(facts)]


def test_ranks_that_would_cut_otherwise_reduce_between_loops(ranks: None) -> None:
    others = Others("other chunks", None)
    facts = facts_of(decoder(), data_of(0, 12), others)
    assert not any(reductions(facts)) and facts.reasons() == [DIFFER] and len(facts.program.loops) > 7  # type: ignore[union-attr]


def test_ranks_that_differ_in_both_run_the_graph_as_it_stands(ranks: None) -> None:
    others = Others("other chunks", "another order")
    facts = facts_of(decoder(), data_of(0, 12), others)
    assert facts.program is None and facts.reasons() == [STAND] and not others.say


@pytest.mark.parametrize(
    ("says", "words"), [(f"{FAILED}ValueError: no\nwait", "another rank does not run"), ("nothing", "nothing from rank 1")]
)
def test_ranks_that_say_nothing_else_are_an_error(ranks: None, says: str, words: str) -> None:
    with pytest.raises(RanksDifferError, match=words):
        facts_of(decoder(), data_of(0, 12), Others(says))


def test_a_rank_that_fails_says_so(ranks: None) -> None:
    others = Others()
    with (
        mock.patch("streamfx.frontend.backend.run_pipeline", side_effect=ValueError("no")),
        pytest.raises(RanksDifferError, match="this rank could not"),
    ):
        facts_of(decoder(), data_of(0, 12), others)
    ((text, *how),) = others.heard
    assert text.startswith(f"{FAILED}ValueError: no\nplease report this") and how == [everybody().group_name, False]
    heard = Others(None)
    facts_of(decoder(), data_of(0, 13), heard)
    assert heard.subjects == others.subjects  # whatever the length, and before anything is known of the graph


@pytest.mark.parametrize(
    ("options", "do"),
    [({"memory_budget": "1KiB", "chunk_size": "auto"}, "raise the budget"), ({"strict": True}, "drop strict=True")],
)
def test_a_rank_whose_user_is_refused_something_says_what_to_do(ranks: None, options: dict[str, Any], do: str) -> None:
    model, others = decoder(), Others(None, None)
    model.layers[0].forward = lambda x: x + x.sort(1)[0]  # type: ignore[method-assign]
    with pytest.raises((OverBudgetError, NotStreamedError)):
        facts_of(model, data_of(0, 12), others, **options)
    text, _, waits = others.heard[-1]
    assert text.startswith(FAILED) and do in text and "report" not in text and not waits


def test_ranks_of_several_groups_reduce_between_loops(ranks: None) -> None:
    """No group could agree for all of them; each compares the order of its own."""
    half = dist.new_group([0, 1])

    def function(x: Tensor) -> Tensor:
        h = all_reduce(F.scaled_dot_product_attention(x, x, x, is_causal=True), "sum", half)
        return all_reduce(h.exp(), "sum", everybody()).square().sum()

    others, x = Others(None, None, None, None), torch.randn(1, 2, 12, 4, requires_grad=True)
    facts = facts_of(function, [x], others)
    assert not any(reductions(facts)) and facts.reasons() == [SEVERAL]
    assert [group for _, group, _ in others.heard] == 2 * [half.group_name, everybody().group_name]
    with pytest.raises(RanksDifferError, match="in the same order"):
        facts_of(function, [x], Others(None, "another order"))
    handed_on = Others(None, None, f"{FAILED}ValueError: no\nwait")  # a rank of this group has another one that does not agree
    with pytest.raises(RanksDifferError, match="ValueError: no"):
        facts_of(function, [x], handed_on)
    left = [(text, group) for text, group, waits in handed_on.heard if not waits]
    assert left == [(f"{FAILED}ValueError: no\nwait", group) for group in (half.group_name, everybody().group_name)]


def test_sums_alone_need_no_agreement(ranks: None) -> None:
    """Ranks whose lengths differ compile in different steps, and add up their losses."""

    def function(x: Tensor) -> Tensor:
        return all_reduce(F.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum(), "sum", everybody())

    others = Others()
    facts = facts_of(function, [torch.randn(1, 2, 12, 4, requires_grad=True)], others)
    assert facts.program is not None and not others.heard


def test_what_ranks_say_tells_chunks_and_order(ranks: None) -> None:
    model = decoder(1)
    texts = {text_of_ranks(facts_of(model, data_of(0, length), **options)) for length in (12, 13) for options in OPTIONS}
    swapped = copy.deepcopy(model)
    swapped.layers[0].forward = lambda x: type(model.layers[0]).forward(swapped.layers[0], x.flip(-1))  # type: ignore[method-assign]
    assert len(texts) == 2 * len(OPTIONS)
    assert text_of_ranks(facts_of(model, data_of(0, 12))) in texts
    other = facts_of(lambda x: all_reduce(Shared.apply(x) @ x.mT @ x, "max", everybody()), [torch.randn(1, 12, 4)])
    assert text_of_ranks(other) not in texts


OPTIONS: list[dict[str, Any]] = [{}, {"chunk_size": 8}, {"chunk_size": "auto"}, {"save": "products"}]


def test_names_of_other_groups_are_not_compared(ranks: None) -> None:
    """Ranks that hold parts of the same layers are in groups of their own for everything else."""

    def texts() -> str:
        half = dist.new_group([0, 1])

        def function(x: Tensor) -> Tensor:
            h = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            return all_reduce(all_reduce(h, "sum", everybody()).exp().sum(), "sum", half)

        return text_of_ranks(facts_of(function, [torch.randn(1, 2, 12, 4, requires_grad=True)]))

    assert texts() == texts()


def sums_of_a_sharded_weight() -> Callable[[Tensor], Tensor]:
    """Rows that are reduced over all ranks, made with a weight that some of them share."""
    weight = distribute_tensor(torch.randn(4, 4), DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"), [Shard(0)])

    def function(x: Tensor) -> Tensor:
        h = F.scaled_dot_product_attention(x @ whole(weight), x, x, is_causal=True)  # type: ignore[arg-type]
        return all_reduce(h, "sum", everybody()).exp().sum()

    weight.requires_grad_()
    return function


def test_what_ranks_say_of_weights_is_the_same_for_all_lengths(ranks: None) -> None:
    function, heard = sums_of_a_sharded_weight(), []
    for length in (12, 13):
        others = Others(None, None, None, None)
        facts_of(function, [torch.randn(1, 2, length, 4)], others)
        heard.append([text for text, *_ in others.heard][:2])
    (rows, weights), (other_rows, other_weights) = heard
    assert rows != other_rows and weights == other_weights
    assert "all_gather" in weights and "reduce_scatter" in weights


def test_ranks_that_gather_in_another_order_say_so(ranks: None) -> None:
    with pytest.raises(RanksDifferError, match="something else on its rank 1"):
        facts_of(sums_of_a_sharded_weight(), [torch.randn(1, 2, 12, 4)], Others(None, "something else"))


def test_a_rank_keeps_to_an_order_that_was_agreed_on(ranks: None) -> None:
    """Whether the others run that one or the new one it could not know."""

    def changed(text: str, group: str, about: str | None = None, **others: Any) -> list[str]:
        if about is None:
            return [text]
        raise RankChangedError("all_gather of two weights\nreduce_scatter of them")

    with pytest.raises(RanksDifferError, match="began with all_gather of two weights"):
        facts_of(sums_of_a_sharded_weight(), [torch.randn(1, 2, 12, 4)], changed)


# -- what is known already


class Known:
    """Notes under what a rank knows what was agreed on."""

    def __init__(self) -> None:
        self.about: list[str | None] = []

    def __call__(self, text: str, group: str, about: str | None = None, **others: Any) -> list[str]:
        self.about.append(about)
        return [text]


def known_of(model: Callable[..., Tensor], length: int, **options: Any) -> list[str | None]:
    known = Known()
    facts_of(model, data_of(0, length), known, **options)
    assert known.about and all(known.about)
    return known.about


def gathered_decoder() -> nn.Module:
    torch.manual_seed(0)
    return sharded(Decoder(2, width=32), DeviceMesh.from_group(everybody(), "cpu"))


def test_a_model_is_known_at_all_lengths_and_in_all_chunks(ranks: None) -> None:
    """So no rank waits for others that do not compile again."""
    model = gathered_decoder()
    first = known_of(model, 12)
    assert known_of(model, 13) == known_of(model, 1) == first
    assert known_of(model, 12, chunk_size=8, bodies="eager", loss_chunk_size=2) == first
    assert known_of(model, 12, save="products") != first


@torch.no_grad()
def test_steps_of_generation_have_an_order_beside_that_of_their_prompt(ranks: None) -> None:
    """All ranks run a prompt, and then one token after the other, where nothing streams."""
    model = gathered_decoder()
    prompt, token = known_of(model, 12), known_of(model, 1)
    assert prompt == known_of(model, 13) and token == known_of(model, 1) and prompt != token


def test_two_models_are_never_one(ranks: None) -> None:
    """What they send is the same, and so are the lines that send it: the order need not be."""
    first, second = gathered_decoder(), gathered_decoder()
    assert known_of(first, 12) != known_of(second, 12)
    assert len(set(numbers_of_weights([*first.parameters(), *second.parameters()]))) == 2 * len(list(first.parameters()))
    assert numbers_of_weights(first.parameters()) == numbers_of_weights(first.parameters())


def test_a_graph_of_sharded_weights_can_run_backward_twice_in_a_later_step(ranks: None) -> None:
    torch._dynamo.reset()
    function = torch.compile(gathered_decoder(), backend="streambp", options={"chunk_size": 4})
    function(*data_of(0, 12)).backward()
    loss = function(*data_of(0, 12))
    loss.backward(retain_graph=True)
    loss.backward()
