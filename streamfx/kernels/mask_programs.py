"""Data-dependent masks: evaluated once per step, for all layers and for both the forward and the backward graph.

A mask program computes the part [b h m n] of an attention mask that a chunk's queries see (batch, heads, queries, keys; any size
may be 1). Attention does not use this dense mask but its tiles (`mask_tiles.py`): ranges of queries and keys, most of which need
no mask. Inputs of a program are tensors and integers of a chunk, such as slices of token ids and positions.

# NOTE [Identity of mask inputs]
The inputs of a mask program are views of values that no loop writes to. A step caches results (`MaskCache`) by the
address, shape and version of the inputs, and keeps their memory alive, so that no other tensor can be allocated
there. Values that the graph creates itself, such as an `arange`, are recomputed by the forward and the backward
graph; these are identified by how they are computed and by the position of the view in them. So a cached result
equals the result of another evaluation. Each forward graph begins with an empty cache, which its backward graph
continues to use; other steps, in this thread or in others, have their own caches.

# NOTE [One evaluation for all chunks]
The host waits for the device when it reads values of a mask. So the first chunk evaluates the masks of all chunks of its
loop. Each mask is reduced to three integers per row, and the integers of all chunks are copied to the host together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn

from streamfx.kernels.mask_tiles import MaskTile, TileKind, VisibleIntervals, tiles_of_intervals, tiles_of_mask, visible_intervals
from streamfx.torch_private import FakeTensor

Inputs = tuple[Any, ...]


class MaskCache:
    """The results of mask programs in one step, keyed by program and inputs, and the memory of these inputs."""

    def __init__(self) -> None:
        """Start without results."""
        # keyed by program and inputs: the visible keys of each row, and the storages of the inputs
        self._intervals: dict[Hashable, tuple[VisibleIntervals, list[Any]]] = {}
        # keyed by that key, and by the sizes of the operands
        self._tiles: dict[Hashable, tuple[MaskTile, ...]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._intervals

    def keep(self, key: Hashable, intervals: VisibleIntervals, inputs: Sequence[Any]) -> None:
        """Cache a result, and keep the storages of its inputs alive.

        The tensors themselves are not kept: one may be a view of a tensor to which this cache is attached.
        """
        self._intervals[key] = intervals, [value.untyped_storage() for value in inputs if isinstance(value, Tensor)]

    def tiles(
        self, key: Hashable, batch_size: int, num_rows: int, num_keys: int, packs_documents: bool
    ) -> tuple[MaskTile, ...] | None:
        """Return the tiles for a batch size and numbers of queries and keys, or None if `key` has not been evaluated.

        With `packs_documents`, consecutive documents form one tile.
        """
        request = (batch_size, num_rows, num_keys, packs_documents)
        tiles = self._tiles.get((key, request))
        if tiles is None and key in self._intervals:
            intervals, _ = self._intervals[key]
            tiles = self._tiles[key, request] = tiles_of_intervals(intervals, *request)
        return tiles


_mask_cache: ContextVar[MaskCache | None] = ContextVar("streamfx_mask_caches", default=None)
_upcoming: ContextVar[Callable[[Any], Iterable[Inputs]] | None] = ContextVar("streamfx_upcoming", default=None)


@contextmanager
def upcoming_inputs(inputs: Callable[[Any], Iterable[Inputs]]) -> Iterator[None]:
    """Context manager for the run of a loop over chunks: `inputs(program)` yields a mask program's inputs for each chunk.

    So the first chunk can evaluate the masks of all of them.
    """
    token = _upcoming.set(inputs)
    try:
        yield
    finally:
        _upcoming.reset(token)


@contextmanager
def use_mask_cache(cache: MaskCache) -> Iterator[MaskCache]:
    """Context manager for the run of a forward or backward graph: inside it, mask programs use `cache`; yields the cache."""
    token = _mask_cache.set(cache)
    try:
        yield cache
    finally:
        _mask_cache.reset(token)


class MaskProgram(nn.Module):
    """Computes the mask of a chunk. All loops with the same mask and all runs share it, so it holds no state of a run.

    `body` computes the mask from the inputs. `literals` has an entry for each input: how it is computed, if the graph itself
    creates it (see NOTE [Identity of mask inputs]), else None.
    """

    def __init__(self, body: fx.GraphModule, literals: Sequence[Hashable | None]) -> None:
        super().__init__()
        self.body, self.literals = body, tuple(literals)

    def forward(self, *inputs: Any) -> Mask:
        return Mask(self, inputs, _mask_cache.get() or MaskCache())

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskProgram:
        """Return itself: AOTAutograd compiles a copy of the backward graph, which must find the forward graph's results."""
        return self

    def tiles(
        self, mask: Mask, batch_size: int, num_rows: int, num_keys: int, finite_hides: bool, packs_documents: bool
    ) -> tuple[MaskTile, ...] | None:
        """Return the tiles of the chunk's queries and keys; None if the mask is fake, or differs between heads.

        They come from the cache if possible. Otherwise the masks of all chunks of the loop are evaluated. `finite_hides`:
        large negative values hide a key as minus infinity does. `packs_documents`: consecutive documents form one tile.
        """
        key = self._identity(mask.inputs, finite_hides)
        cached = None if key is None else mask.cache.tiles(key, batch_size, num_rows, num_keys, packs_documents)
        if cached is not None:
            return cached
        dense = mask.dense()
        if isinstance(dense, FakeTensor) or dense.shape[1] != 1:
            return None
        if key is None:
            mask_of_all_heads = dense.expand(-1, -1, num_rows, num_keys)[:, 0]
            return tiles_of_mask(mask_of_all_heads, batch_size, finite_hides, packs_documents)
        self._evaluate_all(mask, key, finite_hides)
        return mask.cache.tiles(key, batch_size, num_rows, num_keys, packs_documents)

    def _evaluate_all(self, mask: Mask, key: Hashable, finite_hides: bool) -> None:
        """Evaluate the masks of all chunks of the loop, and cache the results: see NOTE [One evaluation for all chunks].

        `key` is the cache key of `mask`, the mask of the current chunk.
        """
        upcoming = _upcoming.get() or (lambda _: ())
        evaluated: dict[Hashable, tuple[Inputs, Tensor, int]] = {}  # (inputs, visible intervals, number of keys) of each mask
        for inputs in (mask.inputs, *upcoming(self)):
            identity = self._identity(inputs, finite_hides)
            if identity is not None and identity not in evaluated and identity not in mask.cache:
                dense = mask.dense() if identity == key else self.dense(inputs)
                if dense.shape[1] == 1 and dense.numel():
                    evaluated[identity] = inputs, visible_intervals(dense[:, 0], finite_hides), dense.shape[3]
        if not evaluated:
            return
        on_host = torch.cat([intervals.flatten() for _, intervals, _ in evaluated.values()]).cpu()
        values_by_mask = on_host.split([intervals.numel() for _, intervals, _ in evaluated.values()])
        for (identity, (inputs, intervals, num_keys)), values in zip(evaluated.items(), values_by_mask, strict=True):
            mask.cache.keep(identity, VisibleIntervals(values.view(intervals.shape), num_keys), inputs)

    def dense(self, inputs: Inputs) -> Tensor:
        """Return the mask [b h m n]; any of the sizes may be 1."""
        (dense,) = self.body.forward(*inputs)
        mask: Tensor = dense[(None,) * (4 - dense.dim())]
        return mask

    def _identity(self, inputs: Inputs, finite_hides: bool) -> Hashable | None:
        """Return a cache key that is equal only for equal inputs, while their memory is kept alive.

        None if an input is fake or has no version counter: then nothing is cached. See NOTE [Identity of mask inputs].
        """
        if any(isinstance(value, Tensor) and (isinstance(value, FakeTensor) or value.is_inference()) for value in inputs):
            return None
        identities = tuple([_identity(value, literal) for value, literal in zip(inputs, self.literals, strict=True)])
        return id(self), finite_hides, identities


