"""A source distribution makes a wheel, and the wheel works: imported, and found by `torch.compile` with no import."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PROBE = """
import importlib.metadata, pathlib, torch
for name in ("streambp", "streamfx"):
    assert name in torch._dynamo.list_backends(), torch._dynamo.list_backends()
    double = torch.compile(lambda x: (x * 2).sum(), backend=name)
    x = torch.ones(3, requires_grad=True)
    double(x).backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
import streamfx, streamfx.passes.operators.rules
where = pathlib.Path(streamfx.__file__).parents[1]
assert pathlib.Path(importlib.metadata.distribution("streamfx").locate_file("streamfx")).parent == where
print(where)
"""


def built(kind: str, source: Path, target: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(path for path in target.iterdir() if path.suffix == (".whl" if kind == "wheel" else ".gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution, as package indexes and `pip install` do it."""
    folder = tmp_path_factory.mktemp("packaging")
    with tarfile.open(built("sdist", ROOT, folder / "sdist")) as archive:
        archive.extractall(folder / "source")
    return built("wheel", next((folder / "source").iterdir()), folder / "wheel")


def test_wheel_holds_the_passes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "passes").rglob("*.py")}
    assert {f"streamfx/{name}" for name in here} <= names
    assert {"streamfx/py.typed", *(f"streamfx/report/templates/report.{kind}" for kind in ("html.j2", "css", "js"))} <= names
    assert not [name for name in names if not name.startswith(("streamfx/", "streamfx-"))]


def test_wheel_works(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE}"
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    result = subprocess.run([sys.executable, *safe, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).resolve() == tmp_path.resolve()


def test_metadata_and_citation_say_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    metadata = message_from_string(text)
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert metadata["License-Expression"] == "Apache-2.0" and not [name for name in classifiers if name.startswith("License ::")]
    assert metadata["Description-Content-Type"] == "text/markdown"
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(classifiers) <= known, "an index refuses what it does not know"
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"streamfx-{citation['version']}-" in wheel.name
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
