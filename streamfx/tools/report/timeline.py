"""The bytes alive over the predicted seconds of a step, by what they are for, beside those of other ways of running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from streamfx.cost.curve import Curve, LoopInterval, standing_out
from streamfx.cost.work import Work

Seconds = Callable[[Work], float]


@dataclass(frozen=True)
class LoopTime:
    """When a loop runs. Of its `chunks` so many are `drawn`: each of these stands for neighbours, too."""

    name: str
    begins: float
    ends: float
    chunks: int
    drawn: int


@dataclass(frozen=True)
class StepCourse:
    """A step by one way of running it: from each of the `seconds` on so many bytes are alive, by term, until the next of them.

    Terms that stay come first, those that come and go last. The backward half begins at `turn`.
    """

    way: str
    seconds: tuple[float, ...]
    terms: Mapping[str, tuple[int, ...]]
    turn: float
    end: float
    flops: int = 0
    loops: tuple[LoopTime, ...] = ()

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The bytes alive, of all terms."""
        return tuple(map(sum, zip(*self.terms.values(), strict=True))) if self.terms else (0,) * len(self.seconds)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)

    @property
    def peak(self) -> int:
        """The position of the moment at which most bytes are alive."""
        return self.totals.index(self.peak_bytes) if self.totals else 0

    def shortened(self, most: int) -> StepCourse:
        """At most so many moments, no peak lost."""
        kept = standing_out(self.totals, most)
        terms = {name: tuple(sizes[i] for i in kept) for name, sizes in self.terms.items()}
        return replace(self, seconds=tuple(self.seconds[i] for i in kept), terms=terms)

    def as_dict(self) -> dict[str, Any]:
        terms = {name: list(sizes) for name, sizes in self.terms.items()}
        loops = [vars(loop) for loop in self.loops]
        found = {"way": self.way, "seconds": list(self.seconds), "terms": terms, "loops": loops}
        return {**found, "turn": self.turn, "end": self.end, "flops": self.flops}


@dataclass(frozen=True)
class Timeline:
    """Our course first, then those of other ways; `source` says whether they are predicted, `clock` how seconds were."""

    courses: tuple[StepCourse, ...]
    clock: str
    source: str = "predicted"

    @property
    def ours(self) -> StepCourse:
        return self.courses[0]

    @property
    def others(self) -> tuple[StepCourse, ...]:
        return self.courses[1:]

    @property
    def peak_bytes(self) -> int:
        """The highest point of our course."""
        return self.ours.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return {"clock": self.clock, "courses": [course.as_dict() for course in self.courses]}


def course_of(way: str, curve: Curve, seconds: Seconds, flops: int | None = None) -> StepCourse:
    """A curve over seconds; `flops` are those of its end, where what was counted along it has some that a mask hides."""
    end = seconds(curve.work)
    final = end if flops is None else seconds(curve.work.without_hidden(curve.work.flops - flops))
    scale = final / end if end else 1.0
    moments, latest = list[float](), 0.0
    for point in curve.points:
        latest = max(latest, scale * seconds(point.work))
        moments.append(latest)
    loops = tuple(_loop_time(loop, lambda work: scale * seconds(work)) for loop in curve.loops)
    turn = scale * seconds(curve.turn) if curve.turn is not None else final
    return StepCourse(way, tuple(moments), _terms_of(curve), turn, final, curve.work.flops if flops is None else flops, loops)


def _loop_time(loop: LoopInterval, seconds: Seconds) -> LoopTime:
    return LoopTime(loop.name, seconds(loop.begins), seconds(loop.ends), loop.chunks, loop.drawn)


def _terms_of(curve: Curve) -> dict[str, tuple[int, ...]]:
    """By term its bytes at each point: first those of which least comes and goes."""
    names = list(dict.fromkeys(name for point in curve.points for name in point.terms))
    sizes = {name: tuple(point.terms.get(name, 0) for point in curve.points) for name in names}
    present = {name: column for name, column in sizes.items() if any(column)}
    return dict(sorted(present.items(), key=lambda item: _coming_and_going(item[1]) / max(item[1])))


def _coming_and_going(sizes: Sequence[int]) -> int:
    return sum(abs(after - before) for before, after in pairwise(sizes))
