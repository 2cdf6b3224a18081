"""Gradients stage by stage: a chain of autograd nodes in front of a compiled function.

AOTAutograd's backward half is one autograd node, and no accumulator runs before it has returned. So the inputs that get gradients
pass through small nodes on their way in, one node per stretch of the backward half (`ir/delivery.py`), each an identity:

    weights of layer 0 -> Identity 1 ------------.
                             | a token            > compiled function -> loss
    weights of layer 1 -> Identity 0 ------------'

Backwards, the compiled function's node keeps the backward half for them, and gives them nothing. Then Identity 0 runs the first
stretch and returns its gradients; by the token, Identity 1 comes after it. Autograd runs accumulators before any other node that
is ready, so hooks on parameters, reducers and optimizers in the backward pass have their turn between two stretches.

# NOTE [Who gets which gradient]
The node of the compiled function looks at its own edges: what it keeps is what leads to an identity for just that input. All else
it computes before it returns. A run (`_Run`) belongs to one call and one backward pass: autograd owns it until that pass ends, in
whatever way. Where anything is not as expected, that node returns all gradients at once, and identities hand on what they get.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from streamfx.ir.delivery import Delivery, Saved
from streamfx.ir.joint import outputs_of
from streamfx.runtime.as_traced import unmarked
from streamfx.runtime.mask_programs import looking
from streamfx.runtime.outer import OuterRunner, call_of, found_before
from streamfx.runtime.written_stretches import Stretches, stretches_of
from streamfx.torch_private.autograd import (
    after_this_backward,
    are_awaited,
    autocast_is_on,
    backward_pass,
    current_autograd_node,
    is_transformed,
    no_autocast,
)

LOST = "a backward half was asked for gradients twice in one backward pass, or in another one than it was begun in"
TWICE = "torch.compile with aot_autograd does not currently support double backward"


@dataclass
class Chain:
    """What a compiled function and its backward half know of each other.

    `always`: not only where somebody waits for gradients. `places`: which gradients each stretch hands over, by input; empty
    where nothing is handed over before the end. `saved`: of what the backward half is given, in whose memory it lies.
    `kept_out`: inputs that are not chained. `is_used`: a call of the function was chained.
    """

    always: bool
    places: tuple[tuple[int, ...], ...] = ()
    saved: Saved = ()
    kept_out: frozenset[int] = frozenset()
    is_used: bool = False

    def keep_out(self, positions: Iterable[int] | None) -> None:
        """Leave inputs as they are, all of them if it is not known which."""
        if positions is None:
            self.places = ()
        else:
            self.kept_out |= frozenset(positions)


class _Call:
    """One call of the compiled function; `tensors` are the inputs that are tensors, by position."""

    def __init__(self, tensors: Sequence[int]) -> None:
        self.tensors = tensors
        self.runs: WeakValueDictionary[int, _Run] = WeakValueDictionary()  # by backward pass


@dataclass(frozen=True)
class InStages:
    """Calls a compiled function, with a chain in front of it where somebody waits for gradients."""

    compiled: Callable[..., Any]
    chain: Chain

    def __call__(self, *arguments: Any) -> Any:
        if not self.chain.places or not torch.is_grad_enabled() or not (self.chain.always or self._is_awaited(arguments)):
            return self.compiled(*arguments)
        return self.compiled(*self._chained(arguments))

    def _is_awaited(self, arguments: Sequence[Any]) -> bool:
        return are_awaited([arguments[position] for some in self.chain.places for position in some])

    def _chained(self, arguments: Sequence[Any]) -> Sequence[Any]:
        if is_transformed():
            return arguments
        given, token = list(arguments), None
        call = _Call([position for position, value in enumerate(given) if isinstance(value, Tensor)])
        for stretch, places in reversed(list(enumerate(self.chain.places))):
            chained = [place for place in places if place not in self.chain.kept_out and _is_plain(given[place])]
            if chained:
                token, *passed = Identity.apply(call, stretch, chained, token, *(given[place] for place in chained))
                for place, value in zip(chained, passed, strict=True):
                    given[place] = value
        self.chain.is_used = True
        return given


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.requires_grad


class _Run:
    """One run of a backward half, between two stretches of it."""

    def __init__(self, stretches: Stretches, arguments: list[Any]) -> None:
        self.results: dict[int, Any] = {}
        self._looks = found_before(arguments)
        self._rest = stretches(arguments, self.results)
        self._autocast, self._context = autocast_is_on(), contextvars.copy_context()
        self._through = -1
        self._advance()

    def until(self, stretch: int) -> None:
        """Run what has not run yet, up to the end of this stretch."""
        while self._through <= stretch:
            self._context.run(self._advance)

    def take(self, stretch: int, places: Sequence[int]) -> list[Tensor | None]:
        """The gradients of a stretch, which nobody else holds."""
        self.until(stretch)
        return [self.results.pop(place, None) for place in places]

    def finish(self) -> None:
        """Let go of what the stretches that nobody asked for would have taken."""
        self._rest.close()
        self.results.clear()

    def _advance(self) -> None:
        """What the compiled function's node runs in, as it was there: its code expects no autocast if it had none."""
        with torch.no_grad(), looking(self._looks), nullcontext() if self._autocast else no_autocast():
            next(self._rest)
        self._through += 1


