"""Every Python snippet of the documentation runs; those of one file run one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamfx
from tests.support.snippets import has_snippets, ran
from tests.support.spread import only

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWING = {page.name: page for page in PAGES if has_snippets(page) and page.parent.name != "recipes"}  # tests/test_recipes.py


@pytest.mark.long
@pytest.mark.parametrize("name", only([name for name in SHOWING if name != "trainers.md"], SHOWING))
def test_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran(SHOWING[name], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_tests_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert [name for file, name in named if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M)] == []
    assert named or page.name != "together.md"


@pytest.mark.long
def test_the_reference_has_everything_that_is_public(tmp_path: Path) -> None:
    """The page that is made of docstrings."""
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs/site/mkdocs.yml")]
    built = subprocess.run([*command, "--site-dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    errors = {name for name in streamfx.__all__ if name in vars(streamfx.errors)}
    missing = [name for name in streamfx.__all__ if f'id="streamfx.{"errors." if name in errors else ""}{name}"' not in reference]
    assert not missing
