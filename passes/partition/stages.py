"""Cut the graph into stages where the fewest bytes are alive.

The forward graph is cut between every two attentions, chunked or not, where sequence-shaped values take the fewest
bytes: in a decoder, at the residual stream. One more cut comes before the loss. The backward graph is cut after the last
use of a stage's forward values, where the fewest bytes are alive: there, only the gradient of the residual stream.

    embed | norm q k v attention o + norm mlp +  |  norm q k v ...  |  norm  |  head loss
                                                 cut               cut      cut
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import ancestors, is_tensor, node_argument
from streamfx.ir.signature import Letter, Window
from streamfx.ir.sizes import numeric, product
from streamfx.ir.stage import Stage
from streamfx.node_meta import MATERIALIZED, SPLIT_FROM, VALUE
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive, only_moves_elements, producer_of
from streamfx.passes.partition.code_sinking import sink_operators
from streamfx.passes.partition.interloop_values import InterloopValues
from streamfx.passes.partition.stage_names import stage_names

aten = torch.ops.aten

PROHIBITIVE_COST = 1 << 60
WRITES_INTO_ZEROS = (aten.select_backward.default, aten.slice_backward.default)


@dataclass(frozen=True)
class FindStages:
    name: ClassVar[str] = "stages"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the stages."""
        return replace(facts, found_stages=_StageFinder(facts).stages())


def stages_with_last(last: Collection[fx.Node], facts: Facts) -> tuple[Stage, ...]:
    """Return the stages if the last one has exactly the forward operators `last`, which must include all their users."""
    return _StageFinder(facts, last).stages()


