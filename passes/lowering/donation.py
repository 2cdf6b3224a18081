"""Reuse gradient buffers for results of the same loop.

A stage's backward loop reads its incoming gradient chunk by chunk, and writes its outgoing gradient in the same
iterations to the same rows. If nothing else uses the incoming gradient, the outgoing one overwrites it: one buffer of
T x d serves all stages. With a single chunk, a result that owns its memory is not copied into a buffer at all.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import fx

from streamfx.ir.program import Broadcast, BufferPart, ChunkSlice, ConcatOutput, LoopSpec, RowSelection
from streamfx.passes.ops.aliasing import memories
from streamfx.runtime.loop import Loop
from streamfx.torch_private import OpOverload


def reuse_buffers(module: fx.GraphModule) -> None:
    """Mark, in each loop of a host program, the results (concatenated rows) that overwrite an operand, or are `is_fresh`.

    An operand is overwritten if it is an earlier loop's result of the same shape that no other node uses. In place.
    """
    for call in module.graph.nodes:
        if call.op != "call_module" or not isinstance(loop := module.get_submodule(call.target), Loop):
            continue
        tensors = call.args[len(loop.spec.symbols) :]
        reused: set[int] = set()
        yields = list(loop.spec.yields)
        for result_index, item in enumerate(yields):
            if not isinstance(item, ConcatOutput):
                continue
            for operand_index, source in enumerate(tensors):
                if (
                    operand_index not in reused
                    and _is_only_use(source, call, module)
                    and _can_overwrite(loop.spec, result_index, operand_index, source, module)
                ):
                    yields[result_index] = replace(item, reuse=operand_index)
                    reused.add(operand_index)
                    break
        loop.spec = replace(loop.spec, yields=tuple(yields))
    for loop in module.children():
        if isinstance(loop, Loop):
            loop.spec = _mark_fresh_results(loop.spec)


def _mark_fresh_results(spec: LoopSpec) -> LoopSpec:
    """Return the loop with `is_fresh` set for results that the body allocates and that alias nothing: a single chunk's result
    need not be copied into a buffer.
    """
    outputs: Sequence[fx.Node] = spec.body.graph.output_node().args[0]  # type: ignore[assignment]
    placeholders = zip(spec.body.graph.find_nodes(op="placeholder"), spec.feeds, strict=True)
    scalars = {node for node, feed in placeholders if not isinstance(feed, (Broadcast, ChunkSlice, BufferPart))}
    memories_by_output = [memories(output) - scalars for output in outputs]
    num_outputs_with = Counter(chain.from_iterable(memories_by_output))
    fresh = [
        len(output_memories) == 1
        and all(num_outputs_with[memory] == 1 and _is_allocated_by_torch(memory) for memory in output_memories)
        for output_memories in memories_by_output
    ]
    yields = [replace(item, is_fresh=fresh[i]) if isinstance(item, ConcatOutput) else item for i, item in enumerate(spec.yields)]
    return replace(spec, yields=tuple(yields))


def _is_allocated_by_torch(memory: fx.Node) -> bool:
    """Return whether an operator of torch allocated a value: other callables may keep a reference to it."""
    producer = memory.all_input_nodes[0] if memory.target is operator.getitem else memory
    return producer.op == "call_function" and isinstance(producer.target, OpOverload)


def _is_only_use(source: fx.Node, call: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a loop is the only user of an earlier loop's stacked result."""
    return set(source.users) == {call} and _concat_output_of(source, module) is not None


def _concat_output_of(source: fx.Node, module: fx.GraphModule) -> ConcatOutput | None:
    """Return the description (shape, dtype, rows) of a loop result that concatenates the rows of all chunks.

    None if `source` is not such a result: the node of another operator, or a sum over chunks.
    """
    if source.target is not operator.getitem:
        return None
    producer, result_index = source.args
    if producer.op != "call_module" or not isinstance(loop := module.get_submodule(producer.target), Loop):  # type: ignore[union-attr,arg-type]
        return None
    item = loop.spec.yields[result_index]  # type: ignore[index]
    return item if isinstance(item, ConcatOutput) else None


def _can_overwrite(spec: LoopSpec, result_index: int, operand_index: int, source: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a loop's result can overwrite an operand: equal rows, shape and dtype, and no view of the operand.

    If an output were a view of the operand, the loop would read it, in another order, while it is overwritten.
    """
    item, source_item = spec.yields[result_index], _concat_output_of(source, module)
    assert isinstance(item, ConcatOutput)
    if source_item is None or replace(source_item, reuse=item.reuse) != item:
        return False
    placeholders = spec.body.graph.find_nodes(op="placeholder")
    operand_views = {node for node, i in zip(placeholders, spec.sources, strict=True) if i == operand_index}
    feeds = [feed for feed, i in zip(spec.feeds, spec.sources, strict=True) if i == operand_index]
    by_rows = all(isinstance(feed, ChunkSlice) and feed.selections == (RowSelection(item.placement, None),) for feed in feeds)
    outputs = spec.body.graph.output_node().args[0]
    return by_rows and not any(memories(output) & operand_views for output in outputs)  # type: ignore[arg-type,union-attr]
