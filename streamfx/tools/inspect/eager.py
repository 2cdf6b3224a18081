"""What a call costs in eager, followed operator by operator under fake tensors, with something around its layers or not.

Of many layers that are alike few are run, and stand for all. That they are alike is seen: the forward half is followed through
all layers once, and has to be, byte by byte, that of few with the missing ones put in.
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
from streamfx.cost.loop_sampling import IterationsDifferError
from streamfx.cost.memory import Cost
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.repeats import Repeat, step_of_all
from streamfx.log import log
from streamfx.tools.inspect.full_depth import LayerSubset
from streamfx.tools.inspect.layer_repeat import Notes, do_the_same
from streamfx.tools.inspect.layers import first_layers, layers_of, name_of_layers, repeat_of
from streamfx.tools.inspect.side_effect_guard import (
    FakeConverter,
    device_of,
    held_tensors,
    modules_of,
    untouched,
    without_gradients,
)
from streamfx.torch_private import FakeTensorMode, fake_mode_of, tree_iter

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """Not in inference mode, which hides what operators are made of from who counts; without gradients where those are off."""
    trains = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(trains):
        yield


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, of which only the input is kept."""
    return partial(checkpoint, forward, use_reentrant=False)


def eager_cost(model: Callable[..., Any], inputs: Mapping[str, Any], around: Around, alike: Repeat | None = None) -> Cost | None:
    """What a call costs in eager, with something around the forward of each layer; None if it cannot be followed, or has none.

    `alike` says which of these layers stand for all, where that was seen for these inputs.
    """
    mode, faker = faker_of(model, (), inputs)
    with accepting_real(mode), mode:
        return EagerCall(model, (), inputs, faker, alike).cost(around) if layers_of(model) else None


def costs_with_one_more(
    model: Callable[..., Any], inputs: Mapping[str, Any], around: Around, few: int
) -> tuple[Cost, Cost] | None:
    """The same of a model with only its first `few` layers, and with one more that does what the one before the last does, which
    is a guess. None where turns of layers do not repeat, or cannot be followed.
    """
    mode, faker = faker_of(model, (), inputs)
    with accepting_real(mode), mode, first_layers(model, few):
        found = EagerCall(model, (), inputs, faker).step(around)
        more = None if found is None else step_of_all(found[0], Repeat(1, 1, few, few + 1))
        return None if found is None or more is None else (found[0].cost, more.cost)


