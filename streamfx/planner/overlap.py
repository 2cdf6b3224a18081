"""What does a step wait for on the wire? Loops run in order; while those of one stage compute, weights of the next are gathered
and gradients of the one before are reduced (`codegen/put_back.py`). So a stage takes the longer of the two.

    loops      | stage 0 | stage 1 | stage 2 |
    wire  g 0  |   g 1   |   g 2   |   r 1   | r 2        max(loops 1, gathers 2 + reductions 0), and so on
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from streamfx.cost.memory import Cost
from streamfx.cost.wire import EXCHANGES, GATHERS, REDUCTIONS
from streamfx.ir.facts import Facts
from streamfx.report.stages import loops_of
from streamfx.report.wire import HALVES, IN_LOOPS, Wire, sent_by_program
from streamfx.runtime.loop import Loop


@dataclass(frozen=True)
class Stretch:
    """Loops of one stage that run after each other in one half, and the bytes that are sent for them.

    `alone` are bytes that nothing computes beside: of what a loop, or a value between loops, waits for at once.
    """

    half: str
    flops: int
    moved: int
    launches: int
    gathered: int
    reduced: int
    alone: int = 0


def stretches_of(facts: Facts, cost: Cost) -> tuple[Stretch, ...]:
    """The stretches of a graph's program in order, none where it runs as it stands."""
    program = facts.program
    if program is None:
        return ()
    sent = sent_by_program(program, len(facts.joint.outputs), cost.loops).by_loop
    stage_of = {loop.spec.name: i for i, stage in enumerate(facts.stages) for loop in loops_of(stage, facts)}
    found: list[Stretch] = []
    for half, module in zip(HALVES, (program.forward, program.backward), strict=True):
        names = [] if module is None else [name for name, child in module.named_children() if isinstance(child, Loop)]
        elsewhere = sum(wire[half][REDUCTIONS].bytes for name, wire in sent.items() if name not in names)
        if elsewhere:  # of gradients that a loop of the forward half has made
            found.append(Stretch(half, 0, 0, 0, 0, elsewhere))
        for _, run in groupby(names, key=lambda name: stage_of.get(name, -1)):
            found.append(_together(half, list(run), cost, sent))
    return tuple(found)


def _together(half: str, names: Sequence[str], cost: Cost, sent: dict[str, Wire]) -> Stretch:
    loops = [cost.loops[name] for name in names]
    own = [sent[name][half] for name in names if name in sent]
    flops, moved, launches = (sum(getattr(loop, key) for loop in loops) for key in ("flops", "moved", "launches"))
    gathered, reduced = (sum(columns[kind].bytes for columns in own) for kind in (GATHERS, REDUCTIONS))
    alone = sum(columns[kind].bytes for columns in own for kind in (EXCHANGES, IN_LOOPS))
    return Stretch(half, flops, moved, launches, gathered, reduced, alone)


def waited(stretches: Sequence[Stretch], seconds: Callable[[Stretch], float], rate: float) -> float:
    """Seconds in which nothing computes, at so many bytes per second."""
    total = sum(part.alone for part in stretches) / rate
    for half in HALVES:
        for part, sent in _beside([part for part in stretches if part.half == half]):
            total += max(0.0, sent / rate - (0.0 if part is None else seconds(part)))
    return total


def _beside(parts: Sequence[Stretch]) -> Iterator[tuple[Stretch | None, int]]:
    """Each stretch of a half with the bytes that are sent meanwhile; first and last, what nothing computes beside."""
    if parts:
        yield None, parts[0].gathered
        for i, part in enumerate(parts):
            following = parts[i + 1].gathered if i + 1 < len(parts) else 0
            yield part, following + (parts[i - 1].reduced if i else 0)
        yield None, parts[-1].reduced
