"""Fake tensors on CUDA with any build of PyTorch and no GPU, autograd included: the graphs and loops that a GPU would run.

Three things stand in for the device: a device guard (`guard.cpp`), hooks that say that CUDA is there (`hooks.cpp`, preloaded),
and the choice that `scaled_dot_product_attention` makes on CUDA (`attention.py`). A CPU build has none of them; in a CUDA build
they replace its own. Programs run in a process of their own, from which real devices are hidden.
"""

import atexit
import hashlib
import json
import os
import shutil
import stat
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
    """The folder with both libraries, compiled once for this version of PyTorch and these sources."""
    assert COMPILER is not None
    sources = {name: HERE / f"{name}.cpp" for name in LIBRARIES}
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources.values())).hexdigest()[:16]
    folder = _kept_folder(f"fake-cuda-{torch.__version__}-{key}")
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    for name, source in sources.items():
        library = folder / f"lib{name}.so"
        if library.exists():
            continue
        made = folder / f"{name}.{os.getpid()}.so"
        subprocess.run([COMPILER, *FLAGS, *include, str(source), "-o", str(made), *linked], check=True)
        made.replace(library)  # a rename is atomic: other processes may build the library, too
    return folder


def _kept_folder(name: str) -> Path:
    """A private folder in the user's cache; if there can be none, one that this process removes when it ends."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        return private_folder(private_folder(cache_home / "streamfx-tests") / name)
    except OSError:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def private_folder(path: Path) -> Path:
    """`path` as a folder that this user alone can write to or list; created if it is missing.

    Programs preload libraries from it: never from a folder that another user made or can write to.

    Raises:
        PermissionError: `path` is a link, or belongs to another user, or others have access to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        state = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise PermissionError(f"{path} must be a folder of user {os.getuid()} alone (drwx------); found {state}: remove it")
    return path


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
