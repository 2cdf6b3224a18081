"""The loop over chunks of the sequence: allocates its buffers and results, and runs generated code on them.

A `LoopSpec` describes the loop: its body, a graph that runs once per chunk; the feeds, one per input of the body; its buffers,
which all chunks share; and its results. A concatenated result holds the rows that each chunk computes; other results are
buffers. `loop_codegen.py` generates the code that feeds the body. Sizes depend on symbols, whose values at run time are an
`env`, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from streamfx.ir.program import Buffer, BufferOutput, ConcatOutput, LoopSpec
from streamfx.ir.sizes import Size
from streamfx.kernels.mask_programs import Inputs, MaskProgram, upcoming_inputs
from streamfx.runtime.chunks import Chunks
from streamfx.runtime.compiled import CompiledBody
from streamfx.runtime.loop_codegen import generate_inputs, generate_loop
from streamfx.runtime.probes import LoopOrigin, measurement
from streamfx.runtime.runtime_sizes import compiled_size

Env = dict[str, int]  # values of symbols
Run: TypeAlias = "Callable[..., None]"  # generated code: (run, bounds, step, chunks, env, tensors, buffers, results)
Masks: TypeAlias = "dict[MaskProgram, list[Callable[..., Iterable[Inputs]]]]"  # for each call, its inputs in all chunks


class Loop(nn.Module):
    """Runs a `LoopSpec`: called with the values of its symbols and its tensors, it returns a tuple of its results."""

    def __init__(self, spec: LoopSpec) -> None:
        """Wrap a loop specification; its code and its size functions are generated on first use."""
        super().__init__()
        self.spec = spec
        self.body = spec.body
        self.compiled: CompiledBody | None = None  # if set, it runs instead of the body
        self.origin: LoopOrigin | None = None  # if set, probes measure this loop
        self._sizes: dict[Size, Callable[[Env], int]] = {}  # compiled expressions
        # the specification for which code was generated; the code, by whether there is a single chunk; the masks
        self._generated: tuple[LoopSpec, dict[bool, Run], Masks] | None = None

    def chunks(self, length: int, env: Env) -> Sequence[tuple[int, int]]:
        """Return the bounds (start, stop) of the chunks of `length` rows, in execution order."""
        return Chunks(length, self.rows_per_chunk(length, env), self.spec.reverse)

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        """Run the loop: `arguments` are the values of its symbols, followed by the tensors.

        Return the concatenated results, then the buffers that are results. If a probe measures the loop, it runs it.
        """
        env: Env = {symbol.name: int(value) for symbol, value in zip(self.spec.symbols, arguments, strict=False)}
        length = self.size(self.spec.length, env)
        step = self.rows_per_chunk(length, env)
        probe, origin = measurement.probe, self.origin
        if probe is None or origin is None:
            return self._run(arguments, env, length, step)
        num_chunks = -(-length // step)
        return probe.run_loop(self.spec.name, origin, num_chunks, lambda: self._run(arguments, env, length, step))

    def _run(self, arguments: Sequence[Any], env: Env, length: int, step: int) -> tuple[Any, ...]:
        """Allocate buffers and results, run the generated code over the chunks, and return results, then buffers.

        `length`: the rows of the sequence; `step`: the rows of a chunk. If a mask program runs in the body, it can ask for the
        inputs of all chunks meanwhile (`upcoming_inputs`).
        """
        spec, tensors = self.spec, arguments[len(self.spec.symbols) :]
        env["chunks"] = num_chunks = max(1, -(-length // step))
        env["step"] = step
        buffers = [self._new_buffer(buffer, env, buffer.zeroed) for buffer in spec.buffers]
        bounds = self.chunks(length, env)
        run = self.runner(bounds)
        concat_outputs = [output for output in spec.yields if isinstance(output, ConcatOutput)]
        is_single = num_chunks == 1 and len(bounds) == 1
        make_result = partial(self._result_of_single_chunk, [*tensors, *buffers]) if is_single else self._result
        results: list[Any] = [make_result(output, tensors, env) for output in concat_outputs]
        if len(bounds):
            code, masks = self._code(is_single)
            loop_arguments = bounds, step, num_chunks, env, tensors, buffers, results
            with upcoming_inputs(lambda program: _upcoming_inputs(masks, program, loop_arguments)) if masks else nullcontext():
                code(run, *loop_arguments)
        buffer_outputs = [output for output in spec.yields if isinstance(output, BufferOutput)]
        buffer_results = [self._finish_buffer(output, buffers, env) for output in buffer_outputs]
        return (*results, *buffer_results)

    def _code(self, is_single: bool) -> tuple[Run, Masks]:
        """Return the generated code, for several chunks or for a single one, and the mask programs of the loop body.

        The code is generated on first use, and again if `spec` was replaced.
        """
        spec, generated = self.spec, self._generated
        if generated is None or generated[0] is not spec:
            generated = self._generated = spec, {}, _mask_inputs_of(spec)
        _, codes, masks = generated
        if is_single not in codes:
            codes[is_single] = generate_loop(spec, is_single)
        return codes[is_single], masks

    def runner(self, bounds: Sequence[tuple[int, int]]) -> Callable[..., Sequence[Any]]:
        """Return the callable that runs the loop body on the inputs of a chunk: the compiled body for `bounds`, or the graph."""
        if self.compiled is None:
            return self.body.forward  # type: ignore[no-any-return]
        assert isinstance(bounds, Chunks)
        return self.compiled.for_chunks(bounds.num_lengths)

    def rows_per_chunk(self, length: int, env: Env) -> int:
        """Return the chunk size in rows: fixed, or computed for `length` rows from a memory budget and the bytes per row."""
        chunk = self.spec.chunk_size
        if isinstance(chunk, int):
            return chunk
        return chunk.rows(length, self.size(chunk.row_bytes, env), self.size(chunk.stream_bytes, env))

    def size(self, size: Size, env: Env) -> int:
        """Return the value of a size, which may be an expression, for these values of its symbols."""
        if isinstance(size, int):
            return size
        function = self._sizes.get(size)
        if function is None:
            function = self._sizes[size] = compiled_size(size)
        return function(env)

    def _new_buffer(self, memory: Buffer | ConcatOutput, env: Env, zeroed: bool) -> Tensor:
        """Allocate a buffer or a concatenated result: zeros if `zeroed`, else uninitialized.

        A loop of one chunk may use another dtype for a sum, because there is nothing to add.
        """
        sizes = [self.size(size, env) for size in memory.shape]
        allocate = torch.zeros if zeroed else torch.empty
        dtype = memory.dtype
        if isinstance(memory, Buffer) and memory.single_chunk_dtype is not None and env["chunks"] == 1:
            dtype = memory.single_chunk_dtype
        return allocate(sizes, dtype=dtype, device=memory.device)  # type: ignore[union-attr]

    # -- results

    def _result(self, output: ConcatOutput, tensors: Sequence[Any], env: Env) -> Tensor:
        """Return the tensor into which chunks write a concatenated result: an input that it may overwrite, or new memory."""
        if output.reuse is not None:
            reused: Tensor = tensors[output.reuse]
            return reused
        return self._new_buffer(output, env, zeroed=False)

    def _result_of_single_chunk(
        self, used_tensors: list[Any], output: ConcatOutput, tensors: Sequence[Any], env: Env
    ) -> Callable[..., tuple[Tensor, bool]]:
        """Return a function of a single chunk's rows that returns (the result, whether the rows must be copied into it).

        The rows themselves are the result if they have its layout, and share no memory with `used_tensors`: the loop's
        inputs and buffers, and earlier results.
        """
        shape = [self.size(size, env) for size in output.shape]

        def adopt(rows: Tensor) -> tuple[Tensor, bool]:
            """Return (the rows as the result, False) if nothing shares their memory, else (new memory, True: copy into it)."""
            if not is_alone(rows, output, used_tensors):
                return self._result(output, tensors, env), True
            used_tensors.append(rows)
            return self._adopt(output, rows).view(shape), False

        return adopt

    def _adopt(self, output: ConcatOutput, rows: Tensor) -> Tensor:
        """Return `rows`, which become the result `output` without a copy; subclasses override this to observe them."""
        return rows

    def _finish_buffer(self, output: BufferOutput, buffers: Sequence[Tensor], env: Env) -> Tensor:
        """Return a buffer as a result: in the result's dtype, and divided by `output.count` if the result is a mean."""
        total, count = buffers[output.buffer], self.size(output.count, env)
        return (total / count if count != 1 else total).to(output.dtype)


