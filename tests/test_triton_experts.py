"""Products by group in Triton, where it is installed: run by its interpreter, and compiled for cards that are not there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with PyTorch's builds for CUDA")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("program", ["interpreted", "compiled"])
def test_kernels(program: str) -> None:
    command = [sys.executable, "-m", "tests.support.triton_programs", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
