"""Kernels whose results we never saw are tried once, on numbers that are known, before a step uses them.

    @isolated("attention in a window")
    def hides(device, dtype, width): return agree(...)

On CUDA the trial runs in a child process: a kernel that reads where it must not ends its process's CUDA context, and with it all
that a training run holds. The child answers one question per line, and ends when it is asked nothing more for a few seconds.
Answers are kept in the user's cache folder, by device, versions and source, so a machine pays for a trial once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamfx.errors import told
from streamfx.kernels import plain_attention
from streamfx.kernels.plain_attention import Causal
from streamfx.log import log
from streamfx.torch_private.inductor import is_out_of_memory

CLOSE = 0.03  # of the largest number: half types have three digits, or two
IDLE = 5  # seconds without a question after which the child ends, and gives back its share of the device's memory
MOST_KEPT = 200  # answers: those of old versions go
ENDING = 10  # seconds that are waited for a process that ends
LONGEST = 180  # seconds that one trial may take: the first one imports PyTorch and creates a CUDA context
NOT_USED = (
    "%s: its kernels are not used on %s with %s: %s. Other kernels take their place: exact, but slower or with more memory."
)

Forward: TypeAlias = "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]"
Backward: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]"
Question: TypeAlias = "dict[str, Any]"


class Outcome(NamedTuple):
    """Whether kernels are right; if not, why they are not used. `lasts` if every later trial would end the same way."""

    is_right: bool
    why: str = ""
    lasts: bool = True


# -- attention, against plain operators


class AttentionSizes(NamedTuple):
    """Of queries and of keys (heads, rows), and the width of a head; of one of values, where that is another."""

    device: torch.device
    dtype: torch.dtype
    queries: tuple[int, int]
    keys: tuple[int, int]
    width: int
    value_width: int | None = None


def agree(forward: Forward, backward: Backward, causal: Causal, sizes: AttentionSizes) -> bool:
    """Whether kernels of (q, k, v) and of (gradient, q, k, v, out, lse) give the numbers that plain operators give.

    Raises:
        RuntimeError: the build has no such kernels.
    """
    width, value_width = sizes.width, sizes.value_width or sizes.width
    heads = ((*sizes.queries, width), (*sizes.keys, width), (*sizes.keys, value_width), (*sizes.queries, value_width))
    query, key, value, gradient = (_known(sizes, own, seed) for seed, own in enumerate(heads))
    result = forward(query, key, value)
    found = (*result, *backward(gradient, query, key, value, *result))
    return all(map(_is_close, found, _truth(causal, *(item.double() for item in (query, key, value, gradient)))))


def _truth(causal: Causal, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    truth = plain_attention.forward(query, key, value, None, causal, None)
    return (*truth, *plain_attention.backward(gradient, query, key, value, *truth, None, causal, None))


def _known(sizes: AttentionSizes, own: tuple[int, ...], seed: int) -> Tensor:
    """The same normal numbers whenever they are asked for. Sines of whole numbers would not do: gradients cancel at some widths,
    and what is left is rounding. An H100 failed the trial of cuDNN's attention for it.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, *own, generator=generator).to(sizes.device, sizes.dtype)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    found = found.double()
    return bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max())


# -- in a process of its own


class IsolatedTrial:
    """A trial `check(device, *arguments)`, which answers each question once. On CUDA it runs in a child process."""

    def __init__(self, label: str, check: Callable[..., bool]) -> None:
        update_wrapper(self, check)
        self.label, self.check = label, check
        self._known: dict[Any, Outcome] = {}

    def __call__(self, device: torch.device, *arguments: Any) -> bool:
        return self.outcome(device, *arguments).is_right

    def outcome(self, device: torch.device, *arguments: Any) -> Outcome:
        """Whether the kernels are right, and why not; arguments are types and numbers."""
        flash = torch.nn.attention.current_flash_attention_impl()
        key = (device, flash, arguments)
        found = self._known.get(key)
        if found is None:
            question = {"check": self.name, "arguments": [_encoded(item) for item in arguments], "flash": flash}
            found = self._known[key] = _asked(question, device) if device.type == "cuda" else _tried(question, device)
            if not found.is_right:
                log.warning(NOT_USED, self.label, device, ", ".join(map(str, arguments)), found.why)
        return found

    @property
    def name(self) -> str:
        return f"{self.check.__module__}:{self.check.__qualname__}"

    def cache_clear(self) -> None:
        self._known.clear()


def isolated(label: str) -> Callable[[Callable[..., bool]], IsolatedTrial]:
    """Let a trial of the kernels with this label run in a process of its own on CUDA."""
    return partial(IsolatedTrial, label)


def _encoded(item: Any) -> Any:
    return str(item) if isinstance(item, torch.dtype) else item


def _decoded(item: Any) -> Any:
    return getattr(torch, item.removeprefix("torch.")) if isinstance(item, str) else item


