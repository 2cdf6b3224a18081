"""How many cases of the slowest files a default run takes: `--long` takes all.

A default run has eight minutes on two cores. Of these files it takes the cases that see a fault of `tests/mutations/`, and those
of as many test functions as there are places, spread over the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest

from tests.mutations import ROWS

TAKEN = pytest.StashKey[set[str]]()  # node ids of the cases that a default run takes

SHARES = {
    "test_agreement.py": 11,
    "test_along_sequence.py": 2,
    "test_analysed_layers.py": 2,
    "test_assertions.py": 6,
    "test_at_peak.py": 2,
    "test_attention_with_sink.py": 19,
    "test_axis_table.py": 5,
    "test_bad_arguments.py": 4,
    "test_bad_input.py": 4,
    "test_bags.py": 7,
    "test_benchmarks.py": 3,
    "test_between.py": 2,
    "test_bodies.py": 3,
    "test_bodies_as_python.py": 4,
    "test_budget.py": 2,
    "test_by_far.py": 1,
    "test_by_group.py": 3,
    "test_canonical_blocks.py": 15,
    "test_casts.py": 22,
    "test_causal_conv_package.py": 3,
    "test_choices.py": 1,
    "test_chunk_sizes.py": 2,
    "test_cli.py": 3,
    "test_collectives.py": 3,
    "test_comparisons.py": 3,
    "test_constant_indices.py": 8,
    "test_constant_places.py": 4,
    "test_copies.py": 5,
    "test_counted_rows.py": 24,
    "test_cuda_documents.py": 9,
    "test_cut_blocks.py": 2,
    "test_deferral.py": 22,
    "test_deferred_outputs.py": 7,
    "test_diagrams.py": 4,
    "test_docstrings.py": 16,
    "test_dropout.py": 2,
    "test_dynamic_shapes.py": 2,
    "test_early_sums.py": 1,
    "test_enable_again.py": 12,
    "test_errors.py": 6,
    "test_evaluation.py": 1,
    "test_experts.py": 4,
    "test_explain.py": 7,
    "test_fake_cuda.py": 1,
    "test_first_step.py": 2,
    "test_flash_attention_2.py": 2,
    "test_flash_package.py": 6,
    "test_flex.py": 2,
    "test_given.py": 8,
    "test_gpu_benchmark.py": 1,
    "test_gradients.py": 2,
    "test_graph_pieces.py": 4,
    "test_hooks.py": 2,
    "test_host_work.py": 20,
    "test_html.py": 2,
    "test_hub_kernels.py": 3,
    "test_import.py": 3,
    "test_joined_parts.py": 2,
    "test_keys_in_blocks.py": 2,
    "test_lengths.py": 2,
    "test_linearity.py": 10,
    "test_live_bytes.py": 2,
    "test_loops.py": 2,
    "test_loops_over_blocks.py": 2,
    "test_losses.py": 3,
    "test_many_ranks.py": 2,
    "test_masks.py": 16,
    "test_masks_that_mislead.py": 16,
    "test_memory.py": 6,
    "test_multiples.py": 16,
    "test_no_gain.py": 2,
    "test_objectives.py": 1,
    "test_offload_attention.py": 4,
    "test_one_pass.py": 4,
    "test_packing.py": 3,
    "test_parameters.py": 4,
    "test_peaks.py": 2,
    "test_plan.py": 2,
    "test_plan_context.py": 2,
    "test_plan_sharded.py": 2,
    "test_plan_updates.py": 2,
    "test_plan_verdict.py": 1,
    "test_plans_of_few_layers.py": 2,
    "test_plugins.py": 3,
    "test_precision.py": 3,
    "test_products_made_again.py": 1,
    "test_profile.py": 2,
    "test_progress.py": 4,
    "test_random.py": 2,
    "test_random_masks.py": 1,
    "test_ranks.py": 7,
    "test_ranks_agree.py": 2,
    "test_record.py": 2,
    "test_relative_shifts.py": 3,
    "test_repeated_layers.py": 5,
    "test_repository.py": 4,
    "test_results.py": 4,
    "test_sampling.py": 4,
    "test_scores.py": 6,
    "test_single_rows.py": 3,
    "test_stagewise.py": 6,
    "test_steps.py": 3,
    "test_stream_callback.py": 2,
    "test_tensor_parallel.py": 1,
    "test_threads.py": 3,
    "test_timeline.py": 2,
    "test_traced_in_part.py": 6,
    "test_transforms_and_pools.py": 10,
    "test_trials.py": 12,
    "test_two_sequences.py": 1,
    "test_unknown_rows.py": 2,
    "test_user_rules.py": 5,
    "test_uses_of_outputs.py": 5,
    "test_values.py": 25,
    "test_verify.py": 4,
    "test_visible.py": 8,
    "test_watched_buffers.py": 3,
    "test_whole.py": 1,
    "test_whys.py": 3,
    "test_windows.py": 5,
    "test_wire.py": 3,
    "test_workspaces.py": 3,
    "test_written.py": 5,
}


def taken(functions: Sequence[str], places: int) -> set[int]:
    """The positions of the cases that are taken, given the function of each: one of each function first, spread over all.

    >>> sorted(taken(["a", "a", "b", "c", "c", "c"], 2)), sorted(taken(["a", "a", "b", "c", "c", "c"], 5))
    ([0, 2], [0, 1, 2, 3, 4])
    """
    groups = [[position for position, _ in group] for _, group in groupby(enumerate(functions), key=lambda pair: pair[1])]
    if places < len(groups):
        return {groups[place * len(groups) // places][0] for place in range(places)}
    rounds = (group[turn] for turn in range(max(map(len, groups), default=0)) for group in groups if turn < len(group))
    return {position for position, _ in zip(rounds, range(places), strict=False)}


def seeing_faults(names: Sequence[str]) -> set[int]:
    """The positions of the cases that a row of `tests/mutations/` names; of a function that it names as a whole, the first case.

    >>> names = [f"test_values.py::test_transfer_functions_hold[{case}]" for case in "ab"]
    >>> seeing_faults(["test_values.py::test_other", *names])
    {1}
    """
    first = {name.split("[")[0]: position for position, name in reversed([*enumerate(names)])}
    named = {test for row in ROWS for test in row.tests}
    return {first[test] for test in named & first.keys()} | {place for place, name in enumerate(names) if name in named}
