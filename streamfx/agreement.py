"""Do all ranks of a group run the same chunks? They compare before they run.

Where a loop reduces rows over ranks, the collective of each chunk meets that of the same chunk on the other ranks. How a graph is
cut follows from sizes, from what buffers hold, from options and budgets, and no rank knows those of another: its shards may be
smaller, its device another one. So each rank writes down the collectives that it is about to run, their chunks and order, and
reads what the others have written. Where that is not the same, rows are reduced between loops, and ranks compare once more;
where it is still not the same, all of them run the graph as it stands.

Lengths are not compared: eager's own reduction asks that they are the same on all ranks, in each call.

Collectives on weights have no rows, and rows that are exchanged between loops are as many as a rank has: ranks may have sequences
of other lengths, and compile again in other steps. What is exchanged, and made again in the backward half, follows from the graph
and the options, not from sizes. So for a group that has only such collectives ranks compare what they have not yet agreed on, and
raise an error where that is not the same. So does a rank that would run the same collectives in another order than before: no
other could tell which of both it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TypeAlias

from torch import fx

from streamfx.errors import RanksDiffer, told
from streamfx.ir.facts import Facts
from streamfx.passes.codegen.collective_order import order_between_loops, order_with_chunks, values_between_loops
from streamfx.passes.operators.collectives import groups_of, is_all_reduce, is_reduced_over_ranks
from streamfx.passes.operators.traits import producer_of
from streamfx.passes.partition.between import Between
from streamfx.ranks_differ import failed_elsewhere, nothing_from_others, other_collectives, other_order_than_before
from streamfx.torch_private.ranks import Changed, Missing, written_by_all

Capture: TypeAlias = "Callable[[], Facts]"
Exchange: TypeAlias = "Callable[..., list[str]]"  # `written_by_all`
FAILED = "failed: "
SEVERAL = "rows are reduced over ranks of several groups: there is no one group that could agree on chunks"
DIFFER = "rows are reduced over ranks that would cut this graph in other ways"
STAND = "the ranks that reduce rows of this graph would cut it in other ways, also between loops"


def run_agreed(run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange | None = None, asked: str = "") -> Facts:
    """What `run` makes of a graph; where rows of it are reduced over ranks, what all of these ranks make of it alike."""
    exchange = exchange or written_by_all
    try:
        return _agreed(run, capture, exchange, asked)
    except RanksDiffer:
        raise
    except Changed as error:
        raise other_order_than_before(str(error)) from error
    except Missing as error:
        raise nothing_from_others(error) from error
    except Exception as error:
        for group in groups_of(capture().joint.graph.nodes):  # nobody is to wait for this rank
            exchange(FAILED + told(error), group, waits=False)
        raise


def _agreed(run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange, asked: str) -> Facts:
    facts = _rows_agreed(run, capture, exchange)
    reduced = groups_of(rows_over_ranks(facts))
    for group in reduced if len(reduced) > 1 else ():
        _raise_unless_same(exchange(order_between_loops(facts, group), group))
    for group in dict.fromkeys((*groups_of_weights(facts), *groups_of_exchanges(facts))):
        if group not in reduced:
            _raise_unless_same(
                exchange(order_between_loops(facts, group), group, about=f"{asked}\n{values_between_loops(facts, group)}")
            )
    return facts


def _raise_unless_same(texts: Sequence[str]) -> None:
    _raise_failed(texts)
    if len(set(texts)) > 1:
        raise other_collectives(*_first_difference(texts))


def _rows_agreed(run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange) -> Facts:
    """With the rows that are reduced over ranks where all of these ranks reduce them."""
    facts = run(capture)
    rows = rows_over_ranks(facts)
    groups = groups_of(rows)
    if not rows or (len(groups) == 1 and is_same_on_all_ranks(facts, groups[0], exchange)):
        return facts
    facts = run(lambda: replace(capture(), apart=DIFFER if len(groups) == 1 else SEVERAL))
    if len(groups) != 1 or is_same_on_all_ranks(facts, groups[0], exchange):
        return facts
    return replace(facts, program=None, stands=STAND)


def rows_over_ranks(facts: Facts) -> list[fx.Node]:
    """What a graph reduces over ranks that has rows of the sequence, also where this rank does not read it."""
    axes = facts.found_axes
    if axes is None or axes.sequence is None:
        return []
    reduced = (node for node in facts.joint.graph.nodes if is_reduced_over_ranks(node) or is_all_reduce(node))
    return [node for node in reduced if axes.sequence_dims(axes.shapes[node])]


def groups_of_weights(facts: Facts) -> list[str]:
    """The groups over which weights are gathered and their gradients reduced."""
    found = facts.collectives
    stretches = () if found is None else (*(gather.stretch for gather in found.gathers.values()), *found.reductions.values())
    return groups_of(node for stretch in stretches for node in stretch.graph.nodes)


def groups_of_exchanges(facts: Facts) -> list[str]:
    """The groups over which rows are exchanged between loops."""
    if facts.found_demand is None or facts.axes.sequence is None:
        return []
    exchanged = {producer_of(node) for node in Between(facts).nodes}
    return groups_of(node for node in facts.joint.graph.nodes if node in exchanged)


def is_same_on_all_ranks(facts: Facts, group: str, exchange: Exchange) -> bool:
    """Whether all ranks of a group run the same collectives, in the same chunks and in the same order."""
    texts = exchange(order_with_chunks(facts, group), group)
    _raise_failed(texts)
    return len(set(texts)) == 1


def _raise_failed(texts: Sequence[str]) -> None:
    failed = next((text for text in texts if text.startswith(FAILED)), None)
    if failed is not None:
        raise failed_elsewhere(failed.removeprefix(FAILED))


def _first_difference(texts: Sequence[str]) -> tuple[int, str, str]:
    """The first rank that runs something else than the first rank, and what both run there."""
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    lines = zip_longest(texts[0].split("\n"), texts[other].split("\n"), fillvalue="nothing more")
    return (other, *next((one.strip(), another.strip()) for one, another in lines if one != another))
