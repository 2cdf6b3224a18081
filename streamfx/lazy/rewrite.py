"""Takes outputs that are large and cheap to rebuild out of a Dynamo graph, and what they are rebuilt from in.

before   return loss, logits                        logits = linear(hidden, weight)
after    return loss, hidden                        hidden [b t d], one V-th part of logits or so
         the caller gets loss and a DeferredTensor that runs linear(hidden, weight) when it is touched
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.joint import outputs_of
from streamfx.ir.recipe import (
    Given,
    GivenInput,
    GivenOutput,
    GivenSize,
    OutputPlan,
    RebuiltOutput,
    Recipe,
    RecipeProgram,
    ReturnedOutput,
    RowAxes,
)
from streamfx.ir.sizes import product, quotient, shape_of, size_of
from streamfx.lazy import steps
from streamfx.lazy.min_cut import Frontier, frontier_of, is_known_size
from streamfx.lazy.op_kinds import ALIASING, CONTRACTING, OpKind, kind_of, sums
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

WORTH = 2  # a value is deferred when it has at least so many times the bytes of what is kept instead


@dataclass(frozen=True)
class Deferral:
    """A graph that returns less, and how its caller gets the original outputs all the same."""

    module: fx.GraphModule
    plan: OutputPlan

    @property
    def unread(self) -> frozenset[int]:
        """Positions of the inputs that only deferred outputs read, such as the head's weight."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return frozenset(position for position, node in enumerate(placeholders) if not node.users)


def defer_outputs(module: fx.GraphModule) -> Deferral | None:
    """The graph with its deferrable outputs taken out; None where there are none. `module` stays as it is."""
    if has_nested_modes(module.graph):
        return None
    values = values_of(module.graph)
    outputs = outputs_of(module.graph)
    chosen = _chosen(outputs, values)
    return _OutputRewriter(module, values, outputs, chosen).result() if chosen else None


def _chosen(outputs: Sequence[Any], values: DynamoValues) -> dict[fx.Node, Frontier]:
    """Which bases of outputs are deferred, the largest first, and from what."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for output in filter(is_dense, outputs):
        groups.setdefault(values.bases[output], []).append(output)
    chosen: dict[fx.Node, Frontier] = {}
    needed: set[fx.Node] = set()
    for base in sorted(groups, key=lambda node: -(bytes_of(node) or 0)):
        if base in needed or not _has_known_shape(base, values):
            continue
        if any(_view_nodes(base, output, values) is None for output in groups[base]):
            continue
        frontier = frontier_of(base, values)
        if frontier is None or WORTH * frontier.cost > (bytes_of(base) or 0):
            continue
        if chosen.keys().isdisjoint(values.bases[node] for node in frontier.given):
            chosen[base] = frontier
            needed.update(values.bases[node] for node in frontier.given)
    read = _behind([output for output in filter(is_dense, outputs) if values.bases[output] not in chosen])
    chosen = {base: frontier for base, frontier in chosen.items() if base in read or not is_made_whole(base)}
    return _incomparable(chosen, groups, outputs, values)


def is_made_whole(base: fx.Node) -> bool:
    """Whether an output is too small to be made along the sequence. If no other output follows from it, as a loss does, the
    caller called the graph for it: deferred, it would take its own memory, and also that of what it is rebuilt from.
    """
    numel = example(base).numel()
    return isinstance(numel, int) and numel < steps.LEAST


def _behind(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What values are computed from, and they themselves."""
    behind, waiting = set(nodes), list(nodes)
    while waiting:
        found = [operand for operand in waiting.pop().all_input_nodes if operand not in behind]
        behind.update(found)
        waiting += found
    return behind