def alike_layers(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Repeat | None:
    """Which layers stand for all in a call; None where they do not."""
    mode, faker = faker_of(model, (), inputs)
    with accepting_real(mode), mode:
        return EagerCall(model, (), inputs, faker).alike


def faker_of(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FakeTensorMode, FakeConverter]:
    """The fake mode of a call, and what makes its tensors fake."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    tensors += [value for module in modules_of(model) for value in held_tensors(module)]
    mode = fake_mode_of(tensors) or FakeTensorMode()
    return mode, FakeConverter(mode, device_of(tensors))


@contextmanager
def accepting_real(mode: FakeTensorMode) -> Iterator[None]:
    """Real parameters may meet fake inputs."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@dataclass
class EagerCall:
    """A call, in the fake mode that is active."""

    model: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    faker: FakeConverter
    given: Repeat | None = None  # how all layers are made of few, where somebody has seen it
    reached: int = 0  # calls of layers that something was around
    _walks: dict[Repeat | None, tuple[EagerStep, Notes]] = field(default_factory=dict)

    def cost(self, around: Around | None = None) -> Cost | None:
        """What the call costs, with something around its layers or not; None if its Python code asks for data that nobody has, or
        calls no layer, so that nothing is around any.

        FLOPs of layers by themselves are counted where nothing is around them.
        """
        found = self.step(around)
        if found is None:
            return None
        step, gradients = found
        if around is not None:
            return replace(step.cost, gradients=gradients, layer_flops=0, layer_attention=0)
        forward = step if self.alike is None else self._forward()[0]
        cost = replace(step.cost, gradients=gradients)
        return replace(cost, layer_flops=forward.layer_flops, layer_attention=forward.layer_attention)

    def step(self, around: Around | None) -> tuple[EagerStep, int] | None:
        """The step and the bytes of its gradients; None as above."""
        self.reached = 0
        try:
            found = self._of_few(around) or self._followed(around)
        except Exception as error:
            log.info("no eager baseline: %s", error)
            return None
        if around is not None and not self.reached:
            log.info("no baseline with something around each layer: none is called")
            return None
        return found

    def _of_few(self, around: Around | None) -> tuple[EagerStep, int] | None:
        """The step and the bytes of its gradients, from those of few layers; None where these do not stand for all."""
        if self.alike is None:
            return None
        few, gradients = self._followed(around, self.alike)
        step = step_of_all(few, self.alike)
        return None if step is None else (step, gradients)

    @cached_property
    def alike(self) -> Repeat | None:
        """How all layers are made of few; None if the forward half of all is not what it is made of few, or layers have their own
        backward half.
        """
        repeat = repeat_of(self.model) if self.given is None else self.given
        if repeat is None or self.given is not None:
            return repeat
        try:
            few = step_of_all(self._forward(repeat)[0], repeat)
        except Exception as error:
            log.info("a model of few of its layers is not followed: %s", error)
            return None
        if few is None:
            return None
        step, notes = self._forward()
        return repeat if few.forward.is_like(step.forward) and not notes.has_own_backward else None

    def _noted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.reached += 1
            return forward(*args, **kwargs)

        return run

    def _forward(self, repeat: Repeat | None = None) -> tuple[EagerStep, Notes]:
        """The forward half of all layers, or of few, and what each of them does. It is followed once."""
        if repeat not in self._walks:
            notes = Notes()
            self._walks[repeat] = self._followed(None, repeat, forward_only=True, notes=notes)[0], notes
        return self._walks[repeat]

    def _followed(
        self, around: Around | None, repeat: Repeat | None = None, forward_only: bool = False, notes: Notes | None = None
    ) -> tuple[EagerStep, int]:
        """A step, and the bytes of gradients of parameters: of all layers, or of few, with the gradients of those missing."""
        try:
            return self._walked(around, repeat, forward_only, notes, True)
        except IterationsDifferError as error:
            log.info("all turns are followed: %s", error)
            return self._walked(around, repeat, forward_only, notes, False)

    def _walked(
        self, around: Around | None, repeat: Repeat | None, forward_only: bool, notes: Notes | None, of_few: bool
    ) -> tuple[EagerStep, int]:
        with self._faked(repeat) as (args, kwargs):
            layers = layers_of(self.model)
            if notes is not None:
                notes.begin(modules_of(self.model), layers, (args, kwargs))
            if around is not None:
                for layer in layers:
                    layer.forward = self._noted(around(layer.forward))
            given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
            parameters = _leaves(modules_of(self.model))
            with (
                RealIntegers(),
                notes or nullcontext(),
                without_gradients([*given, *parameters]),
                outside_of_inference(),
            ):  # fake tensors are the same from call to call
                step = eager_step(lambda: self.model(*args, **kwargs), layers, forward_only, of_few)
                gradients = _gradient_bytes(parameters)
                if repeat is not None:
                    repeated = layers[repeat.front : repeat.front + repeat.period]
                    gradients += repeat.copies * _gradient_bytes(_leaves(part for layer in repeated for part in layer.modules()))
                return step, gradients

    @contextmanager
    def _faked(self, repeat: Repeat | None) -> Iterator[tuple[Any, Any]]:
        """The arguments, and in place the model, of all layers or of few: as fake tensors, but for integers of the caller's."""
        with first_layers(self.model, len(layers_of(self.model)) if repeat is None else repeat.kept), untouched(self.model):
            self.faker.replace(modules_of(self.model), buffers=True)
            yield self.faker.inputs((tuple(self.args), dict(self.kwargs)), with_integers=True)

    def few(self) -> LayerSubset | None:
        """How all layers are made of few that do the same; None where they are not."""
        repeat = repeat_of(self.model, by_settings=True)
        if repeat is None:
            return None
        try:
            alike = do_the_same(self._forward(repeat)[1], self._forward()[1], repeat)
        except Exception as error:
            log.info("the forward half is not followed through all layers: %s", error)
            return None
        return LayerSubset(repeat, name_of_layers(self.model)) if alike else None


def _leaves(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(tensor): tensor for module in modules for tensor in held_tensors(module)}.values())


def _gradient_bytes(tensors: Iterable[Tensor]) -> int:
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum(part.nbytes for part in tensors_in(gradients))
