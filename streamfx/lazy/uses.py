"""Compile uses of deferred outputs, if they run in the chunks of their other uses and materialize no large value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.stage_plan import MIN_ROWS, MIN_WORKING_SET
from streamfx.lazy.recompute import RowCut
from streamfx.log import log
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.options import Options
from streamfx.passes.ops.traits import is_moved_elements
from streamfx.runtime.restride import RESTRIDE_FUNCTIONS
from streamfx.torch_private.symbolic_sizes import size_hint

BYTES_AT_WORK = 16  # working-set bytes per element of a chunk of an output
PARTS = 16  # a chunk's working set may take 1/16 of the output's number of elements, in bytes, or at least the minimum


@dataclass(frozen=True)
class Uses:
    """Compiles uses of deferred outputs (`streamed.py`) with the options of the original call, except for the loop bodies.

    Bodies run in eager, because ATen operators give the same numbers in two graphs, and fused ones need not. `compiled` takes a
    graph, its inputs, options and the indices of weights among the inputs; it returns a function and the facts.
    """

    options: Options
    compiled: Callable[[fx.GraphModule, list[Any], Options, Sequence[int]], tuple[Callable[..., Any], Facts | None]]

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], widest: int, cut: RowCut
    ) -> Callable[..., Any] | None:
        """Return the graph as loops; None if a value other than a result has `most / 2` elements, or if the cut differs."""
        options = replace(self.options, outputs="dense", strict=False, memory_budget=None, bodies="eager")
        options = replace(options, gradients="at once", chunk_size=cut.rows, loss_chunk_size=cut.rows)
        run, facts = self.compiled(graph, inputs, options, weights)
        program = None if facts is None else facts.program
        if program is None or any(2 * numel_of(node) >= widest for node in computed_outside_loops(program.forward.graph)):
            log.info("a use of deferred outputs does not stream, and makes them whole")
            return None
        if not is_cut(known(facts), cut):
            log.info("a use of deferred outputs streams in other chunks than their other uses, and makes them whole")
            return None
        return run

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """Return the chunk size of the options; if none is set, a power of two, so that many lengths share it."""
        requested = (size for size in (self.options.loss_chunk_size, self.options.chunk_size) if isinstance(size, int))
        return next(requested, None) or rows_at_work(numel, length)


def is_cut(facts: Facts, cut: RowCut) -> bool:
    """Return whether all loops run over chunks of the requested number of rows, along the requested axis."""
    axes, inputs = facts.found_axes, facts.joint.graph.find_nodes(op="placeholder")
    if axes is None or axes.sequence is None or not known(facts.program).loops:
        return False
    for position, dim in cut.along:
        atoms = axes.table.resolve(axes.shapes[inputs[position]][dim])
        if atoms != axes.table.resolve((axes.sequence.main,)):
            return False
    specs = [loop.spec for loop in known(facts.program).loops]
    return all(spec.chunk_size == cut.rows and spec.length == axes.sequence.length for spec in specs)


def computed_outside_loops(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that a graph computes outside of its loops, except views of inputs and of results, and the results."""
    results, inputs = set(graph.output_node().all_input_nodes), set(graph.find_nodes(op="placeholder"))
    for node in reversed(graph.nodes):
        if node in results and (is_moved_elements(node) or node.target in RESTRIDE_FUNCTIONS):
            results.update(node.all_input_nodes)
    for node in graph.nodes:
        if is_moved_elements(node) and inputs.issuperset(node.all_input_nodes):
            inputs.add(node)
    return [node for node in graph.nodes if node.op == "call_function" and node not in results | inputs]


def numel_of(node: fx.Node) -> int:
    """Return the number of elements of a tensor node, at the traced sizes; 0 for other nodes."""
    return size_hint(node.meta[VALUE].numel()) if is_tensor(node) else 0


def rows_at_work(numel: int, length: int) -> int:
    """Return the rows per chunk for an output of this size: a power of two, so that many lengths share it.

    >>> rows_at_work(1 << 30, 1 << 16)
    256
    """
    row_bytes = BYTES_AT_WORK * -(-numel // max(length, 1))
    max_rows = max(MIN_ROWS, max(MIN_WORKING_SET, numel // PARTS) // max(row_bytes, 1))
    return 1 << (max_rows.bit_length() - 1)


def bytes_of_results(module: fx.GraphModule) -> int:
    """Return the bytes of the outputs of a Dynamo graph."""
    return sum(bytes_like(node.meta.get(EXAMPLE_VALUE)) for node in outputs_of(module.graph) if isinstance(node, fx.Node))
