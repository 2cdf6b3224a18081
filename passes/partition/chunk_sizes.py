"""Compute the number of query positions in a chunk of each stage.

A chunk has a fixed cost: it reads and writes accumulators, reads the keys and values before it, and launches kernels.
Larger chunks save time until this cost is a small share of the time of the chunk's products. But the intermediate values
of a chunk take memory: as much as one value at a cut, or, if that saves time, a small share of the bytes that the step
holds at any chunk size.
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
    """Return the chunk size of each stage: the requested one, or an `AutoChunk`."""
    chunk_alignment = known(facts.axes.sequence).chunk_alignment
    stream_bytes = max((_row_bytes(stage.outputs, facts) for stage in facts.stages), key=numeric)
    held, num_boundaries = model_bytes(facts), len(facts.stages)
    rates = rates_of(device_of(facts.joint.graph))
    efficient_rows = -(-rates.tokens * _length(facts) // tokens(facts))

    def size(stage: Stage, rows: int | str) -> ChunkSize:
        """Return the requested rows, rounded up to the chunk alignment, or an automatic chunk size."""
        if isinstance(rows, int):
            return -(-rows // chunk_alignment) * chunk_alignment
        row_bytes = _row_bytes((*stage.forward, *stage.backward), facts) // VALUES_PER_LIVE_VALUE
        worthwhile = worthwhile_rows(stage, facts, rates)
        busy = max(min(worthwhile, efficient_rows), min_collective_rows(stage, facts))
        return AutoChunk(row_bytes, stream_bytes, worthwhile, held, num_boundaries, busy, chunk_alignment=chunk_alignment)

    def requested(stage: Stage) -> int | str:
        """Return the chunk size that the options request for a stage."""
        return options.loss_chunk_size if is_loss_stage(stage, facts) else options.chunk_size

    return tuple(size(stage, requested(stage)) for stage in facts.stages)


def is_loss_stage(stage: Stage, facts: Facts) -> bool:
    """Return whether a stage has no attention and sums over the sequence: the head and the loss."""
    storage_classes = [storage_class for node in stage.forward for storage_class in facts.access.storage_classes.get(node, ())]
    has_keys = any(node in facts.key_spans.spans for node in stage.forward)
    return StorageClass.SUM in storage_classes and not has_keys


def tokens(facts: Facts) -> int:
    """Return the number of tokens in the batch: elements of a value at a cut, without its last dimension."""
    axes = facts.axes
    outputs = [node for stage in facts.stages for node in stage.outputs if axes.sequence_dims(axes.shapes[node])]
    sizes = [node.meta[VALUE].shape for node in outputs]
    return max((size_hint(math.prod(size[:-1])) for size in sizes), default=0) or _length(facts)


def _length(facts: Facts) -> int:
    return sequence_length(facts) or 1


def worthwhile_rows(stage: Stage, facts: Facts, rates: Rates) -> int:
    """Return the chunk size above which larger chunks save little time. The forward graph counts twice: it is recomputed."""
    flops = 2 * _flops(stage.forward) + _flops(stage.backward)
    launches = 2 * sum(map(_launches_kernel, stage.forward)) + sum(map(_launches_kernel, stage.backward))
    overhead = rates.seconds(moved=_moved_by_a_chunk(stage, facts), launches=launches)
    row = rates.seconds(flops=flops) / _length(facts)
    return math.ceil(overhead / (MAX_OVERHEAD * row)) if row else 0


def min_collective_rows(stage: Stage, facts: Facts) -> int:
    """Return the smallest chunk size at which no reduction over ranks is latency bound; 0 if there are none."""
    nodes = [node for node in (*stage.forward, *stage.backward) if is_reduced_over_ranks(node)]
    rows = [-(-MIN_COLLECTIVE_BYTES * _length(facts) // max(bytes_like(node.meta[VALUE]), 1)) for node in nodes]
    return max(
        (
            rows_needed
            for node, rows_needed in zip(nodes, rows, strict=True)
            if facts.access.storage_class(node) is StorageClass.ROWS
        ),
        default=0,
    )


def model_bytes(facts: Facts) -> int:
    """Return the bytes of inputs and gradients, which a step holds at any chunk size."""
    inputs = sum(bytes_like(node.meta.get(VALUE)) for node in facts.joint.sources)
    return inputs + gradient_bytes(facts.joint.gradients)


def gradient_bytes(gradients: Iterable[Any]) -> int:
    """Return the bytes of the requested gradients."""
    return sum(bytes_like(node.meta.get(VALUE)) for node in gradients if isinstance(node, fx.Node))


def _flops(nodes: Iterable[fx.Node]) -> int:
    """Return the floating-point operations of the expensive operators among `nodes`."""
    return sum(flops_of_call(node.target, node.args, node.kwargs, node) for node in nodes if is_expensive(node))


def _launches_kernel(node: fx.Node) -> bool:
    """Return whether an operator launches a kernel, unlike views and elements of tuples."""
    return is_tensor(node) and not only_moves_elements(node) and node.target is not operator.getitem


def _moved_by_a_chunk(stage: Stage, facts: Facts) -> int:
    """Return the bytes that a chunk moves beyond its own rows: accumulators, and keys and values of earlier chunks.

    On average, half of the keys come before a chunk.
    """
    access, moved = facts.access, 0
    for node in (*stage.forward, *stage.backward):
        storage_class = access.storage_classes.get(node, (None,))[0]
        if is_tensor(node) and storage_class in (StorageClass.SUM, StorageClass.KEYSUM):
            moved += math.prod(map(size_hint, node.meta[VALUE].shape)) * (
                BYTES_PER_ACCUMULATION if storage_class is StorageClass.SUM else BYTES_PER_ACCUMULATION // 2
            )
        moved += sum(bytes_like(operand.meta[VALUE]) // 2 for operand in _keys_of(node, facts))
    return moved


def _keys_of(node: fx.Node, facts: Facts) -> Iterable[fx.Node]:
    """Return the operands whose key positions an operator reads."""
    axes, access = facts.axes, facts.access
    keys = {letter for letter, role in access.roles.get(node, {}).items() if role is Role.KEYS}
    if not keys or node not in axes.signatures:
        return ()
    operands = zip(tensor_operands(node), axes.signatures[node].operands, strict=False)
    with_keys = [operand for operand, dims in operands if any(keys & set(dim) for dim in dims)]
    return [operand for operand in with_keys if access.storage_classes.get(operand, (None,))[0] is StorageClass.ROWS]


def _row_bytes(nodes: Iterable[fx.Node], facts: Facts) -> Size:
    """Return the bytes per row of the sequence of all chunked values among `nodes`; query-by-key values have all keys."""
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
    """Return a size with typical values for symbols that are not input sizes, such as loop counts."""
    runtime_symbols = free_symbols([size]) - input_symbols(facts.joint)
    return (
        size
        if isinstance(size, int) or not runtime_symbols
        else simplified(size.subs({symbol: numeric(symbol) for symbol in runtime_symbols}))
    )


def _elements_of_a_row(node: fx.Node, axes: AxisFacts) -> Size:
    """Return the elements of a value per position of the sequence."""
    table, sequence = axes.table, known(axes.sequence)
    atoms = [atom for dim in axes.shapes[node] for atom in table.resolve(dim)]
    rows = next((i for i, atom in enumerate(atoms) if atom in sequence.members), None)
    elements = product(table.size(atom) for i, atom in enumerate(atoms) if i != rows)
    block = 1 if rows is None else sequence.block(atoms[rows])
    return elements if block == 1 else -(-elements // block)
