"""The list of faults that tests have to see is about the code as it stands. `python -m tests.mutations` puts them in."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from tests.mutations import KINDS, ROWS
from tests.mutations.row import ROOT, Mutation


@cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}: {row.what}")
def test_its_place_and_its_tests_are_there(row: Mutation) -> None:
    text = (ROOT / row.file).read_text()
    mutated = row.put_into(text)
    assert mutated != text
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    assert row.tests
    for test in row.tests:
        file, *functions = test.split("[")[0].split("::")
        assert functions_in(file).issuperset(functions), f"{test} is gone"


def test_each_kind_has_rows() -> None:
    assert set(KINDS) == {row.kind for row in ROWS}


def test_no_row_stands_twice() -> None:
    assert max(Counter((row.kind, row.what) for row in ROWS).values()) == 1
    assert max(Counter((row.file, row.put_into((ROOT / row.file).read_text())) for row in ROWS).values()) == 1
