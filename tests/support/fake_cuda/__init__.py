"""Fake tensors on CUDA with a CPU build of PyTorch, autograd included: what a graph holds on a GPU, seen without one.

A CPU build lacks three things: a device guard (`guard.cpp`), hooks that say that CUDA is there (`hooks.cpp`, preloaded), and the
choice that `scaled_dot_product_attention` makes on CUDA (`attention.py`). Programs run in a process of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20")


@cache
def built() -> Path:
    """The folder with both libraries, compiled once for this version of PyTorch."""
    assert COMPILER is not None
    folder = Path(gettempdir()) / f"streamfx-fake-cuda-{torch.__version__}-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    home = Path(torch.__file__).parent
    for name in ("guard", "hooks"):
        library = folder / f"lib{name}.so"
        if library.exists():
            continue
        made = folder / f"{name}.{os.getpid()}.so"
        include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        linked = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run([COMPILER, *FLAGS, *include, str(HERE / f"{name}.cpp"), "-o", str(made), *linked], check=True)
        made.replace(library)  # whole or not at all: other processes may build it, too
    return folder


def reported(program: str = "report", **asked: Any) -> dict[str, Any]:
    """What `report.py`, or another program here, says of a step that it traces for CUDA."""
    libraries = built()
    environment = {
        **os.environ,
        "FAKE_CUDA": str(libraries),
        "LD_PRELOAD": str(libraries / "libhooks.so"),
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
    }
    command = [sys.executable, "-m", f"tests.support.fake_cuda.{program}", json.dumps(asked)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
