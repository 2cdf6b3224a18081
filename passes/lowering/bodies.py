"""Build the body of a loop: the graph that computes one chunk, rows [s, e) of the sequence.

Each operator of the loop is copied. Its operands are replaced by the rows it needs, and its shape arguments by the
chunk's sizes, axis by axis. Operators that depend on the position of the rows (`tril`, shifted slices, means over the
sequence, random draws, fused attention) have a dedicated lowering (`lowering_table.py`).

The body's placeholders are slices of values from the host program (which runs the loops), of the loop's buffers, or numbers. A
*prefix buffer* holds a value's rows of all chunks so far. A *per-key sum* (KEYSUM) has a sum over all queries that see a key, as
d(k) of attention: each chunk adds to the rows of the keys that it sees. An *accumulator* is the buffer of a sum over chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from streamfx.ir.access import Layout, OperandAccess
from streamfx.ir.facts import Role, StorageClass
from streamfx.ir.joint import device_of_value, int_argument, is_size, is_tensor, scalar_argument
from streamfx.ir.lazy_module import LazyGraphModule
from streamfx.ir.operator_table import SHAPE_ARGUMENT
from streamfx.ir.program import (
    CHUNKS,
    PER_CHUNK,
    Buffer,
    BufferOutput,
    BufferPart,
    ConcatOutput,
    IsFirst,
    LoopSpec,
    Placement,
    RowRange,
    RowSelection,
    Selector,
    Yield,
)
from streamfx.ir.sizes import Size, free_symbols, product
from streamfx.ir.span import Span
from streamfx.ir.stage_plan import ChunkSize, StagePlan
from streamfx.node_meta import HAS_KEYS, JOINT, VALUE
from streamfx.passes.lowering.accumulating_lowerings import ACCUMULATING_LOWERINGS, ADD_VALUE, mean_divisor
from streamfx.passes.lowering.async_waits import delay_waits
from streamfx.passes.lowering.body_inputs import BodyInputs
from streamfx.passes.lowering.lowering_table import find_lowering
from streamfx.passes.ops.traits import producer_of
from streamfx.passes.partition.loop_distribution import LoopContent
from streamfx.passes.partition.value_table import is_loop_value
from streamfx.runtime import buffers as buffer_ops
from streamfx.runtime.chunked_scans import carry_type
from streamfx.runtime.runtime_sizes import first_in_chunk, first_shifted, rows_in_chunk, rows_in_span, rows_shifted
from streamfx.torch_private.graph_nodes import add_call

aten = torch.ops.aten
PROVENANCE_KEYS = ("stack_trace", "nn_module_stack", "original")  # provenance copied to the body's nodes


class BodyBuilder(BodyInputs):
    """Builds the body of one loop.

    `layout`: the rows that each operator reads. `order`: the position of each node in the joint graph. `reverse`: the loop
    runs from the last chunk to the first. `outer` returns the host program's node for a value that exists between loops, of
    which the body receives slices; None for a value that this loop computes. `states` returns a scan's stored states, or None.
    """

    def __init__(
        self,
        layout: Layout,
        outer: Callable[[fx.Node], fx.Node | None],
        order: dict[fx.Node, int],
        reverse: bool,
        plan: StagePlan,
        states: Callable[[fx.Node], fx.Node | None] = lambda node: None,
    ) -> None:
        """Begin with an empty body. `lowered` maps joint-graph nodes (and other keys) to the body's nodes."""
        super().__init__()
        assert layout.axes.sequence is not None
        self.layout, self.outer, self.order, self.reverse, self.plan = layout, outer, order, reverse, plan
        self.length = layout.axes.sequence.length
        self.lowered: dict[Any, Any] = {}
        self.prefixes: dict[fx.Node, int] = {}  # indices of the buffers that hold all rows so far
        self.prefix_reads: dict[tuple[fx.Node, Selector], fx.Node] = {}
        self.key_sum_calls: dict[fx.Node, tuple[int, fx.Node]] = {}  # by sum over keys: index of its buffer, call that adds to it
        self.outer_states = states
        self.states: dict[fx.Node, int] = {}  # indices of buffers that hold the states of scans at the start of each chunk
        self.requested_span: Span | None = None  # the span of keys for which a mask is being computed

    def label_size(self, node: fx.Node, label: int) -> Size:
        """Return the chunk's size of an operator's axis with label `label`: its rows or keys, or the full size (symbolic)."""
        axes, role = self.layout.axes, self.layout.access.roles.get(node, {}).get(label)
        dim = axes.table.resolve(axes.labels[node][label])
        factor = axes.sequence_factor(dim) if role in (Role.ROWS, Role.KEYS) else None
        if factor is None:
            return axes.table.size_of_dim(dim)
        rows, span = self.layout.rows(dim), self.layout.span(node, self.requested_span)
        num_rows = rows_in_chunk(rows, self.length) if role is Role.ROWS else rows_in_span(rows, span, self.length)
        return product(num_rows if a == factor else axes.table.size(a) for a in dim)

    def result_shape(self, node: fx.Node, result: int = 0) -> list[Any]:
        """Return the shape of a result (by its index) for one chunk, as body arguments: integers, or placeholders for sizes."""
        shape = self.layout.axes.signatures[node].results[result]
        return [self.size_argument(product(self.label_size(node, label) for label in dim)) for dim in shape]

    def value(self, node: fx.Node) -> Any:
        """Return the body's node for the chunk's part of a value of this loop; emit its operator at the first request.

        A value that is recomputed per consumer is emitted once for each span of keys that is requested.
        """
        key = (node, self.requested_span) if self.layout.is_recomputed_per_consumer(node) and is_tensor(node) else node
        if key not in self.lowered:
            producer = producer_of(node)
            if producer is not node:
                lowered = add_call(self.graph, operator.getitem, (self.value(producer), node.args[1]))
            else:
                lowered = find_lowering(node)(self, node)
            self._copy_provenance(node, lowered)
            self.lowered[key] = lowered
        return self.lowered[key]

    def _copy_provenance(self, node: fx.Node, lowered: Any) -> None:
        """Copy the trace's provenance to a lowered node, and mark whether its operator reads key positions."""
        if isinstance(lowered, fx.Node):
            lowered.meta.update({key: node.meta[key] for key in PROVENANCE_KEYS if key in node.meta})
            lowered.meta[JOINT] = node.name
            lowered.meta[HAS_KEYS] = Role.KEYS in self.layout.access.roles.get(producer_of(node), {}).values()

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the body's nodes for an operator's tensor operands, in order: the rows or keys of each that it reads.

        An operator without a span reads the keys that its consumer requests (`requested_span`).
        """
        previous_span = self.requested_span
        self.requested_span = span = self.layout.span(node, previous_span)
        operands = [self.operand(access) for access in self.layout.operand_accesses(node, span)]
        self.requested_span = previous_span
        return operands

    def operand(self, access: OperandAccess) -> fx.Node:
        """Return the rows of an operand that an operator reads, as a body node.

        They come from the host program, from this chunk, from the finished rows of a per-key sum, or from a prefix buffer.
        """
        if access.operand not in self.lowered:
            source = self.outer(access.operand)
            if source is not None:
                return self.input_rows(access.operand, source, access.sequence_dims)
        storage_class = self.layout.access.storage_class(access.operand)
        if storage_class is StorageClass.KEYSUM:
            return self.read_key_sum(access)
        if access.is_own_rows:
            return self.value(access.operand)
        if storage_class is StorageClass.PAIR or access.selector is None or self._is_own_rows(access):
            return self._chunk_rows(access)
        return self.append_to_prefix(access)

    def _is_own_rows(self, access: OperandAccess) -> bool:
        """Return whether the rows that are read are the operand's rows of this chunk, or a slice of them."""
        placement = access.placement
        selected = self.layout.shown_rows(placement, access.selector)
        return selected is not None and (selected.rows == placement.rows or (placement.outer, placement.inner) == (1, 1))

    def _chunk_rows(self, access: OperandAccess) -> fx.Node:
        """Return the chunk's rows of a value of this loop, sliced if the reader's axis, such as x[:, 8:16], lacks some."""
        value, length = self.value(access.operand), self.length
        for placement, _, selector in access.sequence_dims:
            axis_rows, common = placement.rows, self.layout.shown_rows(placement, selector)
            if common is not None and common.rows != axis_rows:
                start = first_shifted(common, axis_rows.length, length) - first_in_chunk(axis_rows, length)
                stop = start + rows_shifted(common, axis_rows.length, length)
                bounds = self.size_argument(start), self.size_argument(stop)
                value = self.graph.call_function(aten.slice.Tensor, (value, placement.dim, *bounds))
        return value

    def append_to_prefix(self, access: OperandAccess) -> fx.Node:
        """Emit the call that appends the chunk's rows of a value to its prefix buffer, and returns the rows that are read.

        Return its node. Equal requests share one call; the buffer is allocated at the first.
        """
        operand, placement, selector = access.operand, access.placement, access.selector
        key = (operand, selector)
        if key not in self.prefix_reads:
            value = self.value(operand)
            if operand not in self.prefixes:
                self.prefixes[operand] = self._new_buffer(operand, operand.meta[VALUE].dtype)
            index = self.prefixes[operand]
            rows_so_far = self.buffer_rows(f"{operand.name}_seen", index, placement, selector)
            chunk_rows = self.buffer_rows(f"{operand.name}_own", index, placement, None)
            shape = self._selected_shape(operand, placement, selector)
            self.prefix_reads[key] = self.graph.call_function(buffer_ops.append, (rows_so_far, chunk_rows, value, shape))
        return self.prefix_reads[key]

    def read_key_sum(self, access: OperandAccess) -> fx.Node:
        """Emit the call that returns the chunk's rows of a per-key sum, complete in this loop's order; return its node."""
        operand, placement = access.operand, access.placement
        index, key_sum_call = self.emit_key_sum(operand)
        rows = self.buffer_rows(f"{operand.name}_own", index, placement, None)
        shape = self._selected_shape(operand, placement, None)
        key = (operand, "completed")
        if key not in self.lowered:
            arguments = rows, key_sum_call, shape, operand.meta[VALUE].dtype
            self.lowered[key] = self.graph.call_function(buffer_ops.complete, arguments)
        return self.lowered[key]

    def emit_key_sum(self, operand: fx.Node) -> tuple[int, fx.Node]:
        """Emit, once, the call that adds this chunk's part of a per-key sum to its buffer; return (index of the buffer, call)."""
        if operand not in self.key_sum_calls:
            contribution = self.value(operand)
            (placement,) = self.layout.placements(operand)
            span = self.layout.span(producer_of(operand))
            first_chunk_overwrites = self._first_chunk_sees_all_keys(placement, span)
            index = self._new_accumulator(operand, self.plan.sum_type(operand), zeroed=not first_chunk_overwrites)
            visible = self.buffer_rows(f"{operand.name}_seen", index, placement, span)
            arguments = visible, contribution, self.is_first_chunk() if first_chunk_overwrites else False
            self.key_sum_calls[operand] = index, self.graph.call_function(buffer_ops.add_rows, arguments)
        return self.key_sum_calls[operand]

    def _first_chunk_sees_all_keys(self, placement: Placement, span: Span) -> bool:
        """Return whether the queries of the chunk that runs first see all keys of an axis, so that it can write, not add.

        `placement`: where the keys lie in the value; `span`: the keys that a chunk sees (None: no limit).
        """
        reaches_end = span.high is None or (self.reverse and span.high >= 0)
        return span.low is None and reaches_end and placement.rows == RowRange(0, self.length)

    def is_first_chunk(self) -> fx.Node:
        """Return the placeholder of the flag that is true in the chunk that runs first."""
        return self.feed("is_first", IsFirst(), None)

    def emit_carry(
        self, node: fx.Node, shape: Sequence[Size], dtype: torch.dtype, keeps_states: bool
    ) -> tuple[fx.Node, fx.Node | None]:
        """Allocate the buffer of a scan's carry, which each chunk reads and overwrites, and one for its states.

        Return the placeholders of both buffers. The states are the carry at the start of each chunk; None unless `keeps_states`.
        """
        device = device_of_value(node)
        self.buffers.append(Buffer(f"{node.name}_carry", tuple(shape), dtype, device, zeroed=True))
        carry = self.feed(f"{node.name}_carry", BufferPart(len(self.buffers) - 1, ()), None)
        self.symbols |= free_symbols(shape)
        if not keeps_states:
            return carry, None
        self.buffers.append(Buffer(f"{node.name}_states", (CHUNKS, *shape), dtype, device, zeroed=False))
        self.states[node] = len(self.buffers) - 1
        return carry, self.feed(f"{node.name}_states", BufferPart(self.states[node], ()), None)

    def _new_buffer(self, value: fx.Node, dtype: torch.dtype) -> int:
        """Allocate a buffer of the full shape of a value (all rows), not zeroed; return its index in `buffers`."""
        shape = self.layout.full_shape(value)
        self.symbols |= free_symbols(shape)
        self.buffers.append(Buffer(value.name, shape, dtype, device_of_value(value), zeroed=False))
        return len(self.buffers) - 1

    def _new_accumulator(self, value: fx.Node, dtype: torch.dtype, zeroed: bool) -> int:
        """Allocate an accumulator of a value's full shape; return its buffer index. Not `zeroed` if a chunk overwrites it."""
        index = self._new_buffer(value, dtype)
        self.buffers[index] = replace(self.buffers[index], zeroed=zeroed, is_sum=True)
        return index

    def accumulation_dtype(self, node: fx.Node) -> torch.dtype:
        """Return the dtype that adds up a sum over chunks: as planned; a wide one for a mean, which may overflow if undivided."""
        is_mean = self.layout.axes.signatures[producer_of(node)].combine == "mean"
        return carry_type(node.meta[VALUE].dtype) if is_mean else self.plan.sum_type(node)

    def emit_accumulation(self, node: fx.Node) -> BufferOutput:
        """Emit the call that adds this chunk's part of a sum over chunks to an accumulator (it may also compute the part).

        Return the loop's output: after the last chunk, the accumulator, divided by the number of elements for a mean.
        """
        dtype = node.meta[VALUE].dtype
        divisor = mean_divisor(producer_of(node), self.layout)
        lowering = ACCUMULATING_LOWERINGS.get(node.target, ADD_VALUE)
        index = self._new_accumulator(node, self.accumulation_dtype(node), zeroed=not lowering.writes_all)
        if lowering.rounds_once and divisor == 1:
            self.buffers[index] = replace(self.buffers[index], single_chunk_dtype=dtype)
        total = self.feed(f"{node.name}_total", BufferPart(index, ()), None)
        add, arguments = lowering.emit(self, node)
        add_call(self.graph, add, (total, *arguments))
        self.symbols |= free_symbols([divisor])
        return BufferOutput(index, dtype, divisor)

    def _selected_shape(self, value: fx.Node, placement: Placement, selector: Selector) -> list[Any]:
        """Return the shape of a value if its sequence dimension (`placement`) has only the selected rows, as body arguments.

        `selector`: a span of keys, shifted rows, or None for the chunk's own rows.
        """
        shape: list[Any] = list(self.layout.full_shape(value))
        rows, length = placement.rows, self.length
        if selector is None:
            num_rows = rows_in_chunk(rows, length)
        elif isinstance(selector, Span):
            num_rows = rows_in_span(rows, selector, length)
        else:
            num_rows = rows_shifted(selector, rows.length, length)
        shape[placement.dim] = product((placement.outer, num_rows, placement.inner))
        return [self.size_argument(size) for size in shape]

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) for a copy of an operator in the body: operands and sizes are replaced by the chunk's.

        The shape argument of an operator such as `view` becomes the result's shape for the chunk.
        """
        operands = iter(self.operands(node))

        def body_argument(argument: fx.Node) -> Any:
            """Return the body's argument for a node among the operator's arguments."""
            return next(operands) if is_tensor(argument) else self.scalar_argument(argument)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), body_argument)
        shape_index = SHAPE_ARGUMENT.get(node.target)
        if shape_index is not None:
            args = (*args[:shape_index], self.result_shape(node), *args[shape_index + 1 :])
        return args, dict(kwargs)

    def scalar_argument(self, argument: Any) -> Any:
        """Return the body's argument for one that is not a tensor: a placeholder for a symbolic size, else the argument."""
        return self.size_argument(scalar_argument(argument)) if is_size(argument) else argument

    def finish(self, name: str, content: LoopContent, chunk_size: ChunkSize) -> tuple[LoopSpec, list[fx.Node], list[fx.Node]]:
        """Emit all values that the loop returns (`content`), and close the body.

        Return the description of the loop, the nodes of the host program that it reads, and the joint-graph values that it
        returns, in order. After these, the loop also returns the states of its scans (`self.states`).
        """
        buffer_outputs: dict[fx.Node, BufferOutput] = {}
        for node in sorted(content.stacked | content.summed | content.key_sums, key=self.order.__getitem__):
            if node in content.summed:
                self._compute_in_order(*(access.operand for access in self.layout.operand_accesses(producer_of(node))))
                buffer_outputs[node] = self.emit_accumulation(node)
            else:
                self._compute_in_order(node)
            if node in content.key_sums:
                buffer_outputs[node] = BufferOutput(self.emit_key_sum(node)[0], node.meta[VALUE].dtype)
        stacked = sorted(content.stacked, key=self.order.__getitem__)
        for node in [node for node in stacked if node in self.prefixes]:  # after the loop, the prefix buffer is the full value
            buffer_outputs[node] = BufferOutput(self.prefixes[node], node.meta[VALUE].dtype)
            stacked.remove(node)
        outputs = [self.value(node) for node in stacked]
        yields: list[Yield] = [*(self._concat_output(node) for node in stacked), *buffer_outputs.values()]
        yields += [BufferOutput(buffer, self.buffers[buffer].dtype) for buffer in self.states.values()]
        returned = [*stacked, *buffer_outputs]
        self.graph.output(tuple(outputs))
        delay_waits(self.graph)
        body = LazyGraphModule(torch.nn.Module(), self.graph)
        self.symbols |= free_symbols([self.length])
        if not isinstance(chunk_size, int):
            self.symbols |= free_symbols([chunk_size.row_bytes, chunk_size.stream_bytes])
        self.symbols -= {symbol for symbol in self.symbols if symbol.name in PER_CHUNK}
        sources, source_indices = self.distinct_sources()
        spec = LoopSpec(
            name=name,
            body=body,
            feeds=tuple(self.feeds),
            sources=source_indices,
            buffers=tuple(self.buffers),
            yields=tuple(yields),
            symbols=tuple(sorted(self.symbols, key=str)),
            length=self.length,
            reverse=self.reverse,
            chunk_size=chunk_size,
            labels=(*(node.name for node in returned), *(self.buffers[buffer].name for buffer in self.states.values())),
        )
        return spec, sources, returned

    def _compute_in_order(self, *roots: fx.Node) -> None:
        """Emit these values of the loop and their ancestors in graph order, so that `value` finds operands emitted.

        It does not recurse, because bodies may have thousands of operators. Values recomputed per consumer are omitted.
        """
        to_emit: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node in to_emit or node in self.lowered or self.outer(node) is not None:
                continue
            if is_loop_value(node, self.layout) and not self.layout.is_recomputed_per_consumer(node):
                to_emit.add(node)
                todo.extend([access.operand for access in self.layout.operand_accesses(producer_of(node))])
        for node in sorted(to_emit, key=self.order.__getitem__):
            self.value(node)

    def _concat_output(self, node: fx.Node) -> ConcatOutput:
        """Return the output that concatenates a value's rows of all chunks: its full shape, and where its rows lie."""
        placement = next(p for p in self.layout.placements(node) if self._is_rows(node, p))
        shape = self.layout.full_shape(node)
        self.symbols |= free_symbols(shape)
        self.require_symbols([RowSelection(placement, None)])
        return ConcatOutput(shape, node.meta[VALUE].dtype, device_of_value(node), placement)

    def _is_rows(self, node: fx.Node, placement: Placement) -> bool:
        """Return whether a sequence dimension (`placement.dim`) of a value runs over query positions, not key positions."""
        producer = producer_of(node)
        result = int_argument(node, 1) if producer is not node else 0
        roles = self.layout.access.roles[producer]
        dim = self.layout.axes.signatures[producer].results[result][placement.dim]
        return any(roles.get(label) is Role.ROWS for label in dim)
