"""What `import streamfx` gives, and what it costs: nothing heavy is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import streamfx

FUNCTIONS = "check_recurrence configure disable enable explain plan profile register_recurrence register_rule streambp verify"
PUBLIC = {*FUNCTIONS.split(), "Options", "__version__"}
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
    code = f"import sys, streamfx, streamfx.cli\nstreamfx.Options(memory_budget='24G')\n{HEAVY}assert not heavy, heavy\n"
    run(code + "streamfx.enable\nassert 'torch' in sys.modules")


COMMANDS = [["--help"], ["plan", "--help"], ["plan", "Qwen3-9B"], ["explain", "no/such"], ["verify", "Lama-3.1-8B"]]


def test_help_is_printed_and_names_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom streamfx.cli import main\n"
        f"for given in {COMMANDS}:\n"
        "    try: assert main(given) == 1\n"
        "    except SystemExit as end: assert not end.code\n"
    )
    assert run(f"{code}{HEAVY}assert not heavy, heavy").count("usage: streamfx") == 2


@pytest.mark.parametrize("before", ["import streamfx\n", pytest.param("", marks=pytest.mark.long)])
def test_the_backend_has_two_names(before: str) -> None:
    """By its entry points, and where these are not those of this checkout, as soon as anything of it is used."""
    installed = metadata.entry_points(group="torch_dynamo_backends").names
    names = [name for name in ("streambp", "streamfx") if name in installed or "import" in before]
    if not names:
        pytest.skip("the installed entry points are of another version")
    run(
        f"import torch\n{before}{'streamfx.verify' if before else ''}\nx = torch.ones(3, requires_grad=True)\n"
        f"for name in {names}:\n"
        "    x.grad = None\n"
        "    torch.compile(lambda x: (x * 2).sum(), backend=name)(x).backward()\n"
        "    assert x.grad.tolist() == [2.0] * 3\n"
    )
