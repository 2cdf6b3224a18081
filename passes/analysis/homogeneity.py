"""Of which number, or of which number per sequence, is a gradient a multiple?

    loss = f(sums)    sums [b]: one per sequence    g = df/dsums [b]    d_hidden[b, t] = g[b] * (d sums[b] / d hidden[b, t])

A value of a backward stretch is driven by a value g in front of it if it depends on the tangents through g alone. It is a
multiple of g if every operator between them is linear in what g drives (`linearity.py`), and keeps each axis of g: row b of the
result depends on row b of the operand alone, as the operators' signatures say. No size is looked at: an axis that was summed
over, mixed, cut or moved is not kept, and one that occurs twice says nothing. A plain number has no axes to keep, so that sums
over all rows (a weight's gradient) are multiples of it, too.
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
    """Rows of a driver that go on where `condition` is `when`, as those that a mask leaves.

    Where no row of a sequence goes on, not even a driver that is infinite reaches the gradient; zero times that is no number.
    """

    condition: fx.Node
    when: bool


@dataclass(frozen=True)
class Homogeneous:
    """A gradient that is `driver` times what it is for a driver of ones; `between` are the operators from one to the other.

    All that is driven passes through the selection, if there is one.
    """

    gradient: fx.Node
    driver: fx.Node
    between: frozenset[fx.Node]
    selection: RowMask | None = None


def multiples(stage: Stage, facts: Facts) -> tuple[Homogeneous, ...]:
    """All gradients of a stage that are made in loops, as multiples of what is known once the forward half is through.

    Between driver and gradient there is no finished sum of the forward half: it would take a second pass. Empty where one
    gradient is no such multiple.
    """
    finder = _Finder(stage, facts)
    found: list[Homogeneous] = []
    for gradient in stage.gradients:
        if is_tensor(gradient) and not finder.is_outside(gradient):
            multiple = next((m for driver in finder.drivers if (m := finder.multiple(gradient, driver)) is not None), None)
            if multiple is None:
                return ()
            found.append(multiple)
    return tuple(found) if finder.are_apart(found) else ()


class _Finder:
    def __init__(self, stage: Stage, facts: Facts) -> None:
        self.stage, self.axes, self.forms, self.tangents = stage, facts.axes, facts.demand.forms, set(facts.joint.tangents)
        self.own = set(stage.backward)
        self.trained = trained_values(facts.joint)
        self.late = self._late()
        self.drivers = tuple(self._drivers())

    def _late(self) -> set[fx.Node]:
        """Sums of what is trained, finished when the loop of the forward stretch is through, and what is made of them."""
        late: set[fx.Node] = set()
        for node in self.stage.forward:
            is_sum = is_tensor(node) and self.forms.get(node) == (StorageClass.SUM,) and node in self.trained
            if is_sum or any(source in late for source in node.all_input_nodes):
                late.add(node)
        return late

    def _drivers(self) -> Iterator[fx.Node]:
        """Tangents, and what they drive outside of loops, the first one first."""
        driven: set[fx.Node] = set()
        sources = dict.fromkeys(source for node in self.stage.backward for source in node.all_input_nodes)
        for node in (*(source for source in sources if source in self.tangents), *self.stage.backward):
            if node in self.tangents or any(source in driven for source in node.all_input_nodes):
                driven.add(node)
                if is_tensor(node) and node.meta[VALUE].is_floating_point() and self.is_outside(node):
                    yield node

    def is_outside(self, node: fx.Node) -> bool:
        """Whether a value has no rows and is made, without a loop, of what the forward half leaves behind."""
        made = self._between(node, None)
        given = {source for item in made for source in item.all_input_nodes if source not in made}
        return self._is_scalar(node) and all(map(self._is_scalar, made)) and all(map(self._is_left_behind, given))

    def _is_scalar(self, node: fx.Node) -> bool:
        return all(form is StorageClass.SCALAR for form in self.forms.get(node, ()))

    def _is_left_behind(self, node: fx.Node) -> bool:
        return (
            node.op != "call_function"
            or node in self.axes.static
            or self._is_scalar(node)
            or self.forms[node] == (StorageClass.SUM,)
        )

    def _between(self, node: fx.Node, driver: fx.Node | None) -> set[fx.Node]:
        """The stretch's operators that a value is made by, back to the driver."""
        found: set[fx.Node] = set()
        todo = [node]
        while todo:
            item = todo.pop()
            if item is not driver and item in self.own and item not in found:
                found.add(item)
                todo.extend(item.all_input_nodes)
        return found

    def multiple(self, gradient: fx.Node, driver: fx.Node) -> Homogeneous | None:
        between = self._between(gradient, driver)
        sources = {source for node in between for source in node.all_input_nodes if source not in between}
        if driver not in sources or any(source in self.late for source in sources):
            return None
        if any(source in self.tangents and source is not driver for source in sources):
            return None
        ordered = [node for node in self.stage.backward if node in between]
        if self._waits_for_sums(ordered):
            return None
        own, wanted = (tuple(map(self.axes.table.resolve, self.axes.shapes[node])) for node in (driver, gradient))
        if aligned(own, wanted) is None:
            return None
        is_kept = _LinearPath(driver, gradient, self.axes, self.forms)
        for node in ordered:
            if not is_kept.through(node):
                return None
        if gradient not in is_kept.driven or not all(self._is_passed(node, gradient, driver) for node in is_kept.selections):
            return None
        return Homogeneous(gradient, driver, frozenset(between), next(iter(is_kept.selections.values()), None))

    def _is_passed(self, selecting: fx.Node, gradient: fx.Node, driver: fx.Node) -> bool:
        """Whether a driver reaches a gradient through an operator that selects rows in no other way."""
        return all(driver not in node.all_input_nodes for node in self._between(gradient, selecting))

    def _waits_for_sums(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether rows are made of a sum over rows that these operators make themselves."""
        finished: set[fx.Node] = set()
        for node in nodes:
            waits = any(source in finished for source in node.all_input_nodes)
            if waits and not self._is_scalar(node):
                return True
            if waits or (is_tensor(node) and self.forms.get(node) == (StorageClass.SUM,)):
                finished.add(node)
        return False

    def are_apart(self, found: Iterable[Homogeneous]) -> bool:
        """Whether no driver, and no value that stays behind, is made of what is driven by ones from now on."""
        staying = [node for node in self.stage.gradients if is_tensor(node) and self.is_outside(node)]
        behind = {node for root in (*(m.driver for m in found), *staying) for node in self._between(root, None)}
        return all(behind.isdisjoint(_driven(m)) for m in found)


def _driven(multiple: Homogeneous) -> set[fx.Node]:
    found: set[fx.Node] = {multiple.driver}
    todo = [multiple.driver]
    while todo:
        users = [user for user in todo.pop().users if user in multiple.between and user not in found]
        found.update(users)
        todo.extend(users)
    return found - {multiple.driver}


class _LinearPath:
    """Follows what a driver drives through linear operators that keep its axes."""

    def __init__(
        self, driver: fx.Node, gradient: fx.Node, axes: AxisFacts, forms: Mapping[fx.Node, tuple[StorageClass, ...]]
    ) -> None:
        self.axes, self.forms, self.driven = axes, forms, {driver}
        self.types = (driver.meta[VALUE].dtype, gradient.meta[VALUE].dtype)
        self.shape = tuple(map(self._resolved, axes.shapes[driver]))
        self.selections: dict[fx.Node, RowMask] = {}
        self.atoms: tuple[Atom, ...] = tuple(atom for dim in self.shape for atom in dim)
        if len(set(self.atoms)) < len(self.atoms) or not all_carry(driver, *self.types):
            self.driven.clear()

    def through(self, node: fx.Node) -> bool:
        """Whether an operator is driven in no other way than linearly, row by row; remembers that it is driven."""
        if not any(source in self.driven for source in node.all_input_nodes):
            return True
        if not all_carry(node, *self.types):
            return False
        if node.target is operator.getitem:
            self.driven.add(node)
            return all(self._keeps(node_argument(node), atom, node.args[1]) for atom in self.atoms)  # type: ignore[arg-type]
        if not self._is_linear(node):
            return False
        self.driven.add(node)
        return not is_tensor(node) or all(self._keeps(node, atom, 0) for atom in self.atoms)

    def _keeps(self, node: fx.Node, atom: Atom, result: int) -> bool:
        """Whether rows of a result along an axis are made of the same rows of the driven operands."""
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
        return self.axes.table.resolve(dim)

    def _is_linear(self, node: fx.Node) -> bool:
        """Whether a result is linear in the driven operands, all others being fixed, and it is known what it leaves out."""
        if not is_linear(node, self.driven):
            return False
        if node.target in LEAVES_OUT:
            condition, when = LEAVES_OUT[node.target](bound_arguments(node), self.driven)
            return when is None or self._may_select(node, RowMask(condition, when))
        return True

    def _may_select(self, node: fx.Node, selection: RowMask) -> bool:
        """Whether it can be told beforehand of which rows of the driver nothing goes on."""
        condition = selection.condition
        shape = tuple(map(self._resolved, self.axes.shapes[condition]))
        if {atom for dim in shape for atom in dim}.isdisjoint(self.atoms):  # the same for all rows of the driver
            return True
        wide = [dim for dim in self.shape if dim]
        along = [dim for dim in shape if not set(dim).isdisjoint(self.atoms)]
        is_outside = condition in self.axes.static and self.forms[condition] in ((StorageClass.SCALAR,), (StorageClass.WHOLE,))
        if along != wide or not is_outside or self.selections:
            return False
        self.selections[node] = selection
        return True


def _count(letter: Letter, shape: LetterShape) -> int:
    return sum(item == letter for dim in shape for item in dim)


def _taken_of_where(arguments: dict[str, Any], driven: Collection[fx.Node]) -> tuple[fx.Node, bool | None]:
    """The condition, and where it has to be what for the driven operand to go on; None where both are driven."""
    yes, no = arguments["self"] in driven, arguments["other"] in driven
    return arguments["condition"], None if yes and no else yes


def _taken_of_fill(arguments: dict[str, Any], driven: Collection[fx.Node]) -> tuple[fx.Node, bool | None]:
    return arguments["mask"], False


LEAVES_OUT: dict[Any, Callable[[dict[str, Any], Collection[fx.Node]], tuple[fx.Node, bool | None]]] = {
    aten.where.self: _taken_of_where,
    aten.masked_fill.Scalar: _taken_of_fill,
}
