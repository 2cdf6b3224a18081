"""What becomes of a use of deferred outputs: does it run in the chunks of their other uses, and what does it make whole?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.stage_plan import LEAST_ROWS, LEAST_WORKING_SET
from streamfx.lazy.recompute import RowCut
from streamfx.log import log
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.options import Options
from streamfx.passes.ops.traits import is_moved_elements
from streamfx.runtime.restride import LIES_AS_TRACED
from streamfx.torch_private.symbolic_sizes import size_hint

BYTES_AT_WORK = 16  # per element of an output of which a chunk is worked on
PARTS = 16  # of an output's elements, in bytes: so much may be worked on where that is more than the least


@dataclass(frozen=True)
class Uses:
    """Compiles what is asked for of deferred outputs (`streamed.py`), with the options that these were made with.

    But for who runs the bodies: operators of ATen give the same numbers in two graphs, which fused ones need not. `compiled`
    takes a graph, its inputs, options and which inputs are weights; it returns a function and what was found out.
    """

    options: Options
    compiled: Callable[[fx.GraphModule, list[Any], Options, Sequence[int]], tuple[Callable[..., Any], Facts | None]]

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], most: int, cut: RowCut
    ) -> Callable[..., Any] | None:
        """The graph as loops; None where it makes something of half of `most` elements that is no result, or cuts otherwise."""
        options = replace(self.options, outputs="dense", strict=False, memory_budget=None, bodies="eager")
        options = replace(options, gradients="at once", chunk_size=cut.rows, loss_chunk_size=cut.rows)
        run, facts = self.compiled(graph, inputs, options, weights)
        program = None if facts is None else facts.program
        if program is None or any(2 * numel_of(node) >= most for node in made_between(program.forward.graph)):
            log.info("a use of deferred outputs does not stream, and makes them whole")
            return None
        if not is_cut(known(facts), cut):
            log.info("a use of deferred outputs streams in other chunks than their other uses, and makes them whole")
            return None
        return run

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """The size asked for; if that is left open, a power of two, which many lengths share."""
        asked = (size for size in (self.options.loss_chunk_size, self.options.chunk_size) if isinstance(size, int))
        return next(asked, None) or rows_at_work(numel, length)


def is_cut(facts: Facts, cut: RowCut) -> bool:
    """Whether all loops run over chunks of so many rows of the axis that was asked for."""
    axes, inputs = facts.found_axes, facts.joint.graph.find_nodes(op="placeholder")
    if axes is None or axes.sequence is None or not known(facts.program).loops:
        return False
    for position, dim in cut.along:
        atoms = axes.table.resolve(axes.shapes[inputs[position]][dim])
        if atoms != axes.table.resolve((axes.sequence.main,)):
            return False
    specs = [loop.spec for loop in known(facts.program).loops]
    return all(spec.chunk_size == cut.rows and spec.length == axes.sequence.length for spec in specs)


def made_between(graph: fx.Graph) -> list[fx.Node]:
    """What a graph makes outside of its loops, but for views: of inputs, and those that are its results."""
    results, inputs = set(graph.output_node().all_input_nodes), set(graph.find_nodes(op="placeholder"))
    for node in reversed(graph.nodes):
        if node in results and (is_moved_elements(node) or node.target in LIES_AS_TRACED):
            results.update(node.all_input_nodes)
    for node in graph.nodes:
        if is_moved_elements(node) and inputs.issuperset(node.all_input_nodes):
            inputs.add(node)
    return [node for node in graph.nodes if node.op == "call_function" and node not in results | inputs]


def numel_of(node: fx.Node) -> int:
    return size_hint(node.meta[VALUE].numel()) if is_tensor(node) else 0


def rows_at_work(numel: int, length: int) -> int:
    """Rows of a chunk of an output with so many elements and rows: a power of two, which many lengths share.

    >>> rows_at_work(1 << 30, 1 << 16)
    256
    """
    row_bytes = BYTES_AT_WORK * -(-numel // max(length, 1))
    most = max(LEAST_ROWS, max(LEAST_WORKING_SET, numel // PARTS) // max(row_bytes, 1))
    return 1 << (most.bit_length() - 1)


def bytes_of_results(module: fx.GraphModule) -> int:
    """Bytes of what a graph of Dynamo's returns."""
    return sum(bytes_like(node.meta.get(EXAMPLE_VALUE)) for node in outputs_of(module.graph) if isinstance(node, fx.Node))
