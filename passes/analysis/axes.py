"""Which dimension of which value is the sequence?

Walks the graph once. Each operator's rule says how the axes of its operands and results hang together; a union-find over
factored dimensions collects what indexes the same thing. The sequence is then chosen among the axes: the one that
attention runs along, else the axis of the inputs that no parameter has and whose rows have an order, else the one that the
most bytes can be streamed along. No size is ever compared to find an axis.

    q [2 37 4 8], k [2 37 2 8]   ->   q [b t h d], k [b t g d]
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.axis_table import Atom, AxisTable, Dim
from streamfx.ir.facts import AxisFacts, Facts, SequenceAxis, Shape
from streamfx.ir.joint import JointGraph, is_parameter, is_tensor, results_of, shape_of_node, tensor_operands
from streamfx.ir.signature import ConcatAxes, FullAxis, Letter, RunningSum, Signature, Tile
from streamfx.ir.sizes import Size, numeric, product, shape_of
from streamfx.node_meta import VALUE, WHY_WHOLE
from streamfx.passes.analysis.derived_axes import members_of, sequence_of, shift_links, turned_axes
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.opaque import is_opaque, places_like, why_opaque
from streamfx.passes.ops.rules.registry import RuleCall, rule_for, said_by
from streamfx.passes.ops.traits import is_moved_elements, is_random, producer_of
from streamfx.runtime.rng import drawing

aten = torch.ops.aten

OTHER_ORDERS = "{target} meets rows that are in two orders, or split in two ways, which do not fit together"

# Operators that tell the rows along a dimension apart by their position.
BY_POSITION = frozenset(
    {
        aten.select.int,
        aten.select_backward.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.unbind.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.cat.default,
        aten.flip.default,
        aten.roll.default,
        aten.cumsum.default,
        aten.cumprod.default,
        aten.cummax.default,
        aten.logcumsumexp.default,
    }
)


@dataclass(frozen=True)
class Axes:
    name: ClassVar[str] = "axes"

    def apply(self, facts: Facts) -> Facts:
        return replace(facts, found_axes=sequence_axes(facts.joint))


def sequence_axes(joint: JointGraph) -> AxisFacts:
    """The axes of every dimension, and which of them is the sequence."""
    axes = axes_of(joint)
    sequence = sequence_axis(joint, axes)
    if split := _split_axes(joint, axes, sequence):
        along = frozenset((node, i) for node, i in split if _holds(sequence, axes, axes.shapes[node][i]))
        split = along or split  # features that are taken apart are no rows
        kept = axes_of(joint, split)
        whole = sequence_axis(joint, kept)
        inputs = [(node, i) for node in joint.primals for i, _ in enumerate(axes.shapes.get(node, ())) if (node, i) in split]
        places = {kept.table.resolve(kept.shapes[node][i])[0]: (node, i) for node, i in inputs}
        if whole is None or whole.main not in places:  # something else in its blocks looks like a sequence
            mains = [main for main, (node, i) in places.items() if _holds(sequence, axes, axes.shapes[node][i])]
            whole = sequence_of(mains[0], kept) if mains else None
        if whole is not None:
            axes, sequence = kept, whole
    return replace(axes, sequence=sequence)


def _holds(sequence: SequenceAxis | None, axes: AxisFacts, dim: Dim) -> bool:
    return sequence is not None and sequence.main in axes.table.resolve(dim)


def _split_axes(joint: JointGraph, axes: AxisFacts, sequence: SequenceAxis | None) -> frozenset[tuple[fx.Node, int]]:
    """Dimensions of inputs that some view cuts into blocks: where one is the sequence, its rows stay single.

    So do those of the sequence where what is cut out of it, or padded around it, is cut into blocks. An input of all rows of all
    sequences, one after the other, is not cut into blocks: [(b t)] beside another input [b t d].
    """
    table = axes.table
    whole = {
        (node, i): dim
        for node in joint.primals
        if is_tensor(node) and not is_parameter(node)
        for i, dim in enumerate(axes.shapes[node])
        if len(dim) == 1
    }
    single = {atom for dim in whole.values() for atom in table.resolve(dim) if len(table.resolve(dim)) == 1}
    split = {place for place, dim in whole.items() if not single.issuperset(table.resolve(dim))}
    if sequence is not None and _has_split_relative(axes, sequence):
        split |= {place for place, dim in whole.items() if table.resolve(dim) == (sequence.main,)}
    return frozenset(split)


def _has_split_relative(axes: AxisFacts, sequence: SequenceAxis) -> bool:
    for node, signature in axes.signatures.items():
        for letter, window in signature.windows.items():
            operand, result = (axes.table.resolve(axes.letters[node][item]) for item in (window.of, letter))
            if len(operand) == 1 < len(result) and operand[0] in sequence.members:
                return True
    return False


def axes_of(joint: JointGraph, kept: Collection[tuple[fx.Node, int]] = ()) -> AxisFacts:
    """The axes of every dimension, with no choice of a sequence yet.

    The dimensions of inputs in `kept` stay in one piece, and so does what is cut out of them or padded around them.
    """
    table = AxisTable()
    shapes: dict[fx.Node, Shape] = {}
    results: dict[fx.Node, tuple[Shape, ...]] = {}
    found: dict[fx.Node, Signature] = {}
    letters: dict[fx.Node, dict[Letter, Dim]] = {}
    declined: dict[fx.Node, str] = {}
    for node in joint.sources:
        if is_tensor(node):
            shapes[node] = tuple(table.fresh(size) for size in shape_of_node(node))
    for node, i in kept:
        table.keep(shapes[node][i][0])
    for node in joint.nodes:
        if node.target is operator.getitem:
            if is_tensor(node):
                shapes[node] = results[node.args[0]][node.args[1]]  # type: ignore[index]
            continue
        outcome = _apply_rule(node, table, shapes)
        if isinstance(outcome, str):
            declined[node] = outcome
            made = tuple(_unknown_dims(result, producer_of(node), table, shapes) for result in results_of(node))
        else:
            found[node], letters[node], made = outcome
        results[node] = made
        if is_tensor(node):
            shapes[node] = made[0]
    _join_parts(table, found, letters)
    return AxisFacts(table, shapes, results, found, letters, declined, static_nodes(joint))


def _join_parts(
    table: AxisTable, signatures: Mapping[fx.Node, Signature], letters: Mapping[fx.Node, Mapping[Letter, Dim]]
) -> None:
    """Parts that stand at one place of one joined axis are one: keys and their mask, joined to others in the same way."""
    first: dict[tuple[Dim, Size, Size], Dim] = {}
    for node, signature in signatures.items():
        if signature.joined is not None:
            letter, joined = signature.joined
            for part, before in joined.parts:
                own = table.resolve(letters[node][part])
                place = table.resolve(letters[node][letter]), before, table.size_of_dim(own)
                if len(own) == len(table.resolve(other := first.setdefault(place, own))) == 1:
                    table.unify(own, other)


def _unknown_dims(value: torch.Tensor | None, made_by: fx.Node, table: AxisTable, shapes: Mapping[fx.Node, Shape]) -> Shape:
    """Dimensions of a result that no rule tells about: its own, or those of operands where there is no rule at all."""
    if value is None:
        return ()
    places = places_like(value, made_by) if is_opaque(made_by) else [None] * value.dim()
    pairs = zip(shape_of(value), places, strict=True)
    return tuple(table.fresh(size) if place is None else shapes[place[0]][place[1]] for size, place in pairs)


def _apply_rule(
    node: fx.Node, table: AxisTable, shapes: dict[fx.Node, Shape]
) -> tuple[Signature, dict[Letter, Dim], tuple[Shape, ...]] | str:
    """The node's signature, the axes behind its letters and its results' dimensions; or why there is none."""
    rule = rule_for(node)
    if rule is None:
        return str(node.meta.get(WHY_WHOLE) or why_opaque(node))
    if is_random(node) and (node.kwargs.get("generator") is not None or drawing(node.target) is None):
        return f"{node.target} draws from a generator that it is not given, so that a chunk cannot draw the same again"
    call = RuleCall(node, table, shapes)
    signature = said_by(rule, call)
    if isinstance(signature, str):
        return signature
    bound = dict(signature.atoms)
    for operand, letter_shape in zip(call.operands, signature.operands, strict=True):
        for dim, letter_dim in zip(shapes[operand], letter_shape, strict=True):
            if len(letter_dim) != 1 or letter_dim[0] in signature.atoms:
                continue
            known = bound.setdefault(letter_dim[0], dim)
            if known is not dim and not table.unify(known, dim):
                return OTHER_ORDERS.format(target=node.target)
    made = []
    for own, letter_shape in zip(call.result_shapes, signature.results, strict=False):
        for size, letter_dim in zip(own, letter_shape, strict=True):
            if len(letter_dim) == 1 and letter_dim[0] not in bound:
                bound[letter_dim[0]] = table.fresh(size)
        made.append(tuple(tuple(atom for letter in dim for atom in bound[letter]) for dim in letter_shape))
    _keep_shifted(signature, bound, table)
    return signature, bound, tuple(made)


def _keep_shifted(signature: Signature, bound: dict[Letter, Dim], table: AxisTable) -> None:
    """An axis that is cut out of one that stays in one piece, or padded around it, stays in one piece as well."""
    for letter, window in signature.windows.items():
        result, operand = table.resolve(bound[letter]), table.resolve(bound[window.of])
        if len(result) == len(operand) == 1 and table.is_kept(operand[0]):
            table.keep(result[0])


def static_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Values that follow from integers, flags, vectors and constants alone: positions, masks, rotary tables, labels.

    They are the same whatever the parameters are, and cheap to make whole where they have one sequence axis.
    """
    static = {node for node in joint.sources if node not in joint.tangents and (not is_tensor(node) or _is_static_input(node))}
    for node in joint.nodes:
        if is_random(node) or is_collective(node):  # what other ranks hold is nothing that follows from this one's integers
            continue
        if all(source in static for source in node.all_input_nodes):
            static.add(node)
    return frozenset(static)


