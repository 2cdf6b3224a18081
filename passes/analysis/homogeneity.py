"""Find the scalar (or per-sequence scalar) in which each gradient is *homogeneous*: scaling the scalar scales the gradient.

Such a gradient can be computed with a scalar of ones before the backward pass, and multiplied by the true one later.

    loss = f(sums)    sums [b]: one per sequence    g = df/dsums [b]    d_hidden[b, t] = g[b] * (d sums[b] / d hidden[b, t])

We call g the cotangent scale (`scale`). A value of a backward graph is homogeneous in g if it depends on tangents through
g alone, every operator from g to the value is linear in the values that depend on g (`linearity.py`), and every operator
keeps each axis of g: row b of the result depends on row b of the operand alone, according to the operator's signature.
Sizes are not compared. An axis that is summed over, mixed, sliced or moved is not kept, and an axis that occurs twice
proves nothing. A scalar has no axes to keep, so sums over all rows, such as a weight's gradient, are homogeneous in it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from streamfx.ir.axis_table import AxisFactor, Dim
from streamfx.ir.facts import AxisFacts, Facts, StorageClass
from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, tensor_operands, trained_values, walk
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.signature import AxisLabel, LabelShape
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.alignment import align
from streamfx.passes.ops.linearity import all_preserve_scale, is_linear


@dataclass(frozen=True)
class RowMask:
    """The rows at which a mask selects the cotangent scale: those whose `condition` equals `when`.

    If no row of a sequence is selected, not even an infinite scale affects the gradient. But the product of a zero
    gradient and an infinite scale would be NaN, so the scale is set to zero there.
    """

    condition: fx.Node
    when: bool


@dataclass(frozen=True)
class Homogeneous:
    """A gradient that equals `scale` times the gradient for a scale of ones.

    `operators` compute the gradient from the scale. If there is a `row_mask`, all paths between them pass through it.
    """

    gradient: fx.Node
    scale: fx.Node
    operators: frozenset[fx.Node]
    row_mask: RowMask | None = None


def homogeneous_gradients(stage: Stage, facts: Facts) -> tuple[Homogeneous, ...]:
    """Pair each gradient that the stage's loops compute with the first cotangent scale in which it is homogeneous.

    A scale is a tangent, or a value without rows that depends on tangents. Return `()` if a gradient has no such scale (for
    example, because it depends on a sum over chunks that is complete only after the forward loop), or if a scale, or a
    gradient outside loops, depends on values that are computed with a scale of ones.
    """
    finder = _HomogeneityFinder(stage, facts)
    homogeneous: list[Homogeneous] = []
    for gradient in stage.gradients:
        if is_tensor(gradient) and not finder.is_outside(gradient):
            candidates = (finder.find_homogeneous(gradient, scale) for scale in finder.scales)
            pair = next((candidate for candidate in candidates if candidate is not None), None)
            if pair is None:
                return ()
            homogeneous.append(pair)
    return tuple(homogeneous) if finder.are_independent(homogeneous) else ()


class _HomogeneityFinder:
    """Finds, for one stage, the cotangent scales and the gradients that are homogeneous in them."""

    def __init__(self, stage: Stage, facts: Facts) -> None:
        """Collect the candidate scales of a stage (a segment of the graph), and sums that its forward loop completes last."""
        self.stage, self.axes, self.storage_classes = stage, facts.axes, facts.access.storage_classes
        self.tangents = set(facts.joint.tangents)
        self.backward_nodes = set(stage.backward)
        self.trained = trained_values(facts.joint)
        self.late_sums = self._late_sums()
        self.scales = tuple(self._scales())

    def _late_sums(self) -> set[fx.Node]:
        """Return the sums of trained values that the forward loop adds up chunk by chunk, and values that depend on them.

        They are complete only after the loop; trained values depend on parameters.
        """
        late_sums: set[fx.Node] = set()
        for node in self.stage.forward:
            is_sum = is_tensor(node) and self.storage_classes.get(node) == (StorageClass.SUM,) and node in self.trained
            if is_sum or any(source in late_sums for source in node.all_input_nodes):
                late_sums.add(node)
        return late_sums

    def _scales(self) -> Iterator[fx.Node]:
        """Yield the candidate scales, in program order: tangents, and floating-point values outside loops that depend on them."""
        scaled: set[fx.Node] = set()
        sources = dict.fromkeys(source for node in self.stage.backward for source in node.all_input_nodes)
        for node in (*(source for source in sources if source in self.tangents), *self.stage.backward):
            if node in self.tangents or any(source in scaled for source in node.all_input_nodes):
                scaled.add(node)
                if is_tensor(node) and node.meta[VALUE].is_floating_point() and self.is_outside(node):
                    yield node

    def is_outside(self, node: fx.Node) -> bool:
        """Return whether a backward value can be computed before the backward loops: neither it nor its operators have rows.

        All inputs of these operators must exist before those loops.
        """
        operators = self._operators_between(node, None)
        inputs = {source for item in operators for source in item.all_input_nodes if source not in operators}
        return self._is_without_rows(node) and all(map(self._is_without_rows, operators)) and all(map(self._is_available, inputs))

    def _is_without_rows(self, node: fx.Node) -> bool:
        """Return whether no result of an operator has sequence rows or is a sum over chunks: loops do not compute it."""
        return all(storage_class is StorageClass.OUTSIDE for storage_class in self.storage_classes.get(node, ()))

    def _is_available(self, node: fx.Node) -> bool:
        """Return whether a value exists before the backward loops: an input, index arithmetic, a scalar or a forward sum."""
        return (
            node.op != "call_function"
            or node in self.axes.static
            or self._is_without_rows(node)
            or self.storage_classes[node] == (StorageClass.SUM,)
        )

    def _operators_between(self, node: fx.Node, scale: fx.Node | None) -> set[fx.Node]:
        """Return the backward operators of the stage that compute `node`; the search backwards stops at `scale`, if given."""

        def followed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            """Return the backward operators among some nodes, without the scale."""
            return [item for item in nodes if item is not scale and item in self.backward_nodes]

        return set(walk(followed([node]), lambda item: followed(item.all_input_nodes)))

    def find_homogeneous(self, gradient: fx.Node, scale: fx.Node) -> Homogeneous | None:
        """Return the gradient with its scale and the operators between them; None unless it is provably homogeneous in it.

        The gradient must depend on tangents through `scale` alone, linearly, and each row of the scale must stay separate.
        """
        operators = self._operators_between(gradient, scale)
        sources = {source for node in operators for source in node.all_input_nodes if source not in operators}
        if scale not in sources or any(source in self.late_sums for source in sources):
            return None
        if any(source in self.tangents and source is not scale for source in sources):
            return None
        ordered = [node for node in self.stage.backward if node in operators]
        if self._waits_for_sums(ordered):
            return None
        scale_axes, gradient_axes = (tuple(map(self.axes.table.resolve, self.axes.shapes[node])) for node in (scale, gradient))
        if align(scale_axes, gradient_axes) is None:
            return None
        path = _LinearPath(scale, gradient, self.axes, self.storage_classes)
        for node in ordered:
            if not path.follow(node):
                return None
        if gradient not in path.scaled or not all(self._is_bottleneck(node, gradient, scale) for node in path.row_masks):
            return None
        return Homogeneous(gradient, scale, frozenset(operators), next(iter(path.row_masks.values()), None))

    def _is_bottleneck(self, row_mask_node: fx.Node, gradient: fx.Node, scale: fx.Node) -> bool:
        """Return whether every path from the scale to the gradient passes through `row_mask_node`."""
        return all(scale not in node.all_input_nodes for node in self._operators_between(gradient, row_mask_node))

    def _waits_for_sums(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether one of these operators (in program order) computes rows from a sum over chunks that they compute.

        Then one loop would have to end before the next starts.
        """
        finished: set[fx.Node] = set()
        for node in nodes:
            waits = any(source in finished for source in node.all_input_nodes)
            if waits and not self._is_without_rows(node):
                return True
            if waits or (is_tensor(node) and self.storage_classes.get(node) == (StorageClass.SUM,)):
                finished.add(node)
        return False

    def are_independent(self, homogeneous: Iterable[Homogeneous]) -> bool:
        """Return whether no scale, and no gradient outside loops, depends on a value between a scale and its gradient.

        Those values are computed with a scale of ones, so they are not the true ones.
        """
        outside_gradients = [node for node in self.stage.gradients if is_tensor(node) and self.is_outside(node)]
        unscaled = {
            node
            for root in (*(pair.scale for pair in homogeneous), *outside_gradients)
            for node in self._operators_between(root, None)
        }
        return all(unscaled.isdisjoint(_scaled_values(pair)) for pair in homogeneous)


