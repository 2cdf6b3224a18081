"""Blocks that are cut out of rows: which of them are those of a view, and what is added to them."""

from __future__ import annotations

from tests.mutations.row import Mutation

FOUND, WRITTEN = "passes/rewrite/views/tile_views.py", "passes/rewrite/views/scatter_to_concat.py"
CUT, STEPS = "passes/scan/trim.py", "passes/scan/detection.py"
PARTS, ODD = "passes/scan/strip_mine.py", "test_cut_blocks.py::test_blocks_that_are_odd"
OF_ROWS, LOOPS = "test_cut_rows.py", "test_loops_over_blocks.py"


def _row(what: str, before: str, after: str) -> Mutation:
    return Mutation("blocks", what, FOUND, before, after, ("test_canonical_blocks.py::test_row",))


def _written(what: str, before: str, after: str) -> Mutation:
    return Mutation("blocks", what, WRITTEN, before, after, ("test_canonical_blocks.py::test_row",))


ROWS = (
    _row(
        "blocks begin anywhere",
        " and start % size == 0 and shape[dim] % size == 0",
        " and shape[dim] % size == 0",
    ),
    _row(
        "every other row of a block is the block",
        '    if not is_known or arguments["step"] != 1:\n',
        "    if not is_known:\n",
    ),
    _row(
        "blocks are joined as the slice would have them",
        " if is_joined else None",
        "",
    ),
    _row(
        "what is added need not be alike",
        "    return all(shape_of_node(part) == shape_of_node(node) and is_alike(part, node) for part in parts)\n",
        "    return True\n",
    ),
    _row(
        "rows and columns lie beside one another",
        "    return rows[0] == others[0] and (rows[2] <= others[1] or others[2] <= rows[1])\n",
        "    return rows[2] <= others[1] or others[2] <= rows[1]\n",
    ),
    _row(
        "nothing is added to rows within one padding",
        "    if len(inside) != 1 or len(beside) != 1 or",
        "    if len(inside) != 1 or",
    ),
    _row(
        "a zero that is added to zeros keeps its sign",
        "    return writer.call(aten.add.Tensor, rows, 0.0)\n",
        "    return rows\n",
    ),
    _row(
        "a padding begins with the rows that are padded",
        "own[0], own[1] - start, own[2] - start)",
        "own[0], own[1], own[2])",
    ),
    _row(
        "a difference is a sum",
        " or len(parts) != 2 or total.kwargs or not _are_like(total, parts)",
        " or len(parts) != 2 or not _are_like(total, parts)",
    ),
    Mutation(
        "blocks",
        "rows within a block are relatives of the rows of which blocks are joined",
        "passes/analysis/axes.py",
        "for part in parts for atom in part[:1])}",
        "for part in parts for atom in part)}",
        ("test_relatives.py::test_blocks_are_relatives_of_what_is_joined_of_them_and_their_rows_are_none",),
    ),
    Mutation(
        "blocks",
        "of several sequences side by side only the first axis is a relative",
        "passes/analysis/axes.py",
        "            related = {*whole, *(atom",
        "            related = {*whole[:1], *(atom",
        ("test_relatives.py::test_several_sequences_side_by_side_are_relatives",),
    ),
    _written(
        "part of a piece is all of it",
        "isinstance(self.value, fx.Node) and self.count ==",
        "isinstance(self.value, fx.Node) or self.count ==",
    ),
    _written(
        "pieces may be cut when they are joined",
        "not all(not piece.is_row and piece.is_whole(dim) for piece in written)",
        "any(piece.is_row for piece in written)",
    ),
    _written("the first to write a row is heard", "        open_rows = rest\n", ""),
    _written("what is written is of any type", "    if not is_alike(rows, node) or not is_fixed", "    if not is_fixed"),
    _written(
        "pieces lie in the order in which they were written",
        "    return sorted(found, key=lambda piece: piece.place)\n",
        "    return found\n",
    ),
    _written("rows are written along any dimension", '    if arguments["dim"] % len(shape) != dim:\n        return None\n', ""),
    _written("blocks are joined along any dimension", "== blocks\n", "is not None\n"),
    _written("rows within a piece begin where the piece does", "self.start + begin - self.place", "self.start"),
    Mutation(
        "blocks",
        "a stack is cut however many rows its own are made of",
        CUT,
        "        if len(kept) in counts and len(values) not in counts:\n",
        "        if kept:\n",
        (f"{OF_ROWS}::test_a_stack_is_cut_to_the_rows_that_were_read",),
    ),
    Mutation(
        "blocks",
        "rows of a padding are cut however many rows are made of them",
        CUT,
        "        if length not in first_counts and any(",
        "        if any(",
        (f"{OF_ROWS}::test_rows_of_a_padding",),
    ),
    Mutation(
        "blocks",
        "paddings may overlap",
        CUT,
        " or any(place[1] < rows.stop and rows.start < place[2] for rows in summands.values())",
        "",
        (f"{OF_ROWS}::test_rows_of_a_padding",),
    ),
    Mutation(
        "blocks",
        "nothing is added to a row of one of several paddings",
        CUT,
        "            return selected if len(parts) == 1 else writer.call(aten.add.Tensor, selected, 0.0)\n",
        "            return selected\n",
        (f"{OF_ROWS}::test_rows_of_a_padding",),
    ),
    Mutation(
        "blocks",
        "blocks, and as many rows behind them, are one loop",
        STEPS,
        "{node: numbers.get(part, own_number) for node, part in range_of.items()}",
        "dict.fromkeys(range_of, own_number)",
        (f"{LOOPS}::test_other_numbers_of_blocks",),
    ),
    Mutation(
        "blocks",
        "a loop does not end where another one begins",
        STEPS,
        "            is_after = node in others or any(",
        "            is_after = any(",
        (f"{LOOPS}::test_other_numbers_of_blocks",),
    ),
    Mutation(
        "blocks",
        "a loop is given values of another one that is rolled up",
        "passes/scan/rerolling.py",
        "replacements.get(operand, operand)",
        "operand",
        (f"{LOOPS}::test_other_numbers_of_blocks",),
    ),
    Mutation(
        "blocks",
        "a loop of the backward half is by itself where it needs rows alone",
        STEPS,
        "in others or self._sharing_reads(nodes, groups):",
        "in others:",
        (f"{LOOPS}::test_rows_that_a_loop_goes_back_through",),
    ),
    Mutation(
        "blocks",
        "blocks are rows where all of them are read alone",
        PARTS,
        "if missing in ([], [0], [count - 1]) and",
        "if not missing and",
        ("test_cut_blocks.py::test_loops_over_blocks_stream",),
    ),
    Mutation(
        "blocks",
        "a row that the backward half takes whole is made again for it",
        "passes/lowering/build_program.py",
        ", *early_sums(number, self.facts)]))",
        "]))",
        ("test_early_sums.py::test_states_of_blocks_go_back_in_one_loop",),
    ),
    Mutation(
        "blocks",
        "recurrences one behind the other are one stage",
        "passes/partition/stages.py",
        "return self.looks_back(node) or (self.axes.is_running(node) and self.is_streamed(node))",
        "return self.looks_back(node)",
        ("test_early_sums.py::test_states_of_blocks_go_back_in_one_loop",),
    ),
    Mutation("blocks", "blocks of no rows are blocks", PARTS, " and sizes[0] > 0 and", " and", (ODD,)),
    Mutation(
        "blocks",
        "what is made behind a loop belongs to its last step",
        STEPS,
        "self.step and source not in after_loop)",
        "self.step)",
        ("test_cut_blocks.py::test_loops_over_blocks_stream",),
    ),
    Mutation(
        "blocks",
        "steps are given rows of the sequence that are no rows of theirs",
        "passes/scan/schedule.py",
        "if 4 * sum(map(self._depends_on_sequence, self._inputs_of_one_step())) > self.pair.length:",
        "if False:",
        ("test_cut_blocks.py::test_blocks_that_overlap_stay_as_they_are",),
    ),
    Mutation(
        "blocks",
        "what no loop takes stays as it was written for loops",
        PARTS,
        "            if node.target is aten.select.int and node.args[1] == own_blocks.dim:\n",
        "            if False:\n",
        ("test_cut_blocks.py::test_what_no_loop_takes_is_put_back",),
    ),
)
