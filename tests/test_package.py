"""`import streamfx`: its names and its cost; no step warns; the package can be built and installed; what cannot be pickled."""

import copy
import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
import torch

import streamfx
from streamfx.errors import NotCopyableError
from streamfx.tools.inspect.verify import Verification
from streamfx.tools.report.timeline import LoopTime, MemoryTimeline
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled

FUNCTIONS = (
    "check_recurrence compare configure disable enable explain plan profile register_recurrence register_rule streambp verify"
)
PUBLIC = {*FUNCTIONS.split(), "Options", "__version__"}
RESULTS = {"Comparison", "EnabledModules", "Explanation", "PlanReport", "Profile", "Verification"}
HEAVY = "heavy = {'torch', 'transformers', 'numpy', 'sympy', 'networkx'} & set(sys.modules)\n"
ROOT = Path(__file__).parents[1]


def run(code: str, *how: str, cwd: Path = ROOT) -> tuple[str, str]:
    """Return both outputs of a program."""
    found = subprocess.run([sys.executable, *how, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout, found.stderr


def test_public_names() -> None:
    errors = {name for name in dir(streamfx) if isinstance(own := getattr(streamfx, name), type) and issubclass(own, Exception)}
    assert set(dir(streamfx)) == PUBLIC | RESULTS | errors
    assert errors == {name for name in vars(streamfx.errors) if name in streamfx.__all__}
    assert set(streamfx.__all__) == set(dir(streamfx)) - {"__version__"}
    assert all(getattr(streamfx, name).__name__ == name for name in streamfx.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'profil'"):
        _ = streamfx.profil


def test_old_names_of_attributes_warn_and_are_the_new_ones() -> None:
    table = re.findall(r"^\| `(\w+)\.(\w+)` \| `\1\.(\w+)` \|$", (ROOT / "docs/renamed.md").read_text(), re.MULTILINE)
    owners = {owner.__name__: owner for owner in (Verification, LoopTime, MemoryTimeline)}
    assert {name: owner.renamed for name, owner in owners.items()} == {
        name: {old: new for owner, old, new in table if owner == name} for name in owners
    }
    loop = LoopTime("loop", 1.0, 2.0, 8, 3)
    with pytest.warns(DeprecationWarning, match="^LoopTime.drawn is now LoopTime.sampled_chunks$"):
        assert loop.drawn == 3
    with pytest.raises(AttributeError, match="'LoopTime' object has no attribute 'drawing'"):
        _ = loop.drawing


def test_old_names_of_errors_warn_once_and_are_the_new_ones() -> None:
    table = re.findall(r"^\| `streamfx\.(\w+)` \| `streamfx\.(\w+)` \|$", (ROOT / "docs/renamed.md").read_text(), re.MULTILINE)
    names = {old: new for old, new in table if new.endswith("Error")}
    code = (
        "import streamfx, warnings\n"
        f"for old, new in {names}.items():\n"
        "    with warnings.catch_warnings(record=True) as seen:\n"
        "        warnings.simplefilter('always')\n"
        "        exec(f'from streamfx import {old} as found')\n"
        "        assert found is getattr(streamfx, old) is getattr(streamfx, new), old\n"
        "    assert [(item.category, str(item.message)) for item in seen] == [\n"
        "        (DeprecationWarning, f'streamfx.{old} is now streamfx.{new}')\n"
        "    ], (old, seen)\n"
        "print(len(streamfx.renamed.RENAMED))"
    )
    assert run(code)[0].strip() == str(len(table)) == str(len(names) + 1)  # all but the result of `enable`, which imports torch


COMMANDS = [["--help"], ["plan", "--help"], ["plan", "Qwen3-9B"], ["explain", "no/such"], ["verify", "Lama-3.1-8B"]]
NAMED = """
for name in ("streambp", "streamfx"):
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x * 2).sum(), backend=name)(x).backward()
    assert x.grad.tolist() == [2.0] * 3
"""


OPERATORS = """
import torch, streamfx.passes
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("streamfx::")]
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
print(len(names) > 20, [name for name in names if not has_kernel(name, "CompositeExplicitAutograd")])
"""


@pytest.mark.long  # CI runs the long tests of this file
def test_importing_the_passes_implements_the_operators_that_they_write() -> None:
    assert run(OPERATORS)[0].split(maxsplit=1) == ["True", "[]\n"]


@pytest.mark.long
def test_the_first_use_imports_torch_and_registers_the_backend() -> None:
    """Neither import, help nor the refusal of a name does. The backend has two names, without installed entry points."""
    code = (
        "import sys, streamfx\nfrom streamfx.tools.cli import main\nstreamfx.Options(memory_budget='24G')\n"
        f"for given in {COMMANDS}:\n"
        "    try: assert main(given) == 1\n"
        "    except SystemExit as end: assert not end.code\n"
        f"{HEAVY}assert not heavy, heavy\n"
        "streamfx.verify\nassert 'torch' in sys.modules\nimport torch\n"
    )
    assert run(code + NAMED)[0].count("usage: streamfx") == 2


# -- warnings

PROGRAM = (ROOT / "tests" / "support" / "warnings.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("asked", [(), ({"memory_budget": "1GiB"},)])
def test_no_step_warns(asked: tuple[dict[str, str], ...]) -> None:
    """Neither with eager bodies nor with those of Inductor."""
    assert run(f"asked = {asked}\n{PROGRAM}", "-W", "error")[1] == ""


# -- packages

PROBE = f"""
import importlib.metadata, pathlib, torch
{NAMED}
import streamfx, streamfx.passes.ops.rules
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
    """Build a wheel from the source distribution, as `pip install` does."""
    folder = tmp_path_factory.mktemp("packaging")
    with tarfile.open(built("sdist", ROOT, folder / "sdist")) as archive:
        archive.extractall(folder / "source")
    return built("wheel", next((folder / "source").iterdir()), folder / "wheel")


@pytest.mark.long
def test_the_wheel_has_all_files_and_works(wheel: Path, tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"streamfx/tools/report/templates/report.{kind}" for kind in ("html.j2", "css", "js")}
    passes = {f"streamfx/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "passes").rglob("*.py")}
    assert {"streamfx/py.typed", *templates, *passes} <= names
    assert not [name for name in names if not name.startswith(("streamfx/", "streamfx-"))]
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE}"
    where, _ = run(code, *(["-P"] if sys.version_info >= (3, 11) else []), cwd=tmp_path)
    assert Path(where.strip()).resolve() == tmp_path.resolve()


@pytest.mark.long
def test_metadata_and_citation_are_valid(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    metadata = message_from_string(text)
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert metadata["License-Expression"] == "Apache-2.0" and not [name for name in classifiers if name.startswith("License ::")]
    assert metadata["Description-Content-Type"] == "text/markdown"
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(classifiers) <= known, "an index refuses unknown classifiers"
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"streamfx-{citation['version']}-" in wheel.name
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


# -- TORCH_TRACE

TRACED = """
import torch
from tests.support.small import Causal, tokens

ids = tokens(2, 64)
torch.compile(Causal(), backend="streambp", options={"chunk_size": 16, "bodies": "eager"})(ids, ids).backward()
"""


@pytest.mark.long
def test_stages_and_listing_are_artifacts_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tlparse shows them."""
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    run(TRACED)
    (trace,) = tmp_path.iterdir()
    stages, listing = (
        "".join(re.findall(rf'"name": "streamfx_{name}".*\n((?:\t.*\n)+)', trace.read_text()))
        for name in ("stages", "build_program")
    )
    assert "every stage streams" in stages and "at the peak" in stages
    assert "head_forward" in listing


# -- objects that hold graphs of their process

IDS = tokens(2, 12)


def profiled() -> Any:
    with streamfx.profile() as profile:
        torch.zeros(8)
    return profile


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an Explanation": (
        lambda: streamfx.explain(Causal(), IDS, IDS, chunk_size=4),
        "keep summary(), which is a dictionary, or the page",
    ),
    "a Profile": (profiled, "keep summary(), which is a dictionary, or the trace"),
    "an EnabledModules": (lambda: streamfx.enable(Causal(), chunk_size=4), "streamfx.enable(copy, **enabled.options)"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_error_names_an_alternative(name: str) -> None:
    make, keep = OBJECTS[name]
    held = make()
    for kept in (pickle.dumps, copy.deepcopy):
        with pytest.raises(NotCopyableError) as refused:
            kept(held)
        assert refused.value.asked == f"{name} cannot be pickled or copied" and keep in refused.value.do
        assert isinstance(refused.value, TypeError)
    if name == "an Explanation":
        summary = held.summary()
        assert pickle.loads(pickle.dumps(summary)) == copy.deepcopy(summary) == summary


def test_an_enabled_model_can_be_copied() -> None:
    model = Causal()
    with streamfx.enable(model, chunk_size=4):
        model(IDS, IDS).backward()
        torch.testing.assert_close(copy.deepcopy(model)(IDS, IDS), model(IDS, IDS))
