"""The rewritten program: host programs that call loops, and the work of each loop per chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import fx

from streamfx.ir.sizes import Size
from streamfx.ir.span import Span
from streamfx.ir.stage_plan import ChunkSize

START, STOP = sympy.Symbol("start", integer=True), sympy.Symbol("stop", integer=True)  # bounds of the current chunk
CHUNK, CHUNKS = (
    sympy.Symbol("chunk", integer=True),
    sympy.Symbol("chunks", integer=True),
)  # index of the chunk, counted from the first row, and the number of chunks
STEP = sympy.Symbol("step", integer=True, positive=True)  # rows of each chunk but the last
PER_CHUNK = {symbol.name for symbol in (START, STOP, CHUNK, CHUNKS, STEP)}


@dataclass(frozen=True)
class RowRange:
    """The rows of an axis that is chunked: row i of `length` rows is at position i * `block` + `offset` of the sequence.

    If a row is a block of several rows, chunks start at block boundaries.
    """

    offset: Size
    length: Size
    block: int = 1


@dataclass(frozen=True)
class Placement:
    """Where a tensor holds the sequence: dimension `dim` is a product of `outer` indices, the rows, and `inner` indices."""

    dim: int
    rows: RowRange
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True)
class ShiftedRows:
    """The rows that match a chunk of another axis, `rows`: its row i is row i + `by` here, if that row exists.

    If `reach` is set, it is a window: row i matches rows i + `by` to i + `by` + `reach`.
    """

    rows: RowRange
    by: Size
    reach: int = 0


Selector: TypeAlias = "Span | ShiftedRows | None"  # None: the chunk's own rows


class RowSelection(NamedTuple):
    """The rows that a chunk reads along one dimension."""

    placement: Placement
    selector: Selector


@dataclass(frozen=True)
class Broadcast:
    """The full value, in every iteration."""


@dataclass(frozen=True)
class ChunkSlice:
    """Rows of a tensor, for each sequence dimension: the chunk's rows, or the rows of a span."""

    selections: tuple[RowSelection, ...]


@dataclass(frozen=True)
class Number:
    """A size computed from the chunk's bounds and the graph's symbols."""

    value: Size


@dataclass(frozen=True)
class BufferPart:
    """Rows of one of the loop's buffers; without selections, the full buffer."""

    buffer: int
    selections: tuple[RowSelection, ...]


@dataclass(frozen=True)
class FirstRow:
    """The chunk's first row, from which its random draws are seeded."""


@dataclass(frozen=True)
class IsFirst:
    """Whether the chunk runs first: it writes sums, and later chunks add to them."""


Feed: TypeAlias = "Broadcast | ChunkSlice | Number | BufferPart | FirstRow | IsFirst"


@dataclass(frozen=True)
class Buffer:
    """A buffer that all chunks of a loop share: rows that later queries read, a carry, or a sum (`is_sum`).

    It is `zeroed` if part of it may be read or added to before it is written. If there is one chunk, a sum has the dtype
    `single_chunk_dtype`, if that is set: a single addend of that dtype loses nothing.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: bool
    is_sum: bool = False
    single_chunk_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ConcatOutput:
    """A result that concatenates the chunks' outputs; `reuse` is the index of an argument that may hold it, row by row.

    `is_fresh` means that the loop body allocates a chunk's rows and nothing aliases them: if there is a single chunk,
    they may be the result.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    reuse: int | None = None
    is_fresh: bool = False


@dataclass(frozen=True)
class BufferOutput:
    """A buffer that is returned after the loop, in the dtype of its value; divided by `count` if it is a mean."""

    buffer: int
    dtype: torch.dtype
    count: Size = 1


Yield: TypeAlias = "ConcatOutput | BufferOutput"


@dataclass(frozen=True)
class LoopSpec:
    """One loop over chunks. `feeds` match the placeholders of the loop body, `sources` has the loop argument of each feed.

    The arguments of a loop are the numbers for `symbols`, then tensors. `yields` are the loop's results: the concatenated
    outputs of the loop body, in order, then buffers.
    """

    name: str
    body: fx.GraphModule
    feeds: tuple[Feed, ...]
    sources: tuple[int | None, ...]
    buffers: tuple[Buffer, ...]
    yields: tuple[Yield, ...]
    symbols: tuple[sympy.Symbol, ...]
    length: Size
    reverse: bool
    chunk_size: ChunkSize
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The host programs that replace the forward and the backward graph."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[fx.Node, ...]
    loops: tuple[Any, ...] = field(default=())
