"""The loop over chunks: feeds a body, keeps its buffers, stacks and sums its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.ir.program import Buffer, BufferPart, ChunkKey, Kept, LoopSpec, Number, Part, Placement, Same, Selector, Stacked
from streamfx.ir.sizes import Size
from streamfx.ir.span import Span
from streamfx.runtime.buffers import rows_of, rows_view
from streamfx.runtime.compiled import CompiledBody
from streamfx.runtime.sizes import compiled_size, member_bounds, shifted_bounds, span_bounds

Env = dict[str, int]


class Chunks(Sequence[tuple[int, int]]):
    """Bounds of the chunks of `step` rows, in the order in which they run: found by number, as there may be millions."""

    def __init__(self, length: int, step: int, reverse: bool = False) -> None:
        self._starts = range(0, length, step) or range(1)
        self._length, self._step, self._reverse = length, step, reverse

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        start = self._starts[-1 - number if self._reverse else number]
        return start, min(start + self._step, self._length)

    def touching(self, row: int) -> set[int]:
        """Numbers of the chunks that hold a row, or begin or end there."""
        near = {min(max(0, row // self._step + beside), len(self) - 1) for beside in (-1, 0)}
        numbers = {len(self) - 1 - place if self._reverse else place for place in near}
        return {number for number in numbers if self[number][0] <= row <= self[number][1]}


class Loop(nn.Module):
    """Runs a `LoopSpec`; called with the values of its symbols and its tensors, returns a tuple of its results."""

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__()
        self.spec = spec
        self.body = spec.body
        self.compiled: CompiledBody | None = None  # runs in place of the body
        self._sizes: dict[Size, Callable[[Env], int]] = {}

    def chunks(self, length: int, env: Env) -> Sequence[tuple[int, int]]:
        """Bounds of the chunks, in the order in which they run."""
        return Chunks(length, self.rows_per_chunk(length, env), self.spec.reverse)

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        """Values of the symbols, then tensors, to the stacked rows of each result, then the buffers that are results."""
        spec = self.spec
        env: Env = {symbol.name: int(value) for symbol, value in zip(spec.symbols, arguments, strict=False)}
        tensors = arguments[len(spec.symbols) :]
        length = self.size(spec.length, env)
        step = self.rows_per_chunk(length, env)
        env["chunks"] = max(1, -(-length // step))
        buffers = [self._new_buffer(buffer, env, buffer.zeroed) for buffer in spec.buffers]
        bounds = self.chunks(length, env)
        run = self.runner(bounds)
        stacked = [item for item in spec.yields if isinstance(item, Stacked)]
        results = [self._result(item, tensors, env) for item in stacked]
        for number, (start, stop) in enumerate(bounds):
            env.update(start=start, stop=stop, chunk=start // step)
            feeds = list(self._feeds(env, tensors, buffers, length, number))
            made: Any = run(*feeds)
            del feeds
            for item, result, rows in zip(stacked, results, made, strict=True):
                own = self._part(result, ((item.placement, None),), env, length, rows_view)
                own.copy_(rows.reshape(own.shape))
            made = rows = None
        kept = (self._finished(item, buffers, env) for item in spec.yields if isinstance(item, Kept))
        return (*results, *kept)

    def runner(self, bounds: Sequence[tuple[int, int]]) -> Callable[..., Sequence[Any]]:
        """What runs the body for these chunks."""
        if self.compiled is None:
            return self.body.forward  # type: ignore[no-any-return]
        return self.compiled.for_chunks(len({stop - start for start, stop in bounds}))

    def rows_per_chunk(self, length: int, env: Env) -> int:
        chunk = self.spec.chunk_size
        if isinstance(chunk, int):
            return chunk
        return chunk.rows(length, self.size(chunk.row_bytes, env), self.size(chunk.stream_bytes, env))

    def size(self, size: Size, env: Env) -> int:
        if isinstance(size, int):
            return size
        function = self._sizes.get(size)
        if function is None:
            function = self._sizes[size] = compiled_size(size)
        return function(env)

    def _new_buffer(self, item: Buffer | Stacked, env: Env, zeroed: bool) -> Tensor:
        sizes = [self.size(size, env) for size in item.shape]
        make = torch.zeros if zeroed else torch.empty
        return make(sizes, dtype=item.dtype, device=item.device)

    # -- before a chunk

    def _feeds(self, env: Env, tensors: Sequence[Any], buffers: Sequence[Tensor], length: int, number: int) -> Iterator[Any]:
        for feed, source in zip(self.spec.feeds, self.spec.sources, strict=True):
            match feed:
                case Same():
                    yield tensors[source]  # type: ignore[index]
                case Part():
                    yield self._part(tensors[source], feed.where, env, length, rows_of)  # type: ignore[index]
                case BufferPart():
                    yield self._part(buffers[feed.buffer], feed.where, env, length, rows_view)
                case Number():
                    yield self.size(feed.value, env)
                case ChunkKey():
                    yield env["start"]

    def _part(
        self,
        tensor: Tensor,
        where: Sequence[tuple[Placement, Selector]],
        env: Env,
        length: int,
        take: Callable[..., Tensor],
    ) -> Tensor:
        for placement, selector in where:
            start, count = self._bounds(placement, selector, env, length)
            outer, inner = self.size(placement.outer, env), self.size(placement.inner, env)
            rows = self.size(placement.rows.length, env)
            tensor = take(tensor, placement.dim, outer, inner, rows, start, count)
        return tensor

    def _bounds(self, placement: Placement, selector: Selector, env: Env, length: int) -> tuple[int, int]:
        """First row and number of rows, in the placement's own axis."""
        start, stop = env["start"], env["stop"]
        offset, rows = self.size(placement.rows.offset, env), self.size(placement.rows.length, env)
        if isinstance(selector, Span):
            return span_bounds(start, stop, length, selector.low, selector.high, offset, rows)
        if selector is None:
            return member_bounds(start, stop, length, offset, rows, placement.rows.block)
        other = self.size(selector.rows.offset, env), self.size(selector.rows.length, env)
        by = self.size(selector.by, env)
        return shifted_bounds(start, stop, length, *other, by, rows, selector.reach, selector.rows.block)

    # -- results

    def _result(self, item: Stacked, tensors: Sequence[Any], env: Env) -> Tensor:
        if item.reuse is not None:
            reused: Tensor = tensors[item.reuse]
            return reused
        return self._new_buffer(item, env, zeroed=False)

    def _finished(self, item: Kept, buffers: Sequence[Tensor], env: Env) -> Tensor:
        total, count = buffers[item.buffer], self.size(item.count, env)
        return (total / count if count != 1 else total).to(item.dtype)
