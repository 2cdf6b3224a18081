"""Remove outputs from a Dynamo graph that are large and cheap to recompute; return the values from which they are recomputed.

before   return loss, logits                        logits = linear(hidden, weight)
after    return loss, hidden                        hidden [b t d], about d/V of the bytes of logits
         the caller gets loss and a DeferredTensor that runs linear(hidden, weight) on first use

Outputs that share memory (views of one tensor) are deferred together; their *base* is the first node with this memory. The
minimum cut (`Frontier`) of a base has the `saved` values, which are returned instead, and the `recomputed` nodes, which form
its recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.joint import ancestors, outputs_of, walk
from streamfx.ir.recipe import (
    InputValue,
    OutputPlan,
    OutputValue,
    RebuiltOutput,
    Recipe,
    RecipeInput,
    RecipeProgram,
    ReturnedOutput,
    RowAxes,
    SizeValue,
)
from streamfx.ir.sizes import product, quotient, shape_of, size_of
from streamfx.lazy import steps
from streamfx.lazy.min_cut import Frontier, find_frontier, is_known_size
from streamfx.lazy.op_kinds import ALIASING, CONTRACTING, OpKind, op_kind, sums_elements
from streamfx.lazy.rows import rows_of_program
from streamfx.lazy.values import (
    DynamoValues,
    bytes_of,
    example,
    has_nested_modes,
    is_dense,
    is_parameter,
    values_of,
)
from streamfx.torch_private import dynamo_copy, placeholder_source

MIN_BYTES_RATIO = 2  # an output is deferred if it has at least this many times the bytes of the values that are saved instead


@dataclass(frozen=True)
class Deferral:
    """A graph with smaller outputs, and the plan that restores the original outputs for its caller."""

    module: fx.GraphModule
    plan: OutputPlan

    @property
    def unread(self) -> frozenset[int]:
        """The indices of inputs that the graph no longer reads, because only deferred outputs do, such as the head's weight."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return frozenset(position for position, node in enumerate(placeholders) if not node.users)


def defer_outputs(module: fx.GraphModule) -> Deferral | None:
    """Return a copy of the graph without outputs that are worth deferring, and the plan that restores them; None if it has none.

    A graph with functorch transformations (`vmap`, `grad`) is not changed either.
    """
    if has_nested_modes(module.graph):
        return None
    values = values_of(module.graph)
    outputs = outputs_of(module.graph)
    chosen = _choose_outputs(outputs, values)
    return _OutputRewriter(module, values, outputs, chosen).result() if chosen else None


def _choose_outputs(outputs: Sequence[Any], values: DynamoValues) -> dict[fx.Node, Frontier]:
    """Return the outputs to defer (the bases of their memory), the largest first, with their minimum cuts.

    An output is deferred if the values that are saved instead have at most half of its bytes, if they are not deferred
    themselves, and if it is large or a kept output depends on it. Outputs that could be compared bit by bit are not deferred.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}  # outputs by their base
    for output in filter(is_dense, outputs):
        groups.setdefault(values.bases[output], []).append(output)
    chosen: dict[fx.Node, Frontier] = {}
    saved_bases: set[fx.Node] = set()  # these must not be deferred
    for base in sorted(groups, key=lambda node: -(bytes_of(node) or 0)):
        if base in saved_bases or not _has_known_shape(base, values):
            continue
        if any(_view_nodes(base, output, values) is None for output in groups[base]):
            continue
        frontier = find_frontier(base, values)
        if frontier is None or MIN_BYTES_RATIO * frontier.saved_bytes > (bytes_of(base) or 0):
            continue
        if chosen.keys().isdisjoint(values.bases[node] for node in frontier.saved):
            chosen[base] = frontier
            saved_bases.update(values.bases[node] for node in frontier.saved)
    needed = ancestors(output for output in filter(is_dense, outputs) if values.bases[output] not in chosen)
    chosen = {base: frontier for base, frontier in chosen.items() if base in needed or not is_too_small_for_chunks(base)}
    return _drop_comparable(chosen, groups, outputs, values)


def is_too_small_for_chunks(base: fx.Node) -> bool:
    """Return whether an output is too small to be computed in chunks.

    If no other output (such as a loss) depends on it, the caller wants this output itself. If deferred, it would occupy its
    memory and, besides, the memory of the values from which it is recomputed.
    """
    numel = example(base).numel()
    return isinstance(numel, int) and numel < steps.MIN_NUMEL


def _drop_comparable(
    chosen: dict[fx.Node, Frontier], groups: Mapping[fx.Node, Sequence[fx.Node]], outputs: Sequence[Any], values: DynamoValues
) -> dict[fx.Node, Frontier]:
    """Return `chosen` without outputs whose elements the caller could compare, bit by bit, with another output of the call.

    For example, the model may return the maximum of its logits, and the caller may search this value in the logits, which
    round differently if recomputed. A loss reveals no single element, because it is a sum. `groups` has the outputs of each base.
    """
    while True:  # an output that is kept may reveal elements of another
        removed = {output for base in chosen for output in groups[base]}
        kept_outputs = [output for output in outputs if isinstance(output, fx.Node) and output not in removed]
        saved_values = [node for frontier in chosen.values() for node in frontier.saved]
        comparable = {
            base
            for base, frontier in chosen.items()
            if _reveals_elements(kept_outputs, {base, *_of_kind(frontier, CONTRACTING)}, _is_scalar_sum, values)
            or _reveals_elements(saved_values, _of_kind(frontier, set(OpKind) - ALIASING), _is_sum, values)
        }
        if not comparable:
            return chosen
        chosen = {base: frontier for base, frontier in chosen.items() if base not in comparable}


def _of_kind(frontier: Frontier, kinds: Collection[OpKind]) -> set[fx.Node]:
    """Return the nodes that a minimum cut recomputes, of these kinds only."""
    return {node for node in frontier.recomputed if op_kind(node) in kinds}


def _reveals_elements(
    observed: Sequence[fx.Node], recomputed: Collection[fx.Node], is_sum: Callable[[fx.Node], bool], values: DynamoValues
) -> bool:
    """Return whether an observed value (a kept output) depends on a recomputed node on a path without a sum.

    Such a value shows single elements of the node, which may round differently when it is recomputed. `is_sum` decides which
    nodes are sums.
    """

    def shown_operands(node: fx.Node) -> list[fx.Node]:
        """Return the operands whose elements a value may show: none if it is a sum."""
        return [] if is_sum(node) else [operand for operand in node.all_input_nodes if not is_known_size(operand, values)]

    return any(node in recomputed for node in walk(observed, shown_operands))


def _is_scalar_sum(node: fx.Node) -> bool:
    """Return whether a value is a zero-dimensional sum of several elements."""
    return _is_sum(node) and example(node).dim() == 0


def _is_sum(node: fx.Node) -> bool:
    """Return whether each element of a node's tensor is a sum of several elements of its first tensor operand."""
    if not sums_elements(node) or not is_dense(node):
        return False
    summed = next((operand for operand in node.all_input_nodes if is_dense(operand)), None)
    if summed is None:
        return False
    operand_numel, numel = (product(shape_of(example(value))) for value in (summed, node))
    return quotient(operand_numel, numel) not in (None, 1)


