"""Runs of a loop that stand for all of its chunks.

The bytes and FLOPs of a chunk follow from its sizes, and these change with the chunk's position in stretches: along each stretch
every size is an affine function of the position. So the ends and the middle of a stretch tell all: FLOPs of the chunks between
them lie on a parabola, and the peak is at one of the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from streamfx.ir.facts import Span
from streamfx.ir.program import BufferPart, LoopSpec, Part, Placement, Selector, Shifted
from streamfx.report.meter import Meter
from streamfx.runtime.loop import Env, Loop

Chunk = tuple[int, int]


class SampledLoop(Loop):
    """A loop that runs few of its chunks, and tells the meter what all of them would have cost."""

    def __init__(self, spec: LoopSpec, meter: Meter) -> None:
        super().__init__(spec)
        self.compiled = self._metered
        self.meter = meter
        self.flops = self.rows = 0
        self._stretches: list[range] = []
        self._costs: dict[int, int] = {}
        self._upcoming: Iterator[int] = iter(())

    def chunks(self, length: int, env: Env) -> list[Chunk]:
        every = super().chunks(length, env)
        self.rows = self.rows_per_chunk(length, env)
        self._stretches = stretches(every, self._edges(env))
        picked = [position for stretch in self._stretches for position in sample_of(stretch)]
        self._upcoming = iter(picked)
        return [every[position] for position in picked]

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        self._costs = {}
        results = super().forward(*arguments)
        cost = sum(total(stretch, self._costs) for stretch in self._stretches)
        self.meter.flops += cost - sum(self._costs.values())
        self.flops += cost
        return results

    def _metered(self, *feeds: Any) -> Sequence[Any]:
        before = self.meter.flops
        made: Sequence[Any] = self.spec.body(*feeds)
        self._costs[next(self._upcoming)] = self.meter.flops - before
        return made

    def _edges(self, env: Env) -> set[int]:
        """Rows at which the size of some part starts or stops to change."""
        found: set[int] = set()
        for feed in self.spec.feeds:
            if isinstance(feed, (Part, BufferPart)):
                for placement, selector in feed.where:
                    found |= self._edges_of(placement, selector, env)
        return found

    def _edges_of(self, placement: Placement, selector: Selector, env: Env) -> set[int]:
        first = self.size(placement.rows.offset, env)
        ends = {first, first + self.size(placement.rows.length, env)}
        shifts = {0}
        if isinstance(selector, Span):
            shifts = {bound for bound in (selector.low, selector.high) if bound is not None}
        elif isinstance(selector, Shifted):
            own = self.size(selector.rows.offset, env)
            ends |= {own, own + self.size(selector.rows.length, env)}
            by = self.size(selector.by, env)
            shifts = {0, by, by + selector.reach}
        return {end - shift for end in ends for shift in shifts}


def stretches(chunks: Sequence[Chunk], edges: Iterable[int]) -> list[range]:
    """Positions of `chunks` in stretches along which sizes change evenly; the first and the last chunk stand alone."""
    alone = {0, len(chunks) - 1}
    for edge in edges:
        alone |= {i for i, (start, stop) in enumerate(chunks) if start <= edge <= stop}
    found: list[range] = []
    for position in range(len(chunks)):
        if position in alone or not found or found[-1][-1] in alone:
            found.append(range(position, position + 1))
        else:
            found[-1] = range(found[-1].start, position + 1)
    return found


def sample_of(stretch: range) -> list[int]:
    """The ends and the middle."""
    return sorted({stretch[0], stretch[len(stretch) // 2], stretch[-1]})


def total(stretch: range, costs: dict[int, int]) -> int:
    """The sum over a stretch of the parabola through the sampled costs."""
    points = [(position, costs[position]) for position in sample_of(stretch)]
    return int(sum((_through(points, position) for position in stretch), Fraction(0)))


def _through(points: Sequence[tuple[int, int]], at: int) -> Fraction:
    """Lagrange's polynomial through the points."""
    value = Fraction(0)
    for x, y in points:
        weight = Fraction(y)
        for other, _ in points:
            if other != x:
                weight *= Fraction(at - other, x - other)
        value += weight
    return value
