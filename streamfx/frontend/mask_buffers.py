"""Inputs that hold a mask or a small table: their values are read once, as a pattern, and checked for changes at each call."""

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

MAX_INTERVALS = 16  # of a mask that depends on column - row
MAX_BYTES_READ_PER_CALL = 1 << 20  # of ordinary numbers; larger tensors are compared by version and address
MAX_EXACT_INT = 1 << 24  # float32 represents all integers up to this one
INDEX_RANGE = constant_pieces(Range(0, MAX_EXACT_INT))  # of a table of expert indices or positions
ORDINARY_NUMBERS = constant_pieces(Range(-ACTIVATION, ACTIVATION, assumed=1))  # ordinary numbers, as in weights


def pattern_of(tensor: Tensor) -> Pieces | None:
    """Describe a tensor [..., n, n] as a function of delta = column - row, if most of it is constant.

    A registered `tril` buffer is 1 for delta <= 0 and 0 above; an additive mask is minus infinity above. For any
    other tensor, return whether it holds ordinary numbers: none is infinite, NaN, or so large that it may represent
    infinity; for an integer table, return whether its values may be row indices.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:  # weights of a model that has no data
        return ORDINARY_NUMBERS if isinstance(tensor, Parameter) and tensor.is_floating_point() else None
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
    """Return the pattern of ordinary numbers if all elements are ordinary, as in trained weights.

    Otherwise return the full range of the dtype for a tensor that needs a gradient, and None for any other.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize == 1:
        return None
    low, high = tensor.detach().aminmax()
    if low.item() >= -ACTIVATION and high.item() <= ACTIVATION:
        return ORDINARY_NUMBERS
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None  # it violates the assumption on weights


def _index_table(tensor: Tensor) -> Pieces | None:
    """Return the index pattern if an integer table [.., ..] holds values from 0 to `MAX_EXACT_INT`; otherwise None.

    A scalar or a vector may count steps, which change at each call, so it has no pattern.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() < 2 or not tensor.numel():
        return None
    low, high = tensor.aminmax()
    return INDEX_RANGE if low.item() >= 0 and high.item() <= MAX_EXACT_INT else None


def _toeplitz(values: Tensor) -> Pieces | None:
    """Describe a matrix that is constant along each diagonal; None if it has more than `MAX_INTERVALS` intervals."""
    values_by_delta = torch.cat((values[1:, 0].flip(0), values[0])).tolist()  # delta = -(n - 1) .. n - 1
    min_delta = -(values.shape[0] - 1)
    bounds = [min_delta + i for i in range(1, len(values_by_delta)) if values_by_delta[i] != values_by_delta[i - 1]]
    if len(bounds) >= MAX_INTERVALS:
        return None
    return merge_equal_pieces(
        bounds, [constant(values_by_delta[0]), *(constant(values_by_delta[bound - min_delta]) for bound in bounds)]
    )


def _constant_above(values: Tensor, diagonal: int) -> Range | None:
    """Return the value that all elements from this diagonal upward have, as a range; None if they differ."""
    n = values.shape[-1]
    above = torch.ones(n, n, dtype=torch.bool, device=values.device).triu_(diagonal)
    corner = values[0, 0, n - 1]
    return constant(corner.item()) if bool((values == corner).logical_or_(~above).all()) else None


@dataclass
class WatchedInput:
    """An input whose values were read: its index, its pattern and its fingerprint.

    `fingerprint` is None for trained weights, which are assumed to remain ordinary numbers.
    """

    index: int
    pattern: Pieces
    fingerprint: Fingerprint | None
    address: int = 0

    @staticmethod
    def of(index: int, tensor: Tensor, pattern: Pieces) -> WatchedInput:
        """Return an input with a fingerprint of its values; trained weights get none."""
        if tensor.requires_grad or not has_memory(tensor):
            return WatchedInput(index, pattern, None)
        return WatchedInput(index, pattern, Fingerprint.of(tensor, reads=_is_read_each_call(tensor, pattern)), tensor.data_ptr())

    def is_visibly_unchanged(self, tensor: Any) -> bool:
        """Return whether the input is unchanged, as far as this is visible without reading its values."""
        if self.fingerprint is None:
            return True
        if not isinstance(tensor, Tensor) or self.fingerprint.visible_change(tensor) is not None:
            return False
        return self.fingerprint.sums is not None or tensor.data_ptr() == self.address

    def has_same_pattern(self, tensor: Any) -> bool:
        """Return whether the input still has the pattern; if it has changed, recompute the pattern and the fingerprint."""
        if self.is_visibly_unchanged(tensor) and (self.fingerprint is None or self.fingerprint.hidden_change(tensor) is None):
            return True
        if not isinstance(tensor, Tensor) or pattern_of(tensor) != self.pattern:
            return False
        current = WatchedInput.of(self.index, tensor, self.pattern)
        self.fingerprint, self.address = current.fingerprint, current.address
        return True


def _is_read_each_call(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether an input is read at each call; for large frozen weights, version and address are compared."""
    return bool(pattern.bounds) or bytes_like(tensor) <= MAX_BYTES_READ_PER_CALL


