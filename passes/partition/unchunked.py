"""What does a graph take that runs as it stood, with nothing cut into chunks?

AOTAutograd's partitioners make the halves that would run without us. Where these fit into the memory budget, or take less than
the loops, they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import fx

from streamfx.budget import bytes_of
from streamfx.cost.memory import Cost, bytes_of_values, cost_of
from streamfx.errors import told
from streamfx.fallbacks import NOT_LOOKED_AT, attempted
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts
from streamfx.ir.joint import JointGraph, descendants, device_of, outputs_of
from streamfx.log import log
from streamfx.node_meta import RECOMPUTE
from streamfx.options import Options
from streamfx.passes.ops.aliasing import memories, memories_made
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.ops.traits import is_expensive
from streamfx.passes.partition.budget_search import held_bytes
from streamfx.passes.partition.chunk_sizes import gradient_bytes

Halves: TypeAlias = "tuple[fx.GraphModule, fx.GraphModule | None]"
TOLERATED = 1.02  # of the bytes of a graph as it stood: so much its loops may take
LEAST = 1 << 20  # bytes: what takes less is not compared, which would make each first step longer
CLOSE = 1.2  # how near to the longest lengths for which it is smaller a search for them comes
LEAVES_OPEN: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "loss_chunk_size", "save", "keep_every"), "auto"),
    "offload": "none",
    "memory_budget": None,
    "adjoints": "exact",
    "strict": False,
}


@dataclass(frozen=True)
class UnchunkedGraph:
    """Halves of a graph as it stood, what a step through them costs, and lengths for which they are smaller."""

    halves: Halves
    cost: Cost
    lengths: Lengths | None = None


def may_fit_whole(joint: JointGraph, budget: int | float | str) -> bool:
    """Whether what the backward half reads of the forward half leaves room in the budget: halves that cannot fit are not made.

    Memory that the forward half surely makes is counted, each once. Where the user's code asks for values to be made again,
    what is kept is not known yet.
    """
    return attempted(partial(_leaves_room, joint, budget), True, NOT_LOOKED_AT, strict=False)


def _leaves_room(joint: JointGraph, budget: int | float | str) -> bool:
    if any(RECOMPUTE in node.meta for node in joint.graph.nodes):
        return True
    held = held_bytes(joint.graph, joint.tangents)
    left = bytes_of(budget, device_of(joint.graph), held, gradient_bytes(joint.gradients)) - held
    read = (memories(node) for node in joint.forward if node.op == "call_function" and not joint.forward.issuperset(node.users))
    return bytes_of_values(node for shown in read if len(shown) == 1 for node in shown if node.op == "call_function") <= left


def fits_whole(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, budget: int | float | str, others: int = 0
) -> bool:
    """Whether the two halves that AOTAutograd would run stay within the budget, with nothing cut into chunks.

    They keep all that the backward half asks for, which is more than Inductor keeps of the same graph. `others` are bytes of
    outputs that the halves do not make.
    """
    held, made = held_bytes(forward.graph), outputs_of(backward.graph)
    left = bytes_of(budget, device_of(forward.graph), held, gradient_bytes(made)) - held - others
    try:
        return cost_of(forward, backward, num_outputs).peak <= left
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known whether the graph fits as it stands: %s", error)
        return False


def may_stand(facts: Facts, options: Options) -> bool:
    """Whether what takes the least memory may run: no option asks for loops, no other rank has to agree, and values take enough
    for a comparison.
    """
    asks = any(getattr(options, name) != value for name, value in LEAVES_OPEN.items())
    return not asks and not has_collectives(facts.joint.graph) and bytes_of_values(facts.joint.nodes) >= LEAST


def is_compared(peak: int) -> bool:
    """Whether a step takes enough for other ways of running it to be worth a look."""
    return peak >= LEAST


def smaller_than(
    ours: Cost | None, facts: Facts, traced: JointGraph, ways: Iterable[Callable[[], Halves]]
) -> UnchunkedGraph | None:
    """Of a `traced` graph the smallest of some ways to run it in one piece, where it takes less than its loops, which cost `ours`
    (less than the first way, if there are no loops); None where it does not, or would not in calls that are longer.
    """
    num_outputs, program = len(facts.joint.outputs), facts.program
    if ours is not None and (not is_compared(ours.peak) or bytes_at_least(traced) >= ours.peak):
        return None
    found = [piece for make in ways if (piece := _simulated(make, num_outputs)) is not None]
    least = min((piece.cost.peak for piece in found), default=0)
    least_held = sorted((one for one in found if one.cost.peak <= TOLERATED * least), key=lambda one: one.cost.held)
    if not found or not _is_less(least, least_held[0].cost, found[0].cost if ours is None else ours):
        return None
    piece, others = least_held[0], found[0].halves if program is None else (program.forward, program.backward)
    held: list[bool] = []

    def holds(lengths: Lengths) -> bool:
        held.append(cost_of(*piece.halves, num_outputs).peak <= TOLERATED * cost_of(*others, num_outputs).peak)
        return held[-1]

    lengths = Lengths.now(facts.joint.graph).furthest_beyond(holds, CLOSE)
    if lengths is None and all(held):  # no call has more of each: parts of a split, say, that add up to a fixed number
        lengths = Lengths({})
    return None if lengths is None else replace(piece, lengths=lengths)


def _is_less(least: int, one: Cost, other: Cost) -> bool:
    """Whether `least`, about the peak of one, is below that of another by more than is tolerated; or whether one has no higher
    peak, and keeps less between its halves, when other graphs of a step run.
    """
    return least * TOLERATED < other.peak or (one.peak <= other.peak and one.held * TOLERATED < other.held)


def _simulated(make: Callable[[], Halves], num_outputs: int) -> UnchunkedGraph | None:
    try:
        halves = make()
        return UnchunkedGraph(halves, cost_of(*halves, num_outputs))
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known what the graph takes as it stands: %s", told(error))
        return None


def bytes_at_least(joint: JointGraph) -> int:
    """Bytes that are surely alive at once if a graph runs in one piece, whatever is fused and recomputed.

    A product reads its operands from memory and writes its result there. No partitioner recomputes a product, unless the user's
    code asks for that: results that an operator on gradients reads are kept until its last read. Gradients stay until the end.
    """
    nodes = joint.nodes
    products = (node for node in nodes if is_expensive(node))
    together = (bytes_of_values({node, *memories_made(node.all_input_nodes)}) for node in products)
    return max(*together, *_alive_in_backward(joint, nodes), 0)


def _alive_in_backward(joint: JointGraph, nodes: list[fx.Node]) -> Iterator[int]:
    """Bytes of kept products and of gradients, after each operator of the backward half."""
    on_gradients = descendants(joint.tangents, nodes)
    backward = [node for node in nodes if node in on_gradients]  # `clamp`'s mask needs none, and may run in the forward half
    last = {source: node for node in backward for source in memories_made(node.all_input_nodes) if source in joint.forward}
    last = {source: node for source, node in last.items() if is_expensive(source) and RECOMPUTE not in source.meta}
    read_last, alive = Counter[fx.Node](), bytes_of_values(last)
    for source, node in last.items():
        read_last[node] += bytes_of_values((source,))
    gradients = memories_made(node for node in joint.gradients if isinstance(node, fx.Node)) - joint.forward
    yield alive
    for node in backward:
        alive += bytes_of_values(gradients & {node})
        yield alive
        alive -= read_last[node]
