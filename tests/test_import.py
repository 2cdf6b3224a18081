"""What `import streamfx` gives, and what it costs: nothing heavy is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import streamfx

PUBLIC = {
    "check_recurrence",
    "configure",
    "disable",
    "enable",
    "explain",
    "plan",
    "profile",
    "register_recurrence",
    "register_rule",
    "streambp",
    "verify",
    "Options",
    "__version__",
}
RESULTS = {"Enabled", "Explanation", "PlanReport", "Profile", "Verification"}
HEAVY = "heavy = {'torch', 'transformers', 'numpy', 'sympy', 'networkx'} & set(sys.modules)\n"
ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_dir_shows_the_functions_the_results_and_the_errors_alone() -> None:
    errors = {name for name in dir(streamfx) if isinstance(own := getattr(streamfx, name), type) and issubclass(own, Exception)}
    assert set(dir(streamfx)) == PUBLIC | RESULTS | errors
    assert errors == {name for name in vars(streamfx.errors) if name in streamfx.__all__}
    assert set(streamfx.__all__) == set(dir(streamfx)) - {"__version__"}


def test_each_public_name_is_what_it_says() -> None:
    assert all(getattr(streamfx, name).__name__ == name for name in streamfx.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'profil'"):
        _ = streamfx.profil


def test_importing_imports_no_torch_and_the_first_use_does() -> None:
    code = f"import sys, streamfx, streamfx.tools.cli\nstreamfx.Options(memory_budget='24G')\n{HEAVY}assert not heavy, heavy\n"
    run(code + "streamfx.enable\nassert 'torch' in sys.modules")


@pytest.mark.parametrize(
    "given", [["--help"], ["plan", "--help"], ["explain", "--help"], ["verify", "--help"], ["doctor", "--help"]], ids=" ".join
)
def test_help_is_printed_before_torch_is_imported(given: list[str]) -> None:
    code = f"import sys\nfrom streamfx.tools.cli import main\ntry: main({given})\nexcept SystemExit as end: assert not end.code\n"
    assert "usage: streamfx" in run(f"{code}{HEAVY}assert not heavy, heavy")


def test_the_package_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "streamfx", "--help"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0 and found.stdout.startswith("usage: streamfx")


@pytest.mark.parametrize("given", [["plan", "Qwen3-9B"], ["explain", "no/such"], ["verify", "Lama-3.1-8B"]], ids=" ".join)
def test_a_wrong_name_is_refused_before_torch_is_imported(given: list[str]) -> None:
    code = f"import sys\nfrom streamfx.tools.cli import main\nassert main({given}) == 1\n"
    run(f"{code}{HEAVY}assert not heavy, heavy")


@pytest.mark.parametrize("before", ["", "import streamfx\n", "from streamfx import verify\n"])
def test_the_backend_has_two_names(before: str) -> None:
    """By its entry points, and where these are not those of this checkout, as soon as anything of it is used."""
    installed = metadata.entry_points(group="torch_dynamo_backends").names
    names = [name for name in ("streambp", "streamfx") if name in installed or "verify" in before]
    if not names:
        pytest.skip("the installed entry points are of another version")
    run(
        f"import torch\n{before}x = torch.ones(3, requires_grad=True)\n"
        f"for name in {names}:\n"
        "    x.grad = None\n"
        "    torch.compile(lambda x: (x * 2).sum(), backend=name)(x).backward()\n"
        "    assert x.grad.tolist() == [2.0] * 3\n"
    )