def _incomparable(
    chosen: dict[fx.Node, Frontier], groups: Mapping[fx.Node, Sequence[fx.Node]], outputs: Sequence[Any], values: DynamoValues
) -> dict[fx.Node, Frontier]:
    """Those of which no other output tells what their elements were in the call, to the last bit.

    The caller may look for the maximum that the model returned among its logits, and these round in another way when they are
    made again. A loss, one number that sums over them, tells nothing of single elements.
    """
    while True:
        made = {output for base in chosen for output in groups[base]}
        kept = [output for output in outputs if isinstance(output, fx.Node) and output not in made]
        given = [node for frontier in chosen.values() for node in frontier.given]
        told = {
            base
            for base, frontier in chosen.items()
            if _tell_of(kept, {base, *_of_kind(frontier, CONTRACTING)}, _is_one_sum, values)
            or _tell_of(given, _of_kind(frontier, set(OpKind) - ALIASING), _is_sum, values)
        }
        if not told:
            return chosen
        chosen = {base: frontier for base, frontier in chosen.items() if base not in told}


def _of_kind(frontier: Frontier, kinds: Collection[OpKind]) -> set[fx.Node]:
    """What is made again, and rounds in another way: the maximum that a call kept is then no maximum of it any more."""
    return {node for node in frontier.rebuilt if kind_of(node) in kinds}


def _tell_of(
    kept: Sequence[fx.Node], made_again: Collection[fx.Node], is_apart: Callable[[fx.Node], bool], values: DynamoValues
) -> bool:
    """Whether any value may be compared with elements of what is made again, of which it is made by more than sums."""
    behind, waiting = set(kept), list(kept)
    while waiting:
        node = waiting.pop()
        if node in made_again:
            return True
        for operand in () if is_apart(node) else node.all_input_nodes:
            if operand not in behind and not is_known_size(operand, values):
                behind.add(operand)
                waiting.append(operand)
    return False


def _is_one_sum(node: fx.Node) -> bool:
    """Whether a value is one number, to which several others were added up."""
    return _is_sum(node) and example(node).dim() == 0


def _is_sum(node: fx.Node) -> bool:
    """Whether each element of a value is a sum of several elements of its operand."""
    if not sums(node) or not is_dense(node):
        return False
    summed = next((operand for operand in node.all_input_nodes if is_dense(operand)), None)
    if summed is None:
        return False
    whole, own = (product(shape_of(example(item))) for item in (summed, node))
    return quotient(whole, own) not in (None, 1)


def _has_known_shape(node: fx.Node, values: DynamoValues) -> bool:
    tensor = example(node)
    return bytes_of(node) is not None and all(values.sizes.knows(size_of(size)) for size in (*tensor.shape, *tensor.stride()))


def _view_nodes(base: fx.Node, output: fx.Node, values: DynamoValues) -> tuple[fx.Node, ...] | None:
    """The functions that take `output` as a view of `base`, in order; None where something else is involved."""
    path: list[fx.Node] = []
    node = output
    while node is not base:
        parents = [operand for operand in node.all_input_nodes if values.bases.get(operand) is base]
        others = [operand for operand in node.all_input_nodes if operand not in parents]
        if kind_of(node) not in ALIASING or node in values.contexts or len(parents) != 1:
            return None
        if not all(is_known_size(operand, values) for operand in others):
            return None
        path.append(node)
        node = parents[0]
    return tuple(reversed(path))


