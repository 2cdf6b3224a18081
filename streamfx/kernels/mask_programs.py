"""Data-dependent masks: evaluated once per step, for all layers and for both the forward and the backward graph.

# NOTE [Identity of mask inputs]
The inputs of a mask program are views of values that no loop writes to. A step caches results (`MaskCache`) by the
address, shape and version of the inputs, and keeps their memory alive, so that no other tensor can be allocated
there. Values that the graph creates itself, such as an `arange`, are recomputed by the forward and the backward
graph; these are identified by how they are computed and by the position of the view in them. So a cached result
equals the result of evaluating the mask again. Each forward graph begins with an empty cache, which its backward
graph continues to use; other steps, in this thread or in others, have their own caches.

# NOTE [One evaluation for all chunks]
The host waits for the device when it reads values of a mask. So the first chunk that asks evaluates the masks of all
chunks of its loop in turn. Each mask is reduced to a few numbers per row, and the numbers of all chunks are copied to
the host together.
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
    """The results of mask programs in one step, keyed by program and inputs, and the memory of these inputs."""

    def __init__(self) -> None:
        """Start without results; `_tiles` caches the tiles for each batch size and number of rows and keys."""
        self._intervals: dict[Hashable, tuple[SeenIntervals, list[Any]]] = {}
        self._tiles: dict[Hashable, tuple[MaskTile, ...]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._intervals

    def keep(self, key: Hashable, seen: SeenIntervals, inputs: Sequence[Any]) -> None:
        """Cache a result, and keep the storages of its inputs alive.

        The tensors themselves are not kept: one may be a view of a tensor to which this cache is attached.
        """
        self._intervals[key] = seen, [item.untyped_storage() for item in inputs if isinstance(item, Tensor)]

    def pieces(self, key: Hashable, batch: int, rows: int, keys: int, packs: bool) -> tuple[MaskTile, ...] | None:
        """Return the tiles for a batch size and numbers of rows and keys, or None if the mask has not been evaluated."""
        sizes = (batch, rows, keys, packs)
        tiles = self._tiles.get((key, sizes))
        if tiles is None and key in self._intervals:
            tiles = self._tiles[key, sizes] = pieces_in(self._intervals[key][0], *sizes)
        return tiles


_looks: ContextVar[MaskCache | None] = ContextVar("streamfx_looks", default=None)
_upcoming: ContextVar[Callable[[Any], Iterable[Inputs]] | None] = ContextVar("streamfx_upcoming", default=None)


@contextmanager
def upcoming_inputs(inputs: Callable[[Any], Iterable[Inputs]]) -> Iterator[None]:
    """While a loop runs, provide the inputs of each of its mask programs for all of its chunks."""
    token = _upcoming.set(inputs)
    try:
        yield
    finally:
        _upcoming.reset(token)


@contextmanager
def looking(cache: MaskCache) -> Iterator[MaskCache]:
    """Use `looks` as the cache while the forward or backward graph of a step runs inside this context."""
    token = _looks.set(cache)
    try:
        yield cache
    finally:
        _looks.reset(token)


class MaskProgram(nn.Module):
    """Computes the mask of a chunk. All loops with the same mask and all runs share it, so it holds no state of a run.

    `literals` identify, for each input that the graph itself creates, how it is computed.
    """

    def __init__(self, body: fx.GraphModule, literals: Sequence[Hashable | None]) -> None:
        super().__init__()
        self.body, self.literals = body, tuple(literals)

    def forward(self, *inputs: Any) -> Mask:
        return Mask(self, inputs, _looks.get() or MaskCache())

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskProgram:
        """Return itself: AOTAutograd compiles a copy of the backward graph, which must find the forward graph's results."""
        return self

    def pieces(
        self, mask: Mask, batch: int, rows: int, keys: int, finite_hides: bool, packs: bool
    ) -> tuple[MaskTile, ...] | None:
        """Return the tiles of the chunk's queries, or None if the mask differs between heads."""
        key = self._identity(mask.inputs, finite_hides)
        cached = None if key is None else mask.looks.pieces(key, batch, rows, keys, packs)
        if cached is not None:
            return cached
        dense = mask.dense()
        if isinstance(dense, FakeTensor) or dense.shape[1] != 1:
            return None
        if key is None:
            return pieces_of(dense.expand(-1, -1, rows, keys)[:, 0], batch, finite_hides, packs)
        self._evaluate_all(mask, key, finite_hides)
        return mask.looks.pieces(key, batch, rows, keys, packs)

    def _evaluate_all(self, mask: Mask, key: Hashable, finite_hides: bool) -> None:
        """Evaluate the masks of all chunks of the loop at once: see NOTE [One evaluation for all chunks]."""
        upcoming = _upcoming.get() or (lambda _: ())
        evaluated: dict[Hashable, tuple[Inputs, Tensor, int]] = {}
        for inputs in (mask.inputs, *upcoming(self)):
            identity = self._identity(inputs, finite_hides)
            if identity is not None and identity not in evaluated and identity not in mask.looks:
                dense = mask.dense() if identity == key else self.dense(inputs)
                if dense.shape[1] == 1 and dense.numel():
                    evaluated[identity] = inputs, numbers_of(dense[:, 0], finite_hides), dense.shape[3]
        if not evaluated:
            return
        row_numbers = torch.cat([row_numbers.flatten() for _, row_numbers, _ in evaluated.values()]).cpu()
        values_by_mask = row_numbers.split([row_numbers.numel() for _, row_numbers, _ in evaluated.values()])
        for (identity, (inputs, row_numbers, keys)), values in zip(evaluated.items(), values_by_mask, strict=True):
            mask.looks.keep(identity, SeenIntervals(values.view(row_numbers.shape), keys), inputs)

    def dense(self, inputs: Inputs) -> Tensor:
        """Return the mask [b h m n]; any of the sizes may be 1."""
        (dense,) = self.body.forward(*inputs)
        mask: Tensor = dense[(None,) * (4 - dense.dim())]
        return mask

    def _identity(self, inputs: Inputs, finite_hides: bool) -> Hashable | None:
        """Return a key that is equal only for equal inputs while these are kept, or None if versions are not counted."""
        if any(isinstance(item, Tensor) and (isinstance(item, FakeTensor) or item.is_inference()) for item in inputs):
            return None
        identities = tuple([_identity(item, literal) for item, literal in zip(inputs, self.literals, strict=True)])
        return id(self), finite_hides, identities


