"""Cost of a function over many equal inputs, by tracing the first and last iterations and extrapolating the ones between.

    forward     0  1  2 | 3 ... n-5 | n-4  n-3  n-2  n-1          backward     n-1  n-2  n-3  n-4 | n-5 ... 3 | 2  1  0

In the forward and in the backward, the iterations at both ends run. They must be equal, byte by byte and FLOP by FLOP:
the two before the first skipped iteration, and all after the last. For each skipped iteration, the meter records again
the points of the last one that ran. A skipped iteration has a result, and a gradient, with the layout of the others;
iterations differ if any other memory is allocated or freed meanwhile.
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

FIRST, LAST = 3, 4  # iterations that run at the ends: a sum exists and has grown before the last two
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
Piece = tuple[Tensor, ...]


class IterationsDifferError(StreamFXError):
    """Iterations that seemed equal are not: all of them must run."""


def in_turn(function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the function's results for all inputs. Its work must depend only on the type of an input, not on earlier calls."""
    iterations = _active_iterations.get()
    return one_by_one(function, pieces) if iterations is None else iterations.results(function, pieces)


def one_by_one(function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the function's results for all inputs; calls may depend on earlier ones, because each of them runs."""
    return [function(*piece) for piece in pieces]


class IterationRecord(NamedTuple):
    """The points that a meter recorded in an iteration, relative to the state at its start, and the state at its end."""

    points: tuple[Point, ...]
    end: Point


class Snapshot(NamedTuple):
    """The number of recorded points, and the state."""

    position: int
    state: Point


@dataclass
class _Iterations:
    """The iterations of one pass: the `skipped` range, and the range `behind` it, whose records must equal the last ones."""

    skipped: range
    after_skipped: range
    running: tuple[int, Snapshot] | None = None
    previous: IterationRecord | None = None
    repeated: IterationRecord | None = None


class Iterations:
    """Runs iterations for a meter that has a recorder: a few of them, or all (`of_few`).

    The results of an iteration are in memory at its end, because iterations are compiled as separate functions.
    """

    def __init__(self, meter: Meter, of_few: bool = True) -> None:
        self.meter, self.of_few = meter, of_few

    def results(self, function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        """Return the results for all inputs, skipping the middle iterations of equal inputs in both passes."""
        kinds = [tuple(map(kind_of, piece)) for piece in pieces]
        equal_count = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
        if not self.of_few or equal_count <= FIRST + LAST or not (torch.is_grad_enabled() and pieces[0][0].requires_grad):
            return self._each(function, pieces)
        skipped = range(FIRST, equal_count - LAST)
        forward = _Iterations(skipped, range(skipped.stop, equal_count))
        backward = _Iterations(skipped[::-1], range(FIRST)[::-1])
        gradients: list[Kind] = []
        outputs: list[Tensor] = []
        for number, piece in enumerate(pieces):
            if self._begin(forward, number):
                with self._unrecorded():
                    outputs.append(_SkippedIteration.apply(self, kind_of(outputs[0]), gradients, *piece))
            else:
                first_view = piece[0].view_as(piece[0])  # its gradient is ready at the end of its iteration
                if number < equal_count:
                    first_view.register_hook(lambda gradient: gradients.append(kind_of(gradient)))
                outputs.append(function(first_view, *piece[1:]))
            outputs[-1].register_hook(partial(self._gradient_ready, backward, number))
        self._begin(forward, len(pieces))
        return outputs

    def _each(self, function: Callable[..., Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        """Return the results, running all iterations. Between iterations, in both passes, no value is pending."""
        outputs: list[Tensor] = []
        for piece in pieces:
            self.meter.flush()
            outputs.append(function(*piece))
            if outputs[-1].requires_grad:
                outputs[-1].register_hook(lambda gradient: self.meter.flush())
        self.meter.flush()
        return outputs

    def _gradient_ready(self, iterations: _Iterations, number: int, gradient: Tensor) -> None:
        """Start an iteration of the backward once the gradient of its result is ready."""
        self._begin(iterations, number)

    def _begin(self, iterations: _Iterations, number: int) -> bool:
        """End the previous iteration and start the next; return whether it is skipped, which records its points."""
        self.meter.flush()
        if iterations.running is not None:
            self._end(iterations, *iterations.running)
        iterations.running = number, self._now()
        if number not in iterations.skipped:
            return False
        assert self.meter.recorder is not None
        if iterations.repeated is None:
            raise IterationsDifferError("the first turns differ")
        work, terms = iterations.running[1].state
        self.meter.recorder.points += [point.above(work, terms) for point in iterations.repeated.points]
        self.meter.work = work.plus(iterations.repeated.end.work)
        return True

    def _end(self, iterations: _Iterations, number: int, start: Snapshot) -> None:
        """Check that an iteration equals the ones it must equal, and store its record if the next ones must equal it."""
        if number in iterations.skipped:
            assert iterations.repeated is not None
            expected = Snapshot(start.position + len(iterations.repeated.points), start.state.above(*iterations.repeated.end))
            if self._now() != expected:
                raise IterationsDifferError(f"turn {number} leaves something else behind")
            return
        record = self._since(start)
        if number in iterations.after_skipped and record != iterations.repeated:
            raise IterationsDifferError(f"turn {number} is like none before")
        iterations.repeated = record if record == iterations.previous else None
        iterations.previous = record

    def _now(self) -> Snapshot:
        """Return the number of recorded points, and the current work and live bytes."""
        assert self.meter.recorder is not None
        return Snapshot(len(self.meter.recorder.points), Point(self.meter.work, dict(self.meter.live_terms)))

    def _since(self, start: Snapshot) -> IterationRecord:
        """Return the points recorded since an iteration began, and the state now, relative to its start."""
        assert self.meter.recorder is not None
        minus_work, minus_terms = NO_WORK.minus(start.state.work), _negative(start.state.terms)
        points = (point.above(minus_work, minus_terms) for point in self.meter.recorder.points[start.position :])
        return IterationRecord(tuple(points), self._now().state.above(minus_work, minus_terms))

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Do not record values created for a skipped iteration: its points are recorded already."""
        work: Work = self.meter.work
        with self.meter.recorded_apart():
            yield
            self.meter.flush()
        self.meter.work = work


class _SkippedIteration(torch.autograd.Function):
    """A skipped iteration: its result, and the gradient of the first tensor of its input, have the layout of the others."""

    @staticmethod
    def forward(ctx: Any, iterations: Iterations, result: Kind, gradients: list[Kind], *piece: Tensor) -> Tensor:
        """Return an empty result of the given kind, instead of running the iteration."""
        ctx.iterations, ctx.gradients, ctx.other_inputs = iterations, gradients, len(piece) - 1
        return _empty(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return an empty gradient for the first tensor of the input; raise an error if other iterations' gradients differ."""
        if len(set(ctx.gradients)) != 1:
            raise IterationsDifferError("gradients of pieces differ")
        with ctx.iterations._unrecorded():
            skipped_gradient = _empty(ctx.gradients[0])
        return None, None, None, skipped_gradient, *(None for _ in range(ctx.other_inputs))


_active_iterations: ContextVar[Iterations | None] = ContextVar("following", default=None)


@contextmanager
def sampled_iterations(iterations: Iterations | None) -> Iterator[None]:
    """Within this context, `in_turn` runs only a few of equal iterations, through `iterations`; outside, it runs all."""
    token = _active_iterations.set(iterations)
    try:
        yield
    finally:
        _active_iterations.reset(token)


def kind_of(tensor: Tensor) -> Kind:
    """Return the properties of a tensor on which its iteration depends."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _empty(kind: Kind) -> Tensor:
    """Allocate an uninitialized tensor of a kind."""
    size, stride, dtype, device = kind
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _negative(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each category, negated."""
    return {name: -size for name, size in terms.items()}
