"""The cost of a call in eager mode, traced operator by operator on fake tensors, optionally with a wrapper around each layer.

If layers repeat (a `Repeat`), only the *kept layers* are traced, the first few, and the cost is extrapolated to all. This is
checked: one full forward trace must equal, byte by byte, the shortened trace with the missing layers filled in. A *step* is the
forward and backward pass of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamfx.cost.eager_step import EagerStep, eager_step
from streamfx.cost.integer_values import RealIntegers
from streamfx.cost.memory import Cost
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.repeats import Repeat, step_of_all
from streamfx.log import log
from streamfx.tools.inspect.full_depth import LayerSubset
from streamfx.tools.inspect.layer_repeat import Notes, confirms_repeat
from streamfx.tools.inspect.layers import find_repeat, first_layers, layers_of, name_of_layers
from streamfx.tools.inspect.side_effect_guard import (
    FakeConverter,
    device_of,
    held_tensors,
    modules_of,
    without_gradients,
    without_side_effects,
)
from streamfx.torch_private import FakeTensorMode, fake_mode_of, tree_iter

LayerWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """Context manager: leave inference mode, in which composite operators are not split into those that the cost counter knows.

    Whether gradients are enabled stays the same.
    """
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a layer in torch's activation checkpointing: only its inputs are saved for backward."""
    return partial(checkpoint, forward, use_reentrant=False)


def eager_cost(
    model: Callable[..., Any], inputs: Mapping[str, Any], wrapper: LayerWrapper, repeat: Repeat | None = None
) -> Cost | None:
    """Return the cost of a call in eager mode with `wrapper` applied to each layer.

    None if it cannot be traced or has no layers. `repeat` is the layer repetition, if already found for these inputs.
    """
    with tracing_mode(model, (), inputs) as faker:
        return EagerCall(model, (), inputs, faker, repeat).cost(wrapper) if layers_of(model) else None


