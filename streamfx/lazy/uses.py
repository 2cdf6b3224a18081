"""What becomes of a use of deferred outputs: does it run in the chunks of their other uses, and what does it make whole?"""

from __future__ import annotations

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.plan import LEAST_ROWS, LEAST_WORKING_SET
from streamfx.lazy.rebuild import Cut
from streamfx.passes.operators.traits import is_moved_elements
from streamfx.runtime.as_traced import LIES_AS_TRACED
from streamfx.torch_private.sizes import size_hint

BYTES_AT_WORK = 16  # per element of an output of which a chunk is worked on
PARTS = 16  # of an output's elements, in bytes: so much may be worked on where that is more than the least


def is_cut(facts: Facts, cut: Cut) -> bool:
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
    return size_hint(node.meta["val"].numel()) if is_tensor(node) else 0


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
    return sum(bytes_like(node.meta.get("example_value")) for node in outputs_of(module.graph) if isinstance(node, fx.Node))
