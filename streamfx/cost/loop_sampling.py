"""Cost of a function over many equal inputs, from its first and last iterations: the others are extrapolated.

    forward     0  1  2 | 3 ... n-5 | n-4  n-3  n-2  n-1          backward     n-1  n-2  n-3  n-4 | n-5 ... 3 | 2  1  0

In the forward and in the backward pass, the iterations at both ends run. For each skipped iteration, the meter records a copy
of the points of the last one that ran. A skipped iteration has a result, and a gradient, with the layout of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamfx.cost.curve import Point, Recorder
from streamfx.cost.meter import Meter, TensorLayout, layout_of
from streamfx.cost.work import NO_WORK, Work

NUM_FIRST, NUM_LAST = 3, 4  # iterations that run at the ends; a sum over iterations exists before the last two of the first
Inputs = tuple[Tensor, ...]


def run_iterations(function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
    """Return the function's results for all inputs; inside `sampled_iterations`, only some calls run.

    Its work and memory must depend only on the layout of an input, not on earlier calls.
    """
    iterations = _active_iterations.get()
    return run_all(function, inputs) if iterations is None else iterations.results(function, inputs)


def run_all(function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
    """Return the function's results for all inputs; calls may depend on earlier ones, because each of them runs."""
    return [function(*arguments) for arguments in inputs]


@dataclass
class _Pass:
    """A forward or backward pass over iterations, of which those in `skipped` do not run.

    While an iteration runs, `start` is the number of points and the state of the meter at its start. `points` and `work` are
    those of the last iteration before the skipped ones, relative to its start.
    """

    skipped: range
    start: tuple[int, Point] | None = None
    points: tuple[Point, ...] = ()
    work: Work = NO_WORK


class Iterations:
    """Runs a few iterations for a meter with a recorder, and extrapolates the points and the work of the others.

    The results of an iteration are in memory at its end, because iterations are compiled as separate functions.
    """

    def __init__(self, meter: Meter, recorder: Recorder) -> None:
        self.meter, self.recorder = meter, recorder

    def results(self, function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
        """Return the results for all inputs, skipping the middle iterations of equal inputs in both passes."""
        layouts = [tuple(map(layout_of, arguments)) for arguments in inputs]
        num_equal = next((i for i, layout in enumerate(layouts) if layout != layouts[0]), len(layouts))
        is_trained = torch.is_grad_enabled() and inputs[0][0].requires_grad
        skipped = range(NUM_FIRST, num_equal - NUM_LAST if is_trained else 0)
        forward, backward = _Pass(skipped), _Pass(skipped[::-1])
        gradients: list[TensorLayout] = []
        outputs: list[Tensor] = []
        for index, arguments in enumerate(inputs):
            if self._begin(forward, index):
                with self._unrecorded():
                    outputs.append(_SkippedIteration.apply(self, layout_of(outputs[0]), gradients, *arguments))
            else:
                first_view = arguments[0].view_as(arguments[0])  # its gradient is ready at the end of its iteration
                if is_trained and index < num_equal:
                    first_view.register_hook(lambda gradient: gradients.append(layout_of(gradient)))
                outputs.append(function(first_view, *arguments[1:]))
            if outputs[-1].requires_grad:
                outputs[-1].register_hook(partial(self._gradient_ready, backward, index))
        self.meter.flush()
        return outputs

    def _gradient_ready(self, backward: _Pass, index: int, gradient: Tensor) -> None:
        """Start an iteration of the backward once the gradient of its result is ready."""
        self._begin(backward, index)

    def _begin(self, current: _Pass, index: int) -> bool:
        """Start iteration `index` of a pass; return whether it is skipped. If so, record points and work in its place."""
        self.meter.flush()
        state = Point(self.meter.work, dict(self.meter.live_terms))
        if index not in current.skipped:
            current.start = len(self.recorder.points), state
            return False
        if current.start is not None:  # the iteration before this one ran
            num_points, (work, terms) = current.start
            minus_work, minus_terms = NO_WORK.minus(work), {name: -size for name, size in terms.items()}
            current.points = tuple(point.shifted(minus_work, minus_terms) for point in self.recorder.points[num_points:])
            current.work, current.start = state.work.minus(work), None
        self.recorder.points += [point.shifted(state.work, state.terms) for point in current.points]
        self.meter.work = state.work.plus(current.work)
        return True

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Do not record values that are created inside, for a skipped iteration: its points are recorded already."""
        work = self.meter.work
        with self.meter.separate_recorder():
            yield
            self.meter.flush()
        self.meter.work = work


class _SkippedIteration(torch.autograd.Function):
    """A skipped iteration: its result, and the gradient of the first tensor of its input, have the layout of the others."""

    @staticmethod
    def forward(ctx: Any, iterations: Iterations, result: TensorLayout, gradients: list[TensorLayout], *inputs: Tensor) -> Tensor:
        """Return an uninitialized result with the given layout, instead of running the iteration."""
        ctx.iterations, ctx.gradients, ctx.other_inputs = iterations, gradients, len(inputs) - 1
        return result.allocate()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return an uninitialized gradient for the first tensor of the input, like that of an iteration that ran."""
        with ctx.iterations._unrecorded():
            skipped_gradient = ctx.gradients[0].allocate()
        return None, None, None, skipped_gradient, *(None for _ in range(ctx.other_inputs))


_active_iterations: ContextVar[Iterations | None] = ContextVar("active_iterations", default=None)


@contextmanager
def sampled_iterations(iterations: Iterations) -> Iterator[None]:
    """Inside this context, `run_iterations` runs only a few of equal iterations; outside, it runs all."""
    token = _active_iterations.set(iterations)
    try:
        yield
    finally:
        _active_iterations.reset(token)
