"""Facts about masks: index arithmetic, evaluated over intervals of delta instead of over positions."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.facts import AxisFacts, DemandFacts, Role
from streamfx.ir.joint import (
    JointGraph,
    bound_arguments,
    is_size,
    is_tensor,
    node_argument,
    shape_of_node,
    tensor_operands,
)
from streamfx.ir.pieces import (
    NUMBERS,
    ORDINARY,
    UNKNOWN,
    Const,
    Fact,
    Ordinary,
    Pieces,
    Slope,
    combined,
    compare_slope,
    everywhere,
)
from streamfx.ir.sizes import size_of
from streamfx.passes.fillers import FILLERS
from streamfx.passes.finite import finite_nodes
from streamfx.passes.intervals import COMPARISONS, either, evaluate, filled, is_minus_infinity, is_zero, ordinary
from streamfx.passes.linear import CONTRACTIONS, MOVES_ELEMENTS, is_random
from streamfx.passes.positions import Affine, affine_of
from streamfx.passes.rules.attention import M, N
from streamfx.passes.rules.registry import broadcast, rule_for

aten = torch.ops.aten

PRODUCES_ORDINARY = {aten.mm.default, aten.bmm.default, aten._cdist_forward.default, aten.embedding.default}
ADDS_UP = {aten.sum.dim_IntList, aten.mean.dim}
ADDS_PRODUCT = {aten.baddbmm.default, aten.addmm.default}


class Masks:
    """Evaluates facts on demand, each node once."""

    def __init__(self, joint: JointGraph, axes: AxisFacts, demand: DemandFacts) -> None:
        self._axes = axes
        self._demand = demand
        self._pieces: dict[fx.Node, Pieces] = {}
        self._affine: dict[fx.Node, Affine | None] = {}
        self._computed = _computed_nodes(joint) | finite_nodes(joint)
        self._patterns: dict[fx.Node, Pieces] = {
            node: node.meta["streamfx_pattern"] for node in joint.sources if node.meta.get("streamfx_pattern", NUMBERS) != NUMBERS
        }
        for node in joint.nodes:
            if is_tensor(node):
                self._affine[node] = self._affine_of(node)
                self._note_pattern(node)
                if self._is_pair(node):
                    self._pieces[node] = self._pieces_of(node)

    def of(self, node: fx.Node) -> Pieces:
        """Facts about a value with rows and keys."""
        return self._pieces.get(node, everywhere(UNKNOWN))

    def fused_bias(self, node: fx.Node) -> Pieces | None:
        """What a fused attention adds to its scores, the causal flag included."""
        arguments = bound_arguments(node)
        mask = arguments.get("attn_mask")
        bias = everywhere(Const(0.0)) if mask is None else self._operand(mask, node)
        if arguments.get("is_causal"):
            apart = self._apart(node)
            if apart is None:
                return everywhere(UNKNOWN)
            hidden = Pieces((apart + 1,), (Const(0.0), Const(float("-inf"))))
            bias = combined(lambda a, b: everywhere(b if is_minus_infinity(b, False) else a), bias, hidden)
        return bias

    def _apart(self, node: fx.Node) -> int | None:
        """How far a fused attention's key number i stands from its query number i: what `is_causal` compares are numbers."""
        sequence, letters = self._axes.sequence, self._axes.letters[node]
        atoms = [self._axes.sequence_atom(letters[letter]) for letter in (N, M)]
        if sequence is None or None in atoms:
            return None
        key, query = (sequence.members[atom][0] for atom in atoms if atom is not None)
        return key - query if isinstance(key - query, int) else None

    # -- values with rows and keys

    def _is_pair(self, node: fx.Node) -> bool:
        return len(self._axes.sequence_dims(self._axes.shapes[node])) == 2

    def _pieces_of(self, node: fx.Node) -> Pieces:
        target = node.target
        if target is operator.getitem:
            return self._of_result(node)
        if target in MOVES_ELEMENTS:
            source = node_argument(node)
            return self._operand(source, node) if self._is_pair(source) or not self._dims(source) else everywhere(UNKNOWN)
        if target in PRODUCES_ORDINARY:
            return everywhere(ORDINARY)
        if target in ADDS_PRODUCT:
            return self._added_product(node)
        if target in ADDS_UP:
            return self._added_up(node, keeps_zero=True)
        if target is aten.convolution.default:  # of one tap
            return self._added_up(node, keeps_zero=node.args[2] is None)
        if target is aten.sub.Tensor and self._is_less_a_number(node):
            return self._shifted(node)
        if target is aten.slice.Tensor:
            return self._sliced(node)
        if target in (aten.tril.default, aten.triu.default):
            return self._triangle(node)
        if target in (aten._softmax.default, aten._safe_softmax.default):
            return self._softmax(node)
        if target is aten._softmax_backward_data.default:
            probabilities = self._operand(node.args[1], node)
            return combined(lambda p: everywhere(p if is_zero(p) else ORDINARY), probabilities)
        if target in FILLERS:
            return everywhere(filled(node))
        if target is aten.index.Tensor:
            source = node_argument(node)
            return everywhere(ORDINARY if source in self._computed and not self._is_pair(source) else UNKNOWN)
        if target is aten.constant_pad_nd.default:
            return self._padded(node)
        return self._elementwise(node)

    def _added_product(self, node: fx.Node) -> Pieces:
        """`bias + a @ b`: a mask given as the bias stays one."""
        bias = self._operand(node.args[0], node)
        scaled = bool(node.kwargs)
        dtype = node.meta["val"].dtype
        return combined(lambda fact: everywhere(ordinary(aten.add.Tensor, (fact, ORDINARY), dtype, scaled)), bias)

    def _added_up(self, node: fx.Node, keeps_zero: bool) -> Pieces:
        """A sum over heads or the batch at each place: of zeros it makes zeros."""
        scores = self._operand(node.args[0], node)
        known = (ORDINARY, Const(0.0)) if keeps_zero else (ORDINARY, ORDINARY)
        return combined(lambda fact: everywhere(UNKNOWN if not _is_number(fact) else known[is_zero(fact)]), scores)

    def _padded(self, node: fx.Node) -> Pieces:
        """More heads, all of whose scores are one number; padded rows or keys would move delta."""
        source, signature = node_argument(node), self._axes.signatures.get(node)
        moves = signature is None or any(letter in signature.shifts for letter in self._demand.roles.get(node, {}))
        if moves or not self._is_pair(source):
            return everywhere(UNKNOWN)
        fill = Const(bound_arguments(node)["value"])
        return combined(lambda fact: everywhere(either(fact, fill)), self._operand(source, node))

    def _is_less_a_number(self, node: fx.Node) -> bool:
        """Whether a computed number per row or per key is subtracted from a value with rows and keys."""
        scores, number = node.args
        tensors = is_tensor(scores) and is_tensor(number) and not node.kwargs
        return tensors and number in self._computed and self._is_pair(scores) and not self._is_pair(number)  # type: ignore[arg-type]

    def _shifted(self, node: fx.Node) -> Pieces:
        """Scores less a number per row, such as the largest: what was hidden stays so, where each row sees at least itself."""
        scores = self._operand(node.args[0], node)
        sees_itself = isinstance(scores.at(0), Ordinary)
        hidden = Const(float("-inf"))
        return combined(
            lambda fact: (
                everywhere(hidden) if sees_itself and is_minus_infinity(fact, True) else evaluate(node, (fact, ORDINARY))
            ),
            scores,
        )

    def _of_result(self, node: fx.Node) -> Pieces:
        producer = node_argument(node)
        if producer.target is aten.native_dropout.default and node.args[1] == 0:
            source = self._operand(producer.args[0], node)
            return combined(lambda fact: everywhere(fact if is_zero(fact) else ORDINARY), source)
        return everywhere(UNKNOWN)

    # -- buffers that hold a mask: patterns of column - row of their last two dimensions

    def _note_pattern(self, node: fx.Node) -> None:
        """Carry a buffer's pattern through slices from the first row and through operators on its elements."""
        sources = [source for source in tensor_operands(node) if source in self._patterns]
        if len(sources) != 1 or len(tensor_operands(node)) != 1:
            return
        (source,) = sources
        if self._keeps_positions(node, source):
            self._patterns[node] = self._patterns[source]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default:
            arguments = [argument for argument in node.args if not isinstance(argument, (list, tuple))]
            facts = [self._patterns[source] if a is source else self._operand(a, node) for a in arguments]
            self._patterns[node] = combined(lambda *f: evaluate(node, f), *facts)

    def _keeps_positions(self, node: fx.Node, source: fx.Node) -> bool:
        rank, before = len(shape_of_node(node)), len(shape_of_node(source))
        arguments = bound_arguments(node)
        if node.target is aten.slice.Tensor:
            from_first = arguments["start"] in (None, 0) and arguments["step"] == 1
            return from_first or arguments["dim"] % rank < rank - 2
        if node.target is aten.select.int:
            return bool(arguments["dim"] % before < before - 2)
        if node.target is aten.unsqueeze.default:
            return bool(arguments["dim"] % rank < rank - 2)
        return node.target in (aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default)

    def _oriented(self, operand: fx.Node, user: fx.Node) -> Pieces:
        """A buffer's pattern as facts of delta, by which of its dimensions its user takes as rows and which as keys."""
        roles = self._operand_roles(operand, user)
        keys_last = roles[-2:] == [Role.ROWS, Role.KEYS]
        offsets = self._offset_between(operand, keys_last)
        if (not keys_last and roles[-2:] != [Role.KEYS, Role.ROWS]) or offsets is None:
            return everywhere(UNKNOWN)
        pattern = self._patterns[operand]
        if not keys_last:  # column - row of the buffer is minus delta
            pattern = Pieces(tuple(1 - cut for cut in reversed(pattern.cuts)), tuple(reversed(pattern.facts)))
        return Pieces(tuple(cut + offsets for cut in pattern.cuts), pattern.facts)

    def _operand_roles(self, operand: fx.Node, user: fx.Node) -> list[Role | None]:
        """The role of each dimension of an operand, as its user takes it."""
        roles, signature = self._demand.roles.get(user, {}), self._axes.signatures.get(user)
        if signature is None:
            return []
        letters = signature.operands[tensor_operands(user).index(operand)]
        return [next((roles[letter] for letter in dim if letter in roles), None) for dim in letters]

    def _offset_between(self, node: fx.Node, keys_last: bool) -> int | None:
        rank = len(shape_of_node(node))
        last, before = self._offset(node, rank - 1), self._offset(node, rank - 2)
        keys, rows = (last, before) if keys_last else (before, last)
        return keys - rows if isinstance(keys, int) and isinstance(rows, int) else None

    def _dims(self, node: fx.Node) -> tuple[int, ...]:
        return self._axes.sequence_dims(self._axes.shapes[node])

    def _operand(self, operand: Any, user: fx.Node) -> Pieces:
        """Facts about an argument: a number, a value with rows and keys, or one that is the same along both."""
        if isinstance(operand, (bool, int, float)):
            return everywhere(Const(operand))
        if is_size(operand):
            value = size_of(operand.meta["val"]) if not isinstance(operand.meta["val"], float) else operand.meta["val"]
            return everywhere(Const(value)) if isinstance(value, (int, float)) else everywhere(UNKNOWN)
        if not is_tensor(operand):
            return everywhere(UNKNOWN)
        if operand in self._patterns:
            return self._oriented(operand, user)
        if operand in self._pieces:
            return self._pieces[operand]
        affine = self._affine.get(operand)
        if affine is not None and affine.dim is None:
            return everywhere(Const(affine.offset))
        return everywhere(ORDINARY if operand in self._computed else UNKNOWN)

    def _roles_by_dim(self, node: fx.Node) -> dict[int, Role]:
        """The role of each sequence dimension of an operator's first result."""
        roles = self._demand.roles.get(node, {})
        letters = self._axes.signatures[node].results[0] if node in self._axes.signatures else ()
        return {i: roles[letter] for i, dim in enumerate(letters) for letter in dim if letter in roles}

    def _sliced(self, node: fx.Node) -> Pieces:
        source = node_argument(node)
        if source in self._pieces or self._is_pair(source):
            return self._square_slice(node, source)
        return self._operand(source, node)  # cut out of a table

    def _square_slice(self, node: fx.Node, source: fx.Node) -> Pieces:
        """A slice that starts at the first row keeps delta; another start would shift it."""
        signature = self._axes.signatures.get(node)
        starts = [start for _, start in signature.shifts.values()] if signature is not None else [None]
        known = self.of(source) if source in self._pieces else self._operand(source, node)
        return known if not known.cuts or all(start == 0 for start in starts) else everywhere(UNKNOWN)

    def _triangle(self, node: fx.Node) -> Pieces:
        source, diagonal = node.args[0], node.args[1] if len(node.args) > 1 else 0
        roles = self._roles_by_dim(node)
        rank = len(shape_of_node(node))
        last, before = roles.get(rank - 1), roles.get(rank - 2)
        offsets = self._offsets(node)
        if not isinstance(diagonal, int) or offsets is None or {last, before} != {Role.ROWS, Role.KEYS}:
            return everywhere(UNKNOWN)
        sign = 1 if last is Role.KEYS else -1  # column - row = sign * delta, up to the axes' own offsets
        relation = "le" if node.target is aten.tril.default else "ge"
        kept = compare_slope(relation, Slope(sign, -sign * offsets), diagonal)
        zero = Const(False) if node.meta["val"].dtype == torch.bool else Const(0)
        return combined(lambda keep, fact: everywhere(fact if keep == Const(True) else zero), kept, self._operand(source, node))

    def _offsets(self, node: fx.Node) -> int | None:
        """Offset of the keys' axis minus offset of the rows' axis."""
        roles = self._roles_by_dim(node)
        offsets = {}
        for dim, role in roles.items():
            offsets[role] = self._offset(node, dim)
        keys, rows = offsets.get(Role.KEYS), offsets.get(Role.ROWS)
        return keys - rows if isinstance(keys, int) and isinstance(rows, int) else None

    def _offset(self, node: fx.Node, dim: int) -> Any:
        sequence = self._axes.sequence
        atom = self._axes.sequence_atom(self._axes.shapes[node][dim])
        if sequence is None or atom is None or len(self._axes.table.resolve(self._axes.shapes[node][dim])) != 1:
            return None
        if atom in sequence.blocks:
            return None
        return sequence.members[atom][0]

    def _softmax(self, node: fx.Node) -> Pieces:
        """Zero where the scores are minus infinity, or a huge negative number while each row sees at least itself."""
        scores = self._operand(node.args[0], node)
        diagonal = scores.at(0)
        sees_itself = isinstance(diagonal, Ordinary) or (isinstance(diagonal, Const) and abs(diagonal.value) < 1e4)
        return combined(lambda fact: everywhere(Const(0.0) if is_minus_infinity(fact, sees_itself) else ORDINARY), scores)

    def _elementwise(self, node: fx.Node) -> Pieces:
        """Any other operator: by its meaning where one is known, by evaluating it on constants, else unknown.

        Only operators that work element by element may be evaluated on the one number that all elements are.
        """
        if rule_for(node) is not broadcast or is_random(node) or node.target is aten.empty_like.default:
            return everywhere(UNKNOWN)
        relative = self._relative(node)
        if relative is not None:
            return relative
        arguments = [argument for argument in node.args if not isinstance(argument, (list, tuple))]
        operands = [self._operand(argument, node) for argument in arguments]
        return combined(lambda *facts: evaluate(node, facts), *operands)

    def _relative(self, node: fx.Node) -> Pieces | None:
        """Comparison or difference of two index vectors, one along the rows and one along the keys."""
        relation = COMPARISONS.get(node.target)
        if relation is None and node.target is not aten.sub.Tensor:
            return None
        left, right = node.args[:2]
        a, b = self._position(left, node), self._position(right, node)
        if a is None or b is None or a[0] == b[0] or a[1] != b[1] or a[1] == 0:
            return None
        keys, rows = (a, b) if a[0] is Role.KEYS else (b, a)
        slope = Slope(keys[1], keys[2] - rows[2])  # keys - rows
        if a[0] is not Role.KEYS:
            slope = Slope(-slope.factor, -slope.offset)
        return everywhere(slope) if relation is None else compare_slope(relation, slope, 0)

    def _position(self, operand: Any, user: fx.Node) -> tuple[Role, int, int] | None:
        """(role, factor, offset): the operand is factor * position + offset along the rows or the keys of `user`."""
        affine = self._affine.get(operand) if isinstance(operand, fx.Node) else None
        if affine is None or affine.dim is None or not isinstance(affine.offset, int):
            return None
        dim = affine.dim + len(shape_of_node(user)) - len(shape_of_node(operand))
        role, start = self._roles_by_dim(user).get(dim), self._offset(operand, affine.dim)
        if role is None or not isinstance(start, int):
            return None
        return role, affine.factor, affine.offset - affine.factor * start

    # -- index vectors

    def _affine_of(self, node: fx.Node) -> Affine | None:
        """The node as factor * index + offset along one dimension, where that is provable."""
        return affine_of(node, self._affine) if node in self._axes.static else None


def _is_number(fact: Fact) -> bool:
    return isinstance(fact, Ordinary) or is_zero(fact)


def _computed_nodes(joint: JointGraph) -> set[fx.Node]:
    """Values that a product or a look-up went into: activations, as opposed to masks made from inputs."""
    computed: set[fx.Node] = set()
    for node in joint.nodes:
        if (
            node.target in CONTRACTIONS
            or node.target is aten.embedding.default
            or any(source in computed for source in node.all_input_nodes)
        ):
            computed.add(node)
    return computed
