"""Each row of canonicalization as text: a graph before and after it alone, and one that is close and stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from streamfx.ir.joint import is_tensor
from streamfx.passes.rewrite.canonicalize import LATE_RULES, RULES
from streamfx.passes.rewrite.driver import simplify
from streamfx.passes.rewrite.pattern import RewriteRule
from streamfx.runtime.associative import SCAN_BACKWARD, TREE_SCAN
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.runtime.segment_sum import BACKWARD, DECAYED_SUMS
from streamfx.tools.report.listing import call_text, dtype_text, shape_text
from tests import (
    test_attention_with_sink,
    test_bags,
    test_canonical,
    test_canonical_blocks,
    test_canonical_equations,
)
from tests.support.canonical import Case, graphs, plain
from tests.support.combines import affine, number_of
from tests.support.flash_package import IS_STAND_IN, flash_attn_func, flash_attn_varlen_func
from tests.support.stateful.blocks import blocks
from tests.support.stateful.selective import selective, selective_backward

aten = torch.ops.aten
all_reduce, wait_tensor = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
LABELS = test_canonical_equations.LABELS
CASES = test_canonical.CASES | test_canonical_equations.CASES | test_canonical_blocks.CASES
ROWS = {row.name: row for row in (*RULES, *LATE_RULES)}


def pair(one: Callable[..., object], other: Callable[..., object], *inputs: Tensor) -> tuple[Case, Case]:
    return Case(one, inputs), Case(other, inputs)


def heads(summed: Callable[[Tensor], Tensor]) -> Case:
    return Case(test_canonical_equations.grouped(summed), test_canonical_equations.HEADS)


def fused(dropout: float) -> Case:
    return Case(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout, True)[0], (plain(2, 3, 5, 4),))


def of_the_flash_package(softcap: float) -> Case:
    return Case(lambda q: flash_attn_func(q, q, q, causal=True, softcap=softcap), (plain(2, 5, 3, 8),))


def of_documents(softcap: float) -> Case:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    how = {"causal": True, "softcap": softcap}
    return Case(lambda q, ends: flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, **how), (plain(5, 3, 8), ends))


def scanned(x: Tensor, a: Tensor, b: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
    """A scan, and its backward."""
    y, last = selective(x, x, a, b, b)
    dx, _, da, *_, dfirst = selective_backward(y, dlast, x, x, a, b, b)
    return y, last, dx, da, dfirst


def combined(x: Tensor, y: Tensor, dx: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Rows combined by a tree, and its backward; of one result there is no gradient."""
    number = number_of(affine, x[0], y[0], 2 * x[0], 2 * y[0], weight)
    made = TREE_SCAN([x, y], [weight], number)
    gradients = SCAN_BACKWARD([dx, None], [x, y], [weight], number)
    return made[1], gradients[0], gradients[2]


