"""What is this, in the fewest operators? The table of equations, and what is not local enough to be one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import drop_unused, joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization import (
    associative_scans,
    attention_with_sink,
    bags,
    blocks_of_rows,
    constant_writes,
    convolution_package,
    convolutions,
    decayed_sums,
    dropped_column,
    fills,
    flash_package,
    flex,
    fused,
    grouped,
    inverse_orders,
    joins,
    losses,
    marks,
    no_ops,
    one_hot,
    opaque,
    over_ranks,
    relative_shifts,
    reversed_scans,
    row_numbers,
    scan_operators,
    scattered,
    softmax,
    stateful_operators,
    windows_of_rows,
    written_blocks,
)
from streamfx.passes.canonicalization.driver import simplify
from streamfx.passes.canonicalization.equation import Equation
from streamfx.passes.canonicalization.experts import PRODUCTS
from streamfx.passes.canonicalization.heads_in_groups import heads_in_groups
from streamfx.passes.canonicalization.permutations import undo_orders
from streamfx.passes.operators.traits import is_random
from streamfx.runtime.rng import draw_seed

TABLE: tuple[Equation, ...] = (
    flex.flex_attention,
    opaque.result_within_a_result,
    over_ranks.reduced_over_ranks,
    no_ops.alias,
    marks.marked_conjugate,
    marks.marked_negative,
    no_ops.copied_over,
    no_ops.view_of_the_same_shape,
    no_ops.transposed_twice,
    no_ops.flipped_twice,
    no_ops.slice_without_padding,
    no_ops.slice_of_everything,
    no_ops.padding_by_nothing,
    fills.constant_like_another,
    fills.constant_like_a_row,
    fills.filled,
    joins.join_with_nothing,
    joins.join_with_constants,
    joins.token_shift,
    joins.rows_written_into_a_constant,
    row_numbers.rows_of_a_matrix,
    row_numbers.rows_of_a_list,
    row_numbers.gradient_of_rows_of_a_list,
    inverse_orders.rows_put_back,
    inverse_orders.gradient_of_rows_put_back,
    inverse_orders.gradient_of_rows_in_order,
    relative_shifts.first_rows_by_number,
    relative_shifts.shifted_rows,
    relative_shifts.gradient_of_shifted_rows,
    relative_shifts.columns_of_shifted_rows,
    relative_shifts.gradient_of_columns,
    one_hot.one_of_each,
    one_hot.put_into_each,
    bags.sum_of_a_bag,
    bags.gradient_of_a_bag,
    bags.gradient_of_weights_in_a_bag,
    scattered.rows_put_by_a_mask,
    scattered.number_put_by_a_mask,
    scattered.gradient_of_rows_put_by_a_mask,
    blocks_of_rows.block_of_a_view,
    blocks_of_rows.gradient_of_a_block,
    blocks_of_rows.sum_of_joined_blocks,
    blocks_of_rows.block_of_joined_blocks,
    blocks_of_rows.rows_of_a_sum_of_paddings,
    written_blocks.rows_of_what_was_written,
    written_blocks.all_that_was_written,
    written_blocks.blocks_that_were_written,
    windows_of_rows.windows,
    windows_of_rows.gradient_of_windows,
    reversed_scans.reversed_scan,
    scan_operators.turned_repetition,
    scan_operators.scan_over_rows,
    associative_scans.rows_of_a_tree,
    decayed_sums.sums_that_decay,
    stateful_operators.OPERATOR_WITH_A_STATE,
    convolutions.gradients_of_a_convolution,
    losses.mean_loss,
    losses.mean_loss_gradient,
    losses.total_weight_of_a_sum,
    softmax.softmax_of_shifted_scores,
    softmax.gradient_of_the_largest_score,
    attention_with_sink.attention_with_a_sink,
    fused.attention_of_a_device,
    flash_package.attention_of_the_flash_package,
    flash_package.packed_attention_of_the_flash_package,
    convolution_package.convolution_of_the_package,
    grouped.heads_repeated_for_groups,
)
WHERE_NOTHING_ELSE_DOES: tuple[Equation, ...] = (
    dropped_column.softmax_without_a_column,
    constant_writes.constants_that_were_written,
)


@dataclass(frozen=True)
class Canonicalize:
    name: ClassVar[str] = "canonicalize"

    def apply(self, facts: Facts) -> Facts:
        joint = facts.joint
        if (why := marks.why_marks_stay(joint.graph, joint.outputs)) is not None:
            return replace(facts, stands=why)
        opaque.note_layouts(joint.graph, len(joint.outputs))
        canonicalize(joint.graph, len(joint.outputs))
        heads_in_groups(joint.graph)
        number_random_operators(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))


def canonicalize(graph: fx.Graph, results: int | None = None) -> None:
    """Simplify a graph in place; its inputs and outputs stay what they are, and `results` of them are the caller's."""
    simplify(graph, TABLE, results)
    while simplify(graph, WHERE_NOTHING_ELSE_DOES, results):
        simplify(graph, TABLE, results)
    undo_orders(graph, PRODUCTS)
    drop_unused(graph)


def number_random_operators(graph: fx.Graph) -> None:
    """Give the graph one seed per step, and each random operator the seed and a number of its own."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and is_random(node)]
    if not drawing:
        return
    seed = GraphWriter(graph).before(drawing[0]).call(draw_seed)
    for number, node in enumerate(drawing):
        node.meta["streamfx_draw"] = (seed, number)
