"""Find the scalar (or per-sequence scalar) in which each gradient is homogeneous.

    loss = f(sums)    sums [b]: one per sequence    g = df/dsums [b]    d_hidden[b, t] = g[b] * (d sums[b] / d hidden[b, t])

We call g the cotangent scale (`driver`). A value of a backward subgraph is driven by an earlier value g if it depends
on the tangents through g alone. It is a multiple of g if every operator between them is linear in the values that g
drives (`linearity.py`) and keeps each axis of g: row b of the result depends on row b of the operand alone, according
to the operators' signatures. Sizes are not compared: an axis that is summed over, mixed, sliced or moved is not kept,
and one that occurs twice proves nothing. A scalar has no axes to keep, so sums over all rows (a weight's gradient)
are multiples of it, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.facts import AxisFacts, Facts, StorageClass
from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, tensor_operands, trained_values
from streamfx.ir.signature import Letter, LetterShape
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.alignment import aligned
from streamfx.passes.ops.linearity import all_carry, is_linear

aten = torch.ops.aten


@dataclass(frozen=True)
class RowMask:
    """Rows of a cotangent scale that are used if `condition` equals `when`, as selected by a mask.

    If no row of a sequence is used, even an infinite scale does not reach the gradient; zero times infinity would be
    NaN.
    """

    condition: fx.Node
    when: bool


@dataclass(frozen=True)
class Homogeneous:
    """A gradient that equals `driver` times its value for a driver of ones; `between` are the operators on the way.

    All driven values pass through the selection, if there is one.
    """

    gradient: fx.Node
    driver: fx.Node
    between: frozenset[fx.Node]
    selection: RowMask | None = None


def multiples(stage: Stage, facts: Facts) -> tuple[Homogeneous, ...]:
    """Return all gradients of a stage that loops compute, as multiples of scales that are known after the forward
    graph.

    No finished sum of the forward graph may lie between the scale and the gradient: it would take a second pass.
    Return an empty tuple if any gradient is not such a multiple.
    """
    finder = _MultipleFinder(stage, facts)
    multiples_found: list[Homogeneous] = []
    for gradient in stage.gradients:
        if is_tensor(gradient) and not finder.is_outside(gradient):
            multiple = next((m for driver in finder.drivers if (m := finder.multiple(gradient, driver)) is not None), None)
            if multiple is None:
                return ()
            multiples_found.append(multiple)
    return tuple(multiples_found) if finder.are_independent(multiples_found) else ()


class _MultipleFinder:
    """Finds, for one stage, the cotangent scales (drivers) and the gradients that are multiples of them."""

    def __init__(self, stage: Stage, facts: Facts) -> None:
        """Collect the late sums and the candidate drivers of a stage."""
        self.stage, self.axes, self.storage_classes, self.tangents = (
            stage,
            facts.axes,
            facts.access.storage_classes,
            set(facts.joint.tangents),
        )
        self.backward_nodes = set(stage.backward)
        self.trained = trained_values(facts.joint)
        self.late = self._late_sums()
        self.drivers = tuple(self._drivers())

    def _late_sums(self) -> set[fx.Node]:
        """Return sums of trained values, complete only after the loop of the forward subgraph, and values computed
        from them.
        """
        late: set[fx.Node] = set()
        for node in self.stage.forward:
            is_sum = is_tensor(node) and self.storage_classes.get(node) == (StorageClass.SUM,) and node in self.trained
            if is_sum or any(source in late for source in node.all_input_nodes):
                late.add(node)
        return late

    def _drivers(self) -> Iterator[fx.Node]:
        """Yield the tangents, and the values outside of loops that they drive, in program order."""
        driven: set[fx.Node] = set()
        sources = dict.fromkeys(source for node in self.stage.backward for source in node.all_input_nodes)
        for node in (*(source for source in sources if source in self.tangents), *self.stage.backward):
            if node in self.tangents or any(source in driven for source in node.all_input_nodes):
                driven.add(node)
                if is_tensor(node) and node.meta[VALUE].is_floating_point() and self.is_outside(node):
                    yield node

    def is_outside(self, node: fx.Node) -> bool:
        """Return whether a value has no rows and is computed, without a loop, from values that the forward graph leaves."""
        operators = self._between(node, None)
        inputs = {source for item in operators for source in item.all_input_nodes if source not in operators}
        return self._is_scalar(node) and all(map(self._is_scalar, operators)) and all(map(self._is_available, inputs))

    def _is_scalar(self, node: fx.Node) -> bool:
        """Return whether no result of an operator has sequence rows."""
        return all(storage_class is StorageClass.OUTSIDE for storage_class in self.storage_classes.get(node, ()))

    def _is_available(self, node: fx.Node) -> bool:
        """Return whether a value exists before the backward loops: an input, a static value, a scalar or a sum."""
        return (
            node.op != "call_function"
            or node in self.axes.static
            or self._is_scalar(node)
            or self.storage_classes[node] == (StorageClass.SUM,)
        )

    def _between(self, node: fx.Node, driver: fx.Node | None) -> set[fx.Node]:
        """Return the operators of the backward subgraph that compute a value, back to the driver."""
        operators: set[fx.Node] = set()
        todo = [node]
        while todo:
            item = todo.pop()
            if item is not driver and item in self.backward_nodes and item not in operators:
                operators.add(item)
                todo.extend(item.all_input_nodes)
        return operators

    def multiple(self, gradient: fx.Node, driver: fx.Node) -> Homogeneous | None:
        """Return the gradient as a multiple of the driver, or None if it is not provably one."""
        between = self._between(gradient, driver)
        sources = {source for node in between for source in node.all_input_nodes if source not in between}
        if driver not in sources or any(source in self.late for source in sources):
            return None
        if any(source in self.tangents and source is not driver for source in sources):
            return None
        ordered = [node for node in self.stage.backward if node in between]
        if self._waits_for_sums(ordered):
            return None
        driver_shape, gradient_shape = (
            tuple(map(self.axes.table.resolve, self.axes.shapes[node])) for node in (driver, gradient)
        )
        if aligned(driver_shape, gradient_shape) is None:
            return None
        path = _LinearPath(driver, gradient, self.axes, self.storage_classes)
        for node in ordered:
            if not path.through(node):
                return None
        if gradient not in path.driven or not all(self._is_bottleneck(node, gradient, driver) for node in path.selections):
            return None
        return Homogeneous(gradient, driver, frozenset(between), next(iter(path.selections.values()), None))

    def _is_bottleneck(self, selecting: fx.Node, gradient: fx.Node, driver: fx.Node) -> bool:
        """Return whether every path from the driver to the gradient passes through `selecting`."""
        return all(driver not in node.all_input_nodes for node in self._between(gradient, selecting))

    def _waits_for_sums(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether rows depend on a sum over rows that these operators compute themselves."""
        finished: set[fx.Node] = set()
        for node in nodes:
            waits = any(source in finished for source in node.all_input_nodes)
            if waits and not self._is_scalar(node):
                return True
            if waits or (is_tensor(node) and self.storage_classes.get(node) == (StorageClass.SUM,)):
                finished.add(node)
        return False

    def are_independent(self, multiples_found: Iterable[Homogeneous]) -> bool:
        """Return whether no driver, and no gradient outside of loops, depends on values that are rescaled (driven by
        ones).
        """
        outside_gradients = [node for node in self.stage.gradients if is_tensor(node) and self.is_outside(node)]
        unscaled = {
            node for root in (*(m.driver for m in multiples_found), *outside_gradients) for node in self._between(root, None)
        }
        return all(unscaled.isdisjoint(_driven_values(m)) for m in multiples_found)


