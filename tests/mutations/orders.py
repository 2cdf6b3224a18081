"""Rows that are sorted and put back: what is no order, or undoes none, and who writes each place once."""

from __future__ import annotations

from tests.mutations.row import Mutation

FOUND = "passes/canonicalization/inverse_orders.py"
BAGS = "passes/canonicalization/bags.py"
INDICES = "passes/canonicalization/constant_indices.py"
ROW = ("test_canonical_equations.py::test_row",)


def _row(what: str, before: str, after: str, tests: tuple[str, ...] = ROW, file: str = FOUND) -> Mutation:
    return Mutation("orders", what, file, before, after, tests)


ROWS = (
    _row(
        "what looks up some rows puts all of them back",
        "    if order is None or shape_of_node(rows) != shape_of_node(node):\n",
        "    if order is None:\n",
    ),
    _row(
        "what is scattered by an order counts up",
        " if is_along and _is_order(order, dim) and _counts_along(written, dim) else None",
        " if is_along and _is_order(order, dim) else None",
    ),
    _row(
        "numbers that are scattered are so along the rows that are looked up",
        '        is_along = is_whole and arguments["dim"] % len(shape_of_node(numbers)) == dim\n',
        "        is_along = is_whole\n",
    ),
    _row(
        "what is sorted by is sorted along the rows that are looked up",
        '    return bool(rank) and bound_arguments(sort)["dim"] % rank == dim\n',
        "    return bool(rank)\n",
    ),
    _row(
        "numbers that count along one dimension count along all",
        "    if any(size != (shape[dim] if i == dim else 1) for i, size in enumerate(wide)):\n        return False\n",
        "",
    ),
    _row(
        "part of an order is one",
        "        is_whole = shape_of_node(order) == shape_of_node(written) == shape_of_node(numbers)\n",
        "        is_whole = True\n",
    ),
    _row(
        "an order is undone from the largest number as well",
        ' == dim and not arguments["descending"] else None',
        " == dim else None",
    ),
    _row(
        "gradients are added to what is there as to zeros",
        '    return is_whole and is_zero(arguments["self"]) and node',
        "    return is_whole and node",
    ),
    _row(
        "gradients of some rows are those of all",
        "    return is_whole and is_zero(",
        "    return is_zero(",
    ),
    _row(
        "a zero that is added to zeros keeps its sign",
        '    rows = writer.call(aten.add.Tensor, arguments["src"], 0.0)\n',
        '    rows = arguments["src"]\n',
    ),
    _row(
        "rows that are put back are added to zeros",
        "    total.scatter_(dim, index, rows.to(total.dtype))\n",
        "    total.scatter_add_(dim, index, rows.to(total.dtype))\n",
        ("test_rows.py::test_what_is_put_back_is_what_it_was",),
        "streamfx/runtime/sums.py",
    ),
    _row(
        "whatever is scattered is written once",
        "    positions = () if EACH_ONCE in call.node.meta else (rank,)\n",
        "    positions = ()\n",
        ("test_rows.py::test_rows_written_over_others",),
        "passes/operators/rules/indexing.py",
    ),
    _row(
        "row numbers may come in any order",
        "            if not torch.equal(number.expand(shape).long(), expected % size):  # type: ignore[union-attr]\n",
        "            if number.sum() != (expected % size).sum() and number.shape == shape:  # type: ignore[union-attr]\n",
        ("test_constant_places.py::test_labels_of_each_row_are_compared",),
        INDICES,
    ),
    _row(
        "only the last of several indices has to be the number of a row",
        "zip(reversed(rows), reversed(numbers), strict=True)",
        "[(rows[-1], numbers[-1])]",
        ("test_constant_places.py::test_labels_of_each_row_are_compared",),
        INDICES,
    ),
    _row(
        "a column of row numbers is beside a row of labels",
        "    if shape_of_node(index) != shape:\n        return False\n",
        "",
        ("test_constant_places.py::test_labels_of_each_row_are_compared",),
        INDICES,
    ),
    _row(
        "what is put at rows of a view has the view's shape",
        "size_arguments(self.source, writer)) if self.is_viewed else value\n",
        "size_arguments(self.source, writer)) if False else value\n",
        ("test_constant_places.py::test_labels_of_each_row_are_compared",),
        "passes/canonicalization/one_hot.py",
    ),
    _row(
        "bags begin wherever offsets count up in steps",
        '        if is_held and (arguments["start"], arguments["step"]) == (0, step):\n',
        '        if is_held and arguments["start"] == 0:\n',
        ("test_bags.py::test_bags_by_themselves",),
        INDICES,
    ),
    _row(
        "all bags are of the length that they have on average",
        '    return None if length is not None and counts_in_steps(arguments["offsets"], length) else LENGTHS\n',
        "    return None if length is not None else LENGTHS\n",
        ("test_bags.py::test_other_bags_run_whole",),
        BAGS,
    ),
    _row(
        "padding counts in a mean",
        "        if self.counted is None:\n            return call(",
        "        if True:\n            return call(",
        ("test_bags.py::test_bags_of_one_length_stream",),
        BAGS,
    ),
    _row(
        "weights of padding have gradients",
        "    made = bags.without_padding(writer.call(aten.sum.dim_IntList, products, [2]), 2)\n",
        "    made = writer.call(aten.sum.dim_IntList, products, [2])\n",
        ("test_bags.py::test_bags_by_themselves",),
        BAGS,
    ),
    _row(
        "windows in larger steps are windows of all rows",
        "tuple(stride) == (1, 1) and not any(padding) and not ceil",
        "not any(padding) and not ceil",
        ("test_rows.py::test_it_runs_whole[windows in steps]",),
        "passes/operators/rules/decompositions.py",
    ),
)