class Mask:
    """The mask of one chunk, which is added to scores and computed on first use."""

    def __init__(self, program: MaskProgram, inputs: tuple[Any, ...], cache: MaskCache) -> None:
        self.program, self.inputs, self.cache = program, inputs, cache
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the mask [b h m n]; b and h may be 1."""
        if self._dense is None:
            self._dense = self.program.dense(self.inputs)
        return self._dense

    def tiles(
        self, num_rows: int, num_keys: int, batch_size: int, finite_hides: bool, packs_documents: bool = False
    ) -> tuple[MaskTile, ...]:
        """Return the tiles of the chunk's queries (rows) and keys.

        If the mask is not decomposed (see `MaskProgram.tiles`), a single tile has the dense mask.
        `finite_hides`: large negative values hide a key as minus infinity does. `packs_documents`: consecutive documents form
        one tile. If no tile needs the dense mask, it is freed.
        """
        tiles = None
        if batch_size and num_rows > 0 and num_keys > 0:
            tiles = self.program.tiles(self, batch_size, num_rows, num_keys, finite_hides, packs_documents)
        if tiles is None:
            return (MaskTile(TileKind.MIXED, (0, num_rows), (0, num_keys), (0, batch_size)),)
        if all(tile.kind is not TileKind.MIXED for tile in tiles):
            self._dense = None
        return tiles


def _identity(value: Any, literal: Hashable | None) -> Hashable:
    """Return the identity of an input: a tensor's layout, and its memory and version, or the literal from which it is computed.

    An input that is not a tensor is its own identity. See NOTE [Identity of mask inputs].
    """
    if not isinstance(value, Tensor):
        return value
    memory = (value.data_ptr(), value._version) if literal is None else (literal, value.storage_offset())
    return *memory, value.dtype, tuple(value.shape), value.stride(), value.device