def _is_static_input(node: fx.Node) -> bool:
    value: torch.Tensor = node.meta[VALUE]
    is_vector = sum(not isinstance(size, int) or size != 1 for size in value.shape) <= 1
    return not (value.is_floating_point() or value.is_complex()) or is_vector


def sequence_axis(joint: JointGraph, axes: AxisFacts) -> SequenceAxis | None:
    main = _attention_axis(joint, axes)
    if main is None:
        main = _widest_axis(joint, axes)
    return None if main is None else sequence_of(main, axes)


def _attention_axis(joint: JointGraph, axes: AxisFacts) -> Atom | None:
    """The axis that stands on both sides of products of rows and keys.

    Fused attention says which; else it is the axis that scores, masks and probabilities have twice. A weight from a width to
    the same width has that twice as well, and so has its gradient, so only what the forward half computes counts.
    """
    votes: Counter[Atom] = Counter()
    for node, signature in axes.signatures.items():
        atoms = {letter: set(axes.table.resolve(dim)) for letter, dim in axes.letters[node].items()}
        keys = {atom for letter in signature.keys for atom in atoms.get(letter, ())}
        votes.update(keys & {atom for letter, own in atoms.items() if letter not in signature.keys for atom in own})
    if not votes:
        weights = weight_nodes(joint)
        for node in (node for node in joint.nodes if node in joint.forward and node not in weights):
            for shape in axes.results.get(node, ()):
                counts = Counter(atom for dim in shape for atom in axes.table.resolve(dim))
                votes.update(atom for atom, times in counts.items() if times == 2)
    own = _input_axes(joint, axes)
    ranked = sorted(votes, key=lambda atom: (atom not in own, -votes[atom], atom))
    if not ranked or ranked[0] in own or not own:
        return ranked[0] if ranked else None
    if ranked[0] in _feature_axes(joint, axes):  # the state of a linear attention has the same width twice
        return None
    sequences = own & _ordered_axes(axes)  # a block of the sequence has itself twice as well, where scores stay inside of blocks
    longest = max((numeric(axes.table.size(atom)) for atom in sequences), default=0)
    is_most = 2 * numeric(axes.table.size(ranked[0])) >= longest  # so have rows that are left behind blocks
    return ranked[0] if not sequences or (is_most and ranked[0] in _relatives(sequences, axes)) else None


