"""Cost of a function over many equal inputs, by tracing the first and last iterations and extrapolating the ones between.

    forward     0  1  2 | 3 ... n-5 | n-4  n-3  n-2  n-1          backward     n-1  n-2  n-3  n-4 | n-5 ... 3 | 2  1  0

In the forward and in the backward pass, the iterations at both ends run. The two before the first skipped iteration, and
all after the last, must be equal, byte by byte and FLOP by FLOP. For each skipped iteration, the meter records a copy of
the points of the last one that ran. A skipped iteration has a result, and a gradient, with the layout of the others; if
any other memory is allocated or freed during it, the iterations differ.
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

NUM_FIRST, NUM_LAST = 3, 4  # iterations that run at the ends; a sum over iterations exists before the last two of the first
Properties = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
Inputs = tuple[Tensor, ...]


class IterationsDifferError(StreamFXError):
    """The sampled iterations differ, so all of them must run."""


def run_iterations(function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
    """Return the function's results for all inputs; inside `sampled_iterations`, only some calls run.

    Its work must depend only on the layout of an input, not on earlier calls.
    """
    iterations = _active_iterations.get()
    return run_all(function, inputs) if iterations is None else iterations.results(function, inputs)


def run_all(function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
    """Return the function's results for all inputs; calls may depend on earlier ones, because each of them runs."""
    return [function(*arguments) for arguments in inputs]


class IterationRecord(NamedTuple):
    """The points that a meter recorded in an iteration, and the state at its end, both relative to the state at its start."""

    points: tuple[Point, ...]
    end: Point


class Snapshot(NamedTuple):
    """The number of points that are recorded so far, and the current state."""

    num_points: int
    state: Point


@dataclass
class _Iterations:
    """The iterations of a forward or backward pass.

    Iterations in `skipped` do not run; iterations in `after_skipped` must have the record `steady_record`. `running`: the
    index of the current iteration and the state at its start. `previous`: the record of the last iteration that ran.
    """

    skipped: range
    after_skipped: range
    running: tuple[int, Snapshot] | None = None
    previous: IterationRecord | None = None
    steady_record: IterationRecord | None = None  # set if the last two records are equal