def _is_watchable(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether changes are detectable: tensors created in inference mode have no version counter."""
    return bytes_like(tensor) <= MAX_BYTES if _is_read_each_call(tensor, pattern) else not tensor.is_inference()


def _pattern_of_input(tensor: Tensor, is_held_by_model: bool) -> Pieces | None:
    """Return the pattern of an input. Inputs of the caller may hold any values, even if they need a gradient (a bias)."""
    if is_held_by_model:
        return pattern_of(tensor)
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None


def watched_inputs(inputs: Sequence[Any], held_by_model: Sequence[bool]) -> list[WatchedInput]:
    """Return the inputs with a known pattern, among the inputs that belong to the model and not to its caller."""
    watched = []
    for index, (tensor, is_held) in enumerate(zip(inputs, held_by_model, strict=True)):
        pattern = _pattern_of_input(tensor, is_held) if isinstance(tensor, Tensor) else None
        if pattern is not None and _is_watchable(tensor, pattern):
            watched.append(WatchedInput.of(index, tensor, pattern))
    return watched


def patterns_of(watched: Sequence[WatchedInput], num_inputs: int, dynamo_index: Sequence[int | None]) -> dict[int, Pieces]:
    """Map patterns of Dynamo's inputs to indices of the traced graph's inputs, where sharded tensors are unwrapped.

    Dynamo's graph has `num_inputs` inputs; `dynamo_index` has, for each input of the traced graph, its index among them.
    """
    if num_inputs == len(dynamo_index):
        return {watched_input.index: watched_input.pattern for watched_input in watched}
    unsharded = {index: i for i, index in enumerate(dynamo_index) if index is not None}
    if None not in dynamo_index:  # AOTAutograd has merged inputs
        return {}
    return {
        unsharded[watched_input.index]: watched_input.pattern for watched_input in watched if watched_input.index in unsharded
    }


def have_same_patterns(watched: Sequence[WatchedInput], inputs: Sequence[Any]) -> bool:
    """Return whether all watched inputs have their patterns. If nothing has changed, each device synchronizes once."""
    tensors = [inputs[watched_input.index] for watched_input in watched]
    pairs = list(zip(watched, tensors, strict=True))
    if all(watched_input.is_visibly_unchanged(tensor) for watched_input, tensor in pairs):
        fingerprints = [
            (watched_input.fingerprint, tensor) for watched_input, tensor in pairs if watched_input.fingerprint is not None
        ]
        if not any_hidden_change(fingerprints):
            return True
    return all(watched_input.has_same_pattern(tensor) for watched_input, tensor in pairs)


@dataclass(frozen=True)
class MaskGuard:
    """A compiled graph that relies on the values of some inputs, and its replacement once they have changed."""

    compiled: Callable[..., Any]
    watched: Sequence[WatchedInput]
    fallback: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        return (self.compiled if have_same_patterns(self.watched, inputs) else self.fallback)(*inputs)
