"""What becomes of a use of deferred outputs: does it run in the chunks of their other uses, and what does it make whole?"""

from __future__ import annotations

from torch import fx

from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_tensor
from streamfx.lazy.rebuild import Cut
from streamfx.passes.operators.traits import is_moved_elements
from streamfx.runtime.as_traced import LIES_AS_TRACED
from streamfx.torch_private.sizes import size_hint


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