def is_alone(rows: Tensor, output: ConcatOutput, others: Iterable[Any]) -> bool:
    """Return whether rows can be the result `output` without a copy.

    They must have its dtype and layout, and fill a storage that no tensor of `others` shares. The loop's body must have
    allocated them (`is_fresh`).
    """
    if not output.is_fresh or (rows.dtype, rows.device) != (output.dtype, output.device):
        return False
    storage = rows.untyped_storage()
    other_storages = (value.untyped_storage() for value in others if isinstance(value, Tensor))
    return (
        rows.is_contiguous()
        and storage.nbytes() == rows.nbytes
        and all(other._cdata != storage._cdata for other in other_storages)
    )


def _mask_inputs_of(spec: LoopSpec) -> Masks:
    """Return, for each mask program that a loop body calls, a function for each call that yields its inputs for all chunks.

    The functions take the arguments of the loop's generated code.
    """
    input_index = {node: i for i, node in enumerate(spec.body.graph.find_nodes(op="placeholder"))}
    inputs_of: Masks = {}
    for call in spec.body.graph.find_nodes(op="call_module"):
        program = spec.body.get_submodule(str(call.target))
        if isinstance(program, MaskProgram):
            inputs_of.setdefault(program, []).append(generate_inputs(spec, [input_index[source] for source in call.args]))
    return inputs_of


def _upcoming_inputs(masks: Masks, program: MaskProgram, loop_arguments: tuple[Any, ...]) -> Iterator[Inputs]:
    """Yield the inputs of all calls of a mask program in the loop, for all chunks.

    `loop_arguments` are those of the generated code, without the first one, `run`, which computes no inputs.
    """
    return chain.from_iterable(inputs(None, *loop_arguments) for inputs in masks.get(program, ()))
