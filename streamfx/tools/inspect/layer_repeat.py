"""Check that all layers of a model do the same as a few of them, with one full forward trace, operator by operator.

    few    embed | 0 | 1 | 2 | 3 | head          all    embed | 0 | 1 | 2 | 2 | ... | 2 | 3 | head

For each operator, the trace notes its target, its arguments, and the origin of each operand (layer and operator index) relative
to its own layer. Layers with equal notes are equal if PyTorch alone defines their backward graph: an `autograd.Function` is user
code that may depend on anything, so its presence rules out repetition.
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

BEFORE = 0  # index of the segment before all layers


class Notes(TorchDispatchMode):
    """Operators by segment: before all layers, in each layer, and after each layer."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[list[Any]] = [[]]
        self.order: list[int] = []
        self.has_own_backward = False  # whether a layer defines a custom backward
        self._held: dict[int, tuple[int | None, Any]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], tuple[int, int, int]]] = {}
        self._others: list[Tensor] = []

    def begin(self, modules: Iterable[nn.Module], layers: Sequence[nn.Module], arguments: Any) -> None:
        """Start recording. Parameters, buffers and arguments are identified by name."""
        self.stretches, self.order = [[]], []
        self._held = _held_by(modules, layers, list(tensors_in(arguments)))
        for number, layer in enumerate(layers):
            layer.forward = self._recording(number, layer.forward)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _recording(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer's forward so that its operators form a segment."""

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
        if func is ASKS_DEVICE:  # a query without work; the number of queries may differ between layers
            return args[0].device
        operands = self._described((args, kwargs))
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        notes = self.stretches[-1]
        for number, result in enumerate(results):
            self._origins[id(result)] = weakref.ref(result), (len(self.stretches) - 1, len(notes), number)
        notes.append((func, operands, tuple(map(_kind, results)), torch.is_grad_enabled()))
        return out

    def _described(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self._origin_of(item), _kind(item)
        if isinstance(item, (tuple, list)):
            return type(item), tuple([self._described(part) for part in item])
        if isinstance(item, dict):
            return tuple((key, self._described(part)) for key, part in item.items())
        return type(item), repr(item) if isinstance(item, float) else item

    def _origin_of(self, tensor: Tensor) -> Any:
        """Return the origin of a tensor relative to the segment that reads it."""
        here = len(self.stretches) - 1
        origin = self._origins.get(id(tensor))
        if origin is not None and origin[0]() is tensor:  # the id may have been reused
            segment, *number = origin[1]
            return (BEFORE if segment == BEFORE else segment - here - 1, *number)
        layer, name = self._held.get(id(tensor), (None, None))
        if name is None:
            self._others.append(tensor)
            name = id(tensor)
        return "held", name if layer is None else (2 * layer + 1 - here, name)


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _held_by(
    modules: Iterable[nn.Module], layers: Sequence[nn.Module], arguments: Iterable[Tensor]
) -> dict[int, tuple[int | None, Any]]:
    """Map each parameter, buffer and argument (by id) to the layer that holds it and its name. All live as long as the model."""
    holders: dict[int, tuple[int | None, Any]] = {id(tensor): (None, number) for number, tensor in enumerate(arguments)}
    for root in modules:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            holders.setdefault(id(tensor), (None, name))
    for number, layer in enumerate(layers):
        own = (*layer.named_parameters(), *layer.named_buffers())
        holders.update((id(tensor), (number, name)) for name, tensor in own)
    return holders


def _has_own_backward(out: Any, inputs: Any) -> bool:
    """Return whether the autograd graph between a layer's inputs and outputs contains an `autograd.Function`."""
    seen = {tensor.grad_fn for tensor in tensors_in(inputs)}
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
    """Return whether the notes of all layers equal those of a few with one period repeated."""
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
