"""Cut the graph into stages where the fewest bytes are alive.

The forward graph is cut between every two attentions, chunked or not, where sequence-shaped values take the fewest
bytes: in a plain decoder, at the residual stream. One more cut comes before the loss. The backward graph is cut after
the last use of the stage just left, again where the fewest bytes are alive: only the gradient of the cut values.

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
from streamfx.node_meta import COLLECTED, PART_OF, VALUE
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive, is_moved_elements, producer_of
from streamfx.passes.partition.code_sinking import sunk
from streamfx.passes.partition.interloop_values import InterloopValues
from streamfx.passes.partition.stage_names import stage_names

aten = torch.ops.aten

UNCUTTABLE = 1 << 60
AMONG_ZEROS = (aten.select_backward.default, aten.slice_backward.default)


@dataclass(frozen=True)
class FindStages:
    name: ClassVar[str] = "stages"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the stages."""
        return replace(facts, found_stages=_Cutter(facts).stages())


def stages_with(last: Collection[fx.Node], facts: Facts) -> tuple[Stage, ...]:
    """Return the stages whose last forward graph is exactly `last`; users of these operators must be among them."""
    return _Cutter(facts, last).stages()


class _Cutter:
    """Cuts the graph. If `last` operators are given, they form the last stage."""

    def __init__(self, facts: Facts, last: Collection[fx.Node] = ()) -> None:
        self.facts, self.axes, self.access, self.key_spans = facts, facts.axes, facts.access, facts.key_spans
        joint = facts.joint
        self.between = InterloopValues(facts)
        nodes = elements_after_producers(joint.nodes)
        self.forward = [node for node in nodes if node in joint.forward]
        self.backward = as_late_as_possible([node for node in nodes if node not in joint.forward], joint.tangents)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.bytes: dict[fx.Node, int] = {}
        self.last = len(last)
        if last:
            self.forward.sort(key=lambda node: node in last)
        else:
            self.forward = sunk(self.forward, [low for low, _ in self.attention_intervals()], self.bytes_of_rows)
        self.position = {node: i for i, node in enumerate(self.forward)}
        self.outputs = {output for output in joint.outputs if isinstance(output, fx.Node)}

    def stages(self) -> tuple[Stage, ...]:
        """Cut the forward graph, assign backward operators to each stage, and list the values that cross each cut."""
        cuts = self.forward_cuts()
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
        """Return whether a value is computed chunk by chunk and has to be stored to cross a cut."""
        return self.between.is_in_loop(node) and node not in self.axes.static

    def is_alive(self, node: fx.Node) -> bool:
        """Return whether a value takes memory from its definition to its last use."""
        return self.is_chunked(node) or node in self.between.long

    def forward_cuts(self) -> list[int]:
        """Return the positions after which the forward graph is cut."""
        live = self.live_bytes(self.forward, self.position, self.outputs)
        attentions = self.attention_intervals()
        gaps = [(last, first - 1) for (_, last), (first, _) in pairwise(attentions)]
        loss = self.first_sequence_sum()
        if self.last:
            gaps.append((len(self.forward) - self.last - 1,) * 2)
        elif loss is not None and (attentions or self.facts.joint.tangents):  # else the head is all there is
            gaps.append((attentions[-1][1] if attentions else -1, loss - 1))
        products_until, reduced = list(accumulate(is_expensive(node) for node in self.forward)), self.reduced_bytes()

        def best(low: int, high: int) -> int | None:
            """Return the position in [low, high] with the fewest live bytes; None if no cut is possible."""
            # If equally few bytes are alive, cut after the last product, so that its result is stored and not
            # computed twice, and before the following norm, whose gradient would read that result. A stored sum
            # over ranks saves one communication.
            candidates = range(max(low, 0), high + 1)
            cut_at = min(candidates, key=lambda i: (live[i] - reduced[i], -products_until[i], i), default=None)
            return cut_at if cut_at is not None and 0 < live[cut_at] < UNCUTTABLE else None

        cuts: list[int] = []
        for low, high in gaps:
            cut = best(low, high)
            if cut is not None and (not cuts or cut > cuts[-1]):
                cuts.append(cut)
        # Windows come first: a narrow running sum alongside the layers might have the minimum.
        layers = self.cuts_between_layers(self.reads_earlier_rows, cuts, best, live)
        return self.cuts_between_layers(self.reads_or_scans_earlier_rows, layers, best, live)

    def cuts_between_layers(
        self,
        is_window: Callable[[fx.Node], bool],
        cuts: Sequence[int],
        best: Callable[[int, int], int | None],
        live: Sequence[int],
    ) -> list[int]:
        """Add cuts between operators that read earlier rows, at the points with the fewest live bytes overall.

        A loop in reverse order has to be given such rows, and recomputes their ancestors. Without a cut it would hold
        the rows of all layers, and compute each layer's last product once more than checkpointing does.
        """
        windows = [i for i, node in enumerate(self.forward) if is_window(node)]
        between = [(low, high - 1) for low, high in pairwise(windows)]
        candidates = [(*pair, cut) for pair in between if (cut := best(*pair)) is not None]
        least = min((live[cut] for _, _, cut in candidates), default=0)
        new = [cut for low, high, cut in candidates if live[cut] == least and not any(low <= other <= high for other in cuts)]
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

        Collected keys wait for all rows: the interval from their definition to the last operator that uses their axis
        is one attention. So are the head groups of an attention.
        """
        intervals = []
        seen: dict[Any, list[int]] = {}
        for node, span in self.key_spans.spans.items():
            if node in self.position and node not in self.axes.static:
                seen.setdefault(producer_of(node).meta.get(PART_OF, id(span)), []).append(self.position[node])
        for node in self.between.attentions:
            producer = producer_of(node)
            seen.setdefault(producer.meta.get(PART_OF, producer), []).append(self.position[node])
        seen |= {
            node: self.collected_key_positions(node)
            for node in self.forward
            if COLLECTED in node.meta and node not in self.axes.static
        }
        for positions in seen.values():
            intervals.append((min(positions), max(positions)))
        merged: list[tuple[int, int]] = []
        for low, high in sorted(intervals):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged

    def collected_key_positions(self, keys: fx.Node) -> list[int]:
        """Return the positions of collected keys, their source, and the operators along the axis of the keys."""
        key_atoms = {atom for dim in keys.meta[COLLECTED] for atom in self.axes.table.resolve(self.axes.shapes[keys][dim])}
        source, todo, nodes = node_argument(keys), [keys], set[fx.Node]()
        while is_moved_elements(source) and node_argument(source) in self.position:
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
        """Return the position of the first sum over the sequence that an output depends on, if any."""
        needed = ancestors(self.facts.joint.outputs)
        for i, node in enumerate(self.forward):
            if self.is_chunked(node) and StorageClass.SUM in self.access.storage_classes[node] and node in needed:
                return i
        return None

    def live_bytes(self, nodes: Sequence[fx.Node], position: dict[fx.Node, int], free: Iterable[fx.Node] = ()) -> list[int]:
        """Return the bytes of sequence-shaped values alive after each position; `free` values cost nothing."""
        change = [0] * (len(nodes) + 1)
        free = set(free)
        for node in nodes:
            if not is_tensor(node):  # a tuple must not be separated from its elements
                elements = [position[user] for user in node.users if user.target is operator.getitem and user in position]
                if elements:
                    change[position[node]] += UNCUTTABLE
                    change[max(elements)] -= UNCUTTABLE
                continue
            if not self.is_alive(node):
                continue
            last = max((position[user] for user in node.users if user in position), default=position[node])
            if last > position[node]:
                cost = self.cost(node, node in free)
                change[position[node]] += cost
                change[last] -= cost
        return list(accumulate(change[:-1]))

    def reduced_bytes(self) -> list[int]:
        """Return, for each position, the bytes reduced over ranks whose last use is at or before it."""
        finished = [0] * len(self.forward)
        for node in self.forward:
            if is_reduced_over_ranks(node):
                finished[max((self.position[user] for user in node.users if user in self.position), default=-1)] += (
                    self.bytes_of_rows(node)
                )
        return list(accumulate(finished))

    def cost(self, node: fx.Node, is_stored: bool) -> int:
        """Return the bytes that a live value adds at a cut: 1 if stored anyway, prohibitive if it has keys."""
        storage_class = self.access.storage_class(node)
        if storage_class in (StorageClass.PAIR, StorageClass.KEYSUM):
            return UNCUTTABLE
        if node in self.between.long:
            return 1 if is_stored else self.between.bytes_of(node)
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
            self.backward = self.sums_after_operands(last_stage_first(self.backward, stage_of_recomputed, count - 1))
        position = {node: i for i, node in enumerate(self.backward)}
        uses_of_stage: list[list[int]] = [[] for _ in range(count)]
        for node in self.backward:
            for source in node.all_input_nodes:
                if source in stage_of and source not in kept and self.is_alive(source):
                    uses_of_stage[stage_of[source]].append(position[node])
        live = self.live_bytes(self.backward, position)
        bounds = [0]
        for stage in range(count - 1, 0, -1):
            low = max((p for positions in uses_of_stage[stage:] for p in positions), default=-1)
            high = min((p for positions in uses_of_stage[:stage] for p in positions), default=len(self.backward))
            candidates = range(max(low + 1, bounds[-1]), max(high, low + 1, bounds[-1]) + 1)
            best = min(candidates, key=lambda i: (live[i - 1] if i else 0, i))
            while best and live[best - 1] >= UNCUTTABLE:  # a query-by-key value is never stored for a later segment
                best += 1
            bounds.append(best)
        bounds.append(len(self.backward))
        return [self.backward[low:high] for low, high in pairwise(bounds)][::-1]

    def sums_after_operands(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Move each addition of sums over rows right after its operands: one sum is stored instead of several."""
        sort_key: dict[fx.Node, int] = {}
        sums = {node for node in nodes if self.access.storage_class(node) is StorageClass.SUM}
        for i, node in enumerate(nodes):
            operands = node.all_input_nodes
            adds = len(operands) > 1 and all(operand in sort_key and operand in sums for operand in operands)
            sort_key[node] = max(sort_key[operand] for operand in operands) if adds else i
            sums.update([node] if adds else [])
        return sorted(nodes, key=sort_key.__getitem__)

    def crossing_backward(self, nodes: Sequence[fx.Node], segment_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
        """Return the values of a backward segment that later segments read or the graph returns."""
        gradients = {gradient for gradient in self.facts.joint.gradients if isinstance(gradient, fx.Node)}
        return [
            node
            for node in nodes
            if is_tensor(node) and (node in gradients or any(segment_of.get(user, stage) < stage for user in node.users))
        ]


def _shrinks_largest_operand(node: fx.Node, driven: Collection[fx.Node]) -> bool:
    """Return whether a product has fewer bytes than its largest operand among `driven`."""
    largest = max((bytes_like(source.meta.get(VALUE)) for source in node.all_input_nodes if source in driven), default=0)
    return is_tensor(node) and bytes_like(node.meta[VALUE]) < largest


def elements_after_producers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Move each element of a tuple right after its producer, so that no cut separates them.

    The final state of a recurrence would otherwise be extracted at the very end, if it is only returned.
    """
    sort_key: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        sort_key[node] = sort_key.get(producer_of(node), i)
    return sorted(sort_key, key=sort_key.__getitem__)


def as_late_as_possible(nodes: Sequence[fx.Node], tangents: Iterable[fx.Node]) -> list[fx.Node]:
    """Move backward operators that depend on no tangent right before their first use.

    Such a value depends on forward values only, perhaps of an early layer, but may be traced before all gradients.
    """
    driven = set(tangents)
    for node in nodes:
        if any(source in driven for source in node.all_input_nodes):
            driven.add(node)
    return before_use(nodes, set(nodes) - driven)


def before_use(nodes: Sequence[fx.Node], moved: Collection[fx.Node]) -> list[fx.Node]:
    """Move each of the `moved` operators right before its first user."""
    position = {node: i for i, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node in moved:
            position[node] = min((position[user] for user in node.users if user in position), default=position[node])
    return sorted(nodes, key=lambda node: (position[node], node not in moved))


def last_stage_first(nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], last: int) -> list[fx.Node]:
    """Move the backward operators of the last stage to the front; `stage_of` maps forward values to their stage.

    If a model is called twice, the backward graph passes all layers of one call before the head of the other.
    Products that no later operator combines with values of the last stage belong to an earlier stage, unless they
    shrink a value that the last stage drives: the head's gradients of logits would otherwise be stored in full. Two
    more kinds of operators move with such products if they have no other use: those that depend on no value of the
    last stage, and those that only reshape their operand or pad it with zeros: the gradient of a final state would
    otherwise be as long as the sequence.
    """
    leads_to_last, driven, earlier_stage_ops = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in reversed(nodes):
        if any(user in leads_to_last for user in node.users) or any(
            stage_of.get(source) == last for source in node.all_input_nodes
        ):
            leads_to_last.add(node)
    for node in nodes:
        if node in leads_to_last or any(source in driven for source in node.all_input_nodes):
            driven.add(node)
        is_earlier_product = is_expensive(node) and node not in leads_to_last and not _shrinks_largest_operand(node, driven)
        if is_earlier_product or any(
            source in earlier_stage_ops or stage_of.get(source, last) < last for source in node.all_input_nodes
        ):
            earlier_stage_ops.add(node)
    reshaped = set[fx.Node]()
    for node in reversed(nodes):
        is_reshaped = is_moved_elements(node) or node.target in AMONG_ZEROS or node not in driven
        if is_reshaped and node not in earlier_stage_ops and earlier_stage_ops.issuperset(node.users):
            reshaped.add(node)
            earlier_stage_ops.add(node)
    return before_use(sorted(nodes, key=earlier_stage_ops.__contains__), reshaped)