def _driven_values(multiple: Homogeneous) -> set[fx.Node]:
    """Return the values between a driver and its gradient that depend on the driver, without the driver."""
    driven: set[fx.Node] = {multiple.driver}
    todo = [multiple.driver]
    while todo:
        users = [user for user in todo.pop().users if user in multiple.between and user not in driven]
        driven.update(users)
        todo.extend(users)
    return driven - {multiple.driver}


class _LinearPath:
    """Follows a driver through linear operators that keep its axes."""

    def __init__(
        self, driver: fx.Node, gradient: fx.Node, axes: AxisFacts, storage_classes: Mapping[fx.Node, tuple[StorageClass, ...]]
    ) -> None:
        """Start with the driver alone; with none if it has an axis twice, or a dtype that loses its numbers."""
        self.axes, self.storage_classes, self.driven = axes, storage_classes, {driver}
        self.types = (driver.meta[VALUE].dtype, gradient.meta[VALUE].dtype)
        self.shape = tuple(map(self._resolved, axes.shapes[driver]))
        self.selections: dict[fx.Node, RowMask] = {}
        self.atoms: tuple[Atom, ...] = tuple(atom for dim in self.shape for atom in dim)
        if len(set(self.atoms)) < len(self.atoms) or not all_carry(driver, *self.types):
            self.driven.clear()

    def through(self, node: fx.Node) -> bool:
        """Return whether an operator depends on the driver only linearly and row by row; if so, mark it as driven."""
        if not any(source in self.driven for source in node.all_input_nodes):
            return True
        if not all_carry(node, *self.types):
            return False
        if node.target is operator.getitem:
            self.driven.add(node)
            return all(self._keeps_rows(node_argument(node), atom, node.args[1]) for atom in self.atoms)  # type: ignore[arg-type]
        if not self._is_linear_and_record_selection(node):
            return False
        self.driven.add(node)
        return not is_tensor(node) or all(self._keeps_rows(node, atom, 0) for atom in self.atoms)

    def _keeps_rows(self, node: fx.Node, atom: Atom, result: int) -> bool:
        """Return whether rows of a result along an axis depend only on the same rows of the driven operands."""
        signature = self.axes.signatures.get(node)
        if signature is None:
            return False
        letters = [letter for letter, dim in self.axes.letters[node].items() if atom in self._resolved(dim)]
        if len(letters) != 1 or self._resolved(self.axes.letters[node][letters[0]]).count(atom) != 1:
            return False
        (letter,) = letters
        operands = zip(tensor_operands(node), signature.operands, strict=True)
        shapes = [shape for operand, shape in operands if operand in self.driven]
        return not signature.is_special(letter) and all(
            _count(letter, shape) == 1 for shape in (*shapes, signature.results[result])
        )

    def _resolved(self, dim: Dim) -> Dim:
        """Return the axis factors of a dimension after unification."""
        return self.axes.table.resolve(dim)

    def _is_linear_and_record_selection(self, node: fx.Node) -> bool:
        """Return whether a result is linear in the driven operands while all others are fixed, and its row selection
        is known.
        """
        if not is_linear(node, self.driven):
            return False
        if node.target in SELECTIONS:
            condition, when = SELECTIONS[node.target](bound_arguments(node), self.driven)
            return when is None or self._record_selection(node, RowMask(condition, when))
        return True

    def _record_selection(self, node: fx.Node, selection: RowMask) -> bool:
        """Return whether the rows of the driver that are not used can be determined beforehand."""
        condition = selection.condition
        shape = tuple(map(self._resolved, self.axes.shapes[condition]))
        if {atom for dim in shape for atom in dim}.isdisjoint(self.atoms):  # the same for all rows of the driver
            return True
        driver_dims = [dim for dim in self.shape if dim]
        condition_dims = [dim for dim in shape if not set(dim).isdisjoint(self.atoms)]
        is_known_before_loop = condition in self.axes.static and self.storage_classes[condition] in (
            (StorageClass.OUTSIDE,),
            (StorageClass.WHOLE,),
        )
        if condition_dims != driver_dims or not is_known_before_loop or self.selections:
            return False
        self.selections[node] = selection
        return True


def _count(letter: Letter, shape: LetterShape) -> int:
    """Return how often a label occurs in the dimensions of a value."""
    return sum(item == letter for dim in shape for item in dim)


def _selection_of_where(arguments: dict[str, Any], driven: Collection[fx.Node]) -> tuple[fx.Node, bool | None]:
    """Return the condition of a `where`, and its value for the driven operand; None if both operands are driven."""
    is_self_driven, is_other_driven = arguments["self"] in driven, arguments["other"] in driven
    return arguments["condition"], None if is_self_driven and is_other_driven else is_self_driven


def _selection_of_fill(arguments: dict[str, Any], driven: Collection[fx.Node]) -> tuple[fx.Node, bool | None]:
    """Return the mask of a `masked_fill`, and False: the driven operand is used if the mask is False."""
    return arguments["mask"], False


SELECTIONS: dict[Any, Callable[[dict[str, Any], Collection[fx.Node]], tuple[fx.Node, bool | None]]] = {
    aten.where.self: _selection_of_where,
    aten.masked_fill.Scalar: _selection_of_fill,
}
