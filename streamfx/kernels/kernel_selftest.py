"""Test kernels that may be wrong on some devices: once, on known values, before a training step uses them.

    @selftest("attention in a window")
    def masks_correctly(device, dtype, width): return matches_reference(...)

On CUDA the test runs in a child process, because a kernel that reads out of bounds destroys the CUDA context of its
process, and with it all tensors of a training run. The child reads one question per line (JSON: the test, its arguments, the
device), answers with an `Outcome` on one line, and exits if it gets no question for a few seconds. Answers are cached in the
user's cache folder, keyed by device, versions and source, so each machine runs a test once.
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

from streamfx.errors import describe_error
from streamfx.kernels import plain_attention
from streamfx.kernels.attention_call import AttentionCall, Causal, Gradients, Result
from streamfx.log import log
from streamfx.torch_private.inductor import is_out_of_memory

TOLERANCE = 0.03  # relative to the largest value: half dtypes have two or three significant digits
IDLE_SECONDS = 5  # seconds without a question after which the child exits and releases its device memory
MAX_CACHED = 200  # answers in the cache; the oldest are dropped
EXIT_SECONDS = 10  # wait for a process to end
TEST_SECONDS = 180  # time limit of a test; the first one imports PyTorch and creates a CUDA context
KERNELS_NOT_USED = (
    "%s: its kernels are not used on %s with %s, because %s. Other kernels run instead: exact, but slower or with more memory."
)

Forward: TypeAlias = "Callable[[AttentionCall], Result]"
Backward: TypeAlias = "Callable[[AttentionCall, Tensor, Tensor, Tensor], Gradients]"
Question: TypeAlias = "dict[str, Any]"  # "check": module:function, "arguments", "flash": the active flash attention, "device"


class Outcome(NamedTuple):
    """The outcome of a test: whether the kernels are correct, and if not, the reason.

    `is_permanent` means that a later test would have the same outcome, so that it is cached.
    """

    is_correct: bool
    reason: str = ""
    is_permanent: bool = True


# -- attention, against plain operators


class AttentionSizes(NamedTuple):
    """The (heads, rows) of queries and of keys, the head width, and the width of value heads if it differs."""

    device: torch.device
    dtype: torch.dtype
    queries: tuple[int, int]
    keys: tuple[int, int]
    width: int
    value_width: int | None = None


def matches_reference(forward: Forward, backward: Backward, causal: Causal, sizes: AttentionSizes) -> bool:
    """Return whether kernels match plain operators on random operands of these sizes: results and gradients.

    The kernels should apply the mask `causal`.

    Raises:
        RuntimeError: if the build has no such kernels.
    """
    width, value_width = sizes.width, sizes.value_width or sizes.width
    heads = ((*sizes.queries, width), (*sizes.keys, width), (*sizes.keys, value_width), (*sizes.queries, value_width))
    query, key, value, gradient = (_random(sizes, shape, seed) for seed, shape in enumerate(heads))
    call = AttentionCall(query, key, value, None, causal)
    results = forward(call)
    outputs = (*results, *backward(call, gradient, *results))
    return all(map(_is_close, outputs, _reference(call, gradient)))


def _reference(call: AttentionCall, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the expected (output, log-sum-exp, dq, dk, dv), by plain operators in float64."""
    call = call._replace(query=call.query.double(), key=call.key.double(), value=call.value.double())
    results = plain_attention.forward(call)
    return (*results, *plain_attention.backward(call, gradient.double(), *results))


