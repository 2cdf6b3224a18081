"""Cut the graph into stages (segments of the forward graph, each with its backward segment) where the fewest bytes are alive.

The forward graph is cut between every two attentions, chunked or not, where sequence-shaped values take the fewest
bytes: in a decoder, at the residual stream. One more cut comes before the loss. The backward graph is cut after the last
use of a stage's forward values, where the fewest bytes are alive: there, only the gradient of the residual stream.

    embed | norm q k v attention o + norm mlp +  |  norm q k v ...  |  norm  |  head loss
                                                 cut               cut      cut
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch import fx

from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import ancestors, is_tensor, node_argument, walk
from streamfx.ir.signature import AxisLabel, Window
from streamfx.ir.stage import Stage
from streamfx.node_meta import MATERIALIZED, SPLIT_FROM, VALUE
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive, only_moves_elements, producer_of
from streamfx.passes.partition.code_sinking import sink_operators
from streamfx.passes.partition.interloop_values import InterloopValues
from streamfx.passes.partition.node_order import move_before_first_use, move_elements_after_producers, move_last_stage_first
from streamfx.passes.partition.stage_names import stage_names
from streamfx.torch_private.graph_nodes import operands_of

PROHIBITIVE_COST = 1 << 60  # bytes: of a cut that is not possible


@dataclass(frozen=True)
class FindStages:
    """The pass: finds the stages."""

    name: ClassVar[str] = "stages"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the stages, in forward order."""
        return replace(facts, found_stages=_StageFinder(facts).stages())


def stages_with_last(last_operators: Collection[fx.Node], facts: Facts) -> tuple[Stage, ...]:
    """Return the stages if the last one has exactly the forward operators `last_operators`, which must include all their users.

    The forward operators are reordered for that; the other cuts are where the fewest bytes are alive.
    """
    return _StageFinder(facts, last_operators).stages()


