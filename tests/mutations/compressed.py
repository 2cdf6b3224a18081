"""Keys that stand for blocks of rows: collected before rows see them, or joined with rows and seen by parts."""

from __future__ import annotations

from tests.mutations.row import Mutation

KEYS = "passes/rewrite/attention/compressed_kv.py"
JOINED = "passes/rewrite/attention/split_concat_kv.py"


def _row(what: str, file: str, before: str, after: str, *tests: str) -> Mutation:
    return Mutation("compressed", what, file, before, after, tuple(f"test_keys_in_blocks.py::test_{test}" for test in tests))


ROWS = (
    _row("rows are the keys of what they see", KEYS, "    return votes >= 0\n", "    return votes < 0\n", "keys_are_collected"),
    _row(
        "a gradient of all keys has an axis of its own",
        KEYS,
        "self.sources.get(self.axis(result, dim)) for dim",
        "None for dim",
        "keys_are_collected",
    ),
    _row(
        "a row that sees no block sees some",
        JOINED,
        "sums[i] if own[i] else",
        "sums[i] if True else",
        "rows_joined_with_blocks",
    ),
    _row(
        "a count beside huge numbers is told",
        JOINED,
        "        if not any(own) and (mask is None or _largest(mask, self.values) > COUNTED):\n            return False\n",
        "",
        "numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them",
    ),
    _row(
        "huge numbers are ordinary",
        JOINED,
        "return max(*numbers, *(",
        "return max(*(",
        "numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them",
    ),
    _row(
        "a huge number shows a key",
        "passes/analysis/diagonal_visible.py",
        " and diagonal.is_counted",
        "",
        "numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them",
    ),
    _row(
        "keys that are counted are seen by parts",
        JOINED,
        'return not arguments["is_causal"] and all(',
        "return all(",
        "keys_that_cannot_be_seen_by_parts_stay_joined",
    ),
    _row(
        "parts lie where they may",
        "passes/rewrite/views/concat_propagation.py",
        "        return lengths == self.lengths and",
        "        return len(lengths) == len(self.lengths) and",
        "keys_that_cannot_be_seen_by_parts_stay_joined",
    ),
    _row(
        "joined masks are those of no keys",
        "passes/analysis/axes.py",
        "                    table.unify(part_dim, other)\n",
        "                    pass\n",
        "rows_joined_with_blocks",
    ),
    _row(
        "a mask of rows and all blocks is made at once",
        "passes/analysis/access_roles.py",
        "return len(dims) + materialized <= 1 and",
        "return len(dims) <= 1 and",
        "keys_are_collected",
    ),
    _row(
        "a sum of a wide mask is made of all of it",
        "passes/analysis/access_roles.py",
        "        return not {Form.ROWS, Form.PAIR}.intersection(forms) and not self._is_filled_later(node)\n",
        "        return not self._is_filled_later(node)\n",
        "joined_keys_are_seen_by_parts",
    ),
    _row(
        "layers without a span of keys are no attention",
        "passes/partition/stages.py",
        "if COLLECTED in node.meta and node not in",
        "if COLLECTED in node.meta and node in",
        "blocks_of_several_layers",
    ),
    Mutation(
        "compressed",
        "the row behind those that are written is written",
        "passes/rewrite/views/decompose_on_sequence.py",
        "aten.lt.Scalar, wide, start + count)",
        "aten.le.Scalar, wide, start + count)",
        ("test_along_sequence.py::test_rows_that_are_written_over",),
    ),
    Mutation(
        "compressed",
        "blocks of another size are joined to the axis",
        "streamfx/ir/axis_table.py",
        " == outer and self.size(rest[0]) == size:",
        " == outer:",
        ("test_axis_table.py::test_what_is_no_row_of_blocks_is_not_the_axis",),
    ),
)
