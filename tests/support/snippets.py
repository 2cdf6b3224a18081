"""Runs the Python snippets of a page, one after the other in one namespace."""

import re
from pathlib import Path
from typing import Any

import torch

SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def has_snippets(page: Path) -> bool:
    return SNIPPET.search(page.read_text()) is not None


def ran(page: Path, folder: Path, replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the namespace after the snippets of a page. Each becomes a file, because Dynamo reads source files.

    `replaced` maps texts of the page, such as a long length, to those that run instead.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    text, namespace = page.read_text(), dict[str, Any]()
    for long, short in (replaced or {}).items():
        assert long in text
        text = text.replace(long, short)
    for snippet in SNIPPET.finditer(text):
        line = text[: snippet.start(1)].count("\n")
        source = "\n" * line + snippet[1]  # as far down as in the page, so that errors name its line
        (file := folder / f"{page.stem}_{line}.py").write_text(source)
        exec(compile(source, str(file), "exec"), namespace)
    torch._dynamo.reset()
    return namespace
