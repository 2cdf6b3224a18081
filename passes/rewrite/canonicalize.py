"""Canonicalization: the table of rewrite rules, and the rewrites that read more than one operator and its neighbors.

It runs before all analyses of the joint graph (forward and backward), and replaces the variants of an operation by the one
variant that later passes read. For example, all attention kernels become `streamfx::attention`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import erase_unused, joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import DRAW
from streamfx.passes.ops.hub_kernels import operator_name
from streamfx.passes.ops.traits import is_random
from streamfx.passes.rewrite.attention import flash_attn, flex, gqa, sdpa_variants, shifted_scores, sink, softmax, softmax_sink
from streamfx.passes.rewrite.attention.head_groups import split_heads_into_groups
from streamfx.passes.rewrite.collectives import merge_all_reduces
from streamfx.passes.rewrite.driver import simplify
from streamfx.passes.rewrite.loss import cross_entropy, nansum
from streamfx.passes.rewrite.moe import masked_scatter
from streamfx.passes.rewrite.moe.expert_mm import GROUPED_MM_HANDLERS
from streamfx.passes.rewrite.moe.sort_elimination import remove_undone_permutations
from streamfx.passes.rewrite.pattern import RewriteRule
from streamfx.passes.rewrite.scans import (
    causal_conv1d,
    conv_gradients,
    custom_scan,
    prefix_tree,
    reverse_cumsum,
    scan_hop,
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

RULES: tuple[RewriteRule, ...] = (
    flex.decompose_flex_attention,
    strided_access.nested_getitem_to_item_at,
    merge_all_reduces.fuse_all_reduce_with_wait,
    no_ops.remove_alias,
    lazy_conj.conj_to_conj_physical,
    lazy_conj.neg_view_to_neg,
    no_ops.remove_copy,
    no_ops.remove_view,
    no_ops.remove_double_transpose,
    no_ops.remove_double_flip,
    no_ops.remove_sliced_pad,
    no_ops.remove_full_slice,
    no_ops.remove_select_of_stack,
    concat.cast_parts_of_stack,
    no_ops.remove_empty_pad,
    constant_fill.new_full_to_full,
    constant_fill.full_like_of_row_to_full,
    constant_fill.fill_to_full_like,
    concat.remove_cat_with_empty,
    concat.cat_of_slices_to_value,
    concat.sum_of_padded_slices_to_value,
    concat.cat_with_constant_to_pad,
    concat.token_shift_to_where,
    concat.slice_scatter_to_pad,
    iota_index.gather_rows_to_index,
    iota_index.index_by_list_to_slices,
    iota_index.index_put_by_list_to_slice_backward,
    inverse_permutation.gather_by_inverse_to_scatter,
    inverse_permutation.scatter_add_by_inverse_to_gather,
    inverse_permutation.scatter_add_by_order_to_scatter,
    shifted_scores.index_by_arange_to_slice,
    shifted_scores.reshapes_to_relative_shift,
    shifted_scores.reshapes_to_relative_shift_backward,
    shifted_scores.merge_slice_into_relative_shift,
    shifted_scores.merge_slice_backward_into_relative_shift,
    index_as_onehot.index_per_row_to_masked_sum,
    index_as_onehot.index_put_per_row_to_where,
    index_as_onehot.diagonal_to_masked_sum,
    embedding_bag.embedding_bag_to_embedding,
    embedding_bag.embedding_bag_backward_to_embedding_backward,
    embedding_bag.embedding_bag_weights_backward_to_product,
    masked_scatter.masked_scatter_to_where,
    masked_scatter.index_put_by_mask_to_where,
    masked_scatter.masked_scatter_backward_to_index_put,
    tile_views.slice_to_select_of_view,
    tile_views.slice_backward_to_select_backward,
    tile_views.add_of_views_to_view_of_add,
    tile_views.slice_of_view_to_select,
    tile_views.view_of_flat_arithmetic_to_arithmetic,
    scatter_to_concat.slice_of_writes_to_cat,
    scatter_to_concat.writes_to_cat,
    scatter_to_concat.view_of_cat_to_stack,
    unfold.unfold_to_stack,
    unfold.unfold_backward_to_slice_backward,
    reverse_cumsum.flipped_scan_to_reverse_scan,
    scan_hop.remove_flip_of_expand,
    scan_hop.scan_to_recurrence,
    prefix_tree.associative_scan_to_recurrence,
    custom_scan.STATEFUL_OPERATOR_TO_RECURRENCE,
    conv_gradients.split_convolution_backward,
    cross_entropy.mean_loss_to_sum,
    cross_entropy.mean_loss_backward_to_sum,
    cross_entropy.remove_total_weight_of_sum,
    nansum.nansum_to_sum,
    softmax.remove_max_before_softmax,
    softmax.remove_gradient_of_max,
    sink.softmax_with_sink_to_attention,
    sdpa_variants.sdpa_to_attention,
    flash_attn.flash_attn_to_attention,
    flash_attn.flash_attn_varlen_to_attention,
    causal_conv1d.causal_conv1d_to_recurrence,
    gqa.remove_repeated_heads,
)
LATE_RULES: tuple[RewriteRule, ...] = (  # tried only after no rule of `RULES` applies
    softmax_sink.softmax_with_sink_to_softmax,
    constant_writes.constant_writes_to_where,
)


@dataclass(frozen=True)
class Canonicalize:
    name: ClassVar[str] = "canonicalize"

    def apply(self, facts: Facts) -> Facts:
        """Rewrite the joint graph in place, and return the facts with the rewritten graph.

        If an operator reads memory that lazily conjugates or negates its numbers, the graph is not rewritten: the returned
        `Facts.unchunked_reason` makes it run unchunked.
        """
        joint = facts.joint
        if (reason := lazy_conj.find_lazy_memory_read(joint.graph, joint.outputs)) is not None:
            return replace(facts, unchunked_reason=reason)
        strided_access.record_layouts(joint.graph, len(joint.outputs))
        canonicalize(joint.graph, len(joint.outputs))
        split_heads_into_groups(joint.graph)
        record_draws(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)))


def canonicalize(graph: fx.Graph, num_results: int | None = None) -> None:
    """Apply all rewrite rules to a graph in place, and remove permutations that are undone later, such as sorts by expert.

    The graph keeps its inputs and outputs. The first `num_results` outputs (all, if None) are returned to the user, who may
    write to them: they are not merged with equal values.
    """
    simplify(graph, RULES, num_results)
    while _has_target(graph, LATE_RULES) and simplify(graph, LATE_RULES, num_results):
        simplify(graph, RULES, num_results)
    remove_undone_permutations(graph, GROUPED_MM_HANDLERS)
    erase_unused(graph)


def _has_target(graph: fx.Graph, rules: Iterable[RewriteRule]) -> bool:
    """Return whether a graph has an operator to which a rule may apply."""
    targets = {target for rule in rules for target in rule.targets}
    return any(target in targets or operator_name(target) in targets for target in {node.target for node in graph.nodes})


def record_draws(graph: fx.Graph) -> None:
    """Emit one operator that draws a seed per training step, and record (seed node, index) at each random operator, in place.

    Loops run an operator of the forward graph once more in backward; from the seed and the index, both runs draw the same
    random numbers. A graph without random operators is not changed.
    """
    draws = [node for node in graph.nodes if node.op == "call_function" and is_random(node)]
    if not draws:
        return
    seed = GraphWriter(graph).move_before(draws[0]).call(draw_seed)
    for index, node in enumerate(draws):
        node.meta[DRAW] = (seed, index)