class Mask:
    """The mask of one chunk, which is added to scores and computed on first use."""

    def __init__(self, program: MaskProgram, inputs: tuple[Any, ...], looks: MaskCache) -> None:
        self.program, self.inputs, self.looks = program, inputs, looks
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the mask [b h m n]; b and h may be 1."""
        if self._dense is None:
            self._dense = self.program.dense(self.inputs)
        return self._dense

    def pieces(self, rows: int, keys: int, batch: int, finite_hides: bool, packs: bool = False) -> tuple[MaskTile, ...]:
        """Return the tiles of the chunk's queries and keys; with `packs`, consecutive documents form one tile."""
        tiles = self.program.pieces(self, batch, rows, keys, finite_hides, packs) if batch and rows > 0 and keys > 0 else None
        if tiles is None:
            return (MaskTile(TileKind.MIXED, (0, rows), (0, keys), (0, batch)),)
        if all(piece.kind is not TileKind.MIXED for piece in tiles):
            self._dense = None
        return tiles


def _identity(item: Any, literal: Hashable | None) -> Hashable:
    """Return what identifies an input: its memory and version, or the literal that it is computed from, and its layout."""
    if not isinstance(item, Tensor):
        return item
    memory = (item.data_ptr(), item._version) if literal is None else (literal, item.storage_offset())
    return *memory, item.dtype, tuple(item.shape), item.stride(), item.device
