"""Blocks that are cut out of rows: which of them are those of a view, and what is added to them."""

from __future__ import annotations

from tests.mutations.row import Mutation

FOUND = "passes/canonicalization/blocks_of_rows.py"


def _row(what: str, before: str, after: str) -> Mutation:
    return Mutation("blocks", what, FOUND, before, after, ("test_canonical_blocks.py::test_row",))


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
        "rows beside those written overlap them",
        "    if own is None or written is None or not _is_beside(written, own):\n",
        "    if own is None or written is None:\n",
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
        "            own = {*whole, *(atom",
        "            own = {*whole[:1], *(atom",
        ("test_relatives.py::test_several_sequences_side_by_side_are_relatives",),
    ),
)