def _random(sizes: AttentionSizes, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal random numbers, with a batch dimension of 1 before `shape`, that depend only on the seed.

    Sines of integers do not work: at some widths gradients cancel and only rounding error is left, which failed the
    test of cuDNN's attention on an H100.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, *shape, generator=generator).to(sizes.device, sizes.dtype)


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree up to the rounding of half dtypes."""
    actual = actual.double()
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


# -- in a child process


class KernelSelftest:
    """A test `check(device, *arguments)` that runs once per device and arguments. On CUDA it runs in a child process."""

    def __init__(self, label: str, check: Callable[..., bool]) -> None:
        """Wrap a check, with a label for warnings; outcomes are kept by device and arguments."""
        update_wrapper(self, check)
        self.label, self.check = label, check
        self._outcomes: dict[Any, Outcome] = {}

    def __call__(self, device: torch.device, *arguments: Any) -> bool:
        """Return whether the kernels are correct."""
        return self.outcome(device, *arguments).is_correct

    def outcome(self, device: torch.device, *arguments: Any) -> Outcome:
        """Return whether the kernels are correct, and the reason if not; test each device and arguments only once.

        Arguments are dtypes and numbers. If the kernels are wrong, the user gets a warning that others run instead.
        """
        flash = torch.nn.attention.current_flash_attention_impl()
        key = (device, flash, arguments)
        outcome = self._outcomes.get(key)
        if outcome is None:
            question = {"check": self.name, "arguments": [_encode(item) for item in arguments], "flash": flash}
            outcome = _ask_child(question, device) if device.type == "cuda" else _run_test(question, device)
            self._outcomes[key] = outcome
            if not outcome.is_correct:
                log.warning(KERNELS_NOT_USED, self.label, device, ", ".join(map(str, arguments)), outcome.reason)
        return outcome

    @property
    def name(self) -> str:
        return f"{self.check.__module__}:{self.check.__qualname__}"

    def cache_clear(self) -> None:
        self._outcomes.clear()


def selftest(label: str) -> Callable[[Callable[..., bool]], KernelSelftest]:
    """Decorate a test of kernels, so that it runs in a child process on CUDA; warnings name the kernels by `label`."""
    return partial(KernelSelftest, label)


def _encode(item: Any) -> Any:
    return str(item) if isinstance(item, torch.dtype) else item


def _decode(item: Any) -> Any:
    return getattr(torch, item.removeprefix("torch.")) if isinstance(item, str) else item


def _run_test(question: Question, device: torch.device) -> Outcome:
    """Run a test in this process, and return its outcome; an exception of the test is also an outcome.

    Raises:
        torch.AcceleratorError: if the device's context is lost, so that the process must end.
    """
    module, name = question["check"].split(":")
    try:
        check = getattr(importlib.import_module(module), name).check
        is_correct = check(device, *map(_decode, question["arguments"]))
    except torch.AcceleratorError:
        raise
    except Exception as error:  # the build has no such kernels, Triton has no compiler, or the device lacks a resource
        return Outcome(False, f"they do not run ({describe_error(error)})", is_permanent=not is_out_of_memory(error))
    return Outcome(is_correct) if is_correct else Outcome(False, "their results differ from those of plain operators")


def _ask_child(question: Question, device: torch.device) -> Outcome:
    """Return the outcome of a test on a CUDA device, from the cache or from the child process; cache permanent outcomes."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = _cache_key(question, index)
    if (cached := _cached_outcomes().get(key)) is not None:
        return cached
    with _CHILD.lock:
        outcome = _CHILD.answer({**question, "device": f"cuda:{index}"})
    if outcome.is_permanent:
        _write_to_cache(key, outcome)
    return outcome


class Child:
    """The process that tests kernels. It is started for the first question, and restarted if it has ended."""

    def __init__(self) -> None:
        """Set the child's command; the process starts with the first question."""
        self.lock = threading.Lock()
        self.command = [sys.executable, "-m", "streamfx.kernels.kernel_selftest"]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None  # a file with the child's stderr

    def answer(self, question: Question) -> Outcome:
        """Return the child's answer, or an outcome that says how the child ended.

        If the child had exited because it was idle, a new child answers.
        """
        was_running = self._process is not None
        outcome, has_ended = self._answer(question)
        return self._answer(question)[0] if was_running and has_ended else outcome

    def _answer(self, question: Question) -> tuple[Outcome, bool]:
        """Send a question to the child; return the outcome, and whether the child exited normally instead (it was idle)."""
        try:
            process = self._running_process()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            line = self._read_line(process)
        except OSError as error:
            self.stop()
            return Outcome(
                False, f"no process could be started to test them ({describe_error(error)})", is_permanent=False
            ), False
        if line is not None and line.endswith(b"\n"):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                is_correct, reason, is_permanent = json.loads(line)
                return Outcome(bool(is_correct), str(reason), bool(is_permanent)), False
            self.stop()
            return Outcome(False, "the process that tested them gave an answer that cannot be read", is_permanent=False), False
        reason = f"gave no answer for {TEST_SECONDS} s" if line is None else self._describe_exit(process)
        has_ended = line is not None and process.returncode == 0
        self.stop()
        return Outcome(False, f"the process that tested them {reason}", is_permanent=False), has_ended

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """Return the child's next line, or less if the child closes its output; None if `TEST_SECONDS` pass."""
        assert process.stdout is not None
        answers, deadline, output = process.stdout.fileno(), time.monotonic() + TEST_SECONDS, b""
        while not output.endswith(b"\n"):
            if not select.select([answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(answers, 1 << 16)
            if not data:
                break
            output += data
        return output

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the child process; start one if there is none or it has ended.

        Raises:
            OSError: if no process can be started.
        """
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
                start_new_session=True,  # an interrupt from the terminal is meant for the parent only
            )
        return self._process

    def _describe_exit(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the process to end; return how it ended, with the last line of its errors."""
        try:
            code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"closed its output, and has not ended in {EXIT_SECONDS} s"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [""]
        return f"ended with code {code} ({lines[-1][:200]})"

    def stop(self) -> None:
        """Kill the process and its descendants; wait at most `EXIT_SECONDS`, because a process may hang in the driver."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # the child may not have read all input
                    assert pipe is not None
                    pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None


_CHILD = Child()


def main() -> None:
    """Answer questions from standard input, one per line, until `IDLE_SECONDS` pass without a question."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        question = json.loads(line)
        if question["flash"] != torch.nn.attention.current_flash_attention_impl():
            torch.nn.attention.activate_flash_attention_impl(question["flash"])
        device = torch.device(question["device"])
        outcome = _run_test(question, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # errors of kernels are reported asynchronously
        print(json.dumps(outcome), file=answers, flush=True)


# -- cached answers of earlier processes


@cache
def _cache_folder() -> Path | None:
    """Return the cache folder, or None if the user has no home, as in some containers."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamfx"
    return None


@cache
def _sources() -> str:
    """Return a hash of the source files of this package: if one changes, cached outcomes no longer count."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _cache_key(question: Question, index: int) -> str:
    """Return the cache key of a question on CUDA device `index`: with the card, the versions and the source."""
    card = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    versions = version("torch"), torch.version.cuda, torch.backends.cudnn.version()
    return json.dumps([question, card, versions, _sources()])


def _cached_outcomes() -> dict[str, Outcome]:
    """Return the outcomes in the cache file, by `_cache_key`; none if it is missing or has another format."""
    folder = _cache_folder()
    try:
        entries = json.loads((folder / "trials.json").read_text()) if folder is not None else {}
        return {key: Outcome(bool(is_correct), str(reason)) for key, (is_correct, reason, _) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # the file is missing or has another format
        return {}


def _write_to_cache(key: str, outcome: Outcome) -> None:
    """Write an answer to the cache. If the folder is not writable, the next process repeats the test."""
    folder = _cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump({**dict(list(_cached_outcomes().items())[-MAX_CACHED:]), key: outcome}, file)
        try:
            Path(file.name).replace(folder / "trials.json")
        except OSError:
            Path(file.name).unlink()


if __name__ == "__main__":
    from streamfx.kernels.kernel_selftest import main as run  # the imported module, not its `__main__` copy

    run()
