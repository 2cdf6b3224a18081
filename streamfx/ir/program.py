"""The rewritten program: host programs that call loops, and the work of each loop per chunk.

A *host program* replaces the forward or the backward graph: loops, and the few operators between them. A loop runs its *body*,
a graph, once per *chunk*: rows [s, e) of the sequence. The body's inputs are *feeds*. Results are concatenated over chunks, or
are *buffers* that all chunks share: for example a sum, or a prefix buffer, the keys of all rows so far.
"""

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
CHUNK = sympy.Symbol("chunk", integer=True)  # index of the current chunk, counted from the first row
CHUNKS = sympy.Symbol("chunks", integer=True)  # number of chunks
STEP = sympy.Symbol("step", integer=True, positive=True)  # rows of each chunk but the last
PER_CHUNK = {symbol.name for symbol in (START, STOP, CHUNK, CHUNKS, STEP)}


@dataclass(frozen=True)
class RowRange:
    """The rows of an axis that is chunked: its row i, of `length` rows, is row i * `block` + `offset` of the sequence.

    If it represents a block of several rows, this is the block's first row, and chunks start at block boundaries.
    """

    offset: Size
    length: Size
    block: int = 1


@dataclass(frozen=True)
class Placement:
    """Where a tensor holds the sequence: dimension `dim` is a product of `outer` indices, the rows, and `inner` indices.

    For `(b t) d` with b=2: dim=0, outer=2, inner=1.
    """

    dim: int
    rows: RowRange
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True)
class ShiftedRows:
    """The rows of an operand that an operator reads for a chunk of another axis: `rows`, the axis of its result.

    For row i of that axis, it reads rows i + `by` to i + `by` + `reach` of the operand, as far as they exist: one row for a
    slice or a padding, several for a convolution.
    """

    rows: RowRange
    by: Size
    reach: int = 0


Selector: TypeAlias = "Span | ShiftedRows | None"  # None: the chunk's own rows


class RowSelection(NamedTuple):
    """The rows that a chunk reads along one dimension: where it holds the sequence, and which rows of it are read."""

    placement: Placement
    selector: Selector


@dataclass(frozen=True)
class Broadcast:
    """The body gets the full value, the same for every chunk."""


@dataclass(frozen=True)
class ChunkSlice:
    """The body gets a slice of a tensor along each dimension that holds the sequence: the chunk's rows, or rows around it."""

    selections: tuple[RowSelection, ...]


@dataclass(frozen=True)
class Number:
    """The body gets a number, computed from the chunk's bounds and the graph's symbols (dynamic sizes)."""

    value: Size


@dataclass(frozen=True)
class BufferPart:
    """The body gets rows of one of the loop's buffers (`buffer`: its index); without selections, the full buffer."""

    buffer: int
    selections: tuple[RowSelection, ...]


@dataclass(frozen=True)
class FirstRow:
    """The body gets the index of the chunk's first row, from which its random draws are seeded."""


@dataclass(frozen=True)
class IsFirst:
    """The body gets whether the chunk runs first: then it writes sums over chunks, and later chunks add to them."""


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
    """A loop's result that concatenates the chunks' outputs along the sequence, as `placement` says.

    `reuse`: the index of a tensor argument whose memory may hold the result, because each chunk reads its rows before it
    writes them; None if there is none. `is_fresh`: the loop body allocates a chunk's rows and nothing aliases them, so the
    rows of a single chunk may be the result.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    reuse: int | None = None
    is_fresh: bool = False


@dataclass(frozen=True)
class BufferOutput:
    """A loop's result that is a buffer (by index), cast to `dtype` after the last chunk; divided by `count` if it is a mean."""

    buffer: int
    dtype: torch.dtype
    count: Size = 1


Yield: TypeAlias = "ConcatOutput | BufferOutput"


@dataclass(frozen=True)
class LoopSpec:
    """One loop over chunks.

    `feeds` match the placeholders of the loop body; `sources` has the index of each feed's loop argument, or None. The
    arguments of a loop are the numbers for `symbols`, then tensors. `yields` are the loop's results: the concatenated
    outputs of the loop body, in order, then buffers; `labels` has a name for each. `length` is the number of rows of the
    sequence. If `reverse`, the chunks run from the last to the first.
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
    """The host programs that replace the forward and the backward graph; `backward` is None if no gradient is needed.

    `saved`: the forward values that the backward program gets. `loops`: the `Loop` objects that both call.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[fx.Node, ...]
    loops: tuple[Any, ...] = field(default=())
