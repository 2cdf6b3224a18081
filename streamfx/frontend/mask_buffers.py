"""Inputs that hold a mask or a few numbers: their values are read once, as a pattern, and watched for changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from streamfx.cost.memory import bytes_like
from streamfx.ir.fingerprint import MAX_BYTES, Fingerprint, any_hidden_change, has_memory
from streamfx.ir.piecewise import Pieces, constant_pieces, merge_equal_pieces
from streamfx.ir.ranges import ACTIVATION, INFINITY, Range, constant, full_range
from streamfx.torch_private import FakeTensor

MOST_PIECES = 16
MOST_READ = 1 << 20  # bytes of ordinary numbers that are read at each call
MOST_COUNTED = 1 << 24  # float32 represents all integers up to this one
PLACES = constant_pieces(Range(0, MOST_COUNTED))  # a table of indices: of experts, of positions
NUMBERS = constant_pieces(Range(-ACTIVATION, ACTIVATION, assumed=1))  # ordinary numbers, as in weights


def pattern_of(tensor: Tensor) -> Pieces | None:
    """Describe a tensor [..., n, n] as a function of delta = column - row, if most of it is constant.

    A registered `tril` buffer is 1 for delta <= 0 and 0 above; an additive mask is minus infinity above. For any
    other tensor, return whether it holds ordinary numbers: none is infinite, NaN, or so large that it may represent
    infinity; for an integer table, return whether its values may be row indices.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:  # weights of a model that has no data
        return NUMBERS if isinstance(tensor, Parameter) and tensor.is_floating_point() else None
    if type(tensor) not in (Tensor, Buffer, Parameter) or not has_memory(tensor):
        return None
    n = tensor.shape[-1] if tensor.dim() > 1 else 0
    is_mask = n > 1 and tensor.shape[-2] == n and not tensor.is_complex() and not tensor.requires_grad
    return (
        (_mask_pattern(tensor.detach().reshape(-1, n, n)) if is_mask else None)
        or _ordinary_numbers(tensor)
        or _index_table(tensor)
    )


def _mask_pattern(values: Tensor) -> Pieces | None:
    """Describe square matrices [k, n, n]: constant above or below the diagonal, or along each diagonal."""
    if bool((values == values[:1]).all()) and bool((values[0, 1:, 1:] == values[0, :-1, :-1]).all()):
        return _toeplitz(values[0])
    above = _constant_above(values, 1)
    below = _constant_above(values.transpose(1, 2), 1)
    if above is None and below is None:
        return None
    low, high = values.aminmax()
    nan = low != low
    inside = Range(-INFINITY, INFINITY, True) if nan else Range(low.item(), high.item())
    return merge_equal_pieces((0, 1), (below or inside, inside, above or inside))


def _ordinary_numbers(tensor: Tensor) -> Pieces | None:
    """Return the pattern of ordinary numbers, as in trained weights, if all elements are."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize == 1:
        return None
    least, most = tensor.detach().aminmax()
    if least.item() >= -ACTIVATION and most.item() <= ACTIVATION:
        return NUMBERS
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None  # it violates the assumption on weights


def _index_table(tensor: Tensor) -> Pieces | None:
    """Return the pattern of indices if an integer table has no negative element.

    A scalar may count steps, so it has no pattern.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() < 2 or not tensor.numel():
        return None
    least, most = tensor.aminmax()
    return PLACES if least.item() >= 0 and most.item() <= MOST_COUNTED else None


def _toeplitz(values: Tensor) -> Pieces | None:
    """Describe a matrix that is constant along each diagonal; None if it has too many pieces."""
    by_delta = torch.cat((values[1:, 0].flip(0), values[0])).tolist()  # delta = -(n - 1) .. n - 1
    first = -(values.shape[0] - 1)
    cuts = [first + i for i in range(1, len(by_delta)) if by_delta[i] != by_delta[i - 1]]
    if len(cuts) >= MOST_PIECES:
        return None
    return merge_equal_pieces(cuts, [constant(by_delta[0]), *(constant(by_delta[cut - first]) for cut in cuts)])


def _constant_above(values: Tensor, diagonal: int) -> Range | None:
    """Return the number that all elements from this diagonal upward have, or None."""
    n = values.shape[-1]
    above = torch.ones(n, n, dtype=torch.bool, device=values.device).triu_(diagonal)
    first = values[0, 0, n - 1]
    return constant(first.item()) if bool((values == first).logical_or_(~above).all()) else None


