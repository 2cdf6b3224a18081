"""Masks that depend on data: looked at once per step, for all layers and for both halves.

# NOTE [What is remembered of a mask]
What a mask program is fed are views of values that no loop writes to. A step remembers them (`MaskCache`) by where they lie in
memory, by their shapes and by their versions, and keeps that memory, so that nothing else can come to lie there. Values that are
written in the graph, such as an `arange`, are made anew by each half; they are known by how they are made, and where in them the
view lies. So what is remembered is what the mask would come down to, were it made again. Each forward half begins with nothing,
and its backward half goes on with what that has found: other steps, in this thread or in others, have looks of their own.

# NOTE [One look for all chunks]
The host waits for the device when it reads numbers of a mask. So the first chunk of a loop that asks lets the masks of all chunks
be made, one after the other; a few numbers of each row are left of them, and those of all chunks are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn

from streamfx.kernels.mask_tiles import MaskTile, SeenIntervals, TileKind, numbers_of, pieces_in, pieces_of
from streamfx.torch_private import FakeTensor

Inputs = tuple[Any, ...]


class MaskCache:
    """What a step has found of its masks, by mask program and inputs, and the memory that the inputs lie in."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[SeenIntervals, list[Any]]] = {}
        self._pieces: dict[Hashable, tuple[MaskTile, ...]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._seen

    def keep(self, key: Hashable, seen: SeenIntervals, inputs: Sequence[Any]) -> None:
        """Of tensors the memory is kept, not the tensor, which may be a view of what these looks hang on."""
        self._seen[key] = seen, [item.untyped_storage() for item in inputs if isinstance(item, Tensor)]

    def pieces(self, key: Hashable, batch: int, rows: int, keys: int, packs: bool) -> tuple[MaskTile, ...] | None:
        """What rows see, of so many sequences, rows and keys; None where nobody has looked."""
        sizes = (batch, rows, keys, packs)
        found = self._pieces.get((key, sizes))
        if found is None and key in self._seen:
            found = self._pieces[key, sizes] = pieces_in(self._seen[key][0], *sizes)
        return found


_looks: ContextVar[MaskCache | None] = ContextVar("streamfx_looks", default=None)
_upcoming: ContextVar[Callable[[Any], Iterable[Inputs]] | None] = ContextVar("streamfx_upcoming", default=None)


@contextmanager
def coming(inputs: Callable[[Any], Iterable[Inputs]]) -> Iterator[None]:
    """While a loop runs: what each of its mask programs is given for all of its chunks."""
    token = _upcoming.set(inputs)
    try:
        yield
    finally:
        _upcoming.reset(token)


@contextmanager
def looking(looks: MaskCache) -> Iterator[MaskCache]:
    """The half of a step that runs inside of it remembers there what it finds."""
    token = _looks.set(looks)
    try:
        yield looks
    finally:
        _looks.reset(token)


class MaskProgram(nn.Module):
    """Makes the mask of a chunk; shared by all loops in which it is the same, and by all runs: it holds nothing of any.

    `literals` say of each input how it is made, if that is written in the graph.
    """

    def __init__(self, body: fx.GraphModule, literals: Sequence[Hashable | None]) -> None:
        super().__init__()
        self.body, self.literals = body, tuple(literals)

    def forward(self, *inputs: Any) -> Mask:
        return Mask(self, inputs, _looks.get() or MaskCache())

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskProgram:
        """Itself: AOTAutograd compiles a copy of the backward half, which is to find what the forward half has found."""
        return self

    def pieces(
        self, mask: Mask, batch: int, rows: int, keys: int, finite_hides: bool, packs: bool
    ) -> tuple[MaskTile, ...] | None:
        """What the chunk's rows see, where the mask is the same for all heads; else None."""
        key = self._identity(mask.inputs, finite_hides)
        known = None if key is None else mask.looks.pieces(key, batch, rows, keys, packs)
        if known is not None:
            return known
        dense = mask.dense()
        if isinstance(dense, FakeTensor) or dense.shape[1] != 1:
            return None
        if key is None:
            return pieces_of(dense.expand(-1, -1, rows, keys)[:, 0], batch, finite_hides, packs)
        self._look(mask, key, finite_hides)
        return mask.looks.pieces(key, batch, rows, keys, packs)

    def _look(self, mask: Mask, key: Hashable, finite_hides: bool) -> None:
        """Look at the masks of all chunks of the loop at once: see NOTE [One look for all chunks]."""
        upcoming = _upcoming.get() or (lambda _: ())
        found: dict[Hashable, tuple[Inputs, Tensor, int]] = {}
        for inputs in (mask.inputs, *upcoming(self)):
            own = self._identity(inputs, finite_hides)
            if own is not None and own not in found and own not in mask.looks:
                dense = mask.dense() if own == key else self.dense(inputs)
                if dense.shape[1] == 1 and dense.numel():
                    found[own] = inputs, numbers_of(dense[:, 0], finite_hides), dense.shape[3]
        if not found:
            return
        numbers = torch.cat([numbers.flatten() for _, numbers, _ in found.values()]).cpu()
        parts = numbers.split([numbers.numel() for _, numbers, _ in found.values()])
        for (own, (inputs, numbers, keys)), part in zip(found.items(), parts, strict=True):
            mask.looks.keep(own, SeenIntervals(part.view(numbers.shape), keys), inputs)

    def dense(self, inputs: Inputs) -> Tensor:
        """[b h m n], each of them all there are or 1."""
        (dense,) = self.body.forward(*inputs)
        made: Tensor = dense[(None,) * (4 - dense.dim())]
        return made

    def _identity(self, inputs: Inputs, finite_hides: bool) -> Hashable | None:
        """The same only for the same values, as long as these inputs are kept; None where versions are not counted."""
        if any(isinstance(item, Tensor) and (isinstance(item, FakeTensor) or item.is_inference()) for item in inputs):
            return None
        own = tuple([_identity(item, literal) for item, literal in zip(inputs, self.literals, strict=True)])
        return id(self), finite_hides, own


class Mask:
    """The mask of one chunk, made when it is needed; added to scores."""

    def __init__(self, program: MaskProgram, inputs: tuple[Any, ...], looks: MaskCache) -> None:
        self.program, self.inputs, self.looks = program, inputs, looks
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """[b h m n], each of b and h all there are or 1."""
        if self._dense is None:
            self._dense = self.program.dense(self.inputs)
        return self._dense

    def pieces(self, rows: int, keys: int, batch: int, finite_hides: bool, packs: bool = False) -> tuple[MaskTile, ...]:
        """What the chunk's rows see of its keys; `packs`: documents that lie one after the other are one piece."""
        found = self.program.pieces(self, batch, rows, keys, finite_hides, packs) if batch and rows > 0 and keys > 0 else None
        if found is None:
            return (MaskTile(TileKind.MIXED, (0, rows), (0, keys), (0, batch)),)
        if all(piece.kind is not TileKind.MIXED for piece in found):
            self._dense = None
        return found


def _identity(item: Any, literal: Hashable | None) -> Hashable:
    if not isinstance(item, Tensor):
        return item
    lies = (item.data_ptr(), item._version) if literal is None else (literal, item.storage_offset())
    return *lies, item.dtype, tuple(item.shape), item.stride(), item.device
