"""Do all layers of a model do what few of them do? The forward half of all is followed once, operator by operator.

    few    embed | 0 | 1 | 2 | 3 | head          all    embed | 0 | 1 | 2 | 2 | ... | 2 | 3 | head

Of each operator is noted down what it is, what it is given, and where in which layer that was made: seen from its own layer.
So two layers do the same if their notes are the same, and PyTorch alone knows their backward half: that of an `autograd.Function`
is somebody's code, which may look at anything, and is not followed here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from streamfx.cost.meter import ASKS_DEVICE
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.repeats import Repeat
from streamfx.torch_private import TorchDispatchMode

BEFORE = 0  # the stretch before all layers


class Notes(TorchDispatchMode):
    """Operators in stretches: before all layers, in each layer, behind each of them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[list[Any]] = [[]]
        self.order: list[int] = []
        self.has_own_backward = False  # whether a layer brings code for its backward half
        self._held: dict[int, tuple[int | None, Any]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], tuple[int, int, int]]] = {}
        self._others: list[Tensor] = []

    def begin(self, modules: Iterable[nn.Module], layers: Sequence[nn.Module], given: Any) -> None:
        """Watch the turns of layers from now on; parameters, buffers and arguments go by name."""
        self.stretches, self.order = [[]], []
        self._held = _held_by(modules, layers, list(tensors_in(given)))
        for number, layer in enumerate(layers):
            layer.forward = self._turn_of(number, layer.forward)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _turn_of(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward, whose operators are a stretch of their own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.order.append(number)
            self.stretches.append([])
            out = forward(*args, **kwargs)
            self.stretches.append([])
            self.has_own_backward |= _has_own_backward(out, (args, kwargs))
            return out

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:  # no work: how often it is asked is nobody's affair
            return args[0].device
        given = self._seen((args, kwargs))
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        notes = self.stretches[-1]
        for number, result in enumerate(results):
            self._made[id(result)] = weakref.ref(result), (len(self.stretches) - 1, len(notes), number)
        notes.append((func, given, tuple(map(_kind, results)), torch.is_grad_enabled()))
        return out

    def _seen(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self._place_of(item), _kind(item)
        if isinstance(item, (tuple, list)):
            return type(item), tuple([self._seen(part) for part in item])
        if isinstance(item, dict):
            return tuple((key, self._seen(part)) for key, part in item.items())
        return type(item), repr(item) if isinstance(item, float) else item

    def _place_of(self, tensor: Tensor) -> Any:
        """Where a tensor comes from, seen from the stretch that reads it."""
        here = len(self.stretches) - 1
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:  # and no other that has its number by now
            stretch, *number = made[1]
            return (BEFORE if stretch == BEFORE else stretch - here - 1, *number)
        layer, name = self._held.get(id(tensor), (None, None))
        if name is None:
            self._others.append(tensor)
            name = id(tensor)
        return "held", name if layer is None else (2 * layer + 1 - here, name)


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _held_by(
    modules: Iterable[nn.Module], layers: Sequence[nn.Module], given: Iterable[Tensor]
) -> dict[int, tuple[int | None, Any]]:
    """By which name parameters, buffers and arguments go, and which layer holds them. They are alive as long as the model."""
    found: dict[int, tuple[int | None, Any]] = {id(tensor): (None, number) for number, tensor in enumerate(given)}
    for root in modules:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            found.setdefault(id(tensor), (None, name))
    for number, layer in enumerate(layers):
        own = (*layer.named_parameters(), *layer.named_buffers())
        found.update((id(tensor), (number, name)) for name, tensor in own)
    return found


def _has_own_backward(out: Any, given: Any) -> bool:
    """Whether what is differentiated between what a layer is given and what it makes holds an `autograd.Function`."""
    seen = {tensor.grad_fn for tensor in tensors_in(given)}
    todo = [tensor.grad_fn for tensor in tensors_in(out)]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                return True
            todo += [source for source, _ in node.next_functions]
    return False


def do_the_same(few: Notes, every: Notes, repeat: Repeat) -> bool:
    """Whether the notes of all layers are those of few, with those of a period repeated."""
    if few.has_own_backward or every.has_own_backward:
        return False
    if few.order != list(range(repeat.kept)) or every.order != list(range(repeat.count)):
        return False
    missing, begin = repeat.count - repeat.kept, repeat.front + repeat.period
    stands_for = [
        number if number < begin else begin + (number - begin) % repeat.period if number < begin + missing else number - missing
        for number in range(repeat.count)
    ]
    order = [0, *(place for number in stands_for for place in (2 * number + 1, 2 * number + 2))]
    return all(every.stretches[i] == few.stretches[place] for i, place in enumerate(order))