@dataclass
class WatchedInput:
    """An input whose values were read: its index, its pattern and its fingerprint.

    `seen` is None for trained weights, which are assumed to stay ordinary numbers.
    """

    position: int
    pattern: Pieces
    seen: Fingerprint | None
    address: int = 0

    @staticmethod
    def of(position: int, tensor: Tensor, pattern: Pieces) -> WatchedInput:
        """Return an input with a fingerprint of its values; trained weights get none."""
        if tensor.requires_grad or not has_memory(tensor):
            return WatchedInput(position, pattern, None)
        return WatchedInput(
            position, pattern, Fingerprint.of(tensor, reads=_is_read_each_call(tensor, pattern)), tensor.data_ptr()
        )

    def looks_the_same(self, tensor: Any) -> bool:
        """Return whether the input is unchanged, as far as this is visible without reading its values."""
        if self.seen is None:
            return True
        if not isinstance(tensor, Tensor) or self.seen.visible_change(tensor) is not None:
            return False
        return self.seen.sums is not None or tensor.data_ptr() == self.address

    def still_holds(self, tensor: Any) -> bool:
        """Return whether the input still has the pattern; if it has changed, recompute the pattern and the fingerprint."""
        if self.looks_the_same(tensor) and (self.seen is None or self.seen.hidden_change(tensor) is None):
            return True
        if not isinstance(tensor, Tensor) or pattern_of(tensor) != self.pattern:
            return False
        current = WatchedInput.of(self.position, tensor, self.pattern)
        self.seen, self.address = current.seen, current.address
        return True


def _is_read_each_call(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether an input is read at each call; for large frozen weights, version and address are compared."""
    return bool(pattern.cuts) or bytes_like(tensor) <= MOST_READ


def _is_watchable(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether changes are detectable: tensors created in inference mode have no version counter."""
    return bytes_like(tensor) <= MAX_BYTES if _is_read_each_call(tensor, pattern) else not tensor.is_inference()


def _pattern_of_input(tensor: Tensor, is_held_by_model: bool) -> Pieces | None:
    """Return the pattern of an input; inputs of the caller may hold anything, even with a gradient (a bias)."""
    if is_held_by_model:
        return pattern_of(tensor)
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None


def watched_inputs(inputs: Sequence[Any], held_by_model: Sequence[bool]) -> list[WatchedInput]:
    """Return the inputs with a known pattern, among those that belong to the model (`held`) and not to its caller."""
    watched = []
    for position, (tensor, is_held) in enumerate(zip(inputs, held_by_model, strict=True)):
        pattern = _pattern_of_input(tensor, is_held) if isinstance(tensor, Tensor) else None
        if pattern is not None and _is_watchable(tensor, pattern):
            watched.append(WatchedInput.of(position, tensor, pattern))
    return watched


def patterns_of(watched: Sequence[WatchedInput], count: int, dynamo_index: Sequence[int | None]) -> dict[int, Pieces]:
    """Map patterns of Dynamo's inputs to indices of the traced graph's inputs, where sharded tensors are unwrapped.

    Dynamo's graph has `count` inputs; `given` has, for each input of the traced graph, its index among them.
    """
    if count == len(dynamo_index):
        return {item.position: item.pattern for item in watched}
    unsharded = {position: i for i, position in enumerate(dynamo_index) if position is not None}
    if None not in dynamo_index:  # AOTAutograd has merged inputs
        return {}
    return {unsharded[item.position]: item.pattern for item in watched if item.position in unsharded}


def all_hold(watched: Sequence[WatchedInput], inputs: Sequence[Any]) -> bool:
    """Return whether all watched inputs have their patterns. If nothing has changed, each device synchronizes once."""
    if all(item.looks_the_same(inputs[item.position]) for item in watched):
        read = [(item.seen, inputs[item.position]) for item in watched if item.seen is not None]
        if not any_hidden_change(read):
            return True
    return all(item.still_holds(inputs[item.position]) for item in watched)


@dataclass(frozen=True)
class MaskGuard:
    """A compiled graph that relies on the values of some inputs, and its replacement once they have changed."""

    compiled: Callable[..., Any]
    watched: Sequence[WatchedInput]
    otherwise: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        return (self.compiled if all_hold(self.watched, inputs) else self.otherwise)(*inputs)
