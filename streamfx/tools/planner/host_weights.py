"""Weights on the host: FSDP2 with `CPUOffloadPolicy` on one device, and `fully_shard` on each layer, then on the model.

Parameters, their gradients and the optimizer's state are on the host. The device holds

    forward     layer 0 | layer 1 | head        the weights of one layer
    backward    head | layer 1 | layer 0        also its gradients, and those of the layer before until they are copied
    both        the weights of the *rest* of the model (embedding, last norm, head), and its gradients until backward ends

On one device FSDP2 copies the weights of a layer right before the layer runs, on the stream that computes (PyTorch 2.13), so the
device waits for these copies. Copies of gradients overlap with the loops of the next layer, unless a hook on a parameter reads
the gradients: then the host, which launches the loops, waits for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from streamfx.argument_checks import require
from streamfx.cost.categories import GRADIENTS, OPTIMIZER, PARAMETERS, STAGE_INPUTS, STREAM_GRADIENT, WEIGHTS
from streamfx.cost.curve import Curve, Point
from streamfx.cost.memory import bytes_like
from streamfx.cost.work import NO_WORK
from streamfx.errors import PlanError
from streamfx.ir.facts import Facts, StorageClass
from streamfx.node_meta import VALUE
from streamfx.runtime.pinned import bytes_pinned_by_torch
from streamfx.tools.inspect.layers import layers_of
from streamfx.tools.planner.overlap import Copies, OverlapInterval, Seconds
from streamfx.tools.report.communication import HALVES
from streamfx.tools.report.stage_table import loops_of

BY_LAYER = "weights on the host are copied to the device layer by layer"
WITHOUT = "call the layers of a ModuleList one after the other, or omit offload='parameters'"
LAYERS_IN_FLIGHT = 2  # layers whose gradients are on the host at once if the optimizer takes them in the backward pass


class Unit(NamedTuple):
    """Bytes of the parameters that FSDP2 copies together: in all, of those with a gradient, and of the largest one."""

    weights: int = 0
    gradients: int = 0
    largest: int = 0

    @staticmethod
    def of(parameters: Iterable[Tensor]) -> Unit:
        sizes = [(parameter.nbytes, parameter.nbytes * parameter.requires_grad) for parameter in parameters]
        return Unit(sum(size for size, _ in sizes), sum(size for _, size in sizes), max((size for size, _ in sizes), default=0))


class Stream(NamedTuple):
    """The residual stream between layers: its bytes, and those of the `first` layer's input if one graph does not save it.

    `first_waits`: whether that input waits on the host; it stays on the device if it needs no gradient (frozen embeddings).
    `ahead` are, for each layer, the bytes that one graph has fetched for the next layer of the backward graph while it runs.
    """

    bytes: int = 0
    first: int = 0
    first_waits: bool = False
    ahead: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class HostWeights:
    """A model whose weights are on the host.

    `layers` are its layers by name, `rest` the other parameters. `late` are the bytes of the rest's gradients that backward
    computes last (those of embeddings), `late_sums` those of their sums in float32. `host` has the bytes on the host by term.
    An optimizer's step reads and writes `step_bytes` there; it runs in hooks on parameters if `in_backward`.
    """

    layers: Mapping[str, Unit]
    rest: Unit
    late: int
    late_sums: int
    host: Mapping[str, int]
    step_bytes: int
    in_backward: bool

    @staticmethod
    def of(model: nn.Module, state: int | None, in_backward: bool, is_pinned: bool) -> HostWeights:
        """Return the layout of a model whose optimizer has `state` bytes; None without an optimizer.

        Raise `PlanError` if the model has no layers.
        """
        modules = layers_of(model)
        require(bool(modules), PlanError, BY_LAYER, f"a {type(model).__name__} without a list of layers", WITHOUT)
        names = {module: name for name, module in model.named_modules()}
        layers = {names[layer]: Unit.of(layer.parameters()) for layer in modules}
        in_layers = {parameter for layer in modules for parameter in layer.parameters()}
        rest = Unit.of(parameter for parameter in model.parameters() if parameter not in in_layers)
        host = _bytes_on_host(model, bytes_pinned_by_torch if is_pinned else int, in_backward, layers.values(), rest)
        embeddings = [weight for weight in set(_embeddings(model)) - in_layers if weight.requires_grad]
        late, late_sums = Unit.of(embeddings).gradients, sum(4 * weight.numel() for weight in embeddings)
        step_bytes = 0 if state is None else 3 * Unit.of(model.parameters()).gradients + 2 * state
        return HostWeights(layers, rest, late, late_sums, {**host, OPTIMIZER: state or 0}, step_bytes, in_backward)

    @property
    def largest(self) -> Unit:
        return max(self.layers.values())

    @property
    def first(self) -> str:
        """The name of the first layer."""
        return next(iter(self.layers))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.rest.weights + sum(unit.weights for unit in self.layers.values())

    # -- memory of the device

    def place_of(self, stage: str) -> str | None:
        """Return the name of the layer that contains a stage, by the stage's name; None if the stage is in no layer."""
        return next((name for name in self.layers if f"{stage}.".startswith(f"{name}.")), None)

    def places(self, graphs: Iterable[Facts]) -> dict[str, str | None]:
        """Return the name of each loop's layer, by the loop's name. Raise `PlanError` if no loop is in a layer."""
        found = {
            loop.spec.name: self.place_of(stage.name)
            for facts in graphs
            if facts.program is not None
            for stage in facts.stages
            for loop in loops_of(stage, facts)
        }
        require(any(found.values()), PlanError, BY_LAYER, "no loop of the step that is in a layer of the model", WITHOUT)
        return found

    def added_to(self, curve: Curve, places: Mapping[str, str | None], stream: Stream) -> Curve:
        """Return the curve of a step of one graph with the memory that a graph for each layer adds on the device.

        In the given curve, parameters take no memory, and each gradient is freed once it is complete. A layer's weights are there
        from the start of its first loop to that of the next layer's first loop. A weight that is being copied is there twice.
        """
        starts = sorted(((loop.start, places.get(loop.name)) for loop in curve.loops), key=lambda start: start[0])
        place: str | None = None
        previous, points, position = place, list[Point](), 0
        for point in curve.points:
            before = place
            while position < len(starts) and starts[position][0] <= point.work:
                place, position = starts[position][1], position + 1
            previous = before if place != before else previous
            is_backward = curve.backward_start is not None and point.work >= curve.backward_start
            added = {WEIGHTS: self.rest.weights, STAGE_INPUTS: 0 if stream.first_waits else stream.first}
            if place is not None:
                unit = self.layers[place]
                added[WEIGHTS] += unit.weights + (unit.largest if place != before else 0)
                if is_backward:
                    added |= self._added_in_backward(place, previous, stream)
                    if place == self.first and stream.first:  # embedding and first layer are one stage of one graph
                        added[GRADIENTS] -= min(self.late_sums, max(0, point.terms.get(GRADIENTS, 0) - unit.gradients))
            points.append(point.shifted(NO_WORK, added))
        embedding = {
            WEIGHTS: self.rest.weights,
            GRADIENTS: self.rest.gradients + self.late_sums + self.largest.gradients,
            STREAM_GRADIENT: stream.bytes,
        }
        copied = {GRADIENTS: 2 * self.rest.gradients}  # FSDP2 copies them into one tensor
        return replace(curve, points=(*points, Point(curve.work, embedding), Point(curve.work, copied)))

    def _added_in_backward(self, place: str, previous: str | None, stream: Stream) -> dict[str, int]:
        """Return the bytes that FSDP2 adds while a layer runs backward after a `previous` one; None after the head.

        The gradients of the rest, and of the previous layer in one tensor. Autograd holds the gradient of the layer's output, in
        whose memory one graph computes that of its input. The values of the next layer are not fetched yet.
        """
        gradients, inputs = self.rest.gradients - self.late, 0 if stream.first_waits else stream.first
        inputs -= stream.ahead.get(place, 0)
        inputs += stream.first if stream.first_waits and place == self.first else 0
        if previous is None:
            return {GRADIENTS: gradients, STAGE_INPUTS: inputs}
        gradients += self.layers[previous].gradients
        return {GRADIENTS: gradients, STAGE_INPUTS: inputs, STREAM_GRADIENT: stream.bytes}

    def stream_of(self, graphs: Sequence[Facts], intervals: Sequence[OverlapInterval]) -> Stream:
        """Return the residual stream of a step that was planned as one graph; empty if no stage is known to be a layer."""
        stages = [(self.place_of(stage.name), stage, facts) for facts in graphs for stage in facts.found_stages or ()]
        in_layers = [(place, stage, facts) for place, stage, facts in stages if place is not None]
        if not in_layers:
            return Stream()
        size = max(
            sum(bytes_like(node.meta[VALUE]) for node in stage.outputs if facts.access.storage_class(node) is StorageClass.ROWS)
            for _, stage, facts in in_layers
        )
        fetched = dict.fromkeys((place for place, *_ in in_layers), 0)
        for interval in intervals:
            if interval.half == HALVES[1] and (place := self.place_of(interval.stage)) is not None:
                fetched[place] += interval.copies.fetched
        ahead = dict(zip([*fetched][1:], fetched.values(), strict=False))
        return Stream(size, size if stages[0][0] is not None else 0, any(fetched.values()) and self.rest.gradients > 0, ahead)

    # -- copies and the optimizer's step

    def with_first_input(self, intervals: Sequence[OverlapInterval], stream: Stream) -> tuple[OverlapInterval, ...]:
        """Return the intervals with the copies of the first layer's input, which one graph does not copy."""
        size, found, halves = stream.first if stream.first_waits else 0, list(intervals), set()
        for i, interval in enumerate(intervals):
            if self.place_of(interval.stage) == self.first and interval.half not in halves:
                copies = Copies(left=size) if interval.half == HALVES[0] else Copies(fetched=size)
                found[i] = replace(interval, copies=interval.copies.plus(copies))
                halves.add(interval.half)
        return tuple(found)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of weights that are copied to the device in a step: those of layers twice, for forward and for backward."""
        return self.rest.weights + 2 * sum(unit.weights for unit in self.layers.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are copied to the host in a step."""
        return self.rest.gradients + sum(unit.gradients for unit in self.layers.values())

    def waiting_seconds(self, intervals: Sequence[OverlapInterval], seconds: Seconds) -> float:
        """Return the seconds in which the device waits for copies: of weights, of gradients and of offloaded values.

        Values that a layer offloads are copied while it runs forward; its backward waits for them.
        """
        waited = seconds.copied(self.fetched_bytes + self.rest.gradients)
        for half in HALVES:
            previous: str | None = None
            for interval in (interval for interval in intervals if interval.half == half):
                place = self.place_of(interval.stage)
                gradients = 0 if previous is None or place == previous or half == HALVES[0] else self.layers[previous].gradients
                concurrent = interval.copies.left + (0 if self.in_backward else gradients)
                waited += seconds.copied(interval.copies.fetched + (gradients if self.in_backward else 0))
                waited += max(0.0, seconds.copied(concurrent) - seconds.loops(interval))
                previous = place
            waited += seconds.copied(self.layers[previous].gradients) if previous is not None and half == HALVES[1] else 0.0
        return waited

    def step_seconds(self, intervals: Sequence[OverlapInterval], seconds: Seconds, bandwidth: float) -> tuple[float, float]:
        """Return the seconds of the optimizer's step at a bandwidth of the host's memory, and those that the device waits for.

        In the backward pass it runs concurrently with the loops of earlier layers; the step of the rest follows all loops.
        """
        step = self.step_bytes / bandwidth
        if not self.in_backward:
            return step, step
        backward = sum(seconds.loops(interval) for interval in intervals if interval.half == HALVES[1])
        return step, max(step * self.rest.gradients / max(self.gradient_bytes, 1), step - backward)


def _bytes_on_host(
    model: nn.Module, rounded: Callable[[int], int], in_backward: bool, layers: Iterable[Unit], rest: Unit
) -> dict[str, int]:
    """Return the bytes of parameters and of gradients on the host, if a tensor takes `rounded` bytes there.

    If the optimizer runs in the backward pass, gradients are not pinned, and the rest's arrive together.
    """
    parameters = {parameter: rounded(parameter.nbytes) for parameter in model.parameters()}
    gradients = sum(size for parameter, size in parameters.items() if parameter.requires_grad)
    if in_backward:
        gradients = max(rest.gradients, LAYERS_IN_FLIGHT * max(unit.gradients for unit in layers))
    return {PARAMETERS: sum(parameters.values()), GRADIENTS: gradients}


def _embeddings(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings that no other module has (an embedding may be tied to the head)."""
    owners = [parameter for module in model.modules() for parameter in module._parameters.values()]
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return [weight for weight in weights if sum(owner is weight for owner in owners) == 1]
