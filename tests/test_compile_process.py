"""The process that compiles loop bodies while this one trains: it fills the cache, ends, and leaves nothing running."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamfx.runtime import compile_process
from streamfx.runtime.compile_process import Answer, CompileProcess

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")


def test_jobs_for_a_process_that_has_ended_for_lack_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer arrives, although the pipe for jobs is broken: another process can take them."""
    text = repr(pickle.dumps(Answer("", "idle"))).replace("{", "{{").replace("}", "}}")
    send = f"from multiprocessing.connection import Connection; Connection({{1}}).send_bytes({text})"
    monkeypatch.setattr(compile_process, "PROGRAM", send)
    process, job = CompileProcess(), SimpleNamespace(key="key", encoded=b"bytes")
    process._process.wait(20)
    process.submit(job)  # type: ignore[arg-type]
    assert [answer.outcome for answer in process.receive()] == ["idle"]
    process.close()


def program(folder: Path, way: str) -> subprocess.Popen[str]:
    """A script that trains a small decoder until its bodies are compiled, with an empty cache unless a run has filled it."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.background_program", way]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


@pytest.mark.long
@needs_compiler
def test_a_process_fills_the_cache(tmp_path: Path) -> None:
    """This process finds all code there; a second start of the script compiles nothing and starts no process."""
    found = [json.loads(program(tmp_path, "train").communicate(timeout=500)[0]) for _ in range(2)]
    assert [run["cache misses"] for run in found] == [0, 0] and [run["processes"] for run in found] == [1, 0]
    assert found[0]["steps before"] > found[1]["steps before"] == 1


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("way", ["killed", "interrupted", "exit", "fork"])
def test_no_process_is_left(way: str, tmp_path: Path) -> None:
    """However this process ends; a forked one that lives longer does not keep the process alive."""
    script = program(tmp_path, way)
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    if way in ("killed", "interrupted"):
        assert is_alive(pid)
        script.send_signal({"killed": signal.SIGKILL, "interrupted": signal.SIGINT}[way])
    script.wait(60)
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
