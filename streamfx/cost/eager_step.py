"""What a step costs in eager: it is run under fake tensors, operator by operator, and all that its bytes do is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from streamfx.cost.curve import Curve, Point, Recorder, shortened
from streamfx.cost.loop_sampling import Iterations, following
from streamfx.cost.memory import Cost, made_like
from streamfx.cost.meter import Meter
from streamfx.cost.nested_tensors import tensors_in, tensors_returned
from streamfx.cost.work import NO_WORK, Work
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private import FakeTensorMode


class WorkMark(NamedTuple):
    """A moment of a half: how many points were recorded, and how much work was done."""

    position: int
    work: Work


@dataclass(frozen=True)
class EagerHalf:
    """All points of a half, the moment at which it began first, the work of the step at its end, and when each layer's turn came.

    A layer's turn comes when it is called, and when the gradient of its result is there; each may come several times, or never.
    """

    points: tuple[Point, ...]
    work: Work
    marks: tuple[tuple[int, WorkMark], ...] = ()

    @property
    def peak(self) -> int:
        return max((point.total for point in self.points), default=0)

    def is_like(self, other: EagerHalf) -> bool:
        """Whether the same bytes come and go at the same moments."""
        return self.work == other.work and self.points == other.points


@dataclass(frozen=True)
class EagerStep:
    """A step in eager: both halves, no second one where nothing has a gradient, and FLOPs of the layers' forward half."""

    forward: EagerHalf
    backward: EagerHalf | None = None
    layer_flops: int = 0
    layer_attention: int = 0

    @property
    def cost(self) -> Cost:
        """What the step costs, gradients of parameters apart."""
        forward, last = self.forward, self.backward or self.forward
        begun = forward.work
        return Cost(
            forward_peak=forward.peak,
            backward_peak=0 if self.backward is None else self.backward.peak,
            held=forward.points[-1].total if forward.points else 0,
            work=last.work,
            layer_flops=self.layer_flops,
            layer_attention=self.layer_attention,
            forward_wire=begun.wire,
            backward_wire=last.work.minus(begun).wire,
            forward_curve=_curve(forward, NO_WORK),
            backward_curve=Curve() if self.backward is None else _curve(self.backward, begun),
        )


def _curve(half: EagerHalf, begun: Work) -> Curve:
    return Curve(shortened(half.points), (), half.work).above(NO_WORK.minus(begun))


def eager_step(
    call: Callable[[], Any], layers: Iterable[nn.Module] = (), forward_only: bool = False, of_few: bool = True
) -> EagerStep:
    """Run a call in eager under the fake mode that is active, with the gradients of its first number, else of all its results.

    The caller of the call keeps its results, as in `out = model(...); out.loss.backward()`. The forward half of `layers`, whose
    `forward` is watched from now on, is counted by itself, too. `of_few` says that of turns that are alike few are followed
    (`loop_sampling.py`); raises `TurnsDiffer` where they are not.
    """
    meter, recorder = Meter(), Recorder()
    meter.recorder = recorder
    marks = _Marks(meter, recorder)
    for number, layer in enumerate(layers):
        layer.forward = marks.noted(number, meter.watched(layer.forward))
    with meter, following(Iterations(meter, of_few)):
        outputs = call()
        meter.flush()
        forward = EagerHalf(tuple(recorder.points), meter.work, tuple(marks.forward))
        recorder.points = [point._replace(work=meter.work) for point in recorder.points[-1:]]
        roots = [value for value in tensors_returned(outputs) if value.requires_grad]
        roots = [value for value in roots if value.dim() == 0][:1] or roots
        if forward_only or not roots:
            return EagerStep(forward, None, meter.watched_flops, meter.watched_attention)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        meter.flush()
        backward = EagerHalf(tuple(recorder.points), meter.work, tuple(marks.backward))
        return EagerStep(forward, backward, meter.watched_flops, meter.watched_attention)


class _Marks:
    """Notes when each layer is called, and when the gradient of its result is there."""

    def __init__(self, meter: Meter, recorder: Recorder) -> None:
        self.meter, self.recorder = meter, recorder
        self.forward: list[tuple[int, WorkMark]] = []
        self.backward: list[tuple[int, WorkMark]] = []

    def noted(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(marks: list[tuple[int, WorkMark]]) -> None:
            self.meter.flush()  # layers are compiled one by one: what one hands on is in memory
            marks.append((number, WorkMark(len(self.recorder.points), self.meter.work)))

        def run(*args: Any, **kwargs: Any) -> Any:
            note(self.forward)
            out = function(*args, **kwargs)
            result = next((value for value in tensors_in(out) if value.requires_grad), None)
            if result is not None and not result.is_leaf:
                result.register_hook(lambda gradient: note(self.backward))
            return out

        return run


def eager_cost_of_graph(module: fx.GraphModule) -> Cost:
    """What a graph of Dynamo's costs in eager."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = [_leaf_like(node) for node in module.graph.find_nodes(op="placeholder")]
        return eager_step(lambda: module(*inputs)).cost


def _leaf_like(node: fx.Node) -> Any:
    """A new input like the one that Dynamo saw."""
    value = node.meta[EXAMPLE_VALUE]
    made = made_like(value)
    return made.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else made
