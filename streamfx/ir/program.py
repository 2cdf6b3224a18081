"""The rewritten program: outer graphs whose nodes are loops, and what each loop does per chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from streamfx.ir.sizes import Size
from streamfx.ir.span import Span
from streamfx.ir.stage_plan import ChunkSize

START, STOP = sympy.Symbol("start", integer=True), sympy.Symbol("stop", integer=True)  # of the current chunk
CHUNK, CHUNKS = (
    sympy.Symbol("chunk", integer=True),
    sympy.Symbol("chunks", integer=True),
)  # its number, counted from the first row
STEP = sympy.Symbol("step", integer=True, positive=True)  # rows of a chunk, but for the last one
PER_CHUNK = {symbol.name for symbol in (START, STOP, CHUNK, CHUNKS, STEP)}


@dataclass(frozen=True)
class RowRange:
    """An axis cut into chunks: `length` rows, row i standing at position i * `block` + `offset` of the sequence.

    Where a row is a block of several rows, chunks begin where blocks do.
    """

    offset: Size
    length: Size
    block: int = 1


@dataclass(frozen=True)
class Placement:
    """Where a tensor holds the sequence: dimension `dim`, with `outer` elements around and `inner` inside each row."""

    dim: int
    rows: RowRange
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True)
class ShiftedRows:
    """The rows that a chunk of another axis, `rows`, stands for: its row i is row i + `by` here, where there is one.

    With a `reach` it is a window: row i stands for rows i + `by` to i + `by` + `reach`.
    """

    rows: RowRange
    by: Size
    reach: int = 0


Selector: TypeAlias = "Span | ShiftedRows | None"  # None: the chunk's own rows


@dataclass(frozen=True)
class Broadcast:
    """The value itself, every iteration."""


@dataclass(frozen=True)
class ChunkSlice:
    """The chunk's rows, or the rows of a span, along each placement."""

    where: tuple[tuple[Placement, Selector], ...]


@dataclass(frozen=True)
class Number:
    """A size, computed from the chunk's bounds and the graph's symbols."""

    value: Size


@dataclass(frozen=True)
class BufferPart:
    """Rows of one of the loop's own buffers."""

    buffer: int
    where: tuple[tuple[Placement, Selector], ...]


@dataclass(frozen=True)
class ChunkKey:
    """The number of the chunk, for random draws that must be repeated."""


@dataclass(frozen=True)
class IsFirst:
    """Whether the chunk is the first one that runs: it writes sums, to which the others add."""


Feed: TypeAlias = "Broadcast | ChunkSlice | Number | BufferPart | ChunkKey | IsFirst"


@dataclass(frozen=True)
class Buffer:
    """What a loop keeps from chunk to chunk: rows that later queries see, a carry, or a sum (`is_sum`).

    It is `zeroed` if some of it may be read or added to before it is written.

    A sum whose parts are products that are rounded as they are added is as good in the type `of_one` where there is one chunk.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: bool
    is_sum: bool = False
    of_one: torch.dtype | None = None


@dataclass(frozen=True)
class ConcatOutput:
    """A result whose chunks are put side by side; `reuse` is an argument that may be overwritten with it, row by row.

    `is_fresh` says that an operator of the body makes a chunk's rows in memory that nothing else shows: those of a single chunk
    may be the result themselves.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    reuse: int | None = None
    is_fresh: bool = False


@dataclass(frozen=True)
class BufferOutput:
    """A buffer that outlives the loop, in the type of the value it holds; divided by `count` where it is a mean."""

    buffer: int
    dtype: torch.dtype
    count: Size = 1


Yield: TypeAlias = "ConcatOutput | BufferOutput"


@dataclass(frozen=True)
class LoopSpec:
    """One loop over chunks. `feeds` follow the body's placeholders, `sources` say which argument of the loop each takes.

    Arguments of a loop are first the numbers for `symbols`, then tensors. `yields` are the loop's results: first those that
    are stacked from the body's outputs, in order, then buffers.
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
    """What runs instead of the two halves of a joint graph."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[fx.Node, ...]
    loops: tuple[Any, ...] = field(default=())
