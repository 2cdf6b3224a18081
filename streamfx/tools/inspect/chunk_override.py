"""Compilations for `verify`: each loop gets several chunks, so that the values passed between chunks are exercised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamfx.frontend.backend import Compilation
from streamfx.ir.facts import Facts
from streamfx.ir.stage_plan import AutoChunk
from streamfx.options import Options
from streamfx.tools.inspect.tracing import QuietCompilation

MIN_CHUNKS = 3  # per loop: the first, the last, and one between
NOT_CHUNKED = "nothing ran in chunks, so this check proves little: streamfx.explain shows the reasons"
ONE_CHUNK = "some loops had one chunk: a smaller chunk_size or loss_chunk_size also checks the values passed between chunks"


class ChunkedCompilation(QuietCompilation):
    """A compilation that limits automatic chunk sizes to a third of the sequence. Explicit sizes are kept."""

    @staticmethod
    def report_no_gain(facts: Facts, options: Options) -> None:
        """Reduce the automatic chunk size of each loop to a third of its length."""
        for loop in () if facts.program is None else facts.program.loops:
            size, length = loop.spec.chunk_size, loop.spec.length
            if isinstance(size, AutoChunk) and isinstance(length, int):
                max_size = -(-max(length, 1) // (MIN_CHUNKS * size.chunk_alignment)) * size.chunk_alignment
                loop.spec = replace(loop.spec, chunk_size=replace(size, max_rows=min(max_size, size.max_rows or max_size)))


def why_not_chunked(compilations: Sequence[Compilation]) -> str:
    """Return why a comparison does not exercise the values passed between chunks, or an empty string if it does."""
    programs = [facts.program for compilation in compilations for facts in compilation.facts]
    loops = [loop for program in programs if program is not None for loop in program.loops]
    lengths = [(loop, loop.spec.length) for loop in loops]
    has_one = any(isinstance(rows, int) and rows > 1 and loop.rows_per_chunk(rows, {}) >= rows for loop, rows in lengths)
    return NOT_CHUNKED if not loops else ONE_CHUNK if has_one else ""
