"""Texts that are compared with files under `tests/goldens`, one file per test; `pytest --update-goldens` writes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "goldens"
TORCH = "2.13"  # the version whose graphs the files show


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)` fails where the text differs from the test's file, or where there is none."""
    if not torch.__version__.startswith(f"{TORCH}."):
        pytest.skip(f"golden files show the graphs of torch {TORCH}")
    path = FOLDER / file_name(request.node.name)

    def compare(text: str) -> None:
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"there is no {path.name}: run pytest --update-goldens, and read what it writes", pytrace=False)
        if text != (kept := path.read_text()):
            pytest.fail(difference(kept, text, path.name), pytrace=False)

    return compare


def file_name(test: str) -> str:
    """
    >>> file_name("test_product[causal-loss gradient]")
    'product.causal.loss_gradient.txt'
    """
    return (
        ".".join(re.sub(r"\W+", "_", part).strip("_") for part in re.split(r"[\[\]-]", test.removeprefix("test_")) if part)
        + ".txt"
    )


def orphans(items: Iterable[pytest.Item]) -> list[str]:
    """Files that no test reads any more."""
    used = {file_name(item.name) for item in items if "golden" in getattr(item, "fixturenames", ())}
    return sorted(path.name for path in FOLDER.iterdir() if path.name not in used)


def difference(kept: str, text: str, name: str) -> str:
    lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"goldens/{name}", "now", lineterm="", n=1)
    shown = list(lines)
    more = [f"... {len(shown) - 60} more lines"] if len(shown) > 60 else []
    return "\n".join([*shown[:60], *more, "if this is meant: pytest --update-goldens, and review the difference"])
