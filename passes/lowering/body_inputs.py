"""Create the placeholders of a loop body.

Placeholders are added while the body is built: slices of values from outside the loop, slices of the loop's buffers,
and numbers that depend on the chunk's bounds. Equal requests share one placeholder. A *feed* describes how the loop computes
the value of a placeholder for each chunk; its *source* is the node of the host program (which runs the loops) that it slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from streamfx.ir.access import SequenceAccess
from streamfx.ir.facts import Role
from streamfx.ir.program import (
    Broadcast,
    Buffer,
    BufferPart,
    ChunkSlice,
    Feed,
    Number,
    Placement,
    RowSelection,
    Selector,
    ShiftedRows,
)
from streamfx.ir.sizes import Size, free_symbols
from streamfx.ir.span import Span
from streamfx.torch_private.graph_nodes import add_placeholder


class BodyInputs:
    """The placeholders of one body.

    `feeds` describes the value of each placeholder, `sources` has the host node that the value comes from, if any.
    `symbols` are the dynamic-shape symbols whose values the loop needs at run time.
    """

    def __init__(self) -> None:
        """Begin with an empty graph. `placeholders` maps (feed, source) to the placeholder, `numbers` sizes to theirs."""
        self.graph = fx.Graph()
        self.last_placeholder: fx.Node | None = None
        self.placeholders: dict[Any, fx.Node] = {}
        self.numbers: dict[Size, fx.Node] = {}
        self.feeds: list[Feed] = []
        self.sources: list[fx.Node | None] = []
        self.buffers: list[Buffer] = []
        self.symbols: set[Any] = set()

    def feed(self, name: str, feed: Feed, source: fx.Node | None) -> fx.Node:
        """Return the placeholder for a feed of a source (None if it has none), added after the last one if it is new.

        `name` is a hint; the graph makes it unique.
        """
        key = (feed, source)
        if key not in self.placeholders:
            last, graph = self.last_placeholder, self.graph
            with graph.inserting_after(last) if last else graph.inserting_before(graph._root.next):
                placeholder = add_placeholder(graph, name)
            self.last_placeholder = self.placeholders[key] = placeholder
            self.feeds.append(feed)
            self.sources.append(source)
        return self.placeholders[key]

    def size_argument(self, size: Size) -> Any:
        """Return a size as an argument: a literal, or a placeholder whose value is computed for each chunk."""
        if isinstance(size, int):
            return size
        if size not in self.numbers:
            self.symbols |= free_symbols([size])
            self.numbers[size] = self.feed("n", Number(size), None)
        return self.numbers[size]

    def input_rows(self, value: fx.Node, source: fx.Node, dims: Sequence[SequenceAccess]) -> fx.Node:
        """Return the placeholder for the rows that an operator reads of a value that exists between loops.

        `source`: its node in the host program; `dims`: for each sequence dimension, which rows are read. Without chunked
        dimensions, the placeholder is the full value.
        """
        selections = tuple(RowSelection(dim.placement, dim.selector) for dim in dims if dim.role is not Role.WHOLE)
        self.require_symbols(selections)
        if not selections:
            return self.feed(value.name, Broadcast(), source)
        suffix = "_keys" if any(isinstance(selector, Span) for _, selector in selections) else "_rows"
        return self.feed(f"{value.name}{suffix}", ChunkSlice(selections), source)

    def buffer_rows(self, name: str, buffer: int, placement: Placement, selector: Selector) -> fx.Node:
        """Return the placeholder for the selected rows of one of the loop's buffers (by index).

        `placement`: the buffer's sequence dimension; `selector`: a span of keys, shifted rows, or None for the chunk's rows.
        """
        selection = RowSelection(placement, selector)
        self.require_symbols([selection])
        return self.feed(name, BufferPart(buffer, (selection,)), None)

    def require_symbols(self, selections: Sequence[RowSelection]) -> None:
        """Add the symbols that these row selections depend on to `self.symbols`."""
        for placement, selector in selections:
            sizes = [placement.outer, placement.inner, placement.rows.offset, placement.rows.length]
            if isinstance(selector, ShiftedRows):
                sizes += [selector.rows.offset, selector.rows.length, selector.by]
            self.symbols |= free_symbols(sizes)

    def distinct_sources(self) -> tuple[list[fx.Node], tuple[int | None, ...]]:
        """Return the distinct source nodes, and for each placeholder the index of its source among them, or None."""
        index: dict[fx.Node, int] = {}
        for source in self.sources:
            if source is not None:
                index.setdefault(source, len(index))
        return list(index), tuple(None if source is None else index[source] for source in self.sources)