def _has_known_shape(node: fx.Node, values: DynamoValues) -> bool:
    """Return whether the sizes and strides of a tensor are determined by the sizes of the inputs."""
    tensor = example(node)
    return bytes_of(node) is not None and all(values.sizes.can_read(size_of(size)) for size in (*tensor.shape, *tensor.stride()))


def _view_nodes(base: fx.Node, output: fx.Node, values: DynamoValues) -> tuple[fx.Node, ...] | None:
    """Return the chain of views from `base` to `output`, two nodes with the same memory, in order; empty if they are equal.

    None if a node between is not a plain view: it has several operands in this memory, reads values that are not sizes, or runs
    under modes that the graph sets.
    """
    path: list[fx.Node] = []
    node = output
    while node is not base:
        parents = [operand for operand in node.all_input_nodes if values.bases.get(operand) is base]
        others = [operand for operand in node.all_input_nodes if operand not in parents]
        if op_kind(node) not in ALIASING or node in values.contexts or len(parents) != 1:
            return None
        if not all(is_known_size(operand, values) for operand in others):
            return None
        path.append(node)
        node = parents[0]
    return tuple(reversed(path))


class _OutputRewriter:
    """Builds the new graph: the same nodes with other outputs."""

    def __init__(
        self, module: fx.GraphModule, values: DynamoValues, outputs: Sequence[Any], chosen: dict[fx.Node, Frontier]
    ) -> None:
        """Copy the module; `copies` maps original nodes to their copies. `chosen` has the outputs to defer, by base."""
        self.values, self.outputs, self.chosen = values, outputs, chosen
        self.module, self.copies = dynamo_copy(module)
        self.inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        self.returned: list[Any] = []  # outputs of the new graph, as nodes of the original graph
        self.recipes: list[Recipe] = []

    def result(self) -> Deferral:
        """Return the rewritten graph and the plan that restores the original outputs."""
        results, order = self._results()
        graph = self.module.graph
        graph.output_node().args = (tuple(self._exported(node) for node in self.returned),)
        self._erase_unused()
        graph.lint()
        self.module.recompile()
        return Deferral(self.module, OutputPlan(tuple(self.recipes), tuple(results), tuple(order), self.values.sizes))

    def _results(self) -> tuple[list[ReturnedOutput | RebuiltOutput], list[int | None]]:
        """Collect the new graph's outputs (`self.returned`) and the recipes of deferred outputs (`self.recipes`).

        Return how the caller's results are built, without duplicates, and the index of each original output among them (None for
        an output that is None).
        """
        results: list[ReturnedOutput | RebuiltOutput] = []
        result_index: dict[Any, int] = {}
        deferred = [output for output in self.outputs if self._base(output) in self.chosen]
        for output in dict.fromkeys(self.outputs):
            if output is not None and output not in deferred:
                result_index[output] = len(results)
                results.append(ReturnedOutput(self._returned(output)))
        recipes = {base: self._add_recipe(base) for base in self.chosen}
        for output in dict.fromkeys(deferred):
            base = self._base(output)
            result_index[output] = len(results)
            results.append(RebuiltOutput(recipes[base], self._view_program(base, output)))
        return results, [result_index.get(output) for output in self.outputs]

    def _base(self, output: Any) -> Any:
        """Return the node whose memory an output shares; None for outputs that are not tensors."""
        return self.values.bases.get(output) if isinstance(output, fx.Node) else None

    def _returned(self, node: Any) -> int:
        """Return the index of a value among the outputs of the new graph; add it if it is missing."""
        if node not in self.returned:
            self.returned.append(node)
        return self.returned.index(node)

    def _exported(self, node: Any) -> Any:
        """Return the node that the new graph returns for an original node (or a constant): its copy, or a clone of that.

        An input, or a view that the original graph did not return, is cloned: otherwise the output would alias another tensor.
        """
        if not isinstance(node, fx.Node):
            return node
        copy = self.copies[node]
        if node in self.outputs or not is_dense(node) or (self.values.bases[node] is node and node.op != "placeholder"):
            return copy
        with self.module.graph.inserting_before(self.module.graph.output_node()):
            clone = self.module.graph.call_method("clone", (copy,))
        clone.meta = dict(copy.meta)
        return clone

    def _erase_unused(self) -> None:
        """Erase the nodes that only deferred outputs needed from the new graph."""
        for frontier in self.chosen.values():
            for node in reversed(frontier.recomputed):
                if node in self.copies and not self.copies[node].users:
                    self.module.graph.erase_node(self.copies.pop(node))

    def _add_recipe(self, base: fx.Node) -> int:
        """Add the recipe of a deferred base to `recipes`, and return its index."""
        frontier, tensor = self.chosen[base], example(base)
        program = self._program(frontier.saved, frontier.recomputed, self._recipe_input)
        self.recipes.append(
            Recipe(
                name=base.name,
                program=program,
                shape=shape_of(tensor),
                strides=tuple(size_of(stride) for stride in tensor.stride()),
                dtype=tensor.dtype,
                device=tensor.device,
                requires_grad=tensor.requires_grad,
                rows=self._row_axes(frontier),
            )
        )
        return len(self.recipes) - 1

    def _row_axes(self, frontier: Frontier) -> RowAxes | None:
        """Return which dimensions of a deferred output are rows: row i needs only row i of one saved value, the largest.

        Parameters are not candidates. None if there is no such dimension, so that the output cannot be computed in chunks.
        """
        with_rows = [node for node in frontier.saved if not is_parameter(node)]
        if not with_rows:
            return None
        largest = max(with_rows, key=lambda node: bytes_of(node) or 0)
        dims = rows_of_program(largest, frontier.recomputed)
        return RowAxes(frontier.saved.index(largest), dims) if any(dim is not None for dim in dims) else None

    def _recipe_input(self, node: fx.Node) -> RecipeInput:
        """Describe a saved value that a recipe reads: an input if the model or autograd keeps it anyway, else a new output."""
        if is_parameter(node) or (node.op == "placeholder" and example(node).requires_grad):
            return InputValue(self.inputs[node], _readable(placeholder_source(node)) or node.name)
        return OutputValue(self._returned(node), node.name)

    def _view_program(self, base: fx.Node, output: fx.Node) -> RecipeProgram | None:
        """Return the views that lead from a base to an output, as a program; None if the output is the base."""
        nodes = _view_nodes(base, output, self.values)
        return self._program((base,), nodes, None) if nodes else None

    def _program(
        self, placeholders: Sequence[fx.Node], nodes: Sequence[fx.Node], label: Callable[[fx.Node], RecipeInput] | None
    ) -> RecipeProgram:
        """Return a program with these nodes, whose inputs are `placeholders` and then the sizes that the nodes read.

        `label` describes each placeholder; if None, the program's descriptions contain only the sizes.
        """
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in placeholders}
        sizes = dict.fromkeys(
            operand for node in nodes for operand in node.all_input_nodes if is_known_size(operand, self.values)
        )
        env.update({node: graph.placeholder(node.name) for node in sizes})
        for node in nodes:
            env[node] = graph.node_copy(node, lambda operand: env[operand])
        graph.output(env[nodes[-1]])
        for copy in graph.nodes:
            copy.meta = {}  # keep no FakeTensors alive
        size_values = tuple(SizeValue(size_of(example(node))) for node in sizes)
        contexts = {env[node]: self.values.contexts[node] for node in nodes if node in self.values.contexts}
        return RecipeProgram(graph, (*map(label, placeholders), *size_values) if label else size_values, contexts)


HOLDERS = ("self", "_modules", "_parameters", "_buffers")


def _readable(source: str) -> str:
    """Return the user's name of a parameter from Dynamo's source text; empty if only Dynamo's own names (`___`) are in it.

    L['self']._modules['lm_head']._parameters['weight'] -> lm_head.weight
    """
    names = [key or attribute for key, attribute in re.findall(r"\['([^']+)'\]|\.(\w+)", source)]
    return ".".join(name for name in names if name not in HOLDERS and not name.startswith("___"))