class _StageFinder:
    """Cuts the graph into stages. If `last_operators` is not empty, these operators form the last stage.

    `forward`, `backward`: the operators in the order in which they are cut. `position`: the index of each in `forward`.
    """

    def __init__(self, facts: Facts, last_operators: Collection[fx.Node] = ()) -> None:
        """Order the operators so that few bytes are alive at the cuts."""
        self.facts, self.axes, self.access, self.key_spans = facts, facts.axes, facts.access, facts.key_spans
        joint = facts.joint
        self.interloop = InterloopValues(facts)
        nodes = move_elements_after_producers(joint.nodes)
        self.forward = [node for node in nodes if node in joint.forward]
        self.backward = move_before_first_use([node for node in nodes if node not in joint.forward], joint.tangents)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.bytes: dict[fx.Node, int] = {}
        self.num_last_operators = len(last_operators)
        if last_operators:
            self.forward.sort(key=lambda node: node in last_operators)
        else:
            self.forward = sink_operators(self.forward, [low for low, _ in self.attention_intervals()], self.bytes_of_rows)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.outputs, self.gradients = (
            {result for result in results if isinstance(result, fx.Node)} for results in (joint.outputs, joint.gradients)
        )

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages: per stage its forward operators (between two cuts), its backward operators, and the forward
        values and gradients that other stages read.
        """
        cuts = self.find_cuts()
        bounds = [0, *(cut + 1 for cut in cuts), len(self.forward)]
        forwards = [self.forward[start:stop] for start, stop in pairwise(bounds)]
        stage_of = {node: stage for stage, nodes in enumerate(forwards) for node in nodes}
        outputs = [self.crossing_forward(nodes, stage_of, stage) for stage, nodes in enumerate(forwards)]
        backwards = self.backward_segments(stage_of, len(forwards), {node for nodes in outputs for node in nodes})
        segment_of = {node: stage for stage, nodes in enumerate(backwards) for node in nodes}
        names = stage_names(forwards)
        return tuple(
            Stage(
                name=names[stage],
                forward=tuple(forwards[stage]),
                backward=tuple(backwards[stage]),
                outputs=tuple(outputs[stage]),
                gradients=tuple(self.crossing_backward(backwards[stage], segment_of, stage)),
            )
            for stage in range(len(forwards))
        )

    def is_chunked(self, node: fx.Node) -> bool:
        """Return whether a value is computed chunk by chunk, so that it must be stored to cross a cut."""
        return self.access.is_in_loop(node) and node not in self.axes.static

    def occupies_memory(self, node: fx.Node) -> bool:
        """Return whether a value takes much memory from its definition to its last use: it is as long as the sequence.

        A loop computes it by chunks, or an operator between loops at once.
        """
        return self.is_chunked(node) or node in self.interloop.long_values

    def find_cuts(self) -> list[int]:
        """Return the positions in `forward` after which it is cut: one between every two attentions, one before the loss, and
        some between recurrent layers.
        """
        costs = self.cut_costs(self.forward, self.position, self.outputs)
        attentions = self.attention_intervals()
        gaps = [(end, next_start - 1) for (_, end), (next_start, _) in pairwise(attentions)]  # each may have a cut
        loss = self.first_sequence_sum()
        if self.num_last_operators:
            before_last_stage = len(self.forward) - self.num_last_operators - 1
            gaps.append((before_last_stage, before_last_stage))
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
        with_windows = self.add_cuts_between_layers(self.reads_earlier_rows, cuts, cheapest_position, costs)
        return self.add_cuts_between_layers(self.reads_or_scans_earlier_rows, with_windows, cheapest_position, costs)

    def add_cuts_between_layers(
        self,
        reads_rows: Callable[[fx.Node], bool],
        cuts: Sequence[int],
        cheapest_position: Callable[[int, int], int | None],
        costs: Sequence[int],
    ) -> list[int]:
        """Return `cuts`, and cuts between every two operators that read earlier rows (`reads_rows`), as convolutions do.

        Between two there is no cut if `cuts` has one there, or if it would cost more than the cheapest such cut. Without cuts,
        a backward loop over all layers would hold the earlier rows that each layer reads, and compute each layer's last
        product once more than checkpointing does. `costs`: of a cut after each position.
        """
        readers = [position for position, node in enumerate(self.forward) if reads_rows(node)]
        gaps = [(reader, next_reader - 1) for reader, next_reader in pairwise(readers)]
        candidates = [(*gap, cut) for gap in gaps if (cut := cheapest_position(*gap)) is not None]
        min_cost = min((costs[cut] for _, _, cut in candidates), default=0)
        new_cuts = [
            cut for low, high, cut in candidates if costs[cut] == min_cost and not any(low <= other <= high for other in cuts)
        ]
        return sorted({*cuts, *new_cuts})

    def reads_earlier_rows(self, node: fx.Node) -> bool:
        """Return whether each row depends on a few earlier rows, as in a convolution or a shift."""
        windows = self.axes.signatures[node].windows if node in self.axes.signatures and self.is_chunked(node) else {}
        return any(self.shifts_rows(node, label, window) for label, window in windows.items())

    def reads_or_scans_earlier_rows(self, node: fx.Node) -> bool:
        """Return whether each row depends on earlier rows, a few or all, as in a recurrence."""
        return self.reads_earlier_rows(node) or (self.axes.is_running(node) and self.is_chunked(node))

    def shifts_rows(self, node: fx.Node, label: AxisLabel, window: Window) -> bool:
        """Return whether a window along the sequence reads rows other than the result's own row.

        `label`: the result's axis label; row t of it is computed from rows t + start to t + start + reach of `window.source`.
        """
        sequence, axis_of_label = self.axes.sequence, self.axes.labels[node]
        result_axis, source_axis = (self.axes.sequence_factor(axis_of_label[own_label]) for own_label in (label, window.source))
        if sequence is None or result_axis is None or source_axis is None:
            return False
        first_row_read = window.start * sequence.block(source_axis) + sequence.members[source_axis].offset
        return bool(window.reach or first_row_read != sequence.members[result_axis].offset)

    def attention_intervals(self) -> list[tuple[int, int]]:
        """Return (first, last) position in `forward` of each attention, in order; overlapping intervals are merged.

        An attention's operators share one span. Keys that all exist at once (*materialized*) need all rows, so the operators
        from their definition to the last use of their axis count as one attention. So do the head groups of one attention.
        """
        positions_of: dict[Any, list[int]] = {}  # by an identifier of the attention
        for node, span in self.key_spans.spans.items():
            if node in self.position and node not in self.axes.static:
                positions_of.setdefault(producer_of(node).meta.get(SPLIT_FROM, id(span)), []).append(self.position[node])
        for node in self.interloop.attentions:
            producer = producer_of(node)
            positions_of.setdefault(producer.meta.get(SPLIT_FROM, producer), []).append(self.position[node])
        positions_of |= {
            node: self.materialized_key_positions(node)
            for node in self.forward
            if MATERIALIZED in node.meta and node not in self.axes.static
        }
        merged: list[tuple[int, int]] = []
        for start, end in sorted((min(positions), max(positions)) for positions in positions_of.values()):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def materialized_key_positions(self, keys: fx.Node) -> list[int]:
        """Return the positions in `forward` of materialized keys (rows that all exist at once, along a separate axis), of the
        value that they are views of, and of the operators whose results have that axis, with their users.
        """
        key_axes = {axis for dim in keys.meta[MATERIALIZED] for axis in self.axes.table.resolve(self.axes.shapes[keys][dim])}
        viewed_value = node_argument(keys)
        while only_moves_elements(viewed_value) and node_argument(viewed_value) in self.position:
            viewed_value = node_argument(viewed_value)

        def users(node: fx.Node) -> Iterable[fx.Node]:
            """Return the users of a forward operator whose result has the key axis; none of other nodes."""
            result_dims = [dim for shape in self.axes.results.get(node, ()) for dim in shape]
            has_key_axis = any(not key_axes.isdisjoint(self.axes.table.resolve(dim)) for dim in result_dims)
            return node.users if has_key_axis and node in self.position else ()

        return [self.position[node] for node in (*walk([keys], users), viewed_value) if node in self.position]

    def first_sequence_sum(self) -> int | None:
        """Return the position in `forward` of the first sum over the sequence on which an output depends, usually the loss.

        None if there is none.
        """
        ancestors_of_outputs = ancestors(self.facts.joint.outputs)
        for position, node in enumerate(self.forward):
            if self.is_chunked(node) and StorageClass.SUM in self.access.storage_classes[node] and node in ancestors_of_outputs:
                return position
        return None

    def cut_costs(
        self, nodes: Sequence[fx.Node], position: dict[fx.Node, int], already_stored: Iterable[fx.Node] = ()
    ) -> list[int]:
        """Return, for each of `nodes`, the cost of a cut after it: the bytes alive there, `PROHIBITIVE_COST` or more if a cut
        is not possible. A value in `already_stored` costs 1 at most. `position`: the index of each node in `nodes`.
        """
        change = [0] * (len(nodes) + 1)  # of the cost, from each position on
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
            last_use = max((position[user] for user in node.users if user in position), default=position[node])
            if last_use > position[node]:
                cost = self.cost(node, node in already_stored)
                change[position[node]] += cost
                change[last_use] -= cost
        return list(accumulate(change[:-1]))

    def reduced_bytes(self) -> list[int]:
        """Return, for each position in `forward`, the bytes of all sums over ranks (all-reduced rows) with no use after it."""
        bytes_ending_at = [0] * len(self.forward)
        for node in self.forward:
            if is_reduced_over_ranks(node):
                last_use = max((self.position[user] for user in node.users if user in self.position), default=-1)
                bytes_ending_at[last_use] += self.bytes_of_rows(node)
        return list(accumulate(bytes_ending_at))

    def cost(self, node: fx.Node, is_stored: bool) -> int:
        """Return the cost of a cut through a live value: its bytes, or 1 if it is stored anyway (`is_stored`).

        A query-by-key value or a sum per key must not cross a cut: `PROHIBITIVE_COST`. Other short values cost 0.
        """
        storage_class = self.access.storage_class(node)
        if storage_class in (StorageClass.PAIR, StorageClass.KEYSUM):
            return PROHIBITIVE_COST
        if node in self.interloop.long_values:
            return 1 if is_stored else self.interloop.storage_bytes(node)
        if storage_class is not StorageClass.ROWS:
            return 0
        return 1 if is_stored else max(1, self.bytes_of_rows(node))

    def bytes_of_rows(self, node: fx.Node) -> int:
        """Return the bytes of all rows of a value that a loop computes chunk by chunk; 0 for other values (cached)."""
        if node not in self.bytes:
            self.bytes[node] = self._compute_bytes_of_rows(node)
        return self.bytes[node]

    def _compute_bytes_of_rows(self, node: fx.Node) -> int:
        """Compute the bytes of all rows of a value; see `bytes_of_rows`."""
        if not is_tensor(node) or not self.is_chunked(node) or self.access.storage_class(node) is not StorageClass.ROWS:
            return 0
        return self.axes.table.num_elements(self.axes.shapes[node]) * int(node.meta[VALUE].element_size())

    def crossing_forward(self, nodes: Sequence[fx.Node], stage_of: dict[fx.Node, int], stage_index: int) -> list[fx.Node]:
        """Return the chunked values among `nodes` (the stage's forward operators) that later stages read or the graph returns.

        `stage_of`: the stage index of each forward node; `stage_index`: of this stage.
        """
        return [
            node
            for node in nodes
            if is_tensor(node)
            and self.is_chunked(node)
            and (node in self.outputs or any(stage_of.get(user, stage_index) > stage_index for user in node.users))
        ]

    def backward_segments(self, stage_of: dict[fx.Node, int], num_stages: int, stored: set[fx.Node]) -> list[list[fx.Node]]:
        """Return the segment of the backward operators for each stage, by stage index; the last stage's segment runs first.

        It ends after the last use of a forward value that the stage recomputes, and before the first use of one of an earlier
        stage, where the fewest bytes are alive. `stage_of`: the stage of each forward node; `stored`: forward values at cuts.
        """
        if self.num_last_operators:
            stage_of_recomputed = {node: stage_of[node] for node in stage_of if node not in stored and self.is_chunked(node)}
            reordered = move_last_stage_first(self.backward, stage_of_recomputed, num_stages - 1)
            self.backward = self.move_up_operators_on_sums(reordered)
        position = {node: i for i, node in enumerate(self.backward)}
        first_use, last_use = [len(self.backward)] * num_stages, [-1] * num_stages  # of the values that a stage recomputes
        for node in self.backward:
            for source in operands_of(node):
                if source in stage_of and source not in stored and self.occupies_memory(source):
                    last_use[stage_of[source]] = position[node]
                    first_use[stage_of[source]] = min(first_use[stage_of[source]], position[node])
        costs = self.cut_costs(self.backward, position)
        bounds = [0]
        for stage in range(num_stages - 1, 0, -1):
            min_bound = max(max(last_use[stage:]) + 1, bounds[-1])
            candidates = range(min_bound, max(min(first_use[:stage]), min_bound) + 1)
            bound = min(candidates, key=lambda i: (costs[i - 1] if i else 0, i))
            while bound and costs[bound - 1] >= PROHIBITIVE_COST:  # a query-by-key value is never stored for a later segment
                bound += 1
            bounds.append(bound)
        bounds.append(len(self.backward))
        return [self.backward[start:stop] for start, stop in pairwise(bounds)][::-1]

    def move_up_operators_on_sums(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes with each operator on several sums over chunks right after them, so that one value crosses a cut.

        For example, a weight that two calls of a head share gets a gradient from each: dw = dw_1 + dw_2.
        """
        sort_key: dict[fx.Node, int] = {}
        sums = {node for node in nodes if self.access.storage_class(node) is StorageClass.SUM}
        for position, node in enumerate(nodes):
            operands = operands_of(node)
            reads_only_sums = len(operands) > 1 and all(operand in sort_key and operand in sums for operand in operands)
            if reads_only_sums:
                sums.add(node)
            sort_key[node] = max(sort_key[operand] for operand in operands) if reads_only_sums else position
        return sorted(nodes, key=sort_key.__getitem__)  # stable: with equal keys, an operator stays after its operands

    def crossing_backward(self, nodes: Sequence[fx.Node], segment_of: dict[fx.Node, int], stage_index: int) -> list[fx.Node]:
        """Return the values among `nodes` (the stage's backward segment) that segments of earlier stages, which run later,
        read, or that the graph returns. `segment_of`: the stage index of each backward node; `stage_index`: of this stage.
        """
        return [
            node
            for node in nodes
            if is_tensor(node)
            and (node in self.gradients or any(segment_of.get(user, stage_index) < stage_index for user in node.users))
        ]
