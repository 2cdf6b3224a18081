"""Every recipe runs as it stands, fits a screen, streams its step, and is found from README and the navigation of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.snippets import ran

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
NEEDS = {
    "sft": ("trl", "peft", "datasets"),
    "dpo": ("trl", "datasets"),
    "grpo": ("trl", "datasets"),
    "lightning": ("lightning",),
}
LINES_OF_A_SCREEN = 60


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipe_streams_is_short_and_is_found(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", *NEEDS.get(page.stem, ())):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    left = ran(page, tmp_path)
    told = [str(left["found"])] if "found" in left else [compiled.text for compiled in left["enabled"].compiled]
    streams = ["every stage streams" in text for text in told]
    assert any(streams), told
    assert all(own or "the graph as it stands takes" in text for own, text in zip(streams, told, strict=True)), told
    assert "checked" not in left or left["checked"].ok
    assert len(page.read_text().splitlines()) <= LINES_OF_A_SCREEN
    assert f"](docs/recipes/{page.name})" in (ROOT / "README.md").read_text()
    assert re.search(rf": recipes/{page.name}$", (ROOT / "docs/site/mkdocs.yml").read_text(), re.MULTILINE)
