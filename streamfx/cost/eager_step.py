"""The cost of a step in eager mode: it runs on fake tensors, operator by operator, and its live bytes are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from streamfx.cost.curve import Curve, Point, Recorder, shortened
from streamfx.cost.loop_sampling import Iterations, sampled_iterations
from streamfx.cost.memory import Cost, tensor_like
from streamfx.cost.meter import Meter
from streamfx.cost.nested_tensors import tensors_in, tensors_returned
from streamfx.cost.work import NO_WORK, Work
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private import FakeTensorMode


class WorkMark(NamedTuple):
    """A moment of a forward or backward pass: the number of points recorded so far, and the work done."""

    num_points: int
    work: Work


@dataclass(frozen=True)
class EagerPass:
    """The points of a forward or backward pass, the work at its end, and a mark for each layer.

    The first point is the state at its start. A layer is marked when it is called, and when the gradient of its result is
    ready; it may have several marks, or none.
    """

    points: tuple[Point, ...]
    work: Work
    marks: tuple[tuple[int, WorkMark], ...] = ()

    @property
    def peak(self) -> int:
        """The peak of the live bytes."""
        return max((point.total for point in self.points), default=0)

    def equals(self, other: EagerPass) -> bool:
        """Return whether the same bytes are allocated and freed at the same moments."""
        return self.work == other.work and self.points == other.points


@dataclass(frozen=True)
class EagerStep:
    """A step in eager mode: its forward pass, its backward pass (None without gradients), and the layers' forward FLOPs."""

    forward: EagerPass
    backward: EagerPass | None = None
    layer_flops: int = 0
    layer_attention: int = 0

    @property
    def cost(self) -> Cost:
        """The cost of the step, without parameter gradients."""
        forward, last_pass = self.forward, self.backward or self.forward
        forward_work = forward.work
        return Cost(
            forward_peak=forward.peak,
            backward_peak=0 if self.backward is None else self.backward.peak,
            held=forward.points[-1].total if forward.points else 0,
            work=last_pass.work,
            layer_flops=self.layer_flops,
            layer_attention=self.layer_attention,
            forward_traffic=forward_work.traffic_by_kind,
            backward_traffic=last_pass.work.minus(forward_work).traffic_by_kind,
            forward_curve=_curve_of(forward, NO_WORK),
            backward_curve=Curve() if self.backward is None else _curve_of(self.backward, forward_work),
        )


def _curve_of(eager_pass: EagerPass, begin: Work) -> Curve:
    """Return the curve of a pass, with work counted from `begin`."""
    return Curve(shortened(eager_pass.points), (), eager_pass.work).shifted(NO_WORK.minus(begin))


def eager_step(call: Callable[[], Any], layers: Iterable[nn.Module] = (), forward_only: bool = False) -> EagerStep:
    """Run a call in eager mode under the active fake mode, and the backward of its first scalar, or else of all results.

    The caller keeps the results, as in `out = model(...); out.loss.backward()`. The forward FLOPs of `layers`, whose
    `forward` is wrapped, are also counted separately. Of many equal iterations, only a few are traced (`loop_sampling.py`).
    """
    meter, recorder = Meter(), Recorder()
    meter.recorder = recorder
    marks = _Marks(meter, recorder)
    for i, layer in enumerate(layers):
        layer.forward = marks.with_marks(i, layer.forward)
    with meter, sampled_iterations(Iterations(meter, recorder)):
        outputs = call()
        meter.flush()
        forward = EagerPass(tuple(recorder.points), meter.work, tuple(marks.forward))
        recorder.points = [point._replace(work=meter.work) for point in recorder.points[-1:]]
        roots = [value for value in tensors_returned(outputs) if value.requires_grad]
        roots = [value for value in roots if value.dim() == 0][:1] or roots
        if forward_only or not roots:
            return EagerStep(forward, None, *marks.layer_flops)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        meter.flush()
        backward = EagerPass(tuple(recorder.points), meter.work, tuple(marks.backward))
        return EagerStep(forward, backward, *marks.layer_flops)


class _Marks:
    """Records a mark when each layer is called, and when the gradient of its result is ready; adds up the layers' FLOPs."""

    def __init__(self, meter: Meter, recorder: Recorder) -> None:
        """Start without marks. `forward` and `backward` hold (layer index, mark); `layer_flops`: all FLOPs, and of attention."""
        self.meter, self.recorder = meter, recorder
        self.forward: list[tuple[int, WorkMark]] = []
        self.backward: list[tuple[int, WorkMark]] = []
        self.layer_flops = 0, 0

    def with_marks(self, layer_index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer's forward so that it records a mark when called, and one when the gradient of its result is ready."""

        def note(marks: list[tuple[int, WorkMark]]) -> None:
            """Append a mark for the layer."""
            self.meter.flush()  # layers are compiled one by one: the result of each is in memory
            marks.append((layer_index, WorkMark(len(self.recorder.points), self.meter.work)))

        def run(*args: Any, **kwargs: Any) -> Any:
            """Run the layer with both marks."""
            note(self.forward)
            work_before, (flops, attention) = self.meter.work, self.layer_flops
            out = function(*args, **kwargs)
            work = self.meter.work.minus(work_before)
            self.layer_flops = flops + work.flops, attention + work.attention_flops
            result = next((value for value in tensors_in(out) if value.requires_grad), None)
            if result is not None and not result.is_leaf:
                result.register_hook(lambda gradient: note(self.backward))
            return out

        return run


def eager_cost_of_graph(module: fx.GraphModule) -> Cost:
    """Return the cost in eager mode of a Dynamo graph."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values = [node.meta[EXAMPLE_VALUE] for node in module.graph.find_nodes(op="placeholder")]  # those that Dynamo traced
        inputs = list(map(tensor_like, values))
        for value, leaf in zip(values, inputs, strict=True):
            if isinstance(value, Tensor):
                leaf.requires_grad_(value.requires_grad)
        return eager_step(lambda: module(*inputs)).cost