def _scaled_values(homogeneous: Homogeneous) -> set[fx.Node]:
    """Return the values that depend on a scale and that its gradient is computed from, except the scale itself."""
    scaled = walk([homogeneous.scale], lambda node: homogeneous.operators.intersection(node.users))
    return set(scaled) - {homogeneous.scale}


class _LinearPath:
    """Follows a scale through linear operators that keep its axes.

    `scaled`: the values that depend on the scale; `factors`: the scale's axis factors; `dtypes`: of scale and gradient.
    `row_masks`: operators such as `where` that select rows of the scale.
    """

    def __init__(
        self, scale: fx.Node, gradient: fx.Node, axes: AxisFacts, storage_classes: Mapping[fx.Node, tuple[StorageClass, ...]]
    ) -> None:
        """Start at the scale; `scaled` is empty if the scale has an axis twice, or a dtype that cannot represent the gradient."""
        self.axes, self.storage_classes, self.scaled = axes, storage_classes, {scale}
        self.dtypes = (scale.meta[VALUE].dtype, gradient.meta[VALUE].dtype)
        self.scale_axes = tuple(map(self._resolved, axes.shapes[scale]))
        self.row_masks: dict[fx.Node, RowMask] = {}
        self.factors: tuple[AxisFactor, ...] = tuple(factor for dim in self.scale_axes for factor in dim)
        if len(set(self.factors)) < len(self.factors) or not all_preserve_scale(scale, *self.dtypes):
            self.scaled.clear()

    def follow(self, node: fx.Node) -> bool:
        """Return whether an operator depends on the scale only linearly and row by row, or not at all.

        If it depends on the scale, add it to `scaled`. Operators must be followed in program order.
        """
        if not any(source in self.scaled for source in node.all_input_nodes):
            return True
        if not all_preserve_scale(node, *self.dtypes):
            return False
        if node.target is operator.getitem:
            self.scaled.add(node)
            return all(self._keeps_rows(node_argument(node), factor, node.args[1]) for factor in self.factors)  # type: ignore[arg-type]
        if not self._is_linear(node):
            return False
        self.scaled.add(node)
        return not is_tensor(node) or all(self._keeps_rows(node, factor, 0) for factor in self.factors)

    def _keeps_rows(self, node: fx.Node, factor: AxisFactor, result_index: int) -> bool:
        """Return whether row i along the axis `factor` of result `result_index` depends only on row i of the scaled operands.

        The operator's signature proves it: one label has this axis, once per tensor, and the operator treats all its rows alike.
        """
        signature = self.axes.signatures.get(node)
        if signature is None:
            return False
        labels = [label for label, dim in self.axes.labels[node].items() if factor in self._resolved(dim)]
        if len(labels) != 1 or self._resolved(self.axes.labels[node][labels[0]]).count(factor) != 1:
            return False
        (label,) = labels
        operands = zip(tensor_operands(node), signature.operands, strict=True)
        shapes = [shape for operand, shape in operands if operand in self.scaled]
        return not signature.is_special(label) and all(
            _count(label, shape) == 1 for shape in (*shapes, signature.results[result_index])
        )

    def _resolved(self, dim: Dim) -> Dim:
        """Return the axis factors of a dimension after unification."""
        return self.axes.table.resolve(dim)

    def _is_linear(self, node: fx.Node) -> bool:
        """Return whether a result is linear in the scaled operands for fixed other operands; record its row mask.

        False if it has a row mask that is not supported.
        """
        if not is_linear(node, self.scaled):
            return False
        row_mask = _find_row_mask(node, self.scaled)
        return row_mask is None or self._record_row_mask(node, row_mask)

    def _record_row_mask(self, node: fx.Node, row_mask: RowMask) -> bool:
        """Record that `node` selects rows of the scale by a mask. Return False if that is not supported.

        The mask must have the scale's dimensions, be known before the loop, and be the only one. A mask that is the same for
        all rows of the scale needs no record.
        """
        condition = row_mask.condition
        condition_axes = tuple(map(self._resolved, self.axes.shapes[condition]))
        if {factor for dim in condition_axes for factor in dim}.isdisjoint(self.factors):  # the same for all rows of the scale
            return True
        scale_dims = [dim for dim in self.scale_axes if dim]
        condition_dims = [dim for dim in condition_axes if not set(dim).isdisjoint(self.factors)]
        is_known_before_loop = condition in self.axes.static and self.storage_classes[condition] in (
            (StorageClass.OUTSIDE,),
            (StorageClass.WHOLE,),
        )
        if condition_dims != scale_dims or not is_known_before_loop or self.row_masks:
            return False
        self.row_masks[node] = row_mask
        return True


def _count(label: AxisLabel, shape: LabelShape) -> int:
    """Return how often an axis label occurs in the dimensions of a value."""
    return sum(item == label for dim in shape for item in dim)


def _find_row_mask(node: fx.Node, scaled: Collection[fx.Node]) -> RowMask | None:
    """Return the mask by which a `where` or `masked_fill` selects its scaled operand; None if it has none, or both are scaled."""
    if not is_kind(node, Kind.WHERE):
        return None
    arguments = bound_arguments(node)
    if "mask" in arguments:  # of `masked_fill`
        return RowMask(arguments["mask"], when=False)
    is_self_scaled, is_other_scaled = arguments["self"] in scaled, arguments["other"] in scaled
    return None if is_self_scaled and is_other_scaled else RowMask(arguments["condition"], when=is_self_scaled)
