"""Scores by distance that views shift row by row, and parts that are joined to one sequence."""

from __future__ import annotations

from tests.mutations.row import Mutation

FOUND, EMITTED = "passes/rewrite/attention/shifted_scores.py", "passes/lowering/lowerings.py"
RUN = "streamfx/runtime/rel_shift.py"
OTHERS, BY_NUMBER = "test_relative_shifts.py::test_no_shift", "test_relative_shifts.py::test_first_rows_by_number"
TABLES = "test_joined_parts.py::test_blocks_that_read_one_table"
SHOWS = "test_relative_shifts.py::test_the_next_row_shows"

ROWS = (
    Mutation(
        "shifts",
        "any part of the rows, read otherwise, is a shift",
        FOUND,
        "        and product((start, other[dim + 1])) == rows\n",
        "",
        (OTHERS,),
    ),
    Mutation(
        "shifts",
        "rows may be as long as they like",
        FOUND,
        "        and columns + 1 == width\n",
        "",
        (OTHERS,),
    ),
    Mutation(
        "shifts",
        "rows are counted across sequences",
        FOUND,
        "        beside[0] == beside[1] == beside[2]\n        and rows == shown\n",
        "        rows == shown\n",
        (OTHERS,),
    ),
    Mutation(
        "shifts",
        "a zero that is added to zeros keeps its sign",
        FOUND,
        "writer.call(aten.add.Tensor, own, 0.0)  # zero plus -0 is zero",
        "own",
        (BY_NUMBER,),
    ),
    Mutation(
        "shifts",
        "what is added to ones is put among zeros",
        FOUND,
        "    is_put = is_zero(whole) and ",
        "    is_put = ",
        (BY_NUMBER,),
    ),
    Mutation(
        "shifts",
        "columns may begin anywhere",
        FOUND,
        ' or taken["start"] not in (None, 0) or taken["step"] != 1:\n        return None\n    if isinstance(part[column], int)',
        ' or taken["step"] != 1:\n        return None\n    if isinstance(part[column], int)',
        ("test_equations.py::test_equation",),
    ),
    Mutation(
        "shifts",
        "a chunk never takes what is the next one's",
        EMITTED,
        "    return is_never_less(width, first + apart + high + 1)\n",
        "    return True\n",
        (SHOWS,),
    ),
    Mutation(
        "shifts",
        "a chunk's keys begin with the first of all",
        EMITTED,
        "builder.number(first - row + column)",
        "builder.number(first - row)",
        ("test_relative_shifts.py::test_it_streams", "test_rules.py::test_law"),
    ),
    Mutation(
        "shifts",
        "rows lie behind one another in memory",
        RUN,
        "return x if x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1) else x.contiguous()",
        "return x",
        ("test_relative_shifts.py::test_operators_are_their_definition",),
    ),
    Mutation(
        "joins",
        "parts stand behind one another wherever they were",
        "passes/analysis/derived_axes.py",
        "        return begins.pop() if len(begins) == 1 else None\n",
        "        return begins.pop()\n",
        ("test_joined_parts.py::test_parts_elsewhere",),
    ),
    Mutation(
        "joins",
        "what is joined has its rows in place",
        "passes/analysis/derived_axes.py",
        "    return join.begin(sequence.members, sequence.blocks) == sequence.members[join.whole][0]\n",
        "    return True\n",
        ("test_joined_parts.py::test_parts_elsewhere",),
    ),
    Mutation(
        "joins",
        "features that are taken apart stay in one piece",
        "passes/analysis/axes.py",
        "        split = along or split  # features that are split are not rows\n",
        "",
        ("test_windows.py::test_blocks_beside_features_that_are_taken_apart",),
    ),
    Mutation(
        "joins",
        "a view that a reader has for itself runs along the axes of its table",
        "passes/ops/rules/pointwise.py",
        "    if OWN_AXES not in call.node.meta:\n",
        "    if call.node.meta:\n",
        (TABLES,),
    ),
    Mutation(
        "joins",
        "views of tables stay, though no more parts stand in place with them",
        "passes/scan/split_shared.py",
        "        for view in views:\n",
        "        for view in views[:0]:\n",
        ("test_joined_parts.py::test_blocks_that_train_one_table",),
    ),
    Mutation(
        "joins",
        "what is cut out of a table twice is rows of what it was cut out of",
        "passes/analysis/access_roles.py",
        "if letter in signature.windows and signature.windows[letter].of in letters]",
        "if letter in signature.windows]",
        (TABLES,),
    ),
    Mutation(
        "joins",
        "features whose halves change places are rows",
        "passes/analysis/axes.py",
        " - (inner & turned_axes(axes))",
        "",
        ("test_joined_parts.py::test_halves_that_change_places_are_features",),
    ),
    Mutation(
        "joins",
        "all parts that are joined change places",
        "passes/analysis/derived_axes.py",
        "for start in starts[join.whole, part]}) > 1\n",
        "for start in starts[join.whole, part]}) > 0\n",
        ("test_joined_parts.py::test_rows_side_by_side",),
    ),
)
