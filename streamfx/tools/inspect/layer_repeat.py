"""Check that all layers of a model do the same as the kept layers, with one full forward trace, operator by operator.

    kept    embed | 0 | 1 | 2 | 3 | head          all    embed | 0 | 1 | 2 | 2 | ... | 2 | 3 | head

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

from streamfx.cost.meter import READS_DEVICE
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.repeats import Repeat
from streamfx.ir.joint import walk
from streamfx.torch_private import TorchDispatchMode

BEFORE = 0  # index of the segment before all layers


class Notes(TorchDispatchMode):
    """Operators by segment: before all layers, in each layer, and after each layer."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Start with one empty segment; `_origins` maps a tensor id to its segment, operator index and result index."""
        super().__init__()
        self.segments: list[list[Any]] = [[]]
        self.order: list[int] = []
        self.has_custom_backward = False  # whether a layer defines a custom backward
        self._names: dict[int, tuple[int | None, Any]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], tuple[int, int, int]]] = {}
        self._unnamed: list[Tensor] = []

    def begin(self, modules: Iterable[nn.Module], layers: Sequence[nn.Module], arguments: Any) -> None:
        """Start recording. Parameters, buffers and arguments are identified by name."""
        self.segments, self.order = [[]], []
        self._names = _names_of_tensors(modules, layers, list(tensors_in(arguments)))
        for layer_index, layer in enumerate(layers):
            layer.forward = self._recording_forward(layer_index, layer.forward)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch to turn this mode off while it compiles, so that compiled regions inside of a model stay compiled."""
        return True

    def _recording_forward(self, layer_index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward, wrapped so that the layer's operators form a segment."""

        def forward_in_own_segment(*args: Any, **kwargs: Any) -> Any:
            """Run the layer with its operators in a new segment, and open another segment for the operators after it.

            Note whether the layer's graph has an `autograd.Function`.
            """
            self.order.append(layer_index)
            self.segments.append([])
            out = forward(*args, **kwargs)
            self.segments.append([])
            self.has_custom_backward |= _has_custom_backward(out, (args, kwargs))
            return out

        return forward_in_own_segment

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator, and note its target, operands, result properties and gradient mode."""
        kwargs = kwargs or {}
        if func is READS_DEVICE:  # a query without work; the number of queries may differ between layers
            return args[0].device
        operands = self._describe((args, kwargs))
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        notes = self.segments[-1]
        for result_index, result in enumerate(results):
            self._origins[id(result)] = weakref.ref(result), (len(self.segments) - 1, len(notes), result_index)
        notes.append((func, operands, tuple(map(_tensor_properties, results)), torch.is_grad_enabled()))
        return out

    def _describe(self, argument: Any) -> Any:
        """Return nested arguments with each tensor replaced by its origin and properties."""
        if isinstance(argument, Tensor):
            return self._origin_of(argument), _tensor_properties(argument)
        if isinstance(argument, (tuple, list)):
            return type(argument), tuple([self._describe(element) for element in argument])
        if isinstance(argument, dict):
            return tuple((key, self._describe(element)) for key, element in argument.items())
        return type(argument), repr(argument) if isinstance(argument, float) else argument

    def _origin_of(self, tensor: Tensor) -> Any:
        """Return the origin of a tensor relative to the segment that reads it.

        It is (segment, operator index, result index) for the result of an operator, ("held", (layer, name)) for another tensor.
        """
        current_segment = len(self.segments) - 1
        origin = self._origins.get(id(tensor))
        if origin is not None and origin[0]() is tensor:  # the id may have been reused
            segment, operator_index, result_index = origin[1]
            offset = BEFORE if segment == BEFORE else segment - current_segment - 1
            return offset, operator_index, result_index
        layer, name = self._names.get(id(tensor), (None, None))
        if name is None:
            self._unnamed.append(tensor)
            name = id(tensor)
        return "held", name if layer is None else (2 * layer + 1 - current_segment, name)


def _tensor_properties(tensor: Tensor) -> Any:
    """Return the properties in which tensors of equal layers agree."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _names_of_tensors(
    modules: Iterable[nn.Module], layers: Sequence[nn.Module], arguments: Iterable[Tensor]
) -> dict[int, tuple[int | None, Any]]:
    """Map each parameter, buffer and argument (by id) to the layer that holds it and its name. All live as long as the model."""
    names: dict[int, tuple[int | None, Any]] = {id(tensor): (None, index) for index, tensor in enumerate(arguments)}
    for root in modules:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            names.setdefault(id(tensor), (None, name))
    for layer_index, layer in enumerate(layers):
        layer_tensors = (*layer.named_parameters(), *layer.named_buffers())
        names.update((id(tensor), (layer_index, name)) for name, tensor in layer_tensors)
    return names


def _has_custom_backward(out: Any, inputs: Any) -> bool:
    """Return whether the autograd graph between a layer's inputs and outputs contains an `autograd.Function`."""
    ends = {None, *(tensor.grad_fn for tensor in tensors_in(inputs))}
    roots: set[Any] = {tensor.grad_fn for tensor in tensors_in(out)} - ends
    nodes = walk(roots, lambda node: {source for source, _ in node.next_functions} - ends)
    return any(isinstance(node, BackwardCFunction) for node in nodes)


def confirms_repeat(notes_of_kept: Notes, notes_of_all: Notes, repeat: Repeat) -> bool:
    """Return whether the notes of all layers equal the notes of the kept layers with one period repeated."""
    if notes_of_kept.has_custom_backward or notes_of_all.has_custom_backward:
        return False
    if notes_of_kept.order != list(range(repeat.kept)) or notes_of_all.order != list(range(repeat.count)):
        return False
    expected = [BEFORE]  # for each segment of all layers, the segment of the kept layers that must equal it
    for layer_index in range(repeat.count):
        source_layer = _source_layer(layer_index, repeat)
        expected += [2 * source_layer + 1, 2 * source_layer + 2]
    return all(notes_of_all.segments[i] == notes_of_kept.segments[segment] for i, segment in enumerate(expected))


def _source_layer(layer_index: int, repeat: Repeat) -> int:
    """Return the index of the kept layer that represents this layer of the full model."""
    num_missing, begin = repeat.count - repeat.kept, repeat.front + repeat.period  # missing layers start at `begin`
    if layer_index < begin:
        return layer_index
    if layer_index < begin + num_missing:
        return begin + (layer_index - begin) % repeat.period
    return layer_index - num_missing
