"""Rules of the repository: formatted, linted, typed, short, without names of models and machines, with tested versions."""

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamfx.tools.cli import main
from streamfx.tools.report import notices
from streamfx.torch_private import versions
from tests.support.tables import TABLES, read
from tests.versions import PAGE, ROOT, known, page

LIBRARY = ("streamfx", "passes")
NAMES = "llama|qwen|mistral|mixtral|gemma|deepseek|gpt_?2|gpt_?neox?|phi_?[1-4]|olmo|falcon|bloom|mamba|bert|smollm"
MODELS = re.compile(rf"\b({NAMES})", re.I)
MACHINE = re.compile(r"(?<![\w.])/(home|root|work|Users|mnt|opt)/\w")
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if ROOT / "streamfx" / "passes" not in path.parents]


# .ci/run calls all of them itself
CHECKS = [("ruff", "format", "--check"), ("ruff", "check"), pytest.param(("mypy",), marks=pytest.mark.long)]


@pytest.mark.parametrize("command", CHECKS, ids=" ".join)
def test_is_clean(command: tuple[str, ...]) -> None:
    pytest.importorskip(command[0])
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_the_library_names_no_model() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources(*LIBRARY)
        if "integrations" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MODELS.search(line)
    ]
    assert not named, "\n".join(named)


def test_files_and_functions_are_short() -> None:
    long = []
    for path in sources(*LIBRARY, "tests", "examples", "benchmarks"):
        lengths = {"the file": (text := path.read_text()).count("\n") - LINES_OF_A_FILE}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[node.name] = (node.end_lineno or 0) - node.lineno + 1 - LINES_OF_A_FUNCTION
        long += [f"{path}: {name} has {over} lines too many" for name, over in lengths.items() if over > 0]
    assert not long, "\n".join(long)


def test_private_interfaces_of_torch_are_in_torch_private() -> None:
    """Dynamo's options are documented under a private name, so they may be anywhere."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(*LIBRARY)
        if "torch_private" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _names_of(node)
        if name.replace("torch.utils._", "torch._").startswith("torch._") and not name.startswith("torch._dynamo.config")
    ]
    assert not found, "\n".join(found)


def _names_of(node: ast.AST) -> list[str]:
    """Return the full names of an import or a chain of attributes: `torch._ops.OpOverload`."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) and node.attr != "_dynamo" else []


def test_packages_import_only_packages_below_them() -> None:
    """The layers are in pyproject.toml."""
    linter = pytest.importorskip("importlinter.cli")
    assert linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_no_file_has_a_path_of_one_machine() -> None:
    files = [path for pattern in ("*.md", "*.toml", "*.txt", "docs/*.md", ".ci/*") for path in ROOT.glob(pattern)]
    here = Path(__file__).resolve()
    files += [path for path in sources(*LIBRARY, "tests", "examples", "benchmarks") if path.resolve() != here]
    found = [str(path.relative_to(ROOT)) for path in files if path.is_file() and MACHINE.search(path.read_text())]
    assert not found


def test_the_readme_has_the_command_of_ci() -> None:
    if not (run := ROOT / ".ci" / "run").exists():
        pytest.skip("no .ci here: an unpacked source distribution")
    command = next(line for line in run.read_text().splitlines() if line.startswith("python3 -m venv"))
    assert command.split(" | ")[0] in (ROOT / "README.md").read_text()


def test_tests_read_all_tables_of_cases() -> None:
    code = "".join(path.read_text() for path in sources("tests"))
    sections = {section for path in TABLES.glob("*.txt") for section in read(path, 1) if section}
    assert sections and not [section for section in sections if f'_cases("{section}", globals()' not in code]


def test_passes_is_a_link() -> None:
    link = ROOT / "streamfx" / "passes"
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert link.is_symlink() and link.resolve() == (ROOT / "passes").resolve()


# -- versions


@pytest.mark.compiled
def test_the_first_compilation_and_doctor_name_an_untested_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "NEWEST", (2, 10))
    monkeypatch.setattr(versions, "OLDEST", (2, 9))
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(logging.getLogger("streamfx"), "disabled", False)  # as import-linter leaves it
    for rows in (8, 9):
        torch._dynamo.reset()
        torch.compile(torch.nn.Linear(4, 4), backend="streambp")(torch.zeros(1, rows, 4)).sum().backward()
    assert caplog.text.count(said := f"PyTorch {torch.__version__} is not tested") == 1
    monkeypatch.setattr("streamfx.tools.cli.doctor.self_test", lambda: {"ok": True, "max_error": 0.0, "seconds": 0.0})
    assert main(["doctor"]) == 0
    assert said in capsys.readouterr().out


TESTED = {"2.10.1": False, "2.11.0": True, "2.14.1+cu130": True, "2.15.0": False, "2.15.0a0+git1": False, "3.0.0": False}


def test_versions_outside_of_the_tested_range_are_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_tested in TESTED.items():
        monkeypatch.setattr(torch, "__version__", version)
        assert (versions.untested() == "") is is_tested


def test_the_page_of_versions_is_current() -> None:
    assert PAGE.read_text() == page(known()), "run python -m tests.versions --record"


def test_pyproject_allows_the_tested_versions() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, (major, newest) = versions.OLDEST, versions.NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{major}.{newest + 1}" in project["dependencies"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert named and set(named) <= {
        ".".join(row["python"].split(".")[:2]) for row in known() if {*row["failed"]} <= {*row.get("explained", {})}
    }
