"""The list of known faults fits the code. `python -m tests.mutations` inserts them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import KINDS, ROWS
from tests.mutations.row import ROOT


@pytest.mark.parametrize("file", sorted({row.file for row in ROWS}))
def test_each_fragment_occurs_once(file: str) -> None:
    text = (ROOT / file).read_text()
    known = {ast.dump(ast.parse(text))}
    for row in ROWS:
        if row.file == file:
            mutated = ast.dump(ast.parse(row.put_into(text)))
            assert mutated not in known, f"{row.what}: another row, or the code, says the same"
            known.add(mutated)


def test_no_fragment_uses_an_undefined_name(tmp_path: Path) -> None:
    """Any test would catch such a fault, and say nothing."""
    pytest.importorskip("ruff")
    for number, row in enumerate(ROWS):
        (tmp_path / f"row_{number}.py").write_text(row.put_into((ROOT / row.file).read_text()))
    options = ["check", "--isolated", "--select", "F821", "--output-format", "concise"]
    command = [sys.executable, "-m", "ruff", *options, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    undefined = [(ROWS[int(number)].what, name) for number, name in re.findall(r"row_(\d+)\.py.*`(\w+)`", result.stdout)]
    assert result.returncode == 0 and not undefined, undefined


@cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_the_tests_of_each_row_are_there() -> None:
    for row in ROWS:
        assert row.tests, row.what
        for test in row.tests:
            file, *functions = test.split("[")[0].split("::")
            assert functions_in(file).issuperset(functions), f"{row.what}: {test} is gone"


def test_each_row_has_a_default_test(request: pytest.FixtureRequest) -> None:
    """Of the rows of which a test is in this run."""
    items = request.session.items
    here, default = _tests(items), _tests(item for item in items if item.get_closest_marker("long") is None)
    missed = [row.what for row in ROWS if not here.isdisjoint(row.tests) and default.isdisjoint(row.tests)]
    assert not missed, f"only --long sees these: {missed}"


def _tests(items: Iterable[pytest.Item]) -> set[str]:
    """Return the ids of cases, and of the functions that they belong to."""
    ids = {item.nodeid.removeprefix("tests/") for item in items}
    return ids | {name.split("[")[0] for name in ids}


def test_each_kind_has_rows() -> None:
    assert set(KINDS) == {row.kind for row in ROWS}
    assert max(Counter((row.kind, row.what) for row in ROWS).values()) == 1