class Iterations:
    """Runs iterations for a meter that has a recorder: a few of them if `is_sampled`, else all.

    The results of an iteration are in memory at its end, because iterations are compiled as separate functions.
    """

    def __init__(self, meter: Meter, is_sampled: bool = True) -> None:
        self.meter, self.is_sampled = meter, is_sampled

    def results(self, function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
        """Return the results for all inputs, skipping the middle iterations of equal inputs in both passes."""
        properties = [tuple(map(properties_of, arguments)) for arguments in inputs]
        num_equal = next((i for i, item in enumerate(properties) if item != properties[0]), len(properties))
        if (
            not self.is_sampled
            or num_equal <= NUM_FIRST + NUM_LAST
            or not (torch.is_grad_enabled() and inputs[0][0].requires_grad)
        ):
            return self._run_each(function, inputs)
        skipped = range(NUM_FIRST, num_equal - NUM_LAST)
        forward = _Iterations(skipped, range(skipped.stop, num_equal))
        backward = _Iterations(skipped[::-1], range(NUM_FIRST)[::-1])
        gradients: list[Properties] = []
        outputs: list[Tensor] = []
        for index, arguments in enumerate(inputs):
            if self._begin(forward, index):
                with self._unrecorded():
                    outputs.append(_SkippedIteration.apply(self, properties_of(outputs[0]), gradients, *arguments))
            else:
                first_view = arguments[0].view_as(arguments[0])  # its gradient is ready at the end of its iteration
                if index < num_equal:
                    first_view.register_hook(lambda gradient: gradients.append(properties_of(gradient)))
                outputs.append(function(first_view, *arguments[1:]))
            outputs[-1].register_hook(partial(self._gradient_ready, backward, index))
        self._begin(forward, len(inputs))
        return outputs

    def _run_each(self, function: Callable[..., Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
        """Return the results of all iterations. The meter is flushed between iterations, so that fusion does not cross them."""
        outputs: list[Tensor] = []
        for arguments in inputs:
            self.meter.flush()
            outputs.append(function(*arguments))
            if outputs[-1].requires_grad:
                outputs[-1].register_hook(lambda gradient: self.meter.flush())
        self.meter.flush()
        return outputs

    def _gradient_ready(self, iterations: _Iterations, index: int, gradient: Tensor) -> None:
        """Start an iteration of the backward once the gradient of its result is ready."""
        self._begin(iterations, index)

    def _begin(self, iterations: _Iterations, index: int) -> bool:
        """Finish the previous iteration and start iteration `index`.

        Return whether it is skipped; if so, the points and the work of `steady_record` are recorded for it.
        """
        self.meter.flush()
        if iterations.running is not None:
            self._finish_iteration(iterations, *iterations.running)
        iterations.running = index, self._now()
        if index not in iterations.skipped:
            return False
        assert self.meter.recorder is not None
        if iterations.steady_record is None:
            raise IterationsDifferError("the first iterations differ")
        work, terms = iterations.running[1].state
        self.meter.recorder.points += [point.shifted(work, terms) for point in iterations.steady_record.points]
        self.meter.work = work.plus(iterations.steady_record.end.work)
        return True

    def _finish_iteration(self, iterations: _Iterations, index: int, start: Snapshot) -> None:
        """Finish an iteration, and store its record.

        A skipped iteration must have changed nothing but what the copied record adds; its record is not stored. An iteration
        after the skipped ones must equal `steady_record`. Any other becomes `previous`, and also `steady_record` if it equals
        the iteration before it.

        Raises:
            IterationsDifferError: if the iteration differs.
        """
        if index in iterations.skipped:
            assert iterations.steady_record is not None
            expected = Snapshot(
                start.num_points + len(iterations.steady_record.points), start.state.shifted(*iterations.steady_record.end)
            )
            if self._now() != expected:
                raise IterationsDifferError(f"memory was allocated or freed during the skipped iteration {index}")
            return
        record = self._since(start)
        if index in iterations.after_skipped and record != iterations.steady_record:
            raise IterationsDifferError(f"iteration {index} differs from the earlier ones")
        iterations.steady_record = record if record == iterations.previous else None
        iterations.previous = record

    def _now(self) -> Snapshot:
        """Return the number of recorded points, and the current work and live bytes."""
        assert self.meter.recorder is not None
        return Snapshot(len(self.meter.recorder.points), Point(self.meter.work, dict(self.meter.live_terms)))

    def _since(self, start: Snapshot) -> IterationRecord:
        """Return the points recorded since an iteration began, and the current state, relative to its start."""
        assert self.meter.recorder is not None
        minus_work, minus_terms = NO_WORK.minus(start.state.work), _negative(start.state.terms)
        points = (point.shifted(minus_work, minus_terms) for point in self.meter.recorder.points[start.num_points :])
        return IterationRecord(tuple(points), self._now().state.shifted(minus_work, minus_terms))

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Do not record values that are created inside, for a skipped iteration: its points are recorded already."""
        work: Work = self.meter.work
        with self.meter.separate_recorder():
            yield
            self.meter.flush()
        self.meter.work = work


class _SkippedIteration(torch.autograd.Function):
    """A skipped iteration: its result, and the gradient of the first tensor of its input, have the layout of the others."""

    @staticmethod
    def forward(ctx: Any, iterations: Iterations, result: Properties, gradients: list[Properties], *inputs: Tensor) -> Tensor:
        """Return an uninitialized result with the given properties, instead of running the iteration."""
        ctx.iterations, ctx.gradients, ctx.other_inputs = iterations, gradients, len(inputs) - 1
        return _empty(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return an empty gradient for the first tensor of the input; raise an error if other iterations' gradients differ."""
        if len(set(ctx.gradients)) != 1:
            raise IterationsDifferError("the gradients of inputs differ in shape, layout, dtype or device")
        with ctx.iterations._unrecorded():
            skipped_gradient = _empty(ctx.gradients[0])
        return None, None, None, skipped_gradient, *(None for _ in range(ctx.other_inputs))


_active_iterations: ContextVar[Iterations | None] = ContextVar("active_iterations", default=None)


@contextmanager
def sampled_iterations(iterations: Iterations | None) -> Iterator[None]:
    """Inside this context, `run_iterations` uses `iterations`, which may run only a few of equal ones; outside, it runs all."""
    token = _active_iterations.set(iterations)
    try:
        yield
    finally:
        _active_iterations.reset(token)


def properties_of(tensor: Tensor) -> Properties:
    """Return the properties of a tensor on which its iteration depends."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _empty(properties: Properties) -> Tensor:
    """Allocate an uninitialized tensor with the given properties."""
    size, stride, dtype, device = properties
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _negative(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each category, negated."""
    return {name: -size for name, size in terms.items()}
