"""Graphs that are split in two where that would not be what one graph does, and heads that keep what they need not."""

from __future__ import annotations

from tests.mutations.row import Mutation

TESTS, PARTS, SPLIT = "test_two_sequences.py", "streamfx/frontend/split_graphs.py", "streamfx/torch_private/split.py"
STAGES, HEADS = "passes/partition/stages.py", f"{TESTS}::test_heads_of_several_calls_keep_no_gradients_of_logits"

ROWS = (
    Mutation(
        "splits",
        "a part may write to what the other part has saved",
        PARTS,
        "        if may_write_to_inputs() if joint is None else mutated_inputs(joint.graph) != []:\n",
        "        if joint is None and may_write_to_inputs():\n",
        (f"{TESTS}::test_a_part_that_writes_to_what_it_is_given_is_none",),
    ),
    Mutation(
        "splits",
        "what the second part reads without a gradient gets zeros",
        PARTS,
        "        if not self.handed_on <= driven:\n",
        "        if joint is None and self.handed_on:\n",
        (f"{TESTS}::test_a_part_without_a_gradient_for_what_it_is_given_is_none",),
    ),
    Mutation(
        "splits",
        "a place may be inside of autocast, or where no gradient is recorded",
        SPLIT,
        "        if not depth and records and not is_first:\n",
        "        if depth >= 0 and not is_first:\n",
        (f"{TESTS}::test_no_place_is_inside_of_a_context",),
    ),
    Mutation(
        "splits",
        "a statement that nothing is known about opens no context",
        SPLIT,
        "        elif VALUE not in node.meta and node.target is not LOAD and not writes(node):\n",
        "        elif node.op == LOAD:\n",
        (f"{TESTS}::test_what_nobody_knows_about_has_no_place_behind_it",),
    ),
    Mutation(
        "splits",
        "a first part may be empty, and the second the graph itself",
        SPLIT,
        "        if not depth and records and not is_first:\n",
        "        if not depth and records:\n",
        (f"{TESTS}::test_what_nobody_knows_about_has_no_place_behind_it",),
    ),
    Mutation(
        "splits",
        "a bucket of DDP may be split",
        PARTS,
        " and self.splits < MOST and not splits_for_ddp()",
        " and self.splits < MOST",
        (f"{TESTS}::test_buckets_of_ddp_are_not_split",),
    ),
    Mutation(
        "splits",
        "sizes of the second part are known from what it is given",
        SPLIT,
        "    return [*sizes, *(node for node in given if node not in sizes)]\n",
        "    return list(given) if sizes else [*given]\n",
        (f"{TESTS}::test_parts_take_the_sizes_that_dynamo_gives",),
    ),
    Mutation(
        "splits",
        "the first part's results may be computed when they are touched",
        PARTS,
        'parts[0].options = replace(parts[0].options, outputs="dense")',
        "parts[0].options = replace(parts[0].options)",
        (f"{TESTS}::test_deferred_outputs_of_the_second_part",),
    ),
    Mutation(
        "splits",
        "a head of an earlier call is a product of an earlier stage",
        STAGES,
        "        is_another = is_expensive(node) and node not in needed and not _makes_less(node, driven)\n",
        "        is_another = is_expensive(node) and node not in needed\n",
        (HEADS,),
    ),
    Mutation(
        "splits",
        "a head's weight has a sum for each call",
        STAGES,
        "self.sums_early(in_front(self.backward, made, count - 1))",
        "in_front(self.backward, made, count - 1)",
        (HEADS,),
    ),
    Mutation(
        "splits",
        "a split is looked for as often as somebody asks",
        "streamfx/frontend/split_graphs.py",
        "        if self.sought is None or self.sought[0] is not facts:",
        "        if True:",
        ("test_budget.py::test_a_split_is_looked_for_once",),
    ),
    Mutation(
        "splits",
        "a graph of one sequence is told that it may be split",
        "streamfx/frontend/split_graphs.py",
        "        if place is None:\n            return error\n        other = OverBudgetError(",
        "        other = OverBudgetError(",
        ("test_budget.py::test_that_no_split_is_tried_is_said_where_it_could_help",),
    ),
    Mutation(
        "splits",
        "small outputs that the caller reads are deferred, whatever is kept for them",
        "streamfx/lazy/rewrite.py",
        "    return isinstance(numel, int) and numel < steps.LEAST",
        "    return False",
        ("test_never_more.py::test_small_outputs_are_deferred_only_beside_what_follows_from_them",),
    ),
    Mutation(
        "splits",
        "small logits beside their loss are made in each call",
        "streamfx/lazy/rewrite.py",
        "if base in read or not is_made_whole(base)}",
        "if not is_made_whole(base)}",
        ("test_never_more.py::test_small_outputs_are_deferred_only_beside_what_follows_from_them",),
    ),
)
