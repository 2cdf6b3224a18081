"""Canonicalization: the table of rewrite rules, and the rewrites that need more than one operator and its neighbors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import erase_unused, joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import DRAW
from streamfx.passes.ops.traits import is_random
from streamfx.passes.rewrite.attention import flash_attn, flex, gqa, sdpa_variants, shifted_scores, sink, softmax, softmax_sink
from streamfx.passes.rewrite.attention.head_groups import heads_in_groups
from streamfx.passes.rewrite.collectives import merge_all_reduces
from streamfx.passes.rewrite.driver import simplify
from streamfx.passes.rewrite.loss import cross_entropy
from streamfx.passes.rewrite.moe import masked_scatter
from streamfx.passes.rewrite.moe.expert_mm import PRODUCTS
from streamfx.passes.rewrite.moe.sort_elimination import remove_undone_permutations
from streamfx.passes.rewrite.pattern import Equation
from streamfx.passes.rewrite.scans import (
    causal_conv1d,
    conv_gradients,
    custom_scan,
    prefix_tree,
    reverse_cumsum,
    scan_hop,
    segment_sum,
)
from streamfx.passes.rewrite.views import (
    concat,
    constant_fill,
    constant_writes,
    embedding_bag,
    index_as_onehot,
    inverse_permutation,
    iota_index,
    lazy_conj,
    no_ops,
    scatter_to_concat,
    strided_access,
    tile_views,
    unfold,
)
from streamfx.runtime.rng import draw_seed

TABLE: tuple[Equation, ...] = (
    flex.flex_attention,
    strided_access.result_within_a_result,
    merge_all_reduces.reduced_over_ranks,
    no_ops.alias,
    lazy_conj.marked_conjugate,
    lazy_conj.marked_negative,
    no_ops.copied_over,
    no_ops.view_of_the_same_shape,
    no_ops.transposed_twice,
    no_ops.flipped_twice,
    no_ops.slice_without_padding,
    no_ops.slice_of_everything,
    no_ops.padding_by_nothing,
    constant_fill.constant_like_another,
    constant_fill.constant_like_a_row,
    constant_fill.filled,
    concat.join_with_nothing,
    concat.join_with_constants,
    concat.token_shift,
    concat.rows_written_into_a_constant,
    iota_index.rows_of_a_matrix,
    iota_index.rows_of_a_list,
    iota_index.gradient_of_rows_of_a_list,
    inverse_permutation.rows_put_back,
    inverse_permutation.gradient_of_rows_put_back,
    inverse_permutation.gradient_of_rows_in_order,
    shifted_scores.first_rows_by_number,
    shifted_scores.shifted_rows,
    shifted_scores.gradient_of_shifted_rows,
    shifted_scores.columns_of_shifted_rows,
    shifted_scores.gradient_of_columns,
    index_as_onehot.one_of_each,
    index_as_onehot.put_into_each,
    embedding_bag.sum_of_a_bag,
    embedding_bag.gradient_of_a_bag,
    embedding_bag.gradient_of_weights_in_a_bag,
    masked_scatter.rows_put_by_a_mask,
    masked_scatter.number_put_by_a_mask,
    masked_scatter.gradient_of_rows_put_by_a_mask,
    tile_views.block_of_a_view,
    tile_views.gradient_of_a_block,
    tile_views.sum_of_joined_blocks,
    tile_views.block_of_joined_blocks,
    tile_views.rows_of_a_sum_of_paddings,
    scatter_to_concat.rows_of_what_was_written,
    scatter_to_concat.all_that_was_written,
    scatter_to_concat.blocks_that_were_written,
    unfold.windows,
    unfold.gradient_of_windows,
    reverse_cumsum.reversed_scan,
    scan_hop.turned_repetition,
    scan_hop.scan_over_rows,
    prefix_tree.rows_of_a_tree,
    segment_sum.sums_that_decay,
    custom_scan.OPERATOR_WITH_A_STATE,
    conv_gradients.gradients_of_a_convolution,
    cross_entropy.mean_loss,
    cross_entropy.mean_loss_gradient,
    cross_entropy.total_weight_of_a_sum,
    softmax.softmax_of_shifted_scores,
    softmax.gradient_of_the_largest_score,
    sink.attention_with_a_sink,
    sdpa_variants.attention_of_a_device,
    flash_attn.attention_of_the_flash_package,
    flash_attn.packed_attention_of_the_flash_package,
    causal_conv1d.convolution_of_the_package,
    gqa.heads_repeated_for_groups,
)
LATE_TABLE: tuple[Equation, ...] = (  # tried only after no rule of `TABLE` applies
    softmax_sink.softmax_without_a_column,
    constant_writes.constants_that_were_written,
)


@dataclass(frozen=True)
class Canonicalize:
    name: ClassVar[str] = "canonicalize"

    def apply(self, facts: Facts) -> Facts:
        """Rewrite the joint graph in place, or return the reason why it must stay as it is (`Facts.unchunked_reason`)."""
        joint = facts.joint
        if (why := lazy_conj.why_lazy_values_stay(joint.graph, joint.outputs)) is not None:
            return replace(facts, unchunked_reason=why)
        strided_access.record_layouts(joint.graph, len(joint.outputs))
        canonicalize(joint.graph, len(joint.outputs))
        heads_in_groups(joint.graph)
        number_random_operators(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))


def canonicalize(graph: fx.Graph, results: int | None = None) -> None:
    """Simplify a graph in place. The graph keeps its inputs and outputs; the first `results` outputs belong to the caller."""
    simplify(graph, TABLE, results)
    while simplify(graph, LATE_TABLE, results):
        simplify(graph, TABLE, results)
    remove_undone_permutations(graph, PRODUCTS)
    erase_unused(graph)


def number_random_operators(graph: fx.Graph) -> None:
    """Give the graph one seed per step, and each random operator that seed and its own number."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and is_random(node)]
    if not drawing:
        return
    seed = GraphWriter(graph).before(drawing[0]).call(draw_seed)
    for number, node in enumerate(drawing):
        node.meta[DRAW] = (seed, number)
