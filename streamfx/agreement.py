"""Do all ranks of a group run the same chunks? They compare before they run.

Where a loop reduces rows over ranks, the collective of each chunk meets that of the same chunk on the other ranks. How a graph is
cut follows from sizes, from what buffers hold, from options and budgets, and no rank knows those of another: its shards may be
smaller, its device another one. So each rank writes down the collectives that it is about to run, their chunks and order, and
reads what the others have written. Where that is not the same, rows are reduced between loops, and ranks compare once more;
where it is still not the same, all of them run the graph as it stands.

Lengths are not compared: eager's own reduction asks that they are the same on all ranks, in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from torch import fx

from streamfx.errors import RanksDiffer, told
from streamfx.ir.facts import Facts
from streamfx.ir.joint import bound_arguments, is_tensor
from streamfx.ir.program import Program
from streamfx.passes.codegen.waits import REDUCED
from streamfx.passes.operators.collectives import groups_of, is_collective, is_reduced_over_ranks
from streamfx.runtime.collectives import begin
from streamfx.runtime.loop import Loop
from streamfx.torch_private.ranks import Missing, written_by_all

Capture: TypeAlias = "Callable[[], Facts]"
Exchange: TypeAlias = "Callable[..., list[str]]"  # text, group, whether it waits: what all ranks of the group have written
FAILED = "failed: "
GROUPS = ("group", "group_name")  # what operators call the ranks that run them together
SEVERAL = "rows are reduced over ranks of several groups: there is no one group that could agree on chunks"
DIFFER = "rows are reduced over ranks that would cut this graph in other ways"
STAND = "the ranks that reduce rows of this graph would cut it in other ways, also between loops"


def run_agreed(run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange | None = None) -> Facts:
    """What `run` makes of a graph; where rows of it are reduced over ranks, what all of these ranks make of it alike."""
    exchange = exchange or written_by_all
    try:
        return _agreed(run, capture, exchange)
    except RanksDiffer:
        raise
    except Missing as error:
        raise RanksDiffer.without(error) from error
    except Exception as error:
        for group in groups_of(capture().joint.graph):  # nobody is to wait for this rank
            exchange(FAILED + told(error), group, waits=False)
        raise


def _agreed(run: Callable[[Capture], Facts], capture: Capture, exchange: Exchange) -> Facts:
    facts = run(capture)
    rows = rows_over_ranks(facts)
    groups = list(dict.fromkeys(str(node.args[2]) for node in rows))
    if not rows or (len(groups) == 1 and is_said_by_all(facts, groups[0], exchange)):
        return facts
    facts = run(lambda: replace(capture(), apart=DIFFER if len(groups) == 1 else SEVERAL))
    if len(groups) > 1 or is_said_by_all(facts, groups[0], exchange):
        return facts
    return replace(facts, program=None, stands=STAND)


def rows_over_ranks(facts: Facts) -> list[fx.Node]:
    """What a graph reduces over ranks that has rows of the sequence."""
    axes = facts.found_axes
    if axes is None or axes.sequence is None:
        return []
    reduced = (node for node in facts.joint.graph.nodes if is_reduced_over_ranks(node))
    return [node for node in reduced if axes.sequence_dims(axes.shapes[node])]


def is_said_by_all(facts: Facts, group: str, exchange: Exchange) -> bool:
    """Whether all ranks of a group run the same collectives, in the same chunks and in the same order."""
    texts = exchange(said(facts, group), group)
    failed = next((text for text in texts if text.startswith(FAILED)), None)
    if failed is not None:
        raise RanksDiffer.elsewhere(failed.removeprefix(FAILED))
    return len(set(texts)) == 1


def said(facts: Facts, group: str) -> str:
    """Which collectives a program runs, in which order; in a loop with its chunks, and what a chunk has of each value."""
    return "\n".join(_lines(facts.program, group)) if facts.program is not None else "as it stands"


def _lines(program: Program, group: str) -> Iterator[str]:
    for name, half in (("forward", program.forward), ("backward", program.backward)):
        yield name
        for node in half.graph.nodes if half is not None else ():
            loop = half.get_submodule(str(node.target)) if node.op == "call_module" else None  # type: ignore[union-attr]
            if isinstance(loop, Loop):
                reduced = [str(inner.meta[REDUCED]) for inner in loop.spec.body.graph.nodes if inner.target is begin]
                order = "backwards" if loop.spec.reverse else "forwards"
                yield from (f"  {order} {loop.spec.chunk_size} of {loop.spec.length}", *reduced) if reduced else ()
            elif is_collective(node):
                yield f"  {_call(node, group)}"


def _call(node: fx.Node, group: str) -> str:
    """What a collective of these ranks is given; those of other groups have names and sizes of their own on each rank."""
    given = bound_arguments(node)
    is_own = any(given.get(name) == group for name in GROUPS)
    return f"{node.target} {fx.node.map_arg(given, _shown)}" if is_own else f"{node.target} of others"  # type: ignore[arg-type]


def _shown(node: fx.Node) -> str:
    return f"{node.meta['val'].dtype} {list(node.meta['val'].shape)}" if is_tensor(node) else "_"
