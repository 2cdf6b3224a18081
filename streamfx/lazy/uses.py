"""Compile uses of lazy outputs to loops, if the loops run in the same chunks as other uses and materialize no large value.

A *use* is a graph that computes small results (a loss, gradients) from outputs that were not computed in the call (lazy logits).
Chunks are ranges of rows, positions of the sequence. `Facts` are the results of the passes for the graph, its loops included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.stage_plan import MIN_ROWS, MIN_WORKING_SET
from streamfx.lazy.recompute import RowChunks
from streamfx.log import log
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.options import Options
from streamfx.passes.ops.traits import only_moves_elements
from streamfx.runtime.restride import RESTRIDE_FUNCTIONS
from streamfx.torch_private.symbolic_sizes import size_hint

BYTES_PER_ELEMENT = 16  # working set of a chunk, per element of the chunk of the output
WORKING_SET_PARTS = 16  # a chunk's working set may have numel / 16 bytes (numel: elements of the output), or the minimum


@dataclass(frozen=True)
class Uses:
    """Compiles uses of lazy outputs (`streamed.py`) with the options of the original call, except for the loop bodies.

    Bodies run in eager mode, because ATen operators give the same numbers in two graphs, but fused operators may not. `compiled`
    takes a graph, its inputs, options and the indices of weights among the inputs; it returns a function and the facts.
    """

    options: Options
    compiled: Callable[[fx.GraphModule, list[Any], Options, Sequence[int]], tuple[Callable[..., Any], Facts | None]]

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], widest: int, row_chunks: RowChunks
    ) -> Callable[..., Any] | None:
        """Return the graph, compiled to loops over the chunks of `row_chunks`.

        `weights` are the indices of inputs without rows, `widest` is the number of elements of the largest value. None if its
        chunks would differ, or if a value outside loops, other than a result, has `widest / 2` elements or more.
        """
        options = replace(self.options, outputs="dense", strict=False, memory_budget=None, bodies="eager")
        options = replace(options, gradients="at once", chunk_size=row_chunks.num_rows, loss_chunk_size=row_chunks.num_rows)
        run, facts = self.compiled(graph, inputs, options, weights)
        program = None if facts is None else facts.program
        if program is None or any(2 * numel_of(node) >= widest for node in computed_outside_loops(program.forward.graph)):
            log.info("a use of lazy outputs does not stream, so it materializes them")
            return None
        if not has_row_chunks(known(facts), row_chunks):
            log.info("a use of lazy outputs would run in other chunks than their other uses, so it materializes them")
            return None
        return run

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """Return the rows per chunk for a lazy output of `numel` elements and `length` rows.

        It is the option `loss_chunk_size` or `chunk_size`; if none is a number, a power of two, so that many lengths share it.
        """
        requested = (size for size in (self.options.loss_chunk_size, self.options.chunk_size) if isinstance(size, int))
        return next(requested, None) or default_rows_per_chunk(numel, length)


def has_row_chunks(facts: Facts, row_chunks: RowChunks) -> bool:
    """Return whether all loops run over chunks of the requested number of rows, along the requested dimensions.

    `row_chunks.row_dims` has the dimension of rows of some inputs; each must be exactly the axis that the loops cut into chunks.
    """
    axes, inputs = facts.found_axes, facts.joint.graph.find_nodes(op="placeholder")
    if axes is None or axes.sequence is None or not known(facts.program).loops:
        return False
    for input_index, dim in row_chunks.row_dims:
        factors = axes.table.resolve(axes.shapes[inputs[input_index]][dim])
        if factors != axes.table.resolve((axes.sequence.main,)):
            return False
    specs = [loop.spec for loop in known(facts.program).loops]
    return all(spec.chunk_size == row_chunks.num_rows and spec.length == axes.sequence.length for spec in specs)


def computed_outside_loops(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that a host program (a graph with loops) computes outside its loops.

    Results are omitted, and values that are only views of inputs or become results by views: they need no more memory.
    """
    results, inputs = set(graph.output_node().all_input_nodes), set(graph.find_nodes(op="placeholder"))
    for node in reversed(graph.nodes):
        if node in results and (only_moves_elements(node) or node.target in RESTRIDE_FUNCTIONS):
            results.update(node.all_input_nodes)
    for node in graph.nodes:
        if only_moves_elements(node) and inputs.issuperset(node.all_input_nodes):
            inputs.add(node)
    return [node for node in graph.nodes if node.op == "call_function" and node not in results | inputs]


def numel_of(node: fx.Node) -> int:
    """Return the number of elements of a tensor node, at the traced sizes; 0 for other nodes."""
    return size_hint(node.meta[VALUE].numel()) if is_tensor(node) else 0


def default_rows_per_chunk(numel: int, length: int) -> int:
    """Return the rows per chunk for an output of `numel` elements and `length` rows: a power of two, which many lengths share.

    The working set of a chunk (16 bytes per element) then takes at most numel / 16 bytes, or `MIN_WORKING_SET` if that is more.

    >>> default_rows_per_chunk(1 << 30, 1 << 16)
    256
    """
    row_bytes = BYTES_PER_ELEMENT * -(-numel // max(length, 1))
    max_rows = max(MIN_ROWS, max(MIN_WORKING_SET, numel // WORKING_SET_PARTS) // max(row_bytes, 1))
    return 1 << (max_rows.bit_length() - 1)


def bytes_of_results(module: fx.GraphModule) -> int:
    """Return the bytes of the outputs of a Dynamo graph, at the traced sizes."""
    return sum(bytes_like(node.meta.get(EXAMPLE_VALUE)) for node in outputs_of(module.graph) if isinstance(node, fx.Node))
