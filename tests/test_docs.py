"""Snippets of the documentation run, its figures are current, and each public name has a complete docstring."""

import doctest
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import streamfx
from benchmarks.figures import BLOCK, BLOCKS, COMMANDS, FILE
from benchmarks.figures import PAGES as FIGURE_PAGES
from tests.support import rewrite_table
from tests.support.snippets import has_snippets, ran

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWING = {page.name: page for page in PAGES if has_snippets(page) and page.parent.name != "recipes"}  # tests/test_examples.py


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWING)
def test_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran(SHOWING[name], tmp_path, {"(1, 4096)": "(1, 256)"} if name == "README.md" else None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_tests_are_valid(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert [name for file, name in named if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M)] == []
    assert named or page.name != "together.md"


def test_excerpts_are_from_goldens() -> None:
    """Each line of an excerpt in architecture.md occurs in its golden file, in this order; `...` stands for omitted lines."""
    excerpts = re.findall(r"<!-- (product\.\S+\.txt) -->\n```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)
    assert len(excerpts) == 7
    for name, excerpt in excerpts:
        golden = iter((ROOT / "tests" / "goldens" / name).read_text().splitlines())
        shown = [line for line in excerpt.splitlines() if line.strip() != "..."]
        assert [line for line in shown if line not in golden] == [], name


def test_where_to_look_names_files_functions_and_constants() -> None:
    """Each file of the table exists, and defines the names after its colon; a file without a folder is in the previous one."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Where to look\n")[2]
    missing, num_names = [], 0
    for row in section.splitlines():
        folder = ROOT / "streamfx"
        for path, names in re.findall(r"`([\w/]+\.py)(?:: ([\w, ]+))?`", row):
            file = next((at for at in (ROOT / "streamfx" / path, folder / path, ROOT / path) if at.exists()), None)
            if file is None:
                missing.append(path)
                continue
            folder, text = file.parent, file.read_text()
            for name in filter(None, names.split(", ")):
                num_names += 1
                if not re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", text, re.M):
                    missing.append(f"{path}: {name}")
    assert missing == []
    assert num_names > 5


def test_the_page_of_rewrite_rules_is_that_of_the_docstrings(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-goldens"):
        rewrite_table.PAGE.write_text(rewrite_table.page())
    assert rewrite_table.PAGE.read_text() == rewrite_table.page()


@pytest.mark.long
def test_the_reference_has_all_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs/site/mkdocs.yml")]
    built = subprocess.run([*command, "--site-dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    errors = {name for name in streamfx.__all__ if name in vars(streamfx.errors)}
    missing = [name for name in streamfx.__all__ if f'id="streamfx.{"errors." if name in errors else ""}{name}"' not in reference]
    assert not missing


# -- predicted figures, which `python -m benchmarks.figures` writes

FIGURES = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", BLOCKS)
def test_pages_quote_the_figures_of_the_file(name: str) -> None:
    quoted = [found[3] for page in FIGURE_PAGES for found in BLOCK.finditer(page.read_text()) if found[2] == name]
    assert quoted == [BLOCKS[name](FIGURES)], "run python -m benchmarks.figures --pages"


def test_figures_are_those_of_the_listed_commands() -> None:
    assert {name: found["command"] for name, found in FIGURES.items()} == {
        name: f"streamfx plan {command}" for name, command in COMMANDS.items()
    }
    assert all(found["commit"] for found in FIGURES.values())


# -- docstrings


def public() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of `dir(streamfx)`, and their methods, also those of our base classes."""
    for name in streamfx.__all__:
        own = getattr(streamfx, name)
        yield name, own
        if isinstance(own, type):
            methods = inspect.getmembers(own, inspect.isfunction)
            yield from (
                (f"{name}.{key}", it) for key, it in methods if not key.startswith("_") and it.__module__.startswith("streamfx.")
            )


PUBLIC = dict(public())


def section(documented: Any, title: str) -> str | None:
    """Return the indented text below a line such as `Args:`."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n(?=[ ]))*)", f"{inspect.getdoc(documented)}\n", re.M)
    return found and found[1]


def names(text: str) -> list[str]:
    """Return the names that the entries of a section describe; an entry may have several.

    >>> names("    a, b: numbers\\n        of things\\n    c: more: text\\n")
    ['a', 'b', 'c']
    """
    entries = re.findall(r"^    (\w[\w, ]*):", text, re.M)
    return [name.strip() for entry in entries for name in entry.split(",")]


@pytest.mark.compiled
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_run(name: str) -> None:
    text = section(PUBLIC[name], "Example")
    assert text and ">>> " in text, f"{name} has no example"
    parsed = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), {}, name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(parsed, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_parameters_results_and_errors(name: str) -> None:
    own = PUBLIC[name]
    if not isinstance(own, type) or "__init__" in vars(own):  # the base of all errors documents their constructor
        takes = [parameter for parameter in inspect.signature(own).parameters if parameter != "self"]
        assert sorted(names(section(own, "Args") or "")) == sorted(takes)
    if inspect.isfunction(own):
        returns_nothing = inspect.signature(own).return_annotation in (None, "None")
        assert bool(section(own, "Returns")) != returns_nothing
    raised = names(section(own, "Raises") or "")
    assert all(issubclass(getattr(streamfx, error), streamfx.StreamFXError) for error in raised)
    assert bool(raised) == (section(own, "Raises") is not None)
    properties = inspect.getmembers(own, lambda it: isinstance(it, property))
    assert [key for key, it in properties if not key.startswith("_") and not inspect.getdoc(it)] == []


def test_the_docstring_of_options_names_each_option() -> None:
    assert names(section(streamfx.Options, "Args") or "") == [field.name for field in fields(streamfx.Options)]
