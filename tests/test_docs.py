"""Every Python snippet of the documentation runs; those of one file run one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.spread import only

ROOT = Path(__file__).parents[1]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWING = {page.name: page for page in PAGES if SNIPPET.search(page.read_text())}


@pytest.mark.parametrize("name", only([name for name in SHOWING if name != "trainers.md"], SHOWING))
def test_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHOWING[name]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    text, namespace = page.read_text(), dict[str, Any]()
    for snippet in SNIPPET.finditer(text):
        line = text[: snippet.start(1)].count("\n")
        source = "\n" * line + snippet[1]  # in a file of its own: Dynamo reads the file of what it compiles as Python
        (file := tmp_path / f"{page.stem}_{line}.py").write_text(source)
        exec(compile(source, str(file), "exec"), namespace)
    torch._dynamo.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
