"""What a call costs in eager, followed operator by operator under fake tensors, with something around its layers or not.

Of many layers that are alike few are run, and stand for all. That they are alike is seen: the forward half is followed through
all layers once, and has to be, byte by byte, that of few with the missing ones put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamfx.cost.eager import EagerStep, eager_step
from streamfx.cost.memory import Cost
from streamfx.cost.repeated import Repeat, step_of_all
from streamfx.cost.values import RealIntegers
from streamfx.inspection.layers import first_layers, layers_of, repeat_of
from streamfx.inspection.untouched import Faker, device_of, held_tensors, modules_of, untouched, without_gradients
from streamfx.log import log
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


def eager_cost(model: Callable[..., Any], inputs: Mapping[str, Any], around: Around) -> Cost | None:
    """What a call costs in eager, with something around the forward of each layer; None if it cannot be followed, or has none."""
    mode, faker = faker_of(model, (), inputs)
    with accepting_real(mode), mode:
        return EagerCall(model, (), inputs, faker).cost(around) if layers_of(model) else None


def faker_of(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FakeTensorMode, Faker]:
    """The fake mode of a call, and what makes its tensors fake."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    tensors += [value for module in modules_of(model) for value in held_tensors(module)]
    mode = fake_mode_of(tensors) or FakeTensorMode()
    return mode, Faker(mode, device_of(tensors))


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
    faker: Faker
    reached: int = 0  # calls of layers that something was around

    def cost(self, around: Around | None = None) -> Cost | None:
        """What the call costs, with something around its layers or not; None if its Python code asks for data that nobody has, or
        calls no layer, so that nothing is around any.

        FLOPs of layers by themselves are counted where nothing is around them.
        """
        self.reached = 0
        try:
            step, gradients = self._of_few(around) or self._followed(around)
        except Exception as error:
            log.info("no eager baseline: %s", error)
            return None
        if around is not None and not self.reached:
            log.info("no baseline with something around each layer: none is called")
            return None
        step = step if around is None else replace(step, layer_flops=0, layer_attention=0)
        return replace(step.cost, gradients=gradients)

    def _of_few(self, around: Around | None) -> tuple[EagerStep, int] | None:
        """The step and the bytes of its gradients, from those of few layers; None where these do not stand for all."""
        if self._repeated is None:
            return None
        repeat, forward = self._repeated
        few, gradients = self._followed(around, repeat)
        step = step_of_all(few, repeat)
        if step is None:
            return None
        return replace(step, layer_flops=forward.layer_flops, layer_attention=forward.layer_attention), gradients

    @cached_property
    def _repeated(self) -> tuple[Repeat, EagerStep] | None:
        """How all layers are made of few, and their forward half; None if that is not what it is made of few."""
        repeat = repeat_of(self.model)
        if repeat is None:
            return None
        try:
            few = step_of_all(self._followed(None, repeat, forward_only=True)[0], repeat)
        except Exception as error:
            log.info("a model of few of its layers is not followed: %s", error)
            return None
        if few is None:
            return None
        forward = self._followed(None, forward_only=True)[0]
        return (repeat, forward) if few.forward.is_like(forward.forward) else None

    def _noted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.reached += 1
            return forward(*args, **kwargs)

        return run

    def _followed(self, around: Around | None, repeat: Repeat | None = None, forward_only: bool = False) -> tuple[EagerStep, int]:
        """A step, and the bytes of gradients of parameters: of all layers, or of few, with the gradients of those missing."""
        layers = layers_of(self.model)
        with first_layers(self.model, len(layers) if repeat is None else repeat.kept), untouched(self.model):
            self.faker.replace(modules_of(self.model), buffers=True)
            args, kwargs = self.faker.inputs((tuple(self.args), dict(self.kwargs)), with_integers=True)
            layers = layers_of(self.model)
            if around is not None:
                for layer in layers:
                    layer.forward = self._noted(around(layer.forward))
            given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
            parameters = _leaves(modules_of(self.model))
            # fake tensors are the same from call to call
            with RealIntegers(), without_gradients([*given, *parameters]), outside_of_inference():
                step = eager_step(lambda: self.model(*args, **kwargs), layers, forward_only)
                gradients = _gradient_bytes(parameters)
                if repeat is not None:
                    repeated = layers[repeat.front : repeat.front + repeat.period]
                    gradients += repeat.copies * _gradient_bytes(_leaves(part for layer in repeated for part in layer.modules()))
                return step, gradients


def _leaves(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(tensor): tensor for module in modules for tensor in held_tensors(module)}.values())


def _gradient_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.grad.nbytes for tensor in tensors if tensor.is_leaf and tensor.grad is not None)
