"""Associative scans that Dynamo has traced as trees: what is read as one, and what a chunk hands on."""

from __future__ import annotations

from tests.mutations.row import Mutation

READ, FUNCTION = "passes/recurrences/trees.py", "passes/recurrences/combining.py"
RUN, ROWS_OF_A_TREE = "streamfx/runtime/associative.py", "streamfx/runtime/trees.py"
STREAMS = "test_associative_scans.py::test_rows_are_combined_chunk_by_chunk"
OTHERS = "test_associative_scans.py::test_what_only_looks_like_one"
ALIKE = "test_associative_scans.py::test_each_row_is_combined_as_pytorch_does"
POSITIONS = "test_associative_scans.py::test_rows_are_combined_chunk_by_chunk[of positions]"


def fault(what: str, file: str, before: str, after: str, *tests: str) -> Mutation:
    return Mutation("trees", what, file, before, after, tests)


ROWS = (
    fault("levels have functions of their own", READ, "(self.body is not None and self.body != body)", "False", OTHERS),
    fault(
        "what is inside of a tree may be used outside of it",
        READ,
        "any(user not in own for node in own.difference(results) for user in node.users)",
        "False",
        OTHERS,
    ),
    fault("even rows may begin anywhere", READ, "self._take(SLICE, row, 0, 0, 1)", "self._next(True)", OTHERS),
    fault(
        "types that the graph switches are not looked at",
        READ,
        "return entered != 0",
        "return False",
        "test_associative_scans.py::test_types_that_the_model_switches_inside",
    ),
    fault("a function may do more than to compute", FUNCTION, 'node.op == "call_function" and computes(node)', "True", OTHERS),
    fault(
        "a function may have a gradient of its own",
        FUNCTION,
        "return is_plain(node) and is_known and not isinstance(target, HigherOrderOperator)",
        "return is_plain(node)",
        f"{OTHERS}[a function with a gradient of its own]",
    ),
    fault("both rows are one value", FUNCTION, "for node in (*elements, *elements)]", "for node in elements] * 2", STREAMS),
    fault(
        "rows of fewer dimensions are rows of as many",
        RUN,
        "own == rank if node in of_rows",
        "own <= rank if node in of_rows",
        POSITIONS,
    ),
    fault(
        "any function goes element by element",
        RUN,
        'if torch.Tag.pointwise not in getattr(node.target, "tags", ()):',
        "if False:",
        f"{STREAMS}[weighted]",
    ),
    fault("each chunk begins with nothing", RUN, "self._read(carry, before, operands)", "{}", STREAMS),
    fault(
        "gradients of what is left behind a chunk are dropped",
        RUN,
        "self._read(carry, self.plan.length - before, rows) if before else {}",
        "{}",
        STREAMS,
    ),
    fault("rows are made again from nothing", RUN, "self._read(states[chunk], after, rows)", "{}", STREAMS),
    fault("a block that went into a larger one stays", ROWS_OF_A_TREE, "    after.pop(level, None)\n", "", ALIKE),
    fault(
        "of all rows before, the last block is enough",
        ROWS_OF_A_TREE,
        "blocks[level] if before is None else combine(before, blocks[level])",
        "blocks[level]",
        ALIKE,
    ),
    fault(
        "gradients of blocks are dropped",
        ROWS_OF_A_TREE,
        "pairs += [pair for level, block in left.items() for pair in zip(after[level], block, strict=True)]",
        "pass",
        ALIKE,
    ),
    fault(
        "leaves that reach no loss have gradients of zeros",
        RUN,
        "each if number in reached and (",
        "each if (",
        "test_associative_scans.py::test_a_leaf_that_reaches_no_loss_has_no_gradient",
    ),
    fault(
        "functions on whole numbers and on others are one",
        RUN,
        "structure(graph), kinds, given,",
        "structure(graph), given,",
        "test_associative_scans.py::test_functions_on_other_dtypes_are_other_functions",
    ),
)
