"""How many cases of the slowest files a default run takes: `--long` takes all.

Measured on two cores: without shares these files take two thirds of the time of a default run, which has to end within the hour
that continuous integration has. The cases taken are those of as many test functions as there are places, spread over the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

SHARES = {
    "test_along_sequence.py": 6,
    "test_analysed_layers.py": 3,
    "test_associative_scans.py": 5,
    "test_axis_table.py": 10,
    "test_benchmarks.py": 6,
    "test_between.py": 5,
    "test_bodies.py": 12,
    "test_by_far.py": 4,
    "test_cli.py": 10,
    "test_collectives.py": 5,
    "test_comparisons.py": 8,
    "test_copies.py": 5,
    "test_cut_blocks.py": 3,
    "test_decayed_sums.py": 4,
    "test_deferred_outputs.py": 30,
    "test_diagrams.py": 4,
    "test_dropout.py": 6,
    "test_enable_again.py": 12,
    "test_flash_package.py": 15,
    "test_flex.py": 6,
    "test_gradients.py": 4,
    "test_graph_pieces.py": 7,
    "test_heads_in_groups.py": 5,
    "test_html.py": 5,
    "test_joined_parts.py": 3,
    "test_keys_in_blocks.py": 5,
    "test_linearity.py": 18,
    "test_loops.py": 6,
    "test_loops_over_blocks.py": 3,
    "test_losses.py": 10,
    "test_no_gain.py": 5,
    "test_objectives.py": 3,
    "test_offload_attention.py": 8,
    "test_packing.py": 9,
    "test_plan_sharded.py": 3,
    "test_plan_updates.py": 3,
    "test_plan_verdict.py": 7,
    "test_plugins.py": 3,
    "test_precision.py": 10,
    "test_profile.py": 6,
    "test_quantized.py": 1,
    "test_random.py": 3,
    "test_ranks_agree.py": 3,
    "test_recipes.py": 2,
    "test_record.py": 12,
    "test_recurrences.py": 10,
    "test_recurrent_families.py": 3,
    "test_relative_shifts.py": 12,
    "test_repeated_layers.py": 8,
    "test_results.py": 16,
    "test_scan_operators.py": 4,
    "test_scores.py": 12,
    "test_single_rows.py": 5,
    "test_stagewise.py": 10,
    "test_stateful.py": 6,
    "test_steps.py": 5,
    "test_threads.py": 5,
    "test_timeline.py": 4,
    "test_trees.py": 4,
    "test_truncated_adjoints.py": 4,
    "test_user_rules.py": 10,
    "test_two_sequences.py": 12,
    "test_uses_of_outputs.py": 10,
    "test_watched_buffers.py": 4,
    "test_whole.py": 3,
    "test_whys.py": 5,
    "test_windows.py": 8,
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
