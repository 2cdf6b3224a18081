"""Ensure that all ranks of a group run the same chunks: they compare plans before they run.

If a loop reduces rows over ranks, the collective of a chunk must match the collective of that chunk on other ranks. The chunks
depend on shapes, buffer contents, options and budgets. No rank knows these of other ranks: their shards may be smaller, their
devices different. So each rank publishes the collectives that it is about to run, with their chunks and order, and reads the
texts of the others. If they differ, all ranks reduce rows between loops and compare again; if they still differ, the graph runs
unchunked on all ranks.

Lengths are not compared: eager's own reduction requires equal lengths on all ranks in each call.

Collectives on weights have no rows, and exchanges of rows between loops only depend on the rows of each rank: ranks may have
sequences of different lengths, and recompile in different steps. Which values are exchanged, and which are recomputed in the
backward graph, follows from the graph and the options, not from shapes. So if a group has only such collectives, its ranks
compare only texts on which they have not agreed before (the key of an agreement identifies them), and raise an error if these
differ. A rank also raises an error if it would run the collectives of a model in a different order than before, because the other
ranks cannot know which order it runs. A rank that raises an error notifies all its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TypeAlias

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.passes.lowering.collective_order import (
    UNCHUNKED,
    describe_order_between_loops,
    describe_order_with_chunks,
    describe_traced_order,
    describe_weight_collectives,
)
from streamfx.passes.ops.collectives import find_group_names, is_all_reduce, is_reduced_over_ranks
from streamfx.rank_errors import (
    NOTHING_MORE,
    failed_elsewhere,
    failure,
    nothing_from_others,
    order_differs_between_lengths,
    other_collectives,
)
from streamfx.torch_private.ranks import RankChangedError, RanksMissingError, exchange_texts

Capture: TypeAlias = "Callable[[], Facts]"
Exchange: TypeAlias = "Callable[..., list[str]]"  # `exchange_texts`
FAILED = "failed: "
ALL_GROUPS_AGREE = "all groups of this rank agree"
SEVERAL_GROUPS = "rows are reduced over ranks of several groups, and there is no single group that could agree on chunks"
OTHER_CHUNKS = "rows are reduced over ranks that would divide this graph into other chunks"
OTHER_LOOPS = "the ranks that reduce rows of this graph would run it in other loops, even with reductions between loops"


def run_with_consensus(
    run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange | None = None, request: str = ""
) -> Facts:
    """Run the passes, and return their facts; if rows are reduced over ranks, facts on which these ranks agree.

    `run` runs the passes on the facts of a traced graph, which `capture` returns. `exchange`: how ranks exchange texts, by
    default `exchange_texts`. `request` identifies the options and the weights of this rank. On an error, notify the other
    ranks and raise.
    """
    channel = _Channel(capture, exchange or exchange_texts, request)
    try:
        return _agree_in_all_groups(run, capture, channel)
    except _RankFailedError as error:
        channel.leave(error.failure)
        raise failed_elsewhere(error.failure) from None
    except Exception as error:
        failure_here = _rank_error(error)
        channel.leave(failure(failure_here))  # so that no other rank waits for this one
        raise failure_here from (None if failure_here is error else error)


class _RankFailedError(Exception):
    """Another rank reported that it does not run a graph; `failure` is its text."""

    def __init__(self, failure: str) -> None:
        super().__init__(failure)
        self.failure = failure


def _rank_error(error: Exception) -> Exception:
    """Return the error to raise on this rank: about the other ranks if they are missing or have changed, else `error` itself."""
    if isinstance(error, RankChangedError):
        return order_differs_between_lengths(str(error))
    return nothing_from_others(error) if isinstance(error, RanksMissingError) else error


@dataclass
class _Channel:
    """Exchanges texts about one graph with the other ranks of a group; `capture` returns the facts of the traced graph.

    Each text names its graph by the traced order of collectives, which a rank knows even if its analysis fails.
    """

    capture: Capture
    exchange: Exchange
    request: str

    def read(self, text: str, group: str, agreement_key: str | None = None) -> list[str]:
        """Write a text for a group (by name), and return the texts of all its ranks.

        If `agreement_key` is set, ranks agree on the text only once per key, and do not exchange it again.

        Raises:
            _RankFailedError: if another rank reports that it failed.
        """
        subject = describe_traced_order(self.graph, group)
        about = None if agreement_key is None else f"{self.request}\n{agreement_key}\n{subject}"
        texts = self.exchange(text, group, subject=subject, about=about)
        failure_text = next((rank_text for rank_text in texts if rank_text.startswith(FAILED)), None)
        if failure_text is not None:
            raise _RankFailedError(failure_text.removeprefix(FAILED))
        return texts

    def leave(self, failure: str) -> None:
        """Notify all groups of this graph, without waiting, that this rank does not run it; `failure` says why."""
        for group in find_group_names(self.graph.nodes):
            self.exchange(FAILED + failure, group, subject=describe_traced_order(self.graph, group), waits=False)

    @cached_property
    def graph(self) -> fx.Graph:
        return self.capture().joint.graph


def _agree_in_all_groups(run: Callable[[Capture], Facts], capture: Capture, channel: _Channel) -> Facts:
    """Return this rank's facts, after all its groups have confirmed that they run the same collectives in the same order.

    First the groups that reduce rows agree on chunks, then every other group on its order. Raise an error if texts differ.
    """
    facts = _facts_with_equal_row_reductions(run, capture, channel)
    row_groups = find_group_names(rows_over_ranks(facts))
    agreement_keys = {group: _agreement_key(facts, group) for group in (*weight_group_names(facts), *exchange_group_names(facts))}
    other_groups = [group for group in agreement_keys if group not in row_groups]
    for group in row_groups if len(row_groups) > 1 else ():
        _raise_unless_same(channel.read(describe_order_between_loops(facts, group), group))
    for group in other_groups:
        _raise_unless_same(channel.read(describe_order_between_loops(facts, group), group, agreement_keys[group]))
    groups = [*row_groups, *other_groups]
    for _ in groups[1:]:  # a rank may have failed in another group: each round passes the notice on to one more group
        for group in groups:
            confirmation_key = f"{ALL_GROUPS_AGREE}\n{agreement_keys[group]}" if group in other_groups else None
            channel.read(ALL_GROUPS_AGREE, group, confirmation_key)
    return facts


def _agreement_key(facts: Facts, group: str) -> str:
    """Return the text that identifies an agreement of a group: its collectives on weights.

    Unchunked graphs without gradients (steps of generation) have separate agreements.
    """
    values = describe_weight_collectives(facts, group)
    return f"{UNCHUNKED}\n{values}" if facts.program is None and not facts.joint.gradients else values


def _raise_unless_same(texts: Sequence[str]) -> None:
    """Raise an error about the first difference if the texts, one for each rank of a group, differ."""
    if len(set(texts)) > 1:
        raise other_collectives(*_first_difference(texts))


def _facts_with_equal_row_reductions(run: Callable[[Capture], Facts], capture: Capture, channel: _Channel) -> Facts:
    """Return facts whose reductions of rows over ranks match on all ranks: in loops, else between loops, else unchunked.

    Rows that are reduced over several groups are always reduced between loops, because no single group could agree on chunks.
    """
    facts = run(capture)
    reductions = rows_over_ranks(facts)
    groups = find_group_names(reductions)
    if not reductions or (len(groups) == 1 and is_same_on_all_ranks(facts, groups[0], channel)):
        return facts
    facts = run(lambda: replace(capture(), separate_reductions=OTHER_CHUNKS if len(groups) == 1 else SEVERAL_GROUPS))
    if len(groups) != 1 or is_same_on_all_ranks(facts, groups[0], channel):
        return facts
    return replace(facts, program=None, unchunked_reason=OTHER_LOOPS)


def rows_over_ranks(facts: Facts) -> list[fx.Node]:
    """Return the reductions over ranks whose operands have rows of the sequence, including those whose result is unused.

    [] if the graph has no sequence axis.
    """
    axes = facts.found_axes
    if axes is None or axes.sequence is None:
        return []
    reductions = (node for node in facts.joint.graph.nodes if is_reduced_over_ranks(node) or is_all_reduce(node))
    return [node for node in reductions if axes.sequence_dims(axes.shapes[node])]


def weight_group_names(facts: Facts) -> list[str]:
    """Return the names of the groups over which weights are gathered and their gradients reduced."""
    collectives = facts.collectives
    if collectives is None:
        return []
    subgraphs = (*(gather.subgraph for gather in collectives.gathers.values()), *collectives.reductions.values())
    return find_group_names(node for subgraph in subgraphs for node in subgraph.graph.nodes)


def exchange_group_names(facts: Facts) -> list[str]:
    """Return the names of the groups with collectives other than sums, such as gathers.

    They exchange rows of the sequence, even if this rank has too few rows to find a sequence axis.
    """
    nodes = facts.joint.graph.nodes
    return find_group_names(node for node in nodes if not is_all_reduce(node) and not is_reduced_over_ranks(node))


def is_same_on_all_ranks(facts: Facts, group: str, channel: _Channel) -> bool:
    """Return whether all ranks of a group run the same collectives, in the same chunks and order."""
    return len(set(channel.read(describe_order_with_chunks(facts, group), group))) == 1


def _first_difference(texts: Sequence[str]) -> tuple[int, str, str]:
    """Return the first rank that differs from rank 0, and the first lines, (of rank 0, of that rank), in which they differ."""
    other_rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    lines = zip_longest(texts[0].split("\n"), texts[other_rank].split("\n"), fillvalue=NOTHING_MORE)
    return (other_rank, *next((left.strip(), right.strip()) for left, right in lines if left != right))