def _tried(question: Question, device: torch.device) -> Outcome:
    """The outcome of a trial, in this process."""
    module, name = question["check"].split(":")
    try:
        check = getattr(importlib.import_module(module), name).check
        is_right = check(device, *map(_decoded, question["arguments"]))
    except torch.AcceleratorError:
        raise  # the context is lost, and with it whatever this process could find out
    except Exception as error:  # the build has no such kernels, Triton no compiler, the device too little of something
        return Outcome(False, f"they do not run ({told(error)})", lasts=not is_out_of_memory(error))
    return Outcome(is_right) if is_right else Outcome(False, "they give other numbers than plain operators do")


def _asked(question: Question, device: torch.device) -> Outcome:
    """The outcome of a trial on a CUDA device: an earlier one's, or that of the child process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = _key(question, index)
    if (kept := _kept().get(key)) is not None:
        return kept
    with _CHILD.lock:
        found = _CHILD.answer({**question, "device": f"cuda:{index}"})
    if found.lasts:
        _keep(key, found)
    return found


class Child:
    """The process that tries kernels, started for the first question and once more after it ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.command = [sys.executable, "-m", "streamfx.kernels.kernel_selftest"]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def answer(self, question: Question) -> Outcome:
        """The child's answer; how it ended, if it gave none. If it was ending because nobody asked, another one is asked."""
        is_old = self._process is not None
        found, has_ended = self._answer(question)
        return self._answer(question)[0] if is_old and has_ended else found

    def _answer(self, question: Question) -> tuple[Outcome, bool]:
        """The outcome, and whether the child had ended by itself, with nothing wrong."""
        try:
            process = self._running()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            line = self._line(process)
        except OSError as error:
            self.stop()
            return Outcome(False, f"no process could be started to try them in ({told(error)})", lasts=False), False
        if line is not None and line.endswith(b"\n"):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                is_right, why, lasts = json.loads(line)
                return Outcome(bool(is_right), str(why), bool(lasts)), False
            self.stop()
            return Outcome(False, "the process that tried them gave an answer that cannot be read", lasts=False), False
        why = f"said nothing for {LONGEST} s" if line is None else self._end(process)
        has_ended = line is not None and process.returncode == 0
        self.stop()
        return Outcome(False, f"the process that tried them {why}", lasts=False), has_ended

    def _line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """What the child writes until a line or its answers end; None if neither comes in time."""
        assert process.stdout is not None
        answers, until, found = process.stdout.fileno(), time.monotonic() + LONGEST, b""
        while not found.endswith(b"\n"):
            if not select.select([answers], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            part = os.read(answers, 1 << 16)
            if not part:
                break
            found += part
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            paths = [path or str(Path.cwd()) for path in sys.path]
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # the interrupt from the terminal is for this process
            )
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return f"closed its answers, and has not ended in {ENDING} s"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [""]
        return f"ended with code {code} ({lines[-1][:200]})"

    def stop(self) -> None:
        """End the process, and those that it started. One that hangs in the driver is not waited for."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what was not read by the child
                    assert pipe is not None
                    pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING)
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None


_CHILD = Child()


def main() -> None:
    """Answer questions from standard input, a line each, until there is none for a while."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    while select.select([sys.stdin], [], [], IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        question = json.loads(line)
        if question["flash"] != torch.nn.attention.current_flash_attention_impl():
            torch.nn.attention.activate_flash_attention_impl(question["flash"])
        device = torch.device(question["device"])
        outcome = _tried(question, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what a kernel did wrong may be noticed late
        print(json.dumps(outcome), file=answers, flush=True)


# -- what earlier processes found


@cache
def _folder() -> Path | None:
    """None where this user has no home, as in some containers."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamfx"
    return None


@cache
def _sources() -> str:
    """A fingerprint of the code that calls the kernels."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _key(question: Question, index: int) -> str:
    card = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    versions = version("torch"), torch.version.cuda, torch.backends.cudnn.version()
    return json.dumps([question, card, versions, _sources()])


def _kept() -> dict[str, Outcome]:
    folder = _folder()
    try:
        found = json.loads((folder / "trials.json").read_text()) if folder is not None else {}
        return {key: Outcome(bool(is_right), str(why)) for key, (is_right, why, _) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # there is none, or something else wrote it
        return {}


def _keep(key: str, outcome: Outcome) -> None:
    """Write an answer down; a folder that cannot be written to costs the next process a trial."""
    folder = _folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump({**dict(list(_kept().items())[-MOST_KEPT:]), key: outcome}, file)
        try:
            Path(file.name).replace(folder / "trials.json")
        except OSError:
            Path(file.name).unlink()


if __name__ == "__main__":
    from streamfx.kernels.kernel_selftest import main as run  # the module that the checks know, and not this copy of it

    run()
