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
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page.read_text())
    missing = [name for file, name in named if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M)]
    assert not missing
    assert named or page.name != "together.md"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page that is made of docstrings."""
    pytest.importorskip("mkdocstrings")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs/site/mkdocs.yml")]
    built = subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return (site / "reference" / "index.html").read_text()


@pytest.mark.long
def test_the_reference_has_everything_that_is_public(reference: str) -> None:
    errors = {name for name in streamfx.__all__ if name in vars(streamfx.errors)}
    missing = [name for name in streamfx.__all__ if f'id="streamfx.{"errors." if name in errors else ""}{name}"' not in reference]
    assert not missing


@pytest.mark.parametrize("name", streamfx.__all__)
def test_everything_that_is_public_says_what_it_does(name: str) -> None:
    own = getattr(streamfx, name)
    public = [
        own,
        *(item for key, item in vars(own).items() if isinstance(own, type) and not key.startswith("_") and callable(item)),
    ]
    assert all(item.__doc__ for item in public), [item for item in public if not item.__doc__]
