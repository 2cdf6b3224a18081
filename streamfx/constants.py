"""Inputs that hold a mask, or a few numbers: buffers whose values are read once, as a pattern of rows and keys, and watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from streamfx.fingerprint import MOST_BYTES, Fingerprint, has_memory
from streamfx.ir.pieces import NUMBERS, ORDINARY, UNKNOWN, Const, Fact, Pieces, joined

MOST_PIECES = 16
MOST_NUMBERS = 1024
LARGE = 1e4  # numbers below are no stand-ins for infinity


def pattern_of(tensor: Tensor) -> Pieces | None:
    """What a tensor [..., n, n] holds as a function of delta = column - row, where most of it is a constant.

    A registered `tril` buffer is 1 for delta <= 0 and 0 above; an additive mask is minus infinity above. A few plain numbers,
    such as a slope for each head, are said to be just that. Tensors made in inference mode do not count who writes to them.
    """
    if tensor.is_inference():
        return None
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.requires_grad or type(tensor) not in (Tensor, torch.nn.Buffer):
        return None
    if _are_few_numbers(tensor):
        return NUMBERS
    n = tensor.shape[-1] if tensor.dim() > 1 else 0
    if n < 2 or tensor.shape[-2] != n or tensor.is_complex():
        return None
    values = tensor.detach().reshape(-1, n, n)
    same_everywhere = bool((values == values[:1]).all())
    if same_everywhere and bool((values[0, 1:, 1:] == values[0, :-1, :-1]).all()):
        return _toeplitz(values[0])
    above = _constant_above(values, 1)
    below = _constant_above(values.transpose(1, 2), 1)
    if above is None and below is None:
        return NUMBERS if tensor.is_floating_point() and bool((values.abs() < LARGE).all()) else None
    inside: Fact = ORDINARY if bool(values.isfinite().all()) else UNKNOWN
    return joined((0, 1), (below or inside, UNKNOWN, above or inside))


def _are_few_numbers(tensor: Tensor) -> bool:
    """Whether nothing in a small tensor stands in for infinity. One that has two equal dimensions may be a mask."""
    wide = [size for size in tensor.shape if size > 1]
    if not tensor.is_floating_point() or tensor.numel() > MOST_NUMBERS or len(set(wide)) < len(wide):
        return False
    return bool((tensor.detach().abs() < LARGE).all())


def _toeplitz(values: Tensor) -> Pieces | None:
    along = torch.cat((values[1:, 0].flip(0), values[0])).tolist()  # delta = -(n - 1) .. n - 1
    first = -(values.shape[0] - 1)
    cuts = [first + i for i in range(1, len(along)) if along[i] != along[i - 1]]
    if len(cuts) >= MOST_PIECES:
        return None
    return joined(cuts, [Const(along[0]), *(Const(along[cut - first]) for cut in cuts)])


def _constant_above(values: Tensor, diagonal: int) -> Fact | None:
    n = values.shape[-1]
    above = torch.ones(n, n, dtype=torch.bool, device=values.device).triu_(diagonal)
    first = values[0, 0, n - 1]
    return Const(first.item()) if bool((values == first).logical_or_(~above).all()) else None


@dataclass
class WatchedInput:
    """One input whose values were read: where it stands, what it held, and what was found in it."""

    position: int
    seen: Fingerprint
    pattern: Pieces

    def still_holds(self, tensor: Any) -> bool:
        """Whether the input still has the pattern, which is looked for again only if it is not what it was."""
        if not isinstance(tensor, Tensor):
            return False
        if self.seen.change(tensor) is None:
            return True
        if pattern_of(tensor) != self.pattern:
            return False
        self.seen = Fingerprint.of(tensor)
        return True


def watched_inputs(inputs: Sequence[Any], held: Sequence[bool]) -> list[WatchedInput]:
    """The inputs that hold a mask, among those that belong to the model (`held`) rather than to its caller."""
    watched = []
    for position, (tensor, belongs) in enumerate(zip(inputs, held, strict=True)):
        readable = belongs and has_memory(tensor) and tensor.nbytes <= MOST_BYTES
        pattern = pattern_of(tensor) if readable else None
        if pattern is not None:
            watched.append(WatchedInput(position, Fingerprint.of(tensor), pattern))
    return watched
