"""Inputs that hold a mask or a small table: their values are read once, as a pattern, and checked for changes at each call.

A *pattern* (`Pieces`) gives a value, or a range of values, for each interval of delta = column - row. For a causal additive mask:
0 for delta <= 0, and minus infinity for delta > 0. A plan may rely on it, for example to skip keys that the mask hides. A
*fingerprint* detects that a tensor has changed: *visibly* (its version counter, shape or address), or hidden (its values).
"""

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

MAX_INTERVALS = 16  # of delta = column - row, in a pattern
MAX_BYTES_READ_PER_CALL = 1 << 20  # of ordinary numbers; larger tensors are compared by version and address
MAX_EXACT_INT = 1 << 24  # float32 represents all integers up to this one
INDEX_RANGE = constant_pieces(Range(0, MAX_EXACT_INT))  # of a table of expert indices or positions
ORDINARY_NUMBERS = constant_pieces(Range(-ACTIVATION, ACTIVATION, assumed=1))  # ordinary numbers, as in weights


def pattern_of(tensor: Tensor) -> Pieces | None:
    """Return the pattern of a tensor's values; None if nothing useful is known about them.

    A square mask [..., n, n] becomes a function of delta = column - row: a registered `tril` buffer is 1 for delta <= 0 and 0
    above, an additive mask is minus infinity above. Other tensors have one range for all elements: ordinary numbers (none is
    infinite, NaN, or so large that it may represent infinity), or possible row indices for an integer table.
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
    """Return the pattern of square matrices [k, n, n], as a function of delta = column - row; None if they have no pattern.

    Either all matrices are equal and constant along each diagonal, or all elements above (or below) the diagonal have one value;
    the other elements then have the range of all values.
    """
    if bool((values == values[:1]).all()) and bool((values[0, 1:, 1:] == values[0, :-1, :-1]).all()):
        return _toeplitz(values[0])
    above = _constant_above(values, 1)
    below = _constant_above(values.transpose(1, 2), 1)
    if above is None and below is None:
        return None
    low, high = values.aminmax()
    has_nan = low != low
    inside = Range(-INFINITY, INFINITY, True) if has_nan else Range(low.item(), high.item())
    return merge_equal_pieces((0, 1), (below or inside, inside, above or inside))


def _ordinary_numbers(tensor: Tensor) -> Pieces | None:
    """Return `ORDINARY_NUMBERS`, one range for all elements, if no element of a float tensor exceeds it, as in trained weights.

    If one does, return the full range of the dtype for a tensor that needs a gradient: the passes would otherwise assume ordinary
    numbers for a weight. Return None in all other cases.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize == 1:
        return None
    low, high = tensor.detach().aminmax()
    if low.item() >= -ACTIVATION and high.item() <= ACTIVATION:
        return ORDINARY_NUMBERS
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None


def _index_table(tensor: Tensor) -> Pieces | None:
    """Return the range of row indices if an integer table of two or more dimensions holds values from 0 to `MAX_EXACT_INT`.

    Return None for any other tensor.

    A scalar or a vector may count steps, which change at each call, so it has no pattern.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() < 2 or not tensor.numel():
        return None
    low, high = tensor.aminmax()
    return INDEX_RANGE if low.item() >= 0 and high.item() <= MAX_EXACT_INT else None


def _toeplitz(values: Tensor) -> Pieces | None:
    """Return the pattern of a square matrix that is constant along each diagonal (each delta = column - row).

    Neighboring diagonals with the same value form an interval; None if there are more than `MAX_INTERVALS` of them.
    """
    values_by_delta = torch.cat((values[1:, 0].flip(0), values[0])).tolist()  # delta = -(n - 1) .. n - 1
    min_delta = -(values.shape[0] - 1)
    bounds = [min_delta + i for i in range(1, len(values_by_delta)) if values_by_delta[i] != values_by_delta[i - 1]]
    if len(bounds) >= MAX_INTERVALS:
        return None
    return merge_equal_pieces(
        bounds, [constant(values_by_delta[0]), *(constant(values_by_delta[bound - min_delta]) for bound in bounds)]
    )


def _constant_above(values: Tensor, diagonal: int) -> Range | None:
    """Return the value that all elements with column - row >= `diagonal` have, as a range; None if they differ.

    `values`: matrices [k, n, n], which must all have this one value there.
    """
    n = values.shape[-1]
    above = torch.ones(n, n, dtype=torch.bool, device=values.device).triu_(diagonal)
    corner = values[0, 0, n - 1]
    return constant(corner.item()) if bool((values == corner).logical_or_(~above).all()) else None


@dataclass
class WatchedInput:
    """An input whose values were read when the graph was compiled: its index, its pattern and its fingerprint.

    `fingerprint` is None for trained weights, which are assumed to remain ordinary numbers. `address` is the tensor's memory.
    """

    index: int
    pattern: Pieces
    fingerprint: Fingerprint | None
    address: int = 0

    @staticmethod
    def of(index: int, tensor: Tensor, pattern: Pieces) -> WatchedInput:
        """Return the record of an input with this pattern, and with a fingerprint; trained weights get none (see the class)."""
        if tensor.requires_grad or not has_memory(tensor):
            return WatchedInput(index, pattern, None)
        return WatchedInput(index, pattern, Fingerprint.of(tensor, reads=_is_read_each_call(tensor, pattern)), tensor.data_ptr())

    def is_visibly_unchanged(self, tensor: Any) -> bool:
        """Return whether the input of this call is unchanged, as far as its version counter, shape and address show.

        True for inputs without a fingerprint. The address only counts for large tensors, whose values are not read.
        """
        if self.fingerprint is None:
            return True
        if not isinstance(tensor, Tensor) or self.fingerprint.visible_change(tensor) is not None:
            return False
        return self.fingerprint.sums is not None or tensor.data_ptr() == self.address

    def has_same_pattern(self, tensor: Any) -> bool:
        """Return whether the input of this call still has the pattern.

        If its values have changed but the pattern has not, the new values are remembered as its fingerprint.
        """
        if self.is_visibly_unchanged(tensor) and (self.fingerprint is None or self.fingerprint.hidden_change(tensor) is None):
            return True
        if not isinstance(tensor, Tensor) or pattern_of(tensor) != self.pattern:
            return False
        current = WatchedInput.of(self.index, tensor, self.pattern)
        self.fingerprint, self.address = current.fingerprint, current.address
        return True


def _is_read_each_call(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether the values of an input are read at each call, to detect hidden changes.

    This holds for masks and small tables. Of large frozen weights, only version counter and address are compared.
    """
    return bool(pattern.bounds) or bytes_like(tensor) <= MAX_BYTES_READ_PER_CALL