def of_other_rows(x: Tensor, y: Tensor, dx: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A backward to which no call belongs."""
    return (SCAN_BACKWARD([dx, None], [x, y], [weight], number_of(affine, x[0], y[0], 2 * x[0], 2 * y[0], weight))[0],)


def decayed(x: Tensor, rows: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    """Sums over rows that decay, and their gradients; of the last sum there is none."""
    decays = -x.square()
    sums, last = DECAYED_SUMS(decays, rows, first)
    ddecays, drows, _ = BACKWARD(sums, None, decays, rows, first)
    return last, ddecays, drows


def that_may_grow(x: Tensor, rows: Tensor) -> Tensor:
    made: Tensor = DECAYED_SUMS(x, rows, None)[0]
    return made


def read_by_others(q: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """What an operator has saved in blocks of rows is looked at."""
    y, _, saved = blocks(q, q, q, g, 0.5, None, False)
    return y, saved.sin()


def put_behind(rows: int) -> Callable[[Tensor], Tensor]:
    """Gradients behind four numbers for which there are none, as rows of eight."""
    return lambda x: aten.slice_backward(x.reshape(2, 7, 4), [2, 8, 4], 1, 1, 8, 1).reshape(2, rows, 32 // rows)


def put_back(start: int) -> Callable[[Tensor], Tensor]:
    return lambda x: RELATIVE_SHIFT_BACKWARD(aten.slice_backward(x, [2, 4, 7], 2, start, start + 3, 1), 1, 4, 8)


def likelihood(reduction: int) -> Case:
    return Case(lambda x, y: aten.nll_loss_forward(x, y, None, reduction, -100)[0], (plain(5, 6), LABELS))


def likelihood_back(reduction: int, known: bool = False) -> Case:
    """With the number of labels, or as many as are known."""

    def function(d: Tensor, x: Tensor, y: Tensor, *count: Tensor) -> Tensor:
        total = torch.full((), 2.0, dtype=x.dtype) if known else count[0]
        made: Tensor = aten.nll_loss_backward(d, x, y, None, reduction, -100, total)
        return made

    return Case(function, (plain(), plain(5, 6), LABELS, *([] if known else [plain()])))


SEEN: dict[str, tuple[Case, Case]] = {  # by row: a graph that it rewrites, and one that only looks like it
    "remove_alias": (CASES["alias"], Case(lambda x: x.clone(), (plain(4, 3),))),
    "fuse_all_reduce_with_wait": pair(
        lambda x: wait_tensor(all_reduce(x, "sum", "0")),
        lambda x: (wait_tensor(begun := all_reduce(x, "sum", "0")), wait_tensor(begun)),
        plain(4, 3),
    ),
    "remove_copy": (CASES["copied over"], CASES["a row copied over"]),
    "conj_to_conj_physical": (CASES["a marked conjugate"], CASES["a conjugate of its own"]),
    "neg_view_to_neg": (CASES["a conjugate's imaginary part"], Case(lambda x: -x + 1, (plain(4, 3),))),
    "remove_view": (CASES["view"], CASES["another view"]),
    "remove_double_transpose": (CASES["turned twice"], Case(lambda x: aten.t(aten.transpose(x, 0, 1)), (plain(4, 3),))),
    "remove_double_flip": (CASES["flipped twice"], CASES["flipped twice, otherwise"]),
    "remove_sliced_pad": (
        Case(lambda x: aten.slice(aten.constant_pad_nd(x, [0, 5]), 1, 0, 3), (plain(4, 3),)),
        CASES["padded in front"],
    ),
    "remove_full_slice": (CASES["sliced"], CASES["every other"]),
    "remove_empty_pad": (CASES["padded by nothing"], CASES["moved by padding"]),
    "new_full_to_full": pair(lambda x: x.new_full((2,), 0.5), lambda x: torch.full_like(x, 0.5), plain(4)),
    "full_like_of_row_to_full": pair(lambda x: torch.zeros_like(x.sin()[:, 0]), lambda x: torch.zeros_like(x.sin()), plain(4, 3)),
    "remove_flip_of_expand": pair(
        lambda x: x.sin().unsqueeze(0).expand(4, 3).flip(0), lambda x: x.sin().unsqueeze(0).expand(4, 3).flip(1), plain(3)
    ),
    "fill_to_full_like": (CASES["filled"], Case(lambda x: aten.fill(x, x[0]), (plain(4),))),
    "remove_cat_with_empty": (CASES["with nothing"], CASES["with nothing of a wider type"]),
    "cat_with_constant_to_pad": (CASES["fills 0.0 0.0 True"], CASES["fills of two signs"]),
    "token_shift_to_where": (CASES["a row in front"], CASES["two rows"]),
    "slice_scatter_to_pad": (CASES["written 0.0 1 3"], CASES["written over rows"]),
    "gather_rows_to_index": (CASES["gathered rows"], CASES["gathered elements"]),
    "gather_by_inverse_to_scatter": (CASES["put back"], CASES["put in order again"]),
    "scatter_add_by_inverse_to_gather": (CASES["gradients put back"], CASES["gradients added to others"]),
    "scatter_add_by_order_to_scatter": (CASES["gradients in order"], CASES["gradients in an order along another dimension"]),
    "slice_to_select_of_view": (CASES["a block of a view"], CASES["a block of another size"]),
    "slice_backward_to_select_backward": (CASES["a gradient of a block"], CASES["a gradient between blocks"]),
    "add_of_views_to_view_of_add": (CASES["blocks that are added"], CASES["blocks that are repeated and added"]),
    "slice_of_view_to_select": (CASES["a block of joined ones"], CASES["blocks that are joined otherwise"]),
    "constant_writes_to_where": (CASES["constants in rows of a list"], CASES["constants in three dimensions"]),
    "slice_of_writes_to_cat": (CASES["all rows but the last block's"], CASES["rows from within a block on"]),
    "writes_to_cat": (CASES["all that was written"], CASES["all but a gap that was written"]),
    "view_of_cat_to_stack": (CASES["blocks that are joined"], CASES["blocks of two sizes that are joined"]),
    "slice_of_padded_sum_to_slice": (CASES["rows of a sum of paddings"], CASES["rows of both paddings"]),
    "index_by_arange_to_slice": pair(
        lambda x: x.index_select(1, torch.arange(2)), lambda x: x.index_select(1, torch.arange(1, 3)), plain(4, 3)
    ),
    "reshapes_to_relative_shift": pair(
        lambda x: x.reshape(2, 8, 4)[:, 1:].reshape(2, -1, 7)[..., :7],
        lambda x: x.reshape(2, 8, 4)[:, 2:].reshape(2, 4, 6),
        plain(2, 4, 8),
    ),
    "reshapes_to_relative_shift_backward": (
        Case(put_behind(4), (plain(2, 4, 7),)),
        Case(put_behind(2), (plain(2, 2, 14),)),
    ),
    "merge_slice_into_relative_shift": pair(
        lambda x: RELATIVE_SHIFT(x, 1, 4, 7)[..., :4], lambda x: RELATIVE_SHIFT(x, 1, 4, 7)[..., 1:4], plain(2, 4, 8)
    ),
    "merge_slice_backward_into_relative_shift": pair(put_back(0), put_back(1), plain(2, 4, 3)),
    "index_per_row_to_masked_sum": (CASES["one of each"], CASES["one of each by other rows"]),
    "index_put_per_row_to_where": (
        CASES["put"],
        Case(lambda x, i: aten.index_put(torch.ones_like(x), [i, i], x[:, 0]), (plain(3, 3), torch.tensor([1, 2, 0]))),
    ),
    "embedding_bag_to_embedding": (test_bags.forward(0), test_bags.forward(0, step=2)),
    "embedding_bag_backward_to_embedding_backward": (test_bags.backward(1), test_bags.backward(1, step=2)),
    "embedding_bag_weights_backward_to_product": (test_bags.backward(0), test_bags.backward(0, step=2)),
    "masked_scatter_to_where": (CASES["scattered before"], CASES["scattered of elements"]),
    "index_put_by_mask_to_where": (CASES["put by a mask of rows"], CASES["put by a mask added"]),
    "masked_scatter_backward_to_index_put": (CASES["added back before"], CASES["added back of elements"]),
    "unfold_to_stack": (CASES["unfolded"], CASES["unfolded in steps"]),
    "unfold_backward_to_slice_backward": (
        CASES["windows"],
        Case(lambda x: aten.unfold_backward(x, [4, 3], 0, 2, 2), (plain(2, 3, 2),)),
    ),
    "flipped_cumsum_to_reverse_cumsum": (CASES["cumsum from behind"], CASES["half turned"]),
    "split_convolution_backward": (CASES["causal"], CASES["in steps"]),
    "mean_loss_to_sum": (likelihood(1), likelihood(2)),
    "mean_loss_backward_to_sum": (likelihood_back(1), likelihood_back(2)),
    "remove_total_weight_of_sum": (likelihood_back(2), likelihood_back(2, known=True)),
    "remove_max_before_softmax": (CASES["less the largest"], CASES["less the least"]),
    "remove_gradient_of_max": (CASES["at the largest"], CASES["of no softmax"]),
    "softmax_with_sink_to_softmax": pair(
        lambda x, k: torch.softmax(torch.cat([x, k], -1), -1)[..., :-1],
        lambda x, k: torch.softmax(torch.cat([x, k], -1), -1)[..., :-2],
        plain(2, 5),
        plain(2, 1),
    ),
    "softmax_with_sink_to_attention": (
        test_attention_with_sink.CASES["beside"],
        test_attention_with_sink.CASES["probabilities are shown"],
    ),
    "sdpa_to_attention": (fused(0.0), fused(0.1)),
    "flash_attn_to_attention": (of_the_flash_package(0.0), of_the_flash_package(30.0)),
    "flash_attn_varlen_to_attention": (of_documents(0.0), of_documents(30.0)),
    "stateful_operator_to_recurrence": (
        Case(scanned, (plain(2, 5, 3), plain(3, 4), plain(2, 5, 4), plain(2, 3, 4))),
        Case(read_by_others, (plain(2, 6, 1, 3), plain(2, 6, 1))),
    ),
    "associative_scan_to_recurrence": pair(combined, of_other_rows, plain(5, 3), plain(5, 3), plain(5, 3), plain(3)),
    "decayed_sums_to_recurrence": (
        Case(decayed, (plain(2, 5), plain(2, 5, 3), plain(2, 3))),
        Case(that_may_grow, (plain(2, 5), plain(2, 5, 3))),
    ),
    "remove_repeated_heads": (
        heads(test_canonical_equations.GROUPS["groups"][0]),
        heads(test_canonical_equations.GROUPS["other groups"][0]),
    ),
}
if not IS_STAND_IN:  # the package itself traces for GPUs alone
    SEEN = {name: cases for name, cases in SEEN.items() if "flash_attn" not in name}
OTHERWISE = {
    "decompose_flex_attention",
    "nested_getitem_to_item_at",
    "scan_to_recurrence",
    "causal_conv1d_to_recurrence",
    "index_by_list_to_slices",
    "index_put_by_list_to_slice_backward",
}  # of functions: test_flex, test_whole, test_scan_operators, test_causal_conv_package, test_constant_places


def listing(graph: fx.Graph) -> str:
    return "\n".join(
        f"    {node.name} = {call_text(node)}"
        + (f"  # {dtype_text(node.meta['val'].dtype)}{shape_text(node.meta['val'])}" if is_tensor(node) else "")
        for node in graph.nodes
        if node.op == "call_function"
    )


def prepared(case: Case, row: RewriteRule) -> fx.Graph:
    """A traced graph, simplified by all other rows."""
    before, _ = graphs(case)
    graph = copy.deepcopy(before.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    simplify(graph, [other for other in RULES if other is not row])
    return graph


def test_every_row_is_seen() -> None:
    assert SEEN.keys() | OTHERWISE == {name for name in ROWS if IS_STAND_IN or "flash_attn" not in name}
    assert all(" -> " in row.text for row in ROWS.values())


@pytest.mark.parametrize("name", SEEN)
def test_equation(name: str, golden: Callable[[str], None]) -> None:
    row = ROWS[name]
    graph, other = (prepared(case, row) for case in SEEN[name])
    before, beside = listing(graph), listing(other)
    simplify(graph, [row])
    simplify(other, [row])
    after = listing(graph)
    assert after != before
    assert listing(other) == beside
    golden(f"{row.text}\n\nbefore\n{before}\nafter\n{after}\nstays as it is\n{beside}\n")
