"""The rules that the whole repository keeps: formatted, linted, typed, short, and free of models and machines."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_no_model_is_known_beforehand() -> None:
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
        tree = ast.parse(text := path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{path}: {node.name} has {lines} lines"] if lines > LINES_OF_A_FUNCTION else []
        long += [f"{path} has {text.count(chr(10))} lines"] if text.count("\n") > LINES_OF_A_FILE else []
    assert not long, "\n".join(long)


def test_private_interfaces_of_torch_are_in_one_room() -> None:
    """It may change them at any time; its options are documented under a private name."""
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
    """What an import or a chain of attributes is of: `torch._ops.OpOverload`."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) and node.attr != "_dynamo" else []


def test_rooms_know_those_below_them_alone() -> None:
    """The contracts are in pyproject.toml."""
    linter = pytest.importorskip("importlinter.cli")
    assert linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_no_path_of_a_machine() -> None:
    files = [path for pattern in ("*.md", "*.toml", "*.txt", "docs/*.md", ".ci/*") for path in ROOT.glob(pattern)]
    here = Path(__file__).resolve()
    files += [path for path in sources(*LIBRARY, "tests", "examples", "benchmarks") if path.resolve() != here]
    found = [str(path.relative_to(ROOT)) for path in files if path.is_file() and MACHINE.search(path.read_text())]
    assert not found


def test_ci_runs_the_command_of_the_readme() -> None:
    if not (run := ROOT / ".ci" / "run").exists():
        pytest.skip("no .ci here: an unpacked source distribution")
    command = next(line for line in run.read_text().splitlines() if line.startswith("python3 -m venv"))
    assert command.split(" | ")[0] in (ROOT / "README.md").read_text()


def test_passes_is_a_link() -> None:
    """One folder, two names: `passes` in the repository is the package `streamfx.passes`."""
    link = ROOT / "streamfx" / "passes"
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert link.is_symlink() and link.resolve() == (ROOT / "passes").resolve()
