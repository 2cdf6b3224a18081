"""The loop over chunks: makes its buffers and results; what feeds its body is written in `loop_code.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.ir.program import Buffer, Kept, LoopSpec, Stacked
from streamfx.ir.sizes import Size
from streamfx.runtime.compiled import CompiledBody
from streamfx.runtime.loop_code import written_loop
from streamfx.runtime.sizes import compiled_size

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
        self._written: tuple[LoopSpec | None, Callable[..., None]] = None, lambda *_: None

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
        env["chunks"] = chunks = max(1, -(-length // step))
        buffers = [self._new_buffer(buffer, env, buffer.zeroed) for buffer in spec.buffers]
        bounds = self.chunks(length, env)
        run = self.runner(bounds)
        results = [self._result(item, tensors, env) for item in spec.yields if isinstance(item, Stacked)]
        if len(bounds):
            self._code()(run, bounds, step, chunks, env, tensors, buffers, results)
        kept = (self._finished(item, buffers, env) for item in spec.yields if isinstance(item, Kept))
        return (*results, *kept)

    def _code(self) -> Callable[..., None]:
        """What runs for the chunks, written when it is first asked for."""
        spec, (known, code) = self.spec, self._written
        if known is not spec:
            code = written_loop(spec)
            self._written = spec, code
        return code

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

    # -- results

    def _result(self, item: Stacked, tensors: Sequence[Any], env: Env) -> Tensor:
        if item.reuse is not None:
            reused: Tensor = tensors[item.reuse]
            return reused
        return self._new_buffer(item, env, zeroed=False)

    def _finished(self, item: Kept, buffers: Sequence[Tensor], env: Env) -> Tensor:
        total, count = buffers[item.buffer], self.size(item.count, env)
        return (total / count if count != 1 else total).to(item.dtype)
