"""Chunks: what an operator is on fewer rows, which row is meant, in which type parts are added, dynamic sizes."""

from __future__ import annotations

from tests.mutations.row import Mutation

EMITTERS, DEMAND, SIZES = "passes/codegen/emitters.py", "passes/analysis/demand.py", "streamfx/runtime/sizes.py"
MISLEADS = "test_masks_that_mislead.py::test_arithmetic_that_misleads"
LAST_STATE = "test_losses.py::test_of_the_last_state_no_gradient_is_kept_that_is_as_long_as_all_rows"
TURNS = "test_recurrent_families.py::test_a_loop_of_turns_runs_whole_and_what_is_around_it_streams"

PLACES = (
    Mutation(
        "rows",
        "an index along a part of a dimension is the number of a row",
        "streamfx/ir/facts.py",
        "if self.sequence is None or len(atoms) != 1 or atoms[0] not in self.sequence.members or",
        "if self.sequence is None or not atoms or atoms[0] not in self.sequence.members or",
        ("test_counted_rows.py::test_the_sequence_is_a_part_of_the_number",),
    ),
    Mutation(
        "rows",
        "operators that count rows may be given any part of a dimension",
        DEMAND,
        "if any(self.axes.row_axis(self.axes.letters[node][letter]) is None for letter in placed):",
        "if False:",
        ("test_counted_rows.py::test_the_sequence_is_a_part_of_the_number",),
    ),
    Mutation(
        "rows",
        "the causal flag compares numbers of rows of the sequence",
        "passes/analysis/masks.py",
        "        return key - query if isinstance(key - query, int) else None",
        "        return 0",
        ("test_masks.py::test_causal_flag_between_shifted_slices",),
    ),
    Mutation(
        "rows",
        "a buffer's pattern survives that a row of it is repeated",
        "passes/analysis/masks.py",
        "return shape_of_node(node)[-2:] == shape_of_node(source)[-2:]",
        "return True",
        ("test_masks_that_mislead.py::test_patterns_of_buffers",),
    ),
    Mutation(
        "rows",
        "joined positions go on where the last ones end",
        "passes/analysis/positions.py",
        "        if fact.offset != offset + factor * position or not isinstance(length, int):\n",
        "        if not isinstance(length, int):\n",
        (MISLEADS,),
    ),
)
COPIES = (
    Mutation(
        "chunks",
        "a mean over rows that keeps its keys is a sum",
        EMITTERS,
        "    share = call(aten.div.Scalar, (total, builder.number(mean_count(node, builder.layout))))\n",
        "    share = total\n",
        ("test_scores.py::test_means_of_shares",),
    ),
    Mutation(
        "chunks",
        "a mean over chunks is a sum",
        "passes/codegen/adders.py",
        '    if signature.combine != "mean":\n        return 1\n',
        "    return 1\n",
        ("test_rules.py::test_law[aten.mean.dim]",),
    ),
    Mutation(
        "chunks",
        "a chunk of one row loses its dimension",
        EMITTERS,
        "return builder.graph.call_function(aten.squeeze.dims, (operand, vanishing(node)))",
        "return emit_copy(builder, node)",
        ("test_rules.py::test_law[aten.squeeze.dim]",),
    ),
    Mutation(
        "chunks",
        "the diagonal of a chunk is that of the whole",
        EMITTERS,
        "    moved = builder.number(diagonal + shift)\n",
        "    moved = builder.number(diagonal + 0 * shift)\n",
        ("test_rules.py::test_law",),
    ),
    Mutation(
        "chunks",
        "rows outside of the sequence are in no chunk",
        SIZES,
        "    first = 0 if start == 0 else min(max((start - offset) // block, 0), rows)\n",
        "    first = min(max((start - offset) // block, 0), rows)\n",
        ("test_counted_rows.py::test_rows_outside_of_the_sequence_see_what_lies_there",),
    ),
    Mutation(
        "chunks",
        "rows behind the sequence see as far as those in it",
        SIZES,
        "    last = rows if high is None or stop == length else min(max(stop + high - offset, 0), rows)\n",
        "    last = rows if high is None else min(max(stop + high - offset, 0), rows)\n",
        ("test_counted_rows.py::test_rows_outside_of_the_sequence_see_what_lies_there",),
    ),
    Mutation(
        "chunks",
        "a scan begins with the chunk, not with its rows",
        "passes/codegen/running.py",
        "return builder.number(own.length - first - rows_in_chunk(own, builder.length) if reverse else first)",
        "return builder.number(1)",
        ("test_counted_rows.py::test_a_scan_begins_where_its_rows_begin",),
    ),
    Mutation(
        "chunks",
        "a scan's carry is joined to all scanned rows",
        "streamfx/runtime/scans.py",
        "        first.copy_(JOINED[kind](carry, first))\n    return from_the_end(kind)(rows, dim) if reverse else"
        " WITHIN[kind](rows, dim)",
        "        scanned = from_the_end(kind)(rows, dim) if reverse else WITHIN[kind](rows, dim)\n"
        "        return JOINED[kind](carry, scanned) if first is not None else scanned\n"
        "    return from_the_end(kind)(rows, dim) if reverse else WITHIN[kind](rows, dim)",
        ("test_counted_rows.py::test_a_scan_goes_on_in_eagers_order",),
    ),
    Mutation(
        "chunks",
        "draws are made in the order of memory",
        "streamfx/runtime/rng.py",
        "dense = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in args]",
        "dense = list(args)",
        ("test_dropout.py::test_gradient_with_dropout_is_that_of_the_sample_drawn",),
    ),
    Mutation(
        "chunks",
        "all chunks draw alike",
        "streamfx/runtime/rng.py",
        "generator.manual_seed(mixed(int(seed), key, start))",
        "generator.manual_seed(mixed(int(seed), key, 0))",
        ("test_dropout.py::test_dropout_drops_what_it_says",),
    ),
    Mutation(
        "chunks",
        "a row without keys has a weight",
        "streamfx/runtime/plain_attention.py",
        "(scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()",
        "(scores - lse.unsqueeze(-1)).exp()",
        ("test_attention_layouts.py::test_a_row_that_sees_no_key_has_no_weights",),
    ),
)
TOTALS = (
    Mutation(
        "sums",
        "a part of a sum has the type of its rows",
        EMITTERS,
        '    kwargs = kwargs if wide == node.meta["val"].dtype else {**kwargs, "dtype": wide}\n',
        "",
        ("test_precision.py::test_parts_of_a_sum_may_be_larger_than_the_sum",),
    ),
    Mutation(
        "sums",
        "a part of a mean has the type of its rows",
        EMITTERS,
        '{"dtype": wide})\n    if builder',
        '{"dtype": dtype})\n    if builder',
        ("test_precision.py::test_parts_of_a_sum_may_be_larger_than_the_sum",),
    ),
    Mutation(
        "sums",
        "several parts are added in the type of one",
        "streamfx/runtime/loop.py",
        'item.of_one is not None and env["chunks"] == 1',
        "item.of_one is not None",
        ("test_precision.py::test_totals_of_one_part_are_no_wider_than_it",),
    ),
    Mutation(
        "sums",
        "rows that are looked up are added in their type",
        "passes/codegen/adders.py",
        "ROUNDED_ONCE = (GROUPED_OUTER, ",
        "ROUNDED_ONCE = (aten.embedding_dense_backward.default, GROUPED_OUTER, ",
        ("test_precision.py::test_totals_of_one_part_are_no_wider_than_it",),
    ),
    Mutation(
        "sums",
        "zeros are added to what has no rows",
        "streamfx/runtime/experts.py",
        "        if start < stop:\n            sums.add_mm",
        "        if True:\n            sums.add_mm",
        ("test_by_group.py::test_groups_without_rows_are_left_alone",),
    ),
    Mutation(
        "sums",
        "a kernel is taken at its word",
        "streamfx/runtime/experts.py",
        "        if getattr(_triton(), check)(device, *types):\n",
        "        if getattr(_triton(), check)(device, *types) in (True, False):\n",
        ("test_by_group.py::test_a_kernel_that_is_not_right_is_not_used",),
    ),
    Mutation(
        "sums",
        "running totals of half types are kept in their type",
        "streamfx/runtime/scans.py",
        "return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype",
        "return dtype",
        ("test_precision.py::test_running_totals_keep_the_digits_that_operators_keep_inside",),
    ),
    Mutation(
        "sums",
        "what flex attention adds is rounded to the queries' type",
        "passes/canonicalization/flex.py",
        'return "sum" if is_held else "other"',
        'return "sum"',
        ("test_flex.py::test_what_is_added_to_scores_of_half_precision_is_not_rounded",),
    ),
)
DYNAMIC = (
    Mutation(
        "sizes",
        "all numbers that follow from lengths are whole",
        SIZES,
        "return kinds.get(type(size), int)",
        "return int",
        ("test_host_work.py::test_numbers_that_follow_from_sizes_need_not_be_whole",),
    ),
    Mutation(
        "sizes",
        "what a size is part of takes it apart",
        "streamfx/runtime/loop_code.py",
        'return Code(text) if text.isidentifier() or text.removeprefix("-").isdigit() else self.size(argument)',
        "return Code(text)",
        ("test_host_work.py::test_sizes_are_written_as_they_are_computed",),
    ),
    Mutation(
        "sizes",
        "a slice from the end begins where its number says",
        "passes/analysis/positions.py",
        "        start = max(start + length, 0) if isinstance(length, int) else None\n",
        "        start = 0\n",
        (MISLEADS,),
    ),
    Mutation(
        "sizes",
        "rows of a chunk depend on what is counted on the way",
        "passes/partition/chunk_sizes.py",
        "    return _told(total, facts)\n",
        "    return total\n",
        (TURNS,),
    ),
    Mutation(
        "sizes",
        "only inputs tell what a symbol stands for",
        "passes/codegen/outer.py",
        "                if size == symbol:\n",
        "                if False:\n",
        (TURNS,),
    ),
    Mutation(
        "rows",
        "what sums over rows is no matter to the rows that are read beside it",
        "streamfx/lazy/rows.py",
        "dim if dim in kept else None for dim in follows",
        "dim for dim in follows",
        ("test_deferred_outputs.py::test_rows_that_are_read_alone",),
    ),
    Mutation(
        "rows",
        "the gradient of the last row is made in front of the cut, as long as all rows",
        "passes/partition/stages.py",
        "is_shown = is_moved_elements(node) or node.target in AMONG_ZEROS or node not in driven",
        "is_shown = is_moved_elements(node)",
        (LAST_STATE,),
    ),
    Mutation(
        "rows",
        "what is put among zeros is made long before it is read",
        "passes/partition/stages.py",
        "    return before_use(sorted(nodes, key=behind.__contains__), shown)\n",
        "    return sorted(nodes, key=behind.__contains__)\n",
        (LAST_STATE,),
    ),
)
ROWS = (*PLACES, *COPIES, *TOTALS, *DYNAMIC)