def find_layer_repetition(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Repeat | None:
    """Return the layer repetition of a call, or None if the layers do not repeat."""
    with tracing_mode(model, (), inputs) as faker:
        return EagerCall(model, (), inputs, faker).repeat


@contextmanager
def tracing_mode(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[FakeConverter]:
    """Context manager: the fake mode in which to trace a call, that of its fake tensors or a new one; yield a converter to it.

    Operators of the mode may mix fake tensors with real ones, such as parameters.
    """
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    tensors += [value for module in modules_of(model) for value in held_tensors(module)]
    mode = fake_mode_of(tensors) or FakeTensorMode()
    saved, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield FakeConverter(mode, device_of(tensors))
    finally:
        mode.allow_non_fake_inputs = saved


@dataclass
class EagerCall:
    """A call to trace in the active fake mode."""

    model: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    faker: FakeConverter
    known_repeat: Repeat | None = None  # the layer repetition, if already known
    wrapped_calls: int = 0  # number of calls of wrapped layers
    _traces: dict[Repeat | None, tuple[EagerStep, Notes]] = field(default_factory=dict)

    def cost(self, wrapper: LayerWrapper | None = None) -> Cost | None:
        """Return the cost of the call, with `wrapper` applied to each layer if given.

        None if the Python code needs the data of a fake tensor, or if no wrapped layer is called. FLOPs per layer are
        counted only if layers are not wrapped.
        """
        result = self.step(wrapper)
        if result is None:
            return None
        step, gradients = result
        if wrapper is not None:
            return replace(step.cost, gradients=gradients, layer_flops=0, layer_attention=0)
        forward = step if self.repeat is None else self._traced_forward()[0]
        cost = replace(step.cost, gradients=gradients)
        return replace(cost, layer_flops=forward.layer_flops, layer_attention=forward.layer_attention)

    def step(self, wrapper: LayerWrapper | None) -> tuple[EagerStep, int] | None:
        """Return (step, bytes of its parameter gradients), with `wrapper` applied to each layer.

        None if the step cannot be traced, or if no wrapped layer is called; the reason is logged.
        """
        self.wrapped_calls = 0
        try:
            result = self._extrapolated_step(wrapper) or self._traced_step(wrapper)
        except Exception as error:
            log.info("no eager baseline: %s", error)
            return None
        if wrapper is not None and not self.wrapped_calls:
            log.info("no baseline with wrapped layers: no layer is called")
            return None
        return result

    def _extrapolated_step(self, wrapper: LayerWrapper | None) -> tuple[EagerStep, int] | None:
        """Return (step, bytes of parameter gradients), extrapolated from the kept layers; None if that is not possible."""
        if self.repeat is None:
            return None
        step_of_few, gradients = self._traced_step(wrapper, self.repeat)
        step = step_of_all(step_of_few, self.repeat)
        return None if step is None else (step, gradients)

    @cached_property
    def repeat(self) -> Repeat | None:
        """How the layers repeat; None if they do not, or if that cannot be proven.

        The proof: the extrapolated forward pass equals the full one, and no layer has a custom backward, which the forward pass
        does not show.
        """
        repeat = find_repeat(self.model) if self.known_repeat is None else self.known_repeat
        if repeat is None or self.known_repeat is not None:
            return repeat
        try:
            extrapolated = step_of_all(self._traced_forward(repeat)[0], repeat)
        except Exception as error:
            log.info("a model with a few of its layers cannot be traced: %s", error)
            return None
        if extrapolated is None:
            return None
        step, notes = self._traced_forward()
        return repeat if extrapolated.forward.equals(step.forward) and not notes.has_custom_backward else None

    def _counting_calls(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a layer, wrapped so that its calls are counted in `wrapped_calls`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.wrapped_calls += 1
            return forward(*args, **kwargs)

        return run

    def _traced_forward(self, repeat: Repeat | None = None) -> tuple[EagerStep, Notes]:
        """Return the forward pass of all layers, or of the kept layers of `repeat`, with notes on each layer.

        It is traced at the first request only.
        """
        if repeat not in self._traces:
            notes = Notes()
            self._traces[repeat] = self._traced_step(None, repeat, forward_only=True, notes=notes)[0], notes
        return self._traces[repeat]

    def _traced_step(
        self, wrapper: LayerWrapper | None, repeat: Repeat | None = None, forward_only: bool = False, notes: Notes | None = None
    ) -> tuple[EagerStep, int]:
        """Trace a step, or only its forward pass; return it, and the bytes of parameter gradients of all layers.

        With `repeat`, only the kept layers are traced; the gradient bytes include those of the missing ones. `notes`, if given,
        records what each layer computes.
        """
        with self._fake_call(repeat) as (args, kwargs):
            layers = layers_of(self.model)
            if notes is not None:
                notes.begin(modules_of(self.model), layers, (args, kwargs))
            if wrapper is not None:
                for layer in layers:
                    layer.forward = self._counting_calls(wrapper(layer.forward))
            inputs = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
            parameters = _leaves(modules_of(self.model))
            with (
                RealIntegers(),
                notes or nullcontext(),
                without_gradients([*inputs, *parameters]),
                outside_of_inference(),
            ):  # the converter returns the same fake tensors for each call
                step = eager_step(lambda: self.model(*args, **kwargs), layers, forward_only)
                gradients = _gradient_bytes(parameters)
                if repeat is not None:
                    repeated = layers[repeat.front : repeat.front + repeat.period]
                    gradients += repeat.copies * _gradient_bytes(_leaves(part for layer in repeated for part in layer.modules()))
                return step, gradients

    @contextmanager
    def _fake_call(self, repeat: Repeat | None) -> Iterator[tuple[Any, Any]]:
        """Context manager: replace the tensors of the model by fake ones, and yield fake (args, kwargs).

        In the block, the model has all its layers, or only the kept layers of `repeat`. Integer inputs are real copies. On exit,
        the model is restored.
        """
        with (
            first_layers(self.model, len(layers_of(self.model)) if repeat is None else repeat.kept),
            without_side_effects(self.model),
        ):
            self.faker.replace(modules_of(self.model), buffers=True)
            yield self.faker.inputs((tuple(self.args), dict(self.kwargs)), with_integers=True)

    def find_layer_subset(self) -> LayerSubset | None:
        """Return the kept layers to trace in place of all; None if the layers do not repeat, or cannot be traced."""
        repeat = find_repeat(self.model, by_settings=True)
        if repeat is None:
            return None
        try:
            repeats = confirms_repeat(self._traced_forward(repeat)[1], self._traced_forward()[1], repeat)
        except Exception as error:
            log.info("the forward pass cannot be traced through all layers: %s", error)
            return None
        return LayerSubset(repeat, name_of_layers(self.model)) if repeats else None


def _leaves(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of the modules, without duplicates."""
    return list({id(tensor): tensor for module in modules for tensor in held_tensors(module)}.values())


def _gradient_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the gradients (`.grad`) that the leaves among these tensors hold."""
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum(tensor.nbytes for tensor in tensors_in(gradients))
