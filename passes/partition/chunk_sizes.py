"""Compute the number of query positions in a chunk of each stage.

A chunk has a fixed cost: it reads and writes accumulators, reads the keys and values before it, and launches kernels.
Larger chunks save time until this cost is a small share of the time of the chunk's products. But the intermediate values
of a chunk take memory: as much as one value at a cut, or, if that saves time, a small share of the bytes that the step
holds at any chunk size. *Rows* are positions along the sequence; a row of a value has all sequences of the batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from streamfx.cost.flops import flops_of_call
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import bytes_like
from streamfx.cost.rates import Rates, rates_of
from streamfx.ir.facts import AxisFacts, Facts, Role, StorageClass, known
from streamfx.ir.joint import device_of, input_symbols, is_tensor, tensor_operands
from streamfx.ir.sizes import Size, free_symbols, numeric, product, simplified
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import AutoChunk, ChunkSize
from streamfx.node_meta import VALUE
from streamfx.options import Options
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive, only_moves_elements
from streamfx.torch_private.symbolic_sizes import size_hint

VALUES_PER_LIVE_VALUE = 3  # about one of so many values of a loop body is alive at its peak
MIN_COLLECTIVE_BYTES = 1 << 20  # a reduction over ranks with fewer bytes is latency bound
MAX_OVERHEAD = 0.01  # share of the time of a chunk's products that the fixed cost may take
BYTES_PER_ACCUMULATION = 8  # bytes moved to add one number to a float32 accumulator


def chunk_sizes(facts: Facts, options: Options) -> tuple[ChunkSize, ...]:
    """Return the chunk size of each stage, in rows: the one that the options request, or an `AutoChunk`.

    An `AutoChunk` has the bytes per row and other quantities from which the number of rows is computed at run time.
    """
    chunk_alignment = known(facts.axes.sequence).chunk_alignment  # each chunk has a multiple of so many rows
    stream_bytes = max((_row_bytes(stage.outputs, facts) for stage in facts.stages), key=numeric)  # of a row at a cut
    held_bytes = model_bytes(facts)
    rates = rates_of(device_of(facts.joint.graph))
    efficient_rows = -(-rates.tokens * _length(facts) // tokens(facts))  # with enough tokens to keep the device busy

    def size(stage: Stage, rows: int | str) -> ChunkSize:
        """Return the requested `rows`, rounded up to the chunk alignment; an automatic chunk size for "auto"."""
        if isinstance(rows, int):
            return -(-rows // chunk_alignment) * chunk_alignment
        row_bytes = _row_bytes((*stage.forward, *stage.backward), facts) // VALUES_PER_LIVE_VALUE
        worthwhile = worthwhile_rows(stage, facts, rates)
        busy = max(min(worthwhile, efficient_rows), min_collective_rows(stage, facts))
        return AutoChunk(
            row_bytes=row_bytes,
            stream_bytes=stream_bytes,
            worthwhile_rows=worthwhile,
            held_bytes=held_bytes,
            num_boundaries=len(facts.stages),
            busy_rows=busy,
            chunk_alignment=chunk_alignment,
            is_loss=is_loss_stage(stage, facts),
        )

    def requested_rows(stage: Stage) -> int | str:
        """Return the rows per chunk that the options request for a stage, or "auto"."""
        return options.loss_chunk_size if is_loss_stage(stage, facts) else options.chunk_size

    return tuple(size(stage, requested_rows(stage)) for stage in facts.stages)


def is_loss_stage(stage: Stage, facts: Facts) -> bool:
    """Return whether a stage has no attention and sums over the sequence: the head and the loss."""
    storage_classes = [storage_class for node in stage.forward for storage_class in facts.access.storage_classes.get(node, ())]
    has_keys = any(node in facts.key_spans.spans for node in stage.forward)
    return StorageClass.SUM in storage_classes and not has_keys


def tokens(facts: Facts) -> int:
    """Return the number of tokens in the batch: elements of a value at a cut (b, t, d), without its last dimension.

    Without such a value, the length of the sequence.
    """
    axes = facts.axes
    outputs = [node for stage in facts.stages for node in stage.outputs if axes.sequence_dims(axes.shapes[node])]
    sizes = [node.meta[VALUE].shape for node in outputs]
    return max((size_hint(math.prod(size[:-1])) for size in sizes), default=0) or _length(facts)


def _length(facts: Facts) -> int:
    """Return the length of the sequence, at least 1."""
    return sequence_length(facts) or 1


def worthwhile_rows(stage: Stage, facts: Facts, rates: Rates) -> int:
    """Return the rows per chunk above which larger chunks save little time; 0 if the stage has no products (matmuls).

    There, the fixed cost of a chunk (launches, accumulators, earlier keys) is 1 % of the time of its products. The forward
    graph counts twice, because backward recomputes it.
    """
    flops = 2 * _flops(stage.forward) + _flops(stage.backward)
    launches = 2 * sum(map(_launches_kernel, stage.forward)) + sum(map(_launches_kernel, stage.backward))
    seconds_per_chunk = rates.seconds(moved=_moved_by_a_chunk(stage, facts), launches=launches)
    seconds_per_row = rates.seconds(flops=flops) / _length(facts)
    return math.ceil(seconds_per_chunk / (MAX_OVERHEAD * seconds_per_row)) if seconds_per_row else 0


def min_collective_rows(stage: Stage, facts: Facts) -> int:
    """Return the smallest number of rows per chunk at which each all-reduce of a chunk's rows moves at least 1 MiB.

    Below, it is latency bound. 0 if loops of the stage reduce no rows over ranks.
    """
    reduced_rows = [
        node
        for node in (*stage.forward, *stage.backward)
        if is_reduced_over_ranks(node) and facts.access.storage_class(node) is StorageClass.ROWS
    ]
    rows_needed = (-(-MIN_COLLECTIVE_BYTES * _length(facts) // max(bytes_like(node.meta[VALUE]), 1)) for node in reduced_rows)
    return max(rows_needed, default=0)


def model_bytes(facts: Facts) -> int:
    """Return the bytes of inputs and gradients, which a step holds at any chunk size."""
    inputs = sum(bytes_like(node.meta.get(VALUE)) for node in facts.joint.sources)
    return inputs + gradient_bytes(facts.joint.gradients)


def gradient_bytes(gradients: Iterable[Any]) -> int:
    """Return the bytes of the graph's gradients; an input without gradient (None) has none."""
    return sum(bytes_like(node.meta.get(VALUE)) for node in gradients if isinstance(node, fx.Node))


