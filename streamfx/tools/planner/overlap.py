"""The waiting time of a step. Loops run in order; while the loops of one stage compute, the weights of the next stage
are gathered and the gradients of the previous one reduced (`lowering/reinsert_collectives.py`), and stage inputs are
copied to the host and back (`runtime/offload.py`). A stage takes the longest of the three.

    loops      | stage 0 | stage 1 | stage 2 |
    wire  g 0  |   g 1   |   g 2   |   r 1   | r 2        max(loops 1, gathers 2 + reductions 0), and so on
    host       |         |   k 0   |   k 1   | k 2        the copies of stage 0 run while stage 1 computes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from streamfx.cost.comm import DEVICES_PER_MACHINE, EXCHANGES, GATHERS, REDUCTIONS, Traffic, total_traffic
from streamfx.cost.memory import Cost, bytes_like
from streamfx.cost.work import NO_WORK, Work, total_work
from streamfx.dialect.offload import from_host, to_host
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop
from streamfx.runtime.pinned import bytes_pinned
from streamfx.tools.report.communication import HALVES, IN_LOOPS, Wire, halves_of, sent_by_program
from streamfx.tools.report.stage_table import loops_of


class Copies(NamedTuple):
    """Bytes fetched from the host before a loop, and bytes copied to the host after it has computed them."""

    fetched: int = 0
    left: int = 0

    def plus(self, other: Copies) -> Copies:
        return Copies(self.fetched + other.fetched, self.left + other.left)


NO_TRAFFIC, NO_COPIES = Traffic(), Copies()


@dataclass(frozen=True)
class OverlapInterval:
    """Consecutive loops of one stage in the forward or backward graph, with their communication and their copies.

    `exposed` is the communication without overlap: a loop, or a value between loops, needs its result at once. `stage` is the
    name of the stage, if it is known.
    """

    half: str
    work: Work = NO_WORK
    gathered: Traffic = NO_TRAFFIC
    reduced: Traffic = NO_TRAFFIC
    exposed: Traffic = NO_TRAFFIC
    copies: Copies = NO_COPIES
    stage: str = ""


class Seconds(NamedTuple):
    """The time of loops, of communication, and of copies."""

    loops: Callable[[OverlapInterval], float]
    sent: Callable[[Traffic], float]
    copied: Callable[[int], float]


def generate_segments(facts: Facts, cost: Cost) -> tuple[OverlapInterval, ...]:
    """Return the intervals of a graph's program in order, or none if the graph is not chunked."""
    program = facts.program
    if program is None:
        return ()
    num_outputs = len(facts.joint.outputs)
    sent, copies = sent_by_program(program, num_outputs, cost.loops).by_loop, copies_by_loop(program, num_outputs)
    stage_of = {loop.spec.name: i for i, stage in enumerate(facts.stages) for loop in loops_of(stage, facts)}
    intervals: list[OverlapInterval] = []
    for half, module in zip(HALVES, (program.forward, program.backward), strict=True):
        names = [] if module is None else [name for name, child in module.named_children() if isinstance(child, Loop)]
        elsewhere = total_traffic(wire[half][REDUCTIONS] for name, wire in sent.items() if name not in names)
        if elsewhere.calls:  # gradients computed by a loop of the forward graph
            intervals.append(OverlapInterval(half, reduced=elsewhere))
        for index, run in groupby(names, key=lambda name: stage_of.get(name, -1)):
            stage = facts.stages[index].name if index >= 0 else ""
            intervals.append(replace(_interval_of(half, list(run), cost, sent, copies[half]), stage=stage))
    return tuple(intervals)


def _interval_of(
    half: str, names: Sequence[str], cost: Cost, sent: dict[str, Wire], copies: dict[str, Copies]
) -> OverlapInterval:
    """Return the work, communication and copies of consecutive loops of one stage, summed up."""
    loops = [cost.loops[name] for name in names]
    columns_of_loops = [sent[name][half] for name in names if name in sent]
    work = total_work(loop.work for loop in loops)
    gathered, reduced = (total_traffic(columns[kind] for columns in columns_of_loops) for kind in (GATHERS, REDUCTIONS))
    exposed = total_traffic(columns[kind] for columns in columns_of_loops for kind in (EXCHANGES, IN_LOOPS))
    copied = Copies(*map(sum, zip(*(copies.get(name, NO_COPIES) for name in names), strict=True)))
    return OverlapInterval(half, work, gathered, reduced, exposed, copied)


def waiting_seconds(overlap_intervals: Sequence[OverlapInterval], seconds: Seconds) -> tuple[float, float]:
    """Return the seconds without computation: waiting for other ranks, and the additional wait for host copies."""
    sent = sum(seconds.sent(interval.exposed) for interval in overlap_intervals)
    copied = 0.0
    for half in HALVES:
        for interval, wire, copies in _with_concurrent_transfers(
            [interval for interval in overlap_intervals if interval.half == half]
        ):
            compute_seconds = 0.0 if interval is None else seconds.loops(interval)
            send_wait = max(0.0, sum(map(seconds.sent, wire)) - compute_seconds)
            sent += send_wait
            copied += max(0.0, seconds.copied(copies) - compute_seconds - send_wait)
    return sent, copied


def _with_concurrent_transfers(
    intervals: Sequence[OverlapInterval],
) -> Iterator[tuple[OverlapInterval | None, list[Traffic], int]]:
    """Yield each interval with the concurrent communication and copies; None before the first and after the last interval."""
    for i in range(-1, len(intervals) + 1 if intervals else -1):
        previous, following = intervals[i - 1 : i] if i > 0 else [], intervals[i + 1 : i + 2]
        wire = [*(interval.gathered for interval in following), *(interval.reduced for interval in previous)]
        copies = sum(interval.copies.fetched for interval in following) + sum(interval.copies.left for interval in previous)
        yield intervals[i] if 0 <= i < len(intervals) else None, wire, copies


# -- copies to the host


def bytes_on_host(facts: Facts) -> int:
    """Return the bytes, in whole pages, that one device's graph holds on the host at its peak, the end of the forward graph."""
    if facts.program is None:
        return 0
    nodes = facts.program.forward.graph.find_nodes(op="call_function", target=to_host)
    return sum(bytes_pinned(bytes_like(node.meta[VALUE])) for node in nodes)


def copies_by_loop(program: Program, num_outputs: int) -> dict[str, dict[str, Copies]]:
    """Return the copies of each loop, by forward or backward graph and by the loop's name."""
    by_half: dict[str, dict[str, Copies]] = {half: {} for half in HALVES}
    for name, host_program in halves_of(program, num_outputs):
        for node, loop_before in host_program.between():
            if node.target in (from_host, to_host):
                is_fetch = node.target is from_host
                size = bytes_like((node.all_input_nodes[0] if is_fetch else node).meta[VALUE])
                loop = host_program.loop_of(node, is_fetch, loop_before)
                copies = Copies(fetched=size) if is_fetch else Copies(left=size)
                by_half[name][loop] = by_half[name].get(loop, Copies()).plus(copies)
    return by_half


def devices_per_host(world: int) -> int:
    """Return how many devices share the memory of a host."""
    return min(world, DEVICES_PER_MACHINE)