def _relatives(atoms: set[Atom], axes: AxisFacts) -> set[Atom]:
    """Axes that are cut out of these, padded or joined from them."""
    links = [(source, target) for source, target, _, _ in shift_links(axes)]
    for node, signature in axes.signatures.items():
        if node.target is aten.cat.default:
            whole, *parts = [axes.table.resolve(axes.letters[node].get(letter, ())) for letter in signature.index]
            own = {*whole, *(atom for part in parts for atom in part[:1])}  # a part may be in blocks, whose rows are no relatives
            links += [(one, other) for one in own for other in own]
    found: set[Atom] = set()
    while atoms - found:
        found |= atoms
        atoms = {b for pair in links for a, b in (pair, pair[::-1]) if a in found}
    return found


def weight_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Values made of parameters alone, or by moving the elements of one floating point input."""
    inputs = {node for node in joint.primals if is_tensor(node) and node.meta[VALUE].is_floating_point()}
    found, parameters = set(inputs), {node for node in inputs if is_parameter(node)}
    for node in joint.nodes:
        sources = [source for source in node.all_input_nodes if is_tensor(source)]
        if sources and all(source in parameters for source in sources):
            parameters.add(node)
        if node in parameters or (is_moved_elements(node) and sources[0] in found):
            found.add(node)
    return frozenset(found)


def _input_axes(joint: JointGraph, axes: AxisFacts) -> set[Atom]:
    """Axes of inputs that no weight mixes: batch and sequence, where capture could tell inputs from parameters."""
    inputs = (node for node in joint.inputs if is_tensor(node) and not is_parameter(node))
    return {atom for node in inputs for atom in _atoms(node, axes)} - _feature_axes(joint, axes)


def widths(joint: JointGraph) -> Callable[[fx.Node, int], bool]:
    """Whether a dimension of a value is one of features, along which weights are contracted, or has any of these."""
    axes = axes_of(joint)
    found = _feature_axes(joint, axes)
    return lambda node, dim: not found.isdisjoint(axes.table.resolve(axes.shapes[node][dim]))


def _feature_axes(joint: JointGraph, axes: AxisFacts) -> set[Atom]:
    """Axes of the weights that products contract: widths. A mask or a table of positions kept as a buffer is no such weight.

    Along an axis that it is repeated for, as a sink is for each row, a weight is no wider.
    """
    parameters = {node for node in joint.primals if is_tensor(node) and is_parameter(node)}
    found: set[Atom] = set()
    repeated: set[Atom] = set()
    for node in (node for node in joint.nodes if node in joint.forward):
        operands = tensor_operands(node)
        if operands and all(operand in parameters for operand in operands):
            parameters.add(node)
            repeated |= _atoms(node, axes) - _atoms(operands[0], axes) if node.target is aten.expand.default else set()
        elif (signature := axes.signatures.get(node)) is not None and signature.results[0]:
            contracted = signature.contracted()
            for operand, shape in zip(operands, signature.operands, strict=True):
                if operand in parameters and any(letter in contracted for dim in shape for letter in dim):
                    found |= _atoms(operand, axes) - repeated
    return found


def _atoms(node: fx.Node, axes: AxisFacts) -> set[Atom]:
    return {atom for dim in axes.shapes[node] for atom in axes.table.resolve(dim)}


def _ordered_axes(axes: AxisFacts) -> set[Atom]:
    """Axes whose rows have an order, because something takes them by their position: a sequence rather than a batch."""
    found: set[Atom] = set()
    for node, signature in axes.signatures.items():
        letters = {item for letter, window in signature.windows.items() for item in (letter, window.of)}
        letters |= {letter for letter, index in signature.index.items() if isinstance(index, RunningSum)}
        letters |= signature.whole if node.target in BY_POSITION else set()
        found |= {atom for letter in letters for atom in axes.table.resolve(axes.letters[node].get(letter, ()))}
    return found


def _widest_axis(joint: JointGraph, axes: AxisFacts) -> Atom | None:
    """The axis along which the most bytes could be made in parts: no parameter has it, and best no operator needs it whole.

    Views and results take their memory all the same. What is made along a part that is cut out of an axis counts for both.

    Among the axes of the inputs one with an order comes first, even where something in between needs all its rows, unless it is
    one of features: its numbers lie side by side, and parts of them change places, as halves do in rotary positions. One along
    which numbers are drawn comes last: what has no rows is drawn once, as eager draws it.
    """
    gain: dict[Atom, int] = defaultdict(int)
    barred: set[Atom] = set()
    own, ordered = _input_axes(joint, axes), _ordered_axes(axes)
    stays = {*joint.outputs, *joint.gradients}
    for node, signature in axes.signatures.items():
        for letter in (letter for letter, index in signature.index.items() if isinstance(index, (FullAxis, Tile, ConcatAxes))):
            barred.update(axes.table.resolve(axes.letters[node].get(letter, ())))
        if node not in axes.static:
            saves = node not in stays and not is_moved_elements(node)
            for shape in axes.results[node]:
                numel = numeric(product(axes.table.size_of_dim(dim) for dim in shape)) if saves else 0
                for atom in {atom for dim in shape for atom in axes.table.resolve(dim)}:
                    gain[atom] += numel
    for node in joint.primals:
        if is_tensor(node) and node.meta[VALUE].is_floating_point() and is_parameter(node):
            barred |= _atoms(node, axes)
    inner = _innermost_axes(joint, axes)
    sequences = (own & ordered & gain.keys()) - (inner & turned_axes(axes))
    candidates = sequences or (gain.keys() - barred)
    drawn = {atom for node in joint.nodes if is_random(node) and not tensor_operands(node) for atom in _atoms(node, axes)}
    total = {atom: sum(gain.get(member, 0) for member in members_of(atom, axes)[0]) for atom in candidates}
    ranked = sorted(candidates, key=lambda a: (a in barred, a in drawn, -total[a], a in inner, -numeric(axes.table.size(a)), -a))
    return ranked[0] if ranked else None


def _innermost_axes(joint: JointGraph, axes: AxisFacts) -> set[Atom]:
    """Axes along which the numbers of inputs lie side by side, and never apart: parts of them would be scattered in memory."""
    inputs = [node for node in joint.primals if is_tensor(node) and node.meta[VALUE].is_floating_point()]
    shapes = [axes.shapes[node] for node in inputs if len(axes.shapes[node]) > 1]
    last, others = (
        {atom for dim in dims for atom in axes.table.resolve(dim)}
        for dims in ([shape[-1] for shape in shapes], [dim for shape in shapes for dim in shape[:-1]])
    )
    return last - others