class Identity(torch.autograd.Function):
    """Hands values on, and their gradients back once a stretch of the backward half has made them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, stretch: int, places: list[int], token: Tensor | None, *values: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.stretch, ctx.places = call, stretch, places
        return values[0].new_empty(0), *(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, _: Any, *given: Tensor | None) -> Any:
        run = ctx.call.runs.get(backward_pass())
        own: Sequence[Tensor | None] = given
        if run is not None:
            own = [_sum(*both) for both in zip(run.take(ctx.stretch, ctx.places), given, strict=True)]
            if torch.is_grad_enabled():
                own = _Once.apply(torch.empty(0, requires_grad=True), *own)
        elif all(gradient is None for gradient in given):
            raise RuntimeError(LOST)
        return None, None, None, None, *own


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated, and say so (`create_graph`)."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(TWICE)


class StagewiseRunner:
    """A backward half that stops where gradients are complete, for those calls that are chained; a boxed callable."""

    def __init__(self, whole: OuterRunner, deliveries: Sequence[Delivery], chain: Chain) -> None:
        self.whole, self.deliveries, self.chain = whole, deliveries, chain
        self._written: Stretches | None = None
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> Any:
        link = _link() if self.chain.is_used else None
        if link is None:
            return self.whole(arguments)
        call, chained = link
        arguments[:] = map(unmarked, arguments)
        run = _Run(self._stretches(), arguments)
        run.until(max((number for number, places in enumerate(self.chain.places) if not chained.issuperset(places)), default=-1))
        call.runs[backward_pass()] = run
        after_this_backward(run.finish)
        return [
            output if not isinstance(output, fx.Node) else None if place in chained else run.results.pop(place)
            for place, output in enumerate(outputs_of(self.whole.module.graph))
        ]

    def _stretches(self) -> Stretches:
        if self._written is None:
            module = self.whole.module
            calls = [(delivery, [call_of(node, module) for node in delivery.operators]) for delivery in self.deliveries]
            self._written = stretches_of("backward", module.graph.find_nodes(op="placeholder"), calls)
        return self._written


def _link() -> tuple[_Call, set[int]] | None:
    """The call whose backward half is running, and which of its inputs are chained; None where none are."""
    node = current_autograd_node()
    edges = () if node is None else node.next_functions
    own = [(function, index) if isinstance(function, _IDENTITY) else (None, 0) for function, index in edges]
    call = next((function.call for function, _ in own if function is not None), None)
    if call is None or len(call.tensors) != len(own):
        return None
    chained = {
        position
        for (function, index), position in zip(own, call.tensors, strict=True)
        if function is not None and function.call is call and index and function.places[index - 1] == position
    }
    return (call, chained) if chained else None


_IDENTITY: Any = Identity._backward_cls