def _is_watchable(tensor: Tensor, pattern: Pieces) -> bool:
    """Return whether changes of an input are detected.

    An input that is read at each call must be small enough for that. Any other needs a version counter, which tensors that were
    created in inference mode do not have.
    """
    return bytes_like(tensor) <= MAX_BYTES if _is_read_each_call(tensor, pattern) else not tensor.is_inference()


def _pattern_of_input(tensor: Tensor, is_held_by_model: bool) -> Pieces | None:
    """Return the pattern of an input that the model holds (a buffer or parameter); None if it has none.

    An input that the caller passes may hold any values: the full range if it needs a gradient (a bias), because the passes would
    otherwise assume ordinary numbers; else None.
    """
    if is_held_by_model:
        return pattern_of(tensor)
    return constant_pieces(full_range(tensor.dtype)) if tensor.requires_grad else None


def watched_inputs(inputs: Sequence[Any], held_by_model: Sequence[bool]) -> list[WatchedInput]:
    """Return the inputs with a known pattern whose changes are detected.

    `held_by_model` says for each input whether the model holds it (a buffer or parameter), as opposed to the caller.
    """
    watched = []
    for index, (tensor, is_held) in enumerate(zip(inputs, held_by_model, strict=True)):
        pattern = _pattern_of_input(tensor, is_held) if isinstance(tensor, Tensor) else None
        if pattern is not None and _is_watchable(tensor, pattern):
            watched.append(WatchedInput.of(index, tensor, pattern))
    return watched


def patterns_of(watched: Sequence[WatchedInput], num_inputs: int, dynamo_index: Sequence[int | None]) -> dict[int, Pieces]:
    """Return the patterns of the watched inputs, by index among the inputs of AOTAutograd's traced graph.

    `dynamo_index` has, for each input of the traced graph, its index among the `num_inputs` inputs of Dynamo's graph; None for
    parts of a tensor subclass, such as a shard. Empty if AOTAutograd has merged inputs, so that indices do not correspond.
    """
    if num_inputs == len(dynamo_index):
        return {watched_input.index: watched_input.pattern for watched_input in watched}
    traced_index = {index: i for i, index in enumerate(dynamo_index) if index is not None}
    if None not in dynamo_index:  # AOTAutograd has merged inputs
        return {}
    return {
        traced_index[watched_input.index]: watched_input.pattern
        for watched_input in watched
        if watched_input.index in traced_index
    }


def have_same_patterns(watched: Sequence[WatchedInput], inputs: Sequence[Any]) -> bool:
    """Return whether all watched inputs of a call still have the patterns with which the graph was compiled.

    If no version counter has changed, the values of all of them are compared at once: each device synchronizes once.
    """
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
    """A compiled graph that relies on the values of some inputs (`watched`), checked at each call.

    Once they have changed, `fallback` runs in its place: the same graph, compiled without assumptions about its inputs.
    """

    compiled: Callable[..., Any]
    watched: Sequence[WatchedInput]
    fallback: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        return (self.compiled if have_same_patterns(self.watched, inputs) else self.fallback)(*inputs)