def _flops(nodes: Iterable[fx.Node]) -> int:
    """Return the floating-point operations of the expensive operators among `nodes`."""
    return sum(flops_of_call(node.target, node.args, node.kwargs, node) for node in nodes if is_expensive(node))


def _launches_kernel(node: fx.Node) -> bool:
    """Return whether an operator launches a kernel, unlike views and elements of tuples."""
    return is_tensor(node) and not only_moves_elements(node) and node.target is not operator.getitem


def _moved_by_a_chunk(stage: Stage, facts: Facts) -> int:
    """Return the bytes that a chunk moves beyond its own rows: accumulators, and keys and values of earlier chunks.

    On average, half of the keys come before a chunk, so half of them are read, and half of a sum per key is updated.
    """
    access, moved_bytes = facts.access, 0
    for node in (*stage.forward, *stage.backward):
        storage_class = access.storage_classes.get(node, (None,))[0]
        if is_tensor(node) and storage_class in (StorageClass.SUM, StorageClass.KEYSUM):
            bytes_per_element = BYTES_PER_ACCUMULATION if storage_class is StorageClass.SUM else BYTES_PER_ACCUMULATION // 2
            moved_bytes += math.prod(map(size_hint, node.meta[VALUE].shape)) * bytes_per_element
        moved_bytes += sum(bytes_like(operand.meta[VALUE]) // 2 for operand in _keys_of(node, facts))
    return moved_bytes


def _keys_of(node: fx.Node, facts: Facts) -> Iterable[fx.Node]:
    """Return the operands that an operator reads at key positions (K and V of attention); only those with rows."""
    axes, access = facts.axes, facts.access
    key_labels = {label for label, role in access.roles.get(node, {}).items() if role is Role.KEYS}
    if not key_labels or node not in axes.signatures:
        return ()
    operands = zip(tensor_operands(node), axes.signatures[node].operands, strict=False)
    with_keys = [operand for operand, dim_labels in operands if any(key_labels & set(labels) for labels in dim_labels)]
    return [operand for operand in with_keys if access.storage_classes.get(operand, (None,))[0] is StorageClass.ROWS]


def _row_bytes(nodes: Iterable[fx.Node], facts: Facts) -> Size:
    """Return the bytes per row of the sequence of all values among `nodes` that loops compute chunk by chunk.

    A row of a query-by-key value has all keys. Views take no bytes.
    """
    access = facts.access
    total: Size = 0
    for node in nodes:
        if (
            is_tensor(node)
            and not only_moves_elements(node)
            and access.storage_class(node) in (StorageClass.ROWS, StorageClass.PAIR)
        ):
            total = total + _elements_of_a_row(node, facts.axes) * node.meta[VALUE].element_size()
    return _with_hints(total, facts)


def _with_hints(size: Size, facts: Facts) -> Size:
    """Return a symbolic size with typical values in place of symbols that are no input sizes, such as data-dependent sizes.

    So it can be evaluated from the inputs of a call.
    """
    runtime_symbols = free_symbols([size]) - input_symbols(facts.joint)
    if isinstance(size, int) or not runtime_symbols:
        return size
    return simplified(size.subs({symbol: numeric(symbol) for symbol in runtime_symbols}))


def _elements_of_a_row(node: fx.Node, axes: AxisFacts) -> Size:
    """Return the number of elements of a value per row of the sequence: (b, t, d) -> b * d.

    If a row of the value represents a block of several rows, divide by the block size.
    """
    table, sequence = axes.table, known(axes.sequence)
    factors = [factor for dim in axes.shapes[node] for factor in table.resolve(dim)]
    sequence_index = next((i for i, factor in enumerate(factors) if factor in sequence.members), None)
    elements = product(table.size(factor) for i, factor in enumerate(factors) if i != sequence_index)
    block_size = 1 if sequence_index is None else sequence.block(factors[sequence_index])
    return elements if block_size == 1 else -(-elements // block_size)
