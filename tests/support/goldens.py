"""Texts that are compared with files under `tests/goldens`, one file per test; `pytest --update-goldens` writes them.

A file holds the text on PyTorch 2.13. If the text differs on another version, that version has its own: `wire.2.torch2.11.txt`.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "goldens"
BASE = "2.13"  # the version whose texts the files without a version hold
HOW = "if this is meant: pytest --update-goldens, and review the difference"
OF_VERSION = re.compile(r"\.torch\d+\.\d+\.txt$")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)` fails if the text differs from the test's file for this version of torch, or if there is none."""
    base = FOLDER / file_name(request.node.name)
    path = file_of(base, torch_version())

    def compare(text: str) -> None:
        if request.config.getoption("--update-goldens"):
            write(base, torch_version(), text)
        elif not path.exists():
            pytest.fail(f"there is no {path.name}: run pytest --update-goldens, and read what it writes", pytrace=False)
        elif text != (kept := path.read_text()):
            pytest.fail(difference(kept, text, path.name), pytrace=False)

    return compare


def torch_version() -> str:
    """Such as 2.13."""
    return ".".join(torch.__version__.split(".")[:2])


def own_file(base: Path, version: str) -> Path:
    """Such as wire.2.torch2.14.txt."""
    return base.with_suffix(f".torch{version}.txt")


def file_of(base: Path, version: str) -> Path:
    """The file to compare with on a version of torch."""
    own = own_file(base, version)
    return own if own.exists() else base


def write(base: Path, version: str, text: str) -> None:
    """Keep a text: in a file of the version's own only if the text differs from the base version's."""
    if version == BASE:
        base.write_text(text)
    elif base.exists() and base.read_text() == text:
        own_file(base, version).unlink(missing_ok=True)
    else:
        own_file(base, version).write_text(text)


def file_name(test: str) -> str:
    """
    >>> file_name("test_product[causal-loss gradient]")
    'product.causal.loss_gradient.txt'
    """
    parts = (re.sub(r"\W+", "_", part).strip("_") for part in re.split(r"[\[\]-]", test.removeprefix("test_")) if part)
    return ".".join(parts) + ".txt"


def orphans(items: Iterable[pytest.Item]) -> list[str]:
    """Return the files that no test reads."""
    used = {file_name(item.name) for item in items if "golden" in getattr(item, "fixturenames", ())}
    return sorted(path.name for path in FOLDER.iterdir() if OF_VERSION.sub(".txt", path.name) not in used)


def difference(kept: str, text: str, name: str) -> str:
    shown = [*difflib.unified_diff(kept.splitlines(), text.splitlines(), f"goldens/{name}", "now", lineterm="", n=1)]
    return "\n".join([*shown[:60], *([f"... {len(shown) - 60} more lines"] if len(shown) > 60 else []), HOW])
