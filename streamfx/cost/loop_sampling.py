"""A function that takes many pieces in turn, pieces that are alike: few turns are followed, and stand for those between.

    forward     0  1  2 | 3 ... n-5 | n-4  n-3  n-2  n-1          backward     n-1  n-2  n-3  n-4 | n-5 ... 3 | 2  1  0

In each half the turns at both ends are followed, and have to do the same, byte by byte and FLOP by FLOP: the two before the first
that is stood for, and all behind the last. What the last of them has told its meter is told again for each turn between. Of those
there is a result, and of it a gradient, laid out as others are; whatever else comes or goes meanwhile makes turns differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamfx.cost.curve import Point
from streamfx.cost.meter import Meter
from streamfx.cost.work import NO_WORK, Work
from streamfx.errors import StreamFXError

FIRST, LAST = 3, 4  # turns that are followed at the ends: a sum has begun, and goes on, with the last but two
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
Piece = tuple[Tensor, ...]


class IterationsDifferError(StreamFXError):
    """Turns that seemed to be alike are not: all of them have to be followed."""


def in_turn(function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """The function's results for all pieces. It does the same for pieces that are alike, whatever came before."""
    turns = _following.get()
    return one_by_one(function, pieces) if turns is None else turns.results(function, pieces)


def one_by_one(function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """The same, whatever the function does."""
    return [function(*piece) for piece in pieces]


class IterationRecord(NamedTuple):
    """What a meter has noted in a turn, from how things stood at its beginning; how they stand at its end."""

    points: tuple[Point, ...]
    end: Point


class Snapshot(NamedTuple):
    """How many points were noted, and how things stood."""

    position: int
    stood: Point


@dataclass
class _Iterations:
    """The turns of a half, in their order; those that are `stood_for`, and those behind them which are to be like the others."""

    stood_for: range
    behind: range
    begun: tuple[int, Snapshot] | None = None
    before: IterationRecord | None = None
    like: IterationRecord | None = None


class Iterations:
    """Follows turns for a meter that has a recorder: few of them, or all (`of_few`).

    What a turn makes is in memory at its end: turns are compiled as functions of their own.
    """

    def __init__(self, meter: Meter, of_few: bool = True) -> None:
        self.meter, self.of_few = meter, of_few

    def results(self, function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        kinds = [tuple(map(kind_of, piece)) for piece in pieces]
        alike = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
        if not self.of_few or alike <= FIRST + LAST or not (torch.is_grad_enabled() and pieces[0][0].requires_grad):
            return self._each(function, pieces)
        between = range(FIRST, alike - LAST)
        forward = _Iterations(between, range(between.stop, alike))
        backward = _Iterations(between[::-1], range(FIRST)[::-1])
        gradients: list[Kind] = []
        found: list[Tensor] = []
        for number, piece in enumerate(pieces):
            if self._begins(forward, number):
                with self._unnoted():
                    found.append(_SkippedIteration.apply(self, kind_of(found[0]), gradients, *piece))
            else:
                own = piece[0].view_as(piece[0])  # whose gradient is there at the end of its turn
                if number < alike:
                    own.register_hook(lambda gradient: gradients.append(kind_of(gradient)))
                found.append(function(own, *piece[1:]))
            found[-1].register_hook(partial(self._comes_back, backward, number))
        self._begins(forward, len(pieces))
        return found

    def _each(self, function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        """The results, with all turns followed: between turns, in both halves, nothing is pending."""
        found: list[Tensor] = []
        for piece in pieces:
            self.meter.flush()
            found.append(function(*piece))
            if found[-1].requires_grad:
                found[-1].register_hook(lambda gradient: self.meter.flush())
        self.meter.flush()
        return found

    def _comes_back(self, half: _Iterations, number: int, gradient: Tensor) -> None:
        """The gradient of a turn's result is there."""
        self._begins(half, number)

    def _begins(self, half: _Iterations, number: int) -> bool:
        """A turn begins where the last one ends; whether it is stood for, and all that it does has been told."""
        self.meter.flush()
        if half.begun is not None:
            self._ends(half, *half.begun)
        half.begun = number, self._now()
        if number not in half.stood_for:
            return False
        assert self.meter.recorder is not None
        if half.like is None:
            raise IterationsDifferError("the first turns differ")
        work, terms = half.begun[1].stood
        self.meter.recorder.points += [point.above(work, terms) for point in half.like.points]
        self.meter.work = work.plus(half.like.end.work)
        return True

    def _ends(self, half: _Iterations, number: int, begun: Snapshot) -> None:
        if number in half.stood_for:
            assert half.like is not None
            expected = Snapshot(begun.position + len(half.like.points), begun.stood.above(*half.like.end))
            if self._now() != expected:
                raise IterationsDifferError(f"turn {number} leaves something else behind")
            return
        found = self._since(begun)
        if number in half.behind and found != half.like:
            raise IterationsDifferError(f"turn {number} is like none before")
        half.like = found if found == half.before else None
        half.before = found

    def _now(self) -> Snapshot:
        assert self.meter.recorder is not None
        return Snapshot(len(self.meter.recorder.points), Point(self.meter.work, dict(self.meter.live_terms)))

    def _since(self, begun: Snapshot) -> IterationRecord:
        assert self.meter.recorder is not None
        back, below = NO_WORK.minus(begun.stood.work), _negative(begun.stood.terms)
        points = (point.above(back, below) for point in self.meter.recorder.points[begun.position :])
        return IterationRecord(tuple(points), self._now().stood.above(back, below))

    @contextmanager
    def _unnoted(self) -> Iterator[None]:
        """What is made for a turn that is stood for has been told."""
        work: Work = self.meter.work
        with self.meter.recorded_apart():
            yield
            self.meter.flush()
        self.meter.work = work


class _SkippedIteration(torch.autograd.Function):
    """A turn that is stood for: its result, and the gradient of the first tensor of its piece, like those of others."""

    @staticmethod
    def forward(ctx: Any, turns: Iterations, result: Kind, gradients: list[Kind], *piece: Tensor) -> Tensor:
        ctx.turns, ctx.gradients, ctx.others = turns, gradients, len(piece) - 1
        return _made(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if len(set(ctx.gradients)) != 1:
            raise IterationsDifferError("gradients of pieces differ")
        with ctx.turns._unnoted():
            made = _made(ctx.gradients[0])
        return None, None, None, made, *(None for _ in range(ctx.others))


_following: ContextVar[Iterations | None] = ContextVar("following", default=None)


@contextmanager
def following(turns: Iterations | None) -> Iterator[None]:
    """Inside of this few turns are followed where pieces are alike; all are without it."""
    token = _following.set(turns)
    try:
        yield
    finally:
        _following.reset(token)


def kind_of(tensor: Tensor) -> Kind:
    """What the turn of a tensor follows from."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _made(kind: Kind) -> Tensor:
    size, stride, dtype, device = kind
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _negative(terms: Mapping[str, int]) -> dict[str, int]:
    return {name: -size for name, size in terms.items()}
