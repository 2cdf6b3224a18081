"""Facts about masks: index arithmetic, evaluated over intervals of delta = key position - query position.

A fact is the `Range` [low, high] of a value's elements, or a `Slope` (factor * delta + offset); `Pieces` has one per interval
of delta: a causal mask is -inf for delta > 0, and 0 elsewhere. `rows` are query positions. A *pattern* is the same for a
constant buffer, by column - row. Score facts decide which keys a softmax ignores (*hidden* keys).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import AccessFacts, AxisFacts, Role
from streamfx.ir.joint import (
    JointGraph,
    bound_arguments,
    is_tensor,
    node_argument,
    shape_of_node,
    tensor_operands,
    trained_sources,
)
from streamfx.ir.operator_table import MOVES_ELEMENTS, Kind, of_kind
from streamfx.ir.piecewise import Fact, Pieces, Slope, combine_pieces, compare_slope, constant_pieces, hull_of
from streamfx.ir.ranges import (
    HIDDEN_SCORE,
    HIDDEN_SCORE_HALF,
    INFINITY,
    VISIBLE_SCORE,
    VISIBLE_SCORE_HALF,
    Range,
    constant,
    full_range,
    is_exact_in,
)
from streamfx.node_meta import PATTERN, VALUE
from streamfx.passes.analysis.affine import LINEAR_COMBINATIONS, Positions, linear_combination
from streamfx.passes.analysis.fused_scores import scores_of
from streamfx.passes.analysis.mask_eval import COMPARISONS, Intervals, keeps_last_two_dims, reach_of
from streamfx.passes.ops.ranges import TRANSFERS, ValueRanges
from streamfx.passes.ops.ranges.arithmetic import plus
from streamfx.passes.ops.ranges.transfer import computation_dtype
from streamfx.passes.ops.rules.attention import M, N
from streamfx.passes.ops.rules.registry import broadcast, rule_for
from streamfx.passes.ops.traits import is_random

aten = torch.ops.aten

FUSED = (ATTENTION, ATTENTION_BACKWARD)
# operators that reduce dimensions other than rows and keys: the ranges of an interval determine the range of the result
REDUCES_OTHERS = of_kind(Kind.SUM, Kind.ADDMM) | {aten._softmax_backward_data.default}


class Masks:
    """Facts about every value with rows and keys, collected in program order."""

    def __init__(self, joint: JointGraph, axes: AxisFacts, access: AccessFacts) -> None:
        """Visit all values of the graph, and record their facts; `access` says which dimensions are rows and which keys."""
        self._axes = axes
        self._access = access
        self._pieces: dict[fx.Node, Pieces] = {}
        self.values = ValueRanges(trained_sources(joint))
        self._positions = Positions(self.values)
        self._intervals = Intervals(reach_of(axes), self.values.of)
        self._patterns: dict[fx.Node, Pieces] = {
            node: pieces for node in joint.sources if (pieces := node.meta.get(PATTERN)) is not None and pieces.bounds
        }
        for node in joint.nodes:
            if is_tensor(node):
                self._find_facts(node)
            elif node.target is aten.max.dim:
                self._record_maximum(node)

    def _find_facts(self, node: fx.Node) -> None:
        """Find and record the facts about one value: its affine form, its pattern, and its facts per interval of delta."""
        if node in self._axes.static:
            self._positions.find(node)
        self._propagate_pattern(node)
        if self._is_pair(node):
            self._pieces[node] = self._facts_by_interval(node)
            self.values.note(node, hull_of(self._pieces[node], reach_of(self._axes)))
        elif node.target in (aten.amax.default, aten.logsumexp.default):
            self._record_maximum(node)

    def of(self, node: fx.Node) -> Pieces:
        """Return the facts about a value with rows and keys, per interval of delta; of other values, their range."""
        return self._pieces.get(node, constant_pieces(self.values.of(node)))

    def fused_bias(self, node: fx.Node) -> Pieces | None:
        """Return the facts about what a fused attention adds to its scores, per interval of delta: mask and causal flag."""
        arguments = bound_arguments(node)
        mask = arguments.get("attn_mask")
        bias = constant_pieces(constant(0)) if mask is None else self._operand_facts(mask, node)
        if arguments.get("is_causal"):
            distance = self._index_distance(node)
            if distance is None:
                return constant_pieces(full_range(torch.float64))
            hidden = Pieces((distance + 1,), (constant(0), constant(-INFINITY)))
            bias = combine_pieces(lambda a, b: constant_pieces(b if b == constant(-INFINITY) else a), bias, hidden)
        return bias

    def _index_distance(self, node: fx.Node) -> int | None:
        """Return delta between key i and query i of a fused attention (`is_causal` compares indices i); None if unknown."""
        sequence, factors = self._axes.sequence, self.index_axes(node)
        if sequence is None or factors is None:
            return None
        key, query = (sequence.members[factor].offset for factor in factors)
        return key - query if isinstance(key - query, int) else None

    def index_axes(self, node: fx.Node) -> tuple[AxisFactor, AxisFactor] | None:
        """Return the axes of (keys, queries) of a fused attention; None unless indices along both are row indices."""
        keys, queries = (self._axes.row_axis(self._axes.labels[node][label]) for label in (N, M))
        return None if keys is None or queries is None else (keys, queries)

    # -- values with rows and keys

    def _is_pair(self, node: fx.Node) -> bool:
        """Return whether a value has two sequence dimensions: query positions and key positions."""
        return len(self._axes.sequence_dims(self._axes.shapes[node])) == 2

    def _facts_by_interval(self, node: fx.Node) -> Pieces:
        """Return the facts about a value with rows and keys: by interval of delta if a rule exists, else its range."""
        target = node.target
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, node)
        if target in MOVES_ELEMENTS:
            source = node_argument(node)
            keeps_roles = self._is_pair(source) or not self._dims(source)
            return self._operand_facts(source, node) if keeps_roles else self._range_of_all(node)
        if target in REDUCES_OTHERS or self._is_elementwise(node):
            return self._evaluate(node)
        return self._range_of_all(node)

    def _range_of_all(self, node: fx.Node) -> Pieces:
        """Return the range of a value's elements as one fact for every delta."""
        return constant_pieces(self.values.of(node))

    def _is_elementwise(self, node: fx.Node) -> bool:
        """Return whether each element of the result depends on the elements at its own position alone."""
        row = TRANSFERS.get(node.target)
        return row is not None and row.elementwise and rule_for(node) is broadcast and not is_random(node)

    def _evaluate(self, node: fx.Node, result: int = 0) -> Pieces:
        """Evaluate an operator on each interval of delta on which its operands have one fact; `result`: which result."""
        relative = self._compare_positions(node)
        if relative is not None:
            return relative
        operands = list(dict.fromkeys(tensor_operands(node)))
        pieces = [self._operand_facts(operand, node) for operand in operands]
        return combine_pieces(
            lambda *facts: self._intervals.evaluate(node, dict(zip(operands, facts, strict=True)), result), *pieces
        )

    def _dropout_result(self, node: fx.Node) -> Pieces:
        """Return the facts about an item of a tuple: a result of dropout by interval; of other operators, the range."""
        producer = node_argument(node)
        if producer.target is aten.native_dropout.default and isinstance(node.args[1], int):
            return self._evaluate(producer, node.args[1])
        return self._range_of_all(node)

    def _one_tap_convolution(self, node: fx.Node) -> Pieces:
        """Return the facts about a convolution: by interval if its kernel has one tap, so that it only mixes heads."""
        taps = shape_of_node(node_argument(node, 1))[2:]
        return self._evaluate(node) if all(size == 1 for size in taps) else self._range_of_all(node)

    def _padded_facts(self, node: fx.Node) -> Pieces:
        """Return the facts about a padded value: by interval unless rows or keys are padded, which would shift delta."""
        source, signature = node_argument(node), self._axes.signatures.get(node)
        is_shifted = signature is None or any(label in signature.windows for label in self._access.roles.get(node, {}))
        return self._range_of_all(node) if is_shifted or not self._is_pair(source) else self._evaluate(node)

    # -- buffers that hold a mask, as patterns of column - row in their last two dimensions

    def _propagate_pattern(self, node: fx.Node) -> None:
        """Record the pattern of a node with one operand, which has a pattern: same for a view, evaluated if elementwise."""
        operands = tensor_operands(node) if self._patterns else ()
        if len(operands) != 1 or operands[0] not in self._patterns:
            return
        (source,) = operands
        if keeps_last_two_dims(node, source):
            self._patterns[node] = self._patterns[source]
        elif (row := TRANSFERS.get(node.target)) is not None and row.elementwise:
            self._patterns[node] = combine_pieces(
                lambda fact: self._intervals.evaluate(node, {source: fact}), self._patterns[source]
            )

    def _facts_from_pattern(self, operand: fx.Node, user: fx.Node) -> Pieces:
        """Return a buffer's pattern (facts by column - row) as facts by delta; `user` decides which are keys."""
        roles = self._operand_roles(operand, user)
        keys_last = roles[-2:] == [Role.ROWS, Role.KEYS]
        delta_at_origin = self._pattern_delta_at_origin(operand, keys_last)
        if (not keys_last and roles[-2:] != [Role.KEYS, Role.ROWS]) or delta_at_origin is None:
            return constant_pieces(self.values.of(operand))
        pattern = self._patterns[operand]
        if not keys_last:  # the buffer's column - row is -delta
            pattern = Pieces(tuple(1 - bound for bound in reversed(pattern.bounds)), tuple(reversed(pattern.facts)))
        return Pieces(tuple(bound + delta_at_origin for bound in pattern.bounds), pattern.facts)

    def _operand_roles(self, operand: fx.Node, user: fx.Node) -> list[Role | None]:
        """Return the role (rows, keys, or None) of each dimension of an operand for its user; `[]` if unknown."""
        roles, signature = self._access.roles.get(user, {}), self._axes.signatures.get(user)
        if signature is None:
            return []
        labels = signature.operands[tensor_operands(user).index(operand)]
        return [next((roles[label] for label in dim if label in roles), None) for dim in labels]

    def _pattern_delta_at_origin(self, node: fx.Node, keys_last: bool) -> int | None:
        """Return delta at index (0, 0) of a buffer's last two dimensions; `keys_last`: rows, keys. None if unknown."""
        rank = len(shape_of_node(node))
        last, before = self._offset(node, rank - 1), self._offset(node, rank - 2)
        keys, rows = (last, before) if keys_last else (before, last)
        return keys - rows if isinstance(keys, int) and isinstance(rows, int) else None

    def _dims(self, node: fx.Node) -> tuple[int, ...]:
        """Return the dimensions of a value that contain the sequence."""
        return self._axes.sequence_dims(self._axes.shapes[node])

    def _operand_facts(self, operand: fx.Node, user: fx.Node) -> Pieces:
        """Return the facts about an operand per interval of delta; its range if `user` has its rows and keys exchanged."""
        if operand in self._patterns:
            return self._facts_from_pattern(operand, user)
        facts = self._pieces.get(operand)
        if facts is None or (facts.bounds and not self._roles_agree(operand, user)):
            return constant_pieces(self.values.of(operand))
        return facts

    def _roles_agree(self, operand: fx.Node, user: fx.Node) -> bool:
        """Return whether an operand's user and producer assign the same roles to it; else delta changes its sign."""
        producer = node_argument(operand) if operand.target is operator.getitem else operand
        producer_roles, user_roles = self._roles_by_dim(producer), self._operand_roles(operand, user)
        return producer_roles == {i: role for i, role in enumerate(user_roles) if role is not None}

    def _roles_by_dim(self, node: fx.Node) -> dict[int, Role]:
        """Return the role of each sequence dimension of an operator's first result."""
        roles = self._access.roles.get(node, {})
        labels = self._axes.signatures[node].results[0] if node in self._axes.signatures else ()
        return {i: roles[label] for i, dim in enumerate(labels) for label in dim if label in roles}

    def _slice_facts(self, node: fx.Node) -> Pieces:
        """Return the facts about a slice of a mask (rows by keys), or of a table with more rows than the sequence."""
        source = node_argument(node)
        if source in self._pieces or self._is_pair(source):
            return self._mask_slice_facts(node, source)
        return self._operand_facts(source, node)  # sliced from a table

    def _mask_slice_facts(self, node: fx.Node, source: fx.Node) -> Pieces:
        """Return the facts about a slice of a mask: the mask's if it starts at row 0; else the range, since delta shifts."""
        signature = self._axes.signatures.get(node)
        starts = [window.start for window in signature.windows.values()] if signature is not None else [None]
        source_facts = self.of(source) if source in self._pieces else self._operand_facts(source, node)
        return source_facts if all(start == 0 for start in starts) else self._range_of_all(node)

    def _triangle_facts(self, node: fx.Node) -> Pieces:
        """Return the facts about `tril` and `triu`: the operand's inside the triangle, zero outside."""
        arguments, roles = bound_arguments(node), self._roles_by_dim(node)
        source, diagonal, rank = arguments["self"], arguments["diagonal"], len(shape_of_node(node))
        last_role, other_role = roles.get(rank - 1), roles.get(rank - 2)
        delta_at_origin = self._delta_at_origin(node)
        if not isinstance(diagonal, int) or delta_at_origin is None or {last_role, other_role} != {Role.ROWS, Role.KEYS}:
            return self._range_of_all(node)
        sign = 1 if last_role is Role.KEYS else -1  # column - row = sign * (delta - delta_at_origin)
        relation = "le" if node.target is aten.tril.default else "ge"
        inside = compare_slope(relation, Slope(sign, -sign * delta_at_origin), diagonal)
        facts = self._operand_facts(source, node)
        return combine_pieces(lambda keep, fact: constant_pieces(fact if keep == constant(True) else constant(0)), inside, facts)

    def _delta_at_origin(self, node: fx.Node) -> int | None:
        """Return delta at row 0 and key 0 of a value: the offset of its key axis less that of its row axis; None if unknown."""
        offsets = {role: self._offset(node, dim) for dim, role in self._roles_by_dim(node).items()}
        keys, rows = offsets.get(Role.KEYS), offsets.get(Role.ROWS)
        return keys - rows if isinstance(keys, int) and isinstance(rows, int) else None

    def _offset(self, node: fx.Node, dim: int) -> Any:
        """Return which row of the sequence index 0 of a dimension is; None if the dimension is not an axis of its rows."""
        sequence, factor = self._axes.sequence, self._axes.row_axis(self._axes.shapes[node][dim])
        return None if sequence is None or factor is None else sequence.members[factor].offset

    def _softmax_facts(self, node: fx.Node) -> Pieces:
        """Return the facts about a softmax: zero where the scores are hidden, at most one elsewhere."""
        scores, probability = node_argument(node), self.values.of(node)
        role = self._roles_by_dim(node).get(bound_arguments(node)["dim"] % len(shape_of_node(node)))
        if role is None:
            return constant_pieces(probability)
        score_facts = self._operand_facts(scores, node)
        hidden, zero = self.hidden_test(node, score_facts), Range(0, 0, probability.nan)
        return combine_pieces(lambda fact: constant_pieces(zero if hidden(fact) else probability), score_facts)

    def hidden_test(self, node: fx.Node, scores: Pieces) -> Callable[[Fact], bool]:
        """Return a test for facts about scores that do not contribute to the softmax or maximum over keys `node`.

        Minus infinity does not contribute. A large negative number does not contribute if each query position sees its own
        key, because the score of that key is much larger. `scores`: the facts by delta; of fused attention, its bias.
        """
        is_float16 = tensor_operands(node)[0].meta[VALUE].dtype == torch.float16
        min_visible, max_hidden = (VISIBLE_SCORE_HALF, HIDDEN_SCORE_HALF) if is_float16 else (VISIBLE_SCORE, HIDDEN_SCORE)
        products = scores_of(node, self.values) if node.target in FUSED else constant(0)

        def score(fact: Fact) -> Range:
            return plus(self._intervals.range(fact), products)

        is_own_key_visible = score(scores.at(0)).low >= min_visible and self._has_own_keys(node)
        return lambda fact: score(fact).high <= (max_hidden if is_own_key_visible else -INFINITY)

    def _has_own_keys(self, node: fx.Node) -> bool:
        """Return whether the keys of an operator include, for each of its rows, the key of the same row of the sequence."""
        sequence, labels = self._axes.sequence, self._axes.labels.get(node, {})
        roles = self._access.roles.get(node, {})
        factors = {role: self._axes.sequence_factor(labels[label]) for label, role in roles.items() if label in labels}
        rows, keys = factors.get(Role.ROWS), factors.get(Role.KEYS)
        if sequence is None or rows is None or keys is None or rows in sequence.blocks or keys in sequence.blocks:
            return False
        (first_row, row_count), (first_key, key_count) = sequence.members[rows], sequence.members[keys]
        if (first_row, row_count) == (first_key, key_count):
            return True
        is_static = all(isinstance(size, int) for size in (first_row, row_count, first_key, key_count))
        return is_static and first_key <= first_row and first_row + row_count <= first_key + key_count  # type: ignore[operator]

    def _record_maximum(self, node: fx.Node) -> None:
        """Record the range of a maximum over keys (or `logsumexp`): it is at least the score of each row's own key."""
        source = tensor_operands(node)[0]
        if source in self._pieces and self._has_own_keys(node):
            diagonal = self._intervals.range(self._operand_facts(source, node).at(0))
            bounds = self.values.of(node if is_tensor(node) else source)
            dim = bound_arguments(node)["dim"]
            dims = [dim] if isinstance(dim, int) else list(dim)
            reduced_roles = [self._operand_roles(source, node)[item] for item in dims]
            if reduced_roles == [Role.KEYS]:
                low = max(diagonal.low - 1 - abs(diagonal.low) / 100, bounds.low)  # with a margin for rounding
                self.values.note(node, Range(low, bounds.high, bounds.nan))

    # -- index vectors

    def _compare_positions(self, node: fx.Node) -> Pieces | None:
        """Return the facts about `cols <= rows`, `rows - cols` and the like, of one vector of rows, one of keys; else None."""
        relation = COMPARISONS.get(node.target)
        if relation is not None:
            terms: Any = ((1, node.args[0]), (-1, node.args[1]))
            dtype = computation_dtype(node, bound_arguments(node))
        elif node.target in LINEAR_COMBINATIONS:
            terms, dtype = linear_combination(node), node.meta[VALUE].dtype
            if terms is not None and not all(is_exact_in(dtype, a, a) for a, _ in terms):
                return None
        else:
            return None
        slope = None if terms is None or dtype is None else self._slope_of_terms(node, terms, dtype)
        if slope is None:
            return None
        return self._intervals.if_exact(slope, node) if relation is None else compare_slope(relation, slope, 0)

    def _slope_of_terms(self, node: fx.Node, weighted_operands: tuple[tuple[int, Any], ...], dtype: torch.dtype) -> Slope | None:
        """Return the sum of coefficient * operand as a slope of delta, for one operand along rows and one along keys.

        None unless their factors are opposite, so that the sum depends on key - row alone, and `dtype` is exact.
        """
        terms: dict[Role, Slope] = {}  # of the position of a row, or of a key
        for coefficient, operand in weighted_operands:
            affine = self._affine_along_role(operand, node, dtype)
            if affine is None or affine[0] in terms:
                return None
            terms[affine[0]] = affine[1].times(coefficient)
        if set(terms) != {Role.ROWS, Role.KEYS}:
            return None
        rows, keys = terms[Role.ROWS], terms[Role.KEYS]
        return replace(rows.plus(keys), factor=keys.factor) if keys.factor == -rows.factor != 0 else None

    def _affine_along_role(self, operand: Any, user: fx.Node, dtype: torch.dtype) -> tuple[Role, Slope] | None:
        """Return rows or keys, and an operand of `user`, which is affine along that dimension, as a slope of the position there.

        The position counts rows of the sequence; the affine form counts from index 0 of the operand. None for other operands.
        """
        affine = self._positions.of(operand)
        if affine is None or affine.dim is None or not self._positions.is_exact(affine, operand, dtype):
            return None
        dim = affine.dim + len(shape_of_node(user)) - len(shape_of_node(operand))
        shape, sizes = self._axes.shapes[operand], shape_of_node(operand)
        role, rows = self._roles_by_dim(user).get(dim), self._axes.indices_per_row(shape[affine.dim], sizes[affine.dim])
        if role is None or rows is None:
            return None
        index = Slope(rows[1], -rows[1] * rows[0], rows[1] - 1)  # as a slope of the position
        return role, index.times(affine.factor).plus(Slope(0, affine.offset))


_RULES: dict[Any, Callable[[Masks, fx.Node], Pieces]] = {
    operator.getitem: Masks._dropout_result,
    aten.convolution.default: Masks._one_tap_convolution,
    aten.slice.Tensor: Masks._slice_facts,
    aten.tril.default: Masks._triangle_facts,
    aten.triu.default: Masks._triangle_facts,
    aten._softmax.default: Masks._softmax_facts,
    aten._safe_softmax.default: Masks._softmax_facts,
    aten.constant_pad_nd.default: Masks._padded_facts,
}
