"""Build the body of a loop, which computes one chunk.

Each operator of the loop is copied. Its operands are replaced by the rows it needs, and its shape arguments by the
chunk's sizes, axis by axis. Operators that depend on the position of the rows (`tril`, shifted slices, means over the
sequence, random draws, fused attention) have a dedicated lowering in `LOWERINGS`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.access import Layout, OperandAccess
from streamfx.ir.facts import Role, StorageClass
from streamfx.ir.joint import device_of_value, int_argument, is_size, is_tensor, scalar_argument
from streamfx.ir.lazy_module import LazyGraphModule
from streamfx.ir.program import (
    CHUNKS,
    PER_CHUNK,
    Buffer,
    BufferOutput,
    BufferPart,
    ConcatOutput,
    FirstRow,
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
from streamfx.kernels import accumulate
from streamfx.node_meta import DRAW, HAS_KEYS, JOINT, VALUE
from streamfx.passes.lowering.accumulating_lowerings import ACCUMULATING_LOWERINGS, PARTIAL_WRITERS, ROUNDED_ONCE, mean_divisor
from streamfx.passes.lowering.async_waits import delay_waits
from streamfx.passes.lowering.body_inputs import SHAPE_ARGUMENT, BodyInputs
from streamfx.passes.ops.traits import is_random, producer_of
from streamfx.passes.partition.loop_distribution import LoopContent
from streamfx.passes.partition.value_table import is_loop_value
from streamfx.runtime import buffers as buffer_ops
from streamfx.runtime.chunked_scans import carry_type
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.rng import replay
from streamfx.runtime.runtime_sizes import first_in_chunk, first_shifted, rows_in_chunk, rows_in_span, rows_shifted

aten = torch.ops.aten
Lowering: TypeAlias = "Callable[[BodyBuilder, fx.Node], fx.Node]"
LOWERINGS: dict[Any, Lowering] = {}

PROVENANCE_KEYS = ("stack_trace", "nn_module_stack", "original")  # provenance copied to the body's nodes


def register_lowering(*operators: Any) -> Callable[[Lowering], Lowering]:
    """Register the lowering of operators."""

    def register(function: Lowering) -> Lowering:
        for target in operators:
            LOWERINGS[target] = function
        return function

    return register


class BodyBuilder(BodyInputs):
    """Builds the body of one loop.

    `outer` maps values that exist between loops to nodes of the host program; the body receives slices of them.
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

    def letter_size(self, node: fx.Node, letter: int) -> Size:
        """Return the size of the axis with a label in the chunk's copy of an operator."""
        axes, role = self.layout.axes, self.layout.access.roles.get(node, {}).get(letter)
        dim = axes.table.resolve(axes.letters[node][letter])
        atom = axes.sequence_atom(dim) if role in (Role.ROWS, Role.KEYS) else None
        if atom is None:
            return axes.table.size_of_dim(dim)
        rows, span = self.layout.rows(dim), self.layout.span(node, self.requested_span)
        num_rows = rows_in_chunk(rows, self.length) if role is Role.ROWS else rows_in_span(rows, span, self.length)
        return product(num_rows if a == atom else axes.table.size(a) for a in dim)

    def result_shape(self, node: fx.Node, result: int = 0) -> list[Any]:
        """Return the shape of a result for one chunk, as body arguments."""
        shape = self.layout.axes.signatures[node].results[result]
        return [self.size_argument(product(self.letter_size(node, letter) for letter in dim)) for dim in shape]

    def value(self, node: fx.Node) -> Any:
        """Return the body's node for a value of this loop; emit the value's operator at the first request."""
        key = (node, self.requested_span) if is_tensor(node) and self.layout.is_recomputed_per_consumer(node) else node
        if key not in self.lowered:
            producer = producer_of(node)
            if producer is not node:
                lowered = self.graph.call_function(operator.getitem, (self.value(producer), node.args[1]))
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
        """Return the body's nodes for an operator's operands, restricted to the requested span of keys."""
        previous_span = self.requested_span
        self.requested_span = span = self.layout.span(node, previous_span)
        operands = [self.operand(access) for access in self.layout.operand_accesses(node, span)]
        self.requested_span = previous_span
        return operands

    def operand(self, access: OperandAccess) -> fx.Node:
        """Return the accessed rows of an operand: from outside, from this loop, or from one of its buffers."""
        source = self.outer(access.operand)
        if source is not None:
            return self.input_rows(access.operand, source, access.sequence_dims)
        storage_class = self.layout.access.storage_class(access.operand)
        if storage_class is StorageClass.KEYSUM:
            return self.read_key_sum(access)
        if storage_class is StorageClass.PAIR or access.selector is None or self._is_own_rows(access):
            return self._chunk_rows(access)
        return self.append_to_prefix(access)

    def _is_own_rows(self, access: OperandAccess) -> bool:
        """Return whether the accessed rows are the operand's rows of this chunk, or can be sliced from them."""
        placement = access.placement
        selected = self.layout.shown_rows(placement, access.selector)
        return selected is not None and (selected.rows == placement.rows or (placement.outer, placement.inner) == (1, 1))

    def _chunk_rows(self, access: OperandAccess) -> fx.Node:
        """Return the chunk's rows of a value that this loop computes: the rows that the reader's axis has as well."""
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
        """Append the chunk's rows of a value to its prefix buffer, and return the accessed rows of the buffer."""
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
        """Return the chunk's rows of a per-key sum, after all chunks whose queries see them have added to it."""
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
        """Emit, at the first request, the call that adds this chunk's part of a per-key sum to a buffer: (buffer index, call)."""
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
        """Return whether the queries of the chunk that runs first see all keys of an axis."""
        reaches_end = span.high is None or (self.reverse and span.high >= 0)
        return span.low is None and reaches_end and placement.rows == RowRange(0, self.length)

    def is_first_chunk(self) -> fx.Node:
        """Return the flag that is true in the first chunk that runs."""
        return self.feed("is_first", IsFirst(), None)

    def emit_carry(
        self, node: fx.Node, shape: Sequence[Size], dtype: torch.dtype, keeps_states: bool
    ) -> tuple[fx.Node, fx.Node | None]:
        """Return an operator's carry and, if `keeps_states`, the buffer of the carry's values at the start of each chunk."""
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
        """Allocate a buffer of the full shape of a value; return its index."""
        shape = self.layout.full_shape(value)
        self.symbols |= free_symbols(shape)
        self.buffers.append(Buffer(value.name, shape, dtype, device_of_value(value), zeroed=False))
        return len(self.buffers) - 1

    def _new_accumulator(self, value: fx.Node, dtype: torch.dtype, zeroed: bool) -> int:
        """Allocate an accumulator for a value; return its index. It is `zeroed` unless the first chunk overwrites it."""
        index = self._new_buffer(value, dtype)
        self.buffers[index] = replace(self.buffers[index], zeroed=zeroed, is_sum=True)
        return index

    def accumulation_dtype(self, node: fx.Node) -> torch.dtype:
        """Return the accumulation dtype of a sum: a wide one for a mean, whose sum may overflow before the division."""
        is_mean = self.layout.axes.signatures[producer_of(node)].combine == "mean"
        return carry_type(node.meta[VALUE].dtype) if is_mean else self.plan.sum_type(node)

    def emit_accumulation(self, node: fx.Node) -> BufferOutput:
        """Emit the addition of this chunk's part of a sum to an accumulator; return the output. One call may compute and add."""
        dtype = node.meta[VALUE].dtype
        divisor = mean_divisor(producer_of(node), self.layout)
        index = self._new_accumulator(node, self.accumulation_dtype(node), zeroed=node.target in PARTIAL_WRITERS)
        if node.target in ROUNDED_ONCE and divisor == 1:
            self.buffers[index] = replace(self.buffers[index], single_chunk_dtype=dtype)
        total = self.feed(f"{node.name}_total", BufferPart(index, ()), None)
        lowering = ACCUMULATING_LOWERINGS.get(node.target)
        add, arguments = lowering(self, node) if lowering else (accumulate.add_part, (self.value(node), self.is_first_chunk()))
        self.graph.call_function(add, (total, *arguments))
        self.symbols |= free_symbols([divisor])
        return BufferOutput(index, dtype, divisor)

    def _selected_shape(self, value: fx.Node, placement: Placement, selector: Selector) -> list[Any]:
        """Return the shape of a value with one sequence dimension, restricted to the selected rows, as body arguments."""
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
        """Return the arguments for a copy of an operator in the body: operands and sizes are replaced by the chunk's."""
        operands = iter(self.operands(node))

        def body_argument(argument: fx.Node) -> Any:
            return next(operands) if is_tensor(argument) else self.scalar_argument(argument)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), body_argument)
        shape_index = SHAPE_ARGUMENT.get(node.target)
        if shape_index is not None:
            args = (*args[:shape_index], self.result_shape(node), *args[shape_index + 1 :])
        return args, dict(kwargs)

    def scalar_argument(self, argument: Any) -> Any:
        """Return an argument that is not a tensor; a symbolic size becomes a placeholder of the body."""
        return self.size_argument(scalar_argument(argument)) if is_size(argument) else argument

    def finish(self, name: str, content: LoopContent, chunk_size: ChunkSize) -> tuple[LoopSpec, list[fx.Node], list[fx.Node]]:
        """Emit the loop's outputs and close the body.

        Returns the loop, the host nodes that it reads, and the values that it returns before the states of its scans.
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
        """Emit `roots` and their ancestors in program order. Not recursive: bodies may have thousands of operators."""
        to_emit: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node in to_emit or node in self.lowered or self.outer(node) is not None:
                continue
            to_emit.add(node)
            if is_loop_value(node, self.layout) and not self.layout.is_recomputed_per_consumer(node):
                todo.extend(access.operand for access in self.layout.operand_accesses(producer_of(node)))
        for node in sorted(to_emit, key=self.order.__getitem__):
            if is_loop_value(node, self.layout) and not self.layout.is_recomputed_per_consumer(node):
                self.value(node)

    def _concat_output(self, node: fx.Node) -> ConcatOutput:
        """Return the output into which the loop writes the rows of each chunk."""
        placement = next(p for p in self.layout.placements(node) if self._is_rows(node, p))
        shape = self.layout.full_shape(node)
        self.symbols |= free_symbols(shape)
        self.require_symbols([RowSelection(placement, None)])
        return ConcatOutput(shape, node.meta[VALUE].dtype, device_of_value(node), placement)

    def _is_rows(self, node: fx.Node, placement: Placement) -> bool:
        """Return whether a sequence dimension of a value runs over query positions, not key positions."""
        producer = producer_of(node)
        result = int_argument(node, 1) if producer is not node else 0
        roles = self.layout.access.roles[producer]
        dim = self.layout.axes.signatures[producer].results[result][placement.dim]
        return any(roles.get(letter) is Role.ROWS for letter in dim)


def find_lowering(node: fx.Node) -> Lowering:
    """Return the lowering of an operator: the registered one, else a seeded draw for a random operator, else a copy."""
    lowering = LOWERINGS.get(node.target) or LOWERINGS.get(type(node.target))
    return lowering or (emit_seeded_draw if is_random(node) else emit_copy)


def emit_copy(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Copy the operator for the chunk's rows."""
    args, kwargs = builder.arguments(node)
    target = COPYING_VIEWS.get(node.target, node.target)
    return builder.graph.call_function(target, args, kwargs)


def emit_seeded_draw(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Emit a random operator whose generator is seeded from the step's seed, the operator's index and the chunk's first row.

    So recomputing the chunk draws the same numbers.
    """
    seed, draw_index = node.meta[DRAW]
    source = builder.outer(seed)
    assert source is not None
    args, kwargs = builder.arguments(node)
    first_row = builder.feed("first_row", FirstRow(), None)
    draw = (str(node.target), builder.input_rows(seed, source, ()), draw_index, first_row)
    return builder.graph.call_function(replay, (*draw, *args), kwargs)
