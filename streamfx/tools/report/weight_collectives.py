"""Print the collectives on weights: those removed from the graph, and where they run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_tensor
from streamfx.ir.subgraph import Subgraph
from streamfx.node_meta import VALUE
from streamfx.tools.report.listing import ListingContext, call_text, outer_lines, shape_text


def removed_collectives(facts: Facts) -> Iterator[str]:
    """Yield how each weight is gathered from its shard, and how each gradient is reduced to a rank's shard."""
    collectives = facts.collectives
    if collectives is None:
        yield "no collectives"
        return
    for weight, gather in collectives.gathers.items():
        yield f"weight {weight.name} {_shape(weight)} = {_chain_text(gather.subgraph)}"
    trained = {position: primal for position, primal, _ in facts.joint.trained}
    for position, subgraph in collectives.reductions.items():
        yield f"gradient of {trained[position].name} = {_chain_text(subgraph)}"


def programs_after_reinsertion(facts: Facts) -> Iterator[str]:
    """Yield both host programs with the reinserted collectives between loops."""
    yield from _host_programs(facts, placeholder="no collective was removed")


def programs_after_buckets(facts: Facts) -> Iterator[str]:
    """Yield both host programs after collectives between the same loops are merged."""
    yield from _host_programs(facts, placeholder="no collectives were merged")


def _host_programs(facts: Facts, placeholder: str) -> Iterator[str]:
    """Yield both host programs, or `placeholder` if the graph has no collectives on weights."""
    if facts.collectives is None:
        yield placeholder
        return
    if facts.program is None:
        return
    values = [node for node in (*facts.joint.sources, *facts.joint.nodes) if is_tensor(node)]
    yield from outer_lines(facts.program, ListingContext({}, {id(node.meta[VALUE]): node.name for node in values}))


def _chain_text(subgraph: Subgraph) -> str:
    """Format a chain of operators as nested calls."""
    text = {subgraph.source: f"{subgraph.source.name} {_shape(subgraph.source)}"}
    for node in subgraph.nodes:
        text[node] = call_text(node, text.__getitem__)
    return text[subgraph.result]


def _shape(node: fx.Node) -> str:
    return shape_text(node.meta[VALUE])