class _StageFinder:
    """Cuts the graph into stages. If `last` is not empty, these operators form the last stage."""

    def __init__(self, facts: Facts, last: Collection[fx.Node] = ()) -> None:
        self.facts, self.axes, self.access, self.key_spans = facts, facts.axes, facts.access, facts.key_spans
        joint = facts.joint
        self.interloop = InterloopValues(facts)
        nodes = move_elements_after_producers(joint.nodes)
        self.forward = [node for node in nodes if node in joint.forward]
        self.backward = move_before_first_use([node for node in nodes if node not in joint.forward], joint.tangents)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.bytes: dict[fx.Node, int] = {}
        self.last = len(last)
        if last:
            self.forward.sort(key=lambda node: node in last)
        else:
            self.forward = sink_operators(self.forward, [low for low, _ in self.attention_intervals()], self.bytes_of_rows)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.outputs = {output for output in joint.outputs if isinstance(output, fx.Node)}

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages: the forward graph between cuts, the backward operators, and the values that cross each cut."""
        cuts = self.find_cuts()
        bounds = [0, *(cut + 1 for cut in cuts), len(self.forward)]
        forwards = [self.forward[low:high] for low, high in pairwise(bounds)]
        stage_of = {node: i for i, nodes in enumerate(forwards) for node in nodes}
        crossing = [self.crossing_forward(nodes, stage_of, i) for i, nodes in enumerate(forwards)]
        backwards = self.backward_segments(stage_of, len(forwards), {node for nodes in crossing for node in nodes})
        segment_of = {node: i for i, nodes in enumerate(backwards) for node in nodes}
        names = stage_names(forwards)
        return tuple(
            Stage(
                name=names[i],
                forward=tuple(forwards[i]),
                backward=tuple(backwards[i]),
                outputs=tuple(crossing[i]),
                gradients=tuple(self.crossing_backward(backwards[i], segment_of, i)),
            )
            for i in range(len(forwards))
        )

    def is_chunked(self, node: fx.Node) -> bool:
        """Return whether a value is computed chunk by chunk, so that it must be stored to cross a cut."""
        return self.access.is_in_loop(node) and node not in self.axes.static

    def occupies_memory(self, node: fx.Node) -> bool:
        """Return whether a value takes memory from its definition to its last use."""
        return self.is_chunked(node) or node in self.interloop.long_values

    def find_cuts(self) -> list[int]:
        """Return the positions after which the forward graph is cut."""
        costs = self.cut_costs(self.forward, self.position, self.outputs)
        attentions = self.attention_intervals()
        gaps = [(last, first - 1) for (_, last), (first, _) in pairwise(attentions)]
        loss = self.first_sequence_sum()
        if self.last:
            gaps.append((len(self.forward) - self.last - 1,) * 2)
        elif loss is not None and (attentions or self.facts.joint.tangents):  # else the head is the only stage
            gaps.append((attentions[-1][1] if attentions else -1, loss - 1))
        products_until, reduced = list(accumulate(is_expensive(node) for node in self.forward)), self.reduced_bytes()

        def cheapest_position(low: int, high: int) -> int | None:
            """Return the position in [low, high] after which the fewest bytes are alive; None if no cut is possible."""
            # Of equal positions, take the first one after the last product: its result is then stored and not computed
            # twice, and the following norm, whose gradient reads that result, is in the next stage. A stored sum over
            # ranks saves a collective, so its bytes are subtracted.
            candidates = range(max(low, 0), high + 1)
            position = min(candidates, key=lambda i: (costs[i] - reduced[i], -products_until[i], i), default=None)
            return position if position is not None and 0 < costs[position] < PROHIBITIVE_COST else None

        cuts: list[int] = []
        for low, high in gaps:
            cut = cheapest_position(low, high)
            if cut is not None and (not cuts or cut > cuts[-1]):
                cuts.append(cut)
        # Windows come first, because a narrow running sum alongside the layers might have the fewest live bytes.
        layers = self.add_cuts_between_layers(self.reads_earlier_rows, cuts, cheapest_position, costs)
        return self.add_cuts_between_layers(self.reads_or_scans_earlier_rows, layers, cheapest_position, costs)

    def add_cuts_between_layers(
        self,
        is_window: Callable[[fx.Node], bool],
        cuts: Sequence[int],
        cheapest_position: Callable[[int, int], int | None],
        costs: Sequence[int],
    ) -> list[int]:
        """Return the cuts, and new ones between operators that read earlier rows, where the fewest bytes are alive.

        A loop in reverse order gets the earlier rows as inputs, and recomputes their ancestors. Without a cut, it would
        hold these rows for all layers, and compute each layer's last product once more than checkpointing does.
        """
        windows = [i for i, node in enumerate(self.forward) if is_window(node)]
        gaps = [(low, high - 1) for low, high in pairwise(windows)]
        candidates = [(*gap, cut) for gap in gaps if (cut := cheapest_position(*gap)) is not None]
        least = min((costs[cut] for _, _, cut in candidates), default=0)
        new = [cut for low, high, cut in candidates if costs[cut] == least and not any(low <= other <= high for other in cuts)]
        return sorted({*cuts, *new})

    def reads_earlier_rows(self, node: fx.Node) -> bool:
        """Return whether each row depends on a few earlier rows, as in a convolution or a shift."""
        windows = self.axes.signatures[node].windows if node in self.axes.signatures and self.is_chunked(node) else {}
        return any(self.shifts_rows(node, letter, window) for letter, window in windows.items())

    def reads_or_scans_earlier_rows(self, node: fx.Node) -> bool:
        """Return whether each row depends on earlier rows, a few or all, as in a recurrence."""
        return self.reads_earlier_rows(node) or (self.axes.is_running(node) and self.is_chunked(node))

    def shifts_rows(self, node: fx.Node, letter: Letter, window: Window) -> bool:
        """Return whether a window reads rows at other positions than the result's."""
        sequence, letters = self.axes.sequence, self.axes.letters[node]
        result, source = (self.axes.sequence_atom(letters[item]) for item in (letter, window.source))
        if sequence is None or result is None or source is None:
            return False
        block = sequence.block(source)
        return bool(window.reach or window.start * block + sequence.members[source].offset != sequence.members[result].offset)

    def attention_intervals(self) -> list[tuple[int, int]]:
        """Return the first and last position of each forward attention, with overlapping intervals merged.

        Materialized keys need all rows, so the operators from their definition to the last use of their axis count as one
        attention. So do the head groups of one attention.
        """
        seen: dict[Any, list[int]] = {}
        for node, span in self.key_spans.spans.items():
            if node in self.position and node not in self.axes.static:
                seen.setdefault(producer_of(node).meta.get(SPLIT_FROM, id(span)), []).append(self.position[node])
        for node in self.interloop.attentions:
            producer = producer_of(node)
            seen.setdefault(producer.meta.get(SPLIT_FROM, producer), []).append(self.position[node])
        seen |= {
            node: self.materialized_key_positions(node)
            for node in self.forward
            if MATERIALIZED in node.meta and node not in self.axes.static
        }
        merged: list[tuple[int, int]] = []
        for low, high in sorted((min(positions), max(positions)) for positions in seen.values()):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged

    def materialized_key_positions(self, keys: fx.Node) -> list[int]:
        """Return the positions of materialized keys, of their source, and of the operators along their axis."""
        key_atoms = {atom for dim in keys.meta[MATERIALIZED] for atom in self.axes.table.resolve(self.axes.shapes[keys][dim])}
        source, todo, nodes = node_argument(keys), [keys], set[fx.Node]()
        while only_moves_elements(source) and node_argument(source) in self.position:
            source = node_argument(source)
        while todo:
            node = todo.pop()
            if node in self.position and node not in nodes:
                nodes.add(node)
                result_dims = [dim for shape in self.axes.results.get(node, ()) for dim in shape]
                has_key_axis = any(not key_atoms.isdisjoint(self.axes.table.resolve(dim)) for dim in result_dims)
                todo += [user for user in node.users if has_key_axis]
        return [self.position[node] for node in (*nodes, source) if node in self.position]

    def first_sequence_sum(self) -> int | None:
        """Return the position of the first sum over the sequence on which an output depends; None if there is none."""
        ancestors_of_outputs = ancestors(self.facts.joint.outputs)
        for i, node in enumerate(self.forward):
            if self.is_chunked(node) and StorageClass.SUM in self.access.storage_classes[node] and node in ancestors_of_outputs:
                return i
        return None

    def cut_costs(
        self, nodes: Sequence[fx.Node], position: dict[fx.Node, int], already_stored: Iterable[fx.Node] = ()
    ) -> list[int]:
        """Return the cost of a cut after each node: the bytes alive there; at least `PROHIBITIVE_COST` if it is not possible."""
        change = [0] * (len(nodes) + 1)
        already_stored = set(already_stored)
        for node in nodes:
            if not is_tensor(node):  # a tuple must not be separated from its elements
                elements = [position[user] for user in node.users if user.target is operator.getitem and user in position]
                if elements:
                    change[position[node]] += PROHIBITIVE_COST
                    change[max(elements)] -= PROHIBITIVE_COST
                continue
            if not self.occupies_memory(node):
                continue
            last = max((position[user] for user in node.users if user in position), default=position[node])
            if last > position[node]:
                cost = self.cost(node, node in already_stored)
                change[position[node]] += cost
                change[last] -= cost
        return list(accumulate(change[:-1]))

    def reduced_bytes(self) -> list[int]:
        """Return, for each position, the bytes of all sums over ranks that have no use after it."""
        finished = [0] * len(self.forward)
        for node in self.forward:
            if is_reduced_over_ranks(node):
                finished[max((self.position[user] for user in node.users if user in self.position), default=-1)] += (
                    self.bytes_of_rows(node)
                )
        return list(accumulate(finished))

    def cost(self, node: fx.Node, is_stored: bool) -> int:
        """Return a live value's cost at a cut: its bytes, 1 if it is stored anyway, prohibitive if it has keys, else 0."""
        storage_class = self.access.storage_class(node)
        if storage_class in (StorageClass.PAIR, StorageClass.KEYSUM):
            return PROHIBITIVE_COST
        if node in self.interloop.long_values:
            return 1 if is_stored else self.interloop.storage_bytes(node)
        if storage_class is not StorageClass.ROWS or is_stored:
            return 0 if storage_class is not StorageClass.ROWS else 1
        return max(1, self.bytes_of_rows(node))

    def bytes_of_rows(self, node: fx.Node) -> int:
        """Return the full-sequence bytes of a value computed chunk by chunk; 0 for others."""
        if node not in self.bytes:
            self.bytes[node] = self._bytes_of_rows(node)
        return self.bytes[node]

    def _bytes_of_rows(self, node: fx.Node) -> int:
        """Compute the full-sequence bytes of a value; see `bytes_of_rows`."""
        if not is_tensor(node) or not self.is_chunked(node) or self.access.storage_class(node) is not StorageClass.ROWS:
            return 0
        elements = numeric(product(self.axes.table.size_of_dim(dim) for dim in self.axes.shapes[node]))
        return elements * int(node.meta[VALUE].element_size())

    def crossing_forward(self, nodes: Sequence[fx.Node], stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
        """Return the chunked values of a stage that later stages read or the graph returns."""
        return [
            node
            for node in nodes
            if is_tensor(node)
            and self.is_chunked(node)
            and (node in self.outputs or any(stage_of.get(user, stage) > stage for user in node.users))
        ]

    def backward_segments(self, stage_of: dict[fx.Node, int], count: int, kept: set[fx.Node]) -> list[list[fx.Node]]:
        """Split the backward graph into `count` segments, indexed by stage; the last stage's segment runs first."""
        if self.last:
            stage_of_recomputed = {node: stage_of[node] for node in stage_of if node not in kept and self.is_chunked(node)}
            self.backward = self.move_sums_after_operands(move_last_stage_first(self.backward, stage_of_recomputed, count - 1))
        position = {node: i for i, node in enumerate(self.backward)}
        uses_of_stage: list[list[int]] = [[] for _ in range(count)]
        for node in self.backward:
            for source in node.all_input_nodes:
                if source in stage_of and source not in kept and self.occupies_memory(source):
                    uses_of_stage[stage_of[source]].append(position[node])
        costs = self.cut_costs(self.backward, position)
        bounds = [0]
        for stage in range(count - 1, 0, -1):
            low = max((p for positions in uses_of_stage[stage:] for p in positions), default=-1)
            high = min((p for positions in uses_of_stage[:stage] for p in positions), default=len(self.backward))
            candidates = range(max(low + 1, bounds[-1]), max(high, low + 1, bounds[-1]) + 1)
            bound = min(candidates, key=lambda i: (costs[i - 1] if i else 0, i))
            while bound and costs[bound - 1] >= PROHIBITIVE_COST:  # a query-by-key value is never stored for a later segment
                bound += 1
            bounds.append(bound)
        bounds.append(len(self.backward))
        return [self.backward[low:high] for low, high in pairwise(bounds)][::-1]

    def move_sums_after_operands(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes with each addition of sums over rows right after its operands: one sum is stored, not several."""
        sort_key: dict[fx.Node, int] = {}
        sums = {node for node in nodes if self.access.storage_class(node) is StorageClass.SUM}
        for i, node in enumerate(nodes):
            operands = node.all_input_nodes
            is_addition = len(operands) > 1 and all(operand in sort_key and operand in sums for operand in operands)
            sort_key[node] = max(sort_key[operand] for operand in operands) if is_addition else i
            sums.update([node] if is_addition else [])
        return sorted(nodes, key=sort_key.__getitem__)

    def crossing_backward(self, nodes: Sequence[fx.Node], segment_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
        """Return the values of a backward segment that later segments read or the graph returns."""
        gradients = {gradient for gradient in self.facts.joint.gradients if isinstance(gradient, fx.Node)}
        return [
            node
            for node in nodes
            if is_tensor(node) and (node in gradients or any(segment_of.get(user, stage) < stage for user in node.users))
        ]


def _shrinks_largest_operand(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Return whether a product has fewer bytes than its largest operand in `dependent`."""
    largest = max((bytes_like(source.meta.get(VALUE)) for source in node.all_input_nodes if source in dependent), default=0)
    return is_tensor(node) and bytes_like(node.meta[VALUE]) < largest


def move_elements_after_producers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each element of a tuple right after its producer, so that no cut separates them.

    The final state of a recurrence is extracted at the end of the trace if it is only returned.
    """
    sort_key: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        sort_key[node] = sort_key.get(producer_of(node), i)
    return sorted(sort_key, key=sort_key.__getitem__)


def move_before_first_use(nodes: Sequence[fx.Node], tangents: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each node that depends on no tangent right before its first use.

    Such a node depends on forward values only, perhaps of an early layer, but may be traced before all gradients.
    """
    dependent = set(tangents)
    for node in nodes:
        if any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
    return move_before_use(nodes, set(nodes) - dependent)


def move_before_use(nodes: Sequence[fx.Node], moved: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each of the `moved` operators right before its first user."""
    position = {node: i for i, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node in moved:
            position[node] = min((position[user] for user in node.users if user in position), default=position[node])
    return sorted(nodes, key=lambda node: (position[node], node not in moved))


def move_last_stage_first(nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], last: int) -> list[fx.Node]:
    """Return the backward operators, the last stage's operators first; `stage_of` maps forward values to stages.

    If a model is called twice, the trace has all layers of one call before the head of the other. Operators are moved
    after the last stage in four cases:
    - products whose result no operator combines with values of the last stage, and operators that depend on them. But a
      product that shrinks a dependent value of the last stage stays: else the gradient of the logits would be stored;
    - operators that read a forward value of an earlier stage, and operators that depend on them;
    - operators used only by moved operators that do not depend on the last stage;
    - operators used only by moved operators that reshape their operand or write it into zeros: else the gradient of a
      final state, with zeros for all other rows, would be stored.
    """
    used_by_last, dependent, moved_back = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in reversed(nodes):
        if any(user in used_by_last for user in node.users) or any(
            stage_of.get(source) == last for source in node.all_input_nodes
        ):
            used_by_last.add(node)
    for node in nodes:
        if node in used_by_last or any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
        is_moved_product = is_expensive(node) and node not in used_by_last and not _shrinks_largest_operand(node, dependent)
        if is_moved_product or any(source in moved_back or stage_of.get(source, last) < last for source in node.all_input_nodes):
            moved_back.add(node)
    reshaped = set[fx.Node]()
    for node in reversed(nodes):
        is_reshaped = only_moves_elements(node) or node.target in WRITES_INTO_ZEROS or node not in dependent
        if is_reshaped and node not in moved_back and moved_back.issuperset(node.users):
            reshaped.add(node)
            moved_back.add(node)
    return move_before_use(sorted(nodes, key=moved_back.__contains__), reshaped)
