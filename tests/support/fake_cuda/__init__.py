"""Fake tensors on CUDA with any build of PyTorch and no GPU, autograd included: the graphs and loops that a GPU would run.

Three things stand in for the device: a device guard (`guard.cpp`), hooks that say that CUDA is there (`hooks.cpp`, preloaded),
and the choice that `scaled_dot_product_attention` makes on CUDA (`attention.py`). A CPU build has none of them; in a CUDA build
they replace its own. Programs run in a process of their own, from which real devices are hidden.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20")
LIBRARIES = ("guard", "hooks")


@cache
def built() -> Path:
    """The folder with both libraries, compiled once by this process: only its user can write to the folder."""
    assert COMPILER is not None
    folder, home = Path(tempfile.mkdtemp()), Path(torch.__file__).parent
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    for name in LIBRARIES:
        made = ["-o", str(folder / f"lib{name}.so")]
        subprocess.run([COMPILER, *FLAGS, *include, str(HERE / f"{name}.cpp"), *made, *linked], check=True)
    return folder


def reported(program: str = "report", **asked: Any) -> dict[str, Any]:
    """The report of `report.py`, or of another program here, on a step that it traces for CUDA."""
    libraries = built()
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # on a machine with a GPU, a CUDA build must not find it
        "FAKE_CUDA": str(libraries),
        "LD_PRELOAD": str(libraries / "libhooks.so"),
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
    }
    command = [sys.executable, "-m", f"tests.support.fake_cuda.{program}", json.dumps(asked)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