class _OutputRewriter:
    """Makes the new graph: the same nodes, other outputs."""

    def __init__(
        self, module: fx.GraphModule, values: DynamoValues, outputs: Sequence[Any], chosen: dict[fx.Node, Frontier]
    ) -> None:
        self.values, self.outputs, self.chosen = values, outputs, chosen
        self.module, self.copies = dynamo_copy(module)
        self.inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        self.returned: list[Any] = []  # outputs of the new graph, as nodes of the old one
        self.recipes: list[Recipe] = []

    def result(self) -> Deferral:
        results, order = self._results()
        graph = self.module.graph
        graph.output_node().args = (tuple(self._exported(node) for node in self.returned),)
        self._erase_unused()
        graph.lint()
        self.module.recompile()
        return Deferral(self.module, OutputPlan(tuple(self.recipes), tuple(results), tuple(order), self.values.sizes))

    def _results(self) -> tuple[list[ReturnedOutput | RebuiltOutput], list[int | None]]:
        results: list[ReturnedOutput | RebuiltOutput] = []
        places: dict[Any, int] = {}
        deferred = [output for output in self.outputs if self._base(output) in self.chosen]
        for output in dict.fromkeys(self.outputs):
            if output is not None and output not in deferred:
                places[output] = len(results)
                results.append(ReturnedOutput(self._returned(output)))
        recipes = {base: self._recipe(base) for base in self.chosen}
        for output in dict.fromkeys(deferred):
            base = self._base(output)
            places[output] = len(results)
            results.append(RebuiltOutput(recipes[base], self._view(base, output)))
        return results, [places.get(output) for output in self.outputs]

    def _base(self, output: Any) -> Any:
        return self.values.bases.get(output) if isinstance(output, fx.Node) else None

    def _returned(self, node: Any) -> int:
        """The position of a value among the outputs of the new graph."""
        if node not in self.returned:
            self.returned.append(node)
        return self.returned.index(node)

    def _exported(self, node: Any) -> Any:
        """What the new graph returns for an old node: a copy of what is an input, or part of something larger."""
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
        for frontier in self.chosen.values():
            for node in reversed(frontier.rebuilt):
                if node in self.copies and not self.copies[node].users:
                    self.module.graph.erase_node(self.copies.pop(node))

    def _recipe(self, base: fx.Node) -> int:
        frontier, tensor = self.chosen[base], example(base)
        program = self._program(frontier.given, frontier.rebuilt, self._given)
        self.recipes.append(
            Recipe(
                name=base.name,
                program=program,
                shape=shape_of(tensor),
                strides=tuple(size_of(stride) for stride in tensor.stride()),
                dtype=tensor.dtype,
                device=tensor.device,
                requires_grad=tensor.requires_grad,
                rows=self._rows(frontier),
            )
        )
        return len(self.recipes) - 1

    def _rows(self, frontier: Frontier) -> RowAxes | None:
        streamed = [node for node in frontier.given if not is_parameter(node)]
        if not streamed:
            return None
        largest = max(streamed, key=lambda node: bytes_of(node) or 0)
        dims = rows_of_program(largest, frontier.rebuilt)
        return RowAxes(frontier.given.index(largest), dims) if any(dim is not None for dim in dims) else None

    def _given(self, node: fx.Node) -> Given:
        """Inputs are kept as they are where they outlive the call unchanged or autograd keeps them anyway."""
        if is_parameter(node) or (node.op == "placeholder" and example(node).requires_grad):
            return GivenInput(self.inputs[node], _readable(placeholder_source(node)) or node.name)
        return GivenOutput(self._returned(node), node.name)

    def _view(self, base: fx.Node, output: fx.Node) -> RecipeProgram | None:
        nodes = _view_nodes(base, output, self.values)
        return self._program((base,), nodes, None) if nodes else None

    def _program(
        self, given: Sequence[fx.Node], nodes: Sequence[fx.Node], label: Callable[[fx.Node], Given] | None
    ) -> RecipeProgram:
        """The nodes as a graph of their own, fed by `given`, which `label` describes (or nothing: see `Program`)."""
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in given}
        sizes = dict.fromkeys(
            operand for node in nodes for operand in node.all_input_nodes if is_known_size(operand, self.values)
        )
        env.update({node: graph.placeholder(node.name) for node in sizes})
        for node in nodes:
            env[node] = graph.node_copy(node, lambda operand: env[operand])
        graph.output(env[nodes[-1]])
        for copy in graph.nodes:
            copy.meta = {}  # no FakeTensors
        numbers = tuple(GivenSize(size_of(example(node))) for node in sizes)
        contexts = {env[node]: self.values.contexts[node] for node in nodes if node in self.values.contexts}
        return RecipeProgram(graph, (*map(label, given), *numbers) if label else numbers, contexts)


HOLDERS = ("self", "_modules", "_parameters", "_buffers")


def _readable(source: str) -> str:
    """`L['self']._modules['lm_head']._parameters['weight']` as `lm_head.weight`; names with three underscores are Dynamo's."""
    parts = [first or second for first, second in re.findall(r"\['([^']+)'\]|\.(\w+)", source)]
    return ".".join(part for part in parts if part not in HOLDERS and not part.startswith("___"))
