"""`streamfx.compare`: run the same training steps in eager mode, with gradient checkpointing, and through the backend, each way
in a process of its own, and compare memory, time, losses, and gradients.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from streamfx.argument_checks import check_call, require
from streamfx.errors import NotComparableError, describe_error
from streamfx.options import resolve_options
from streamfx.progress import show_activity
from streamfx.tools.inspect import measured_steps
from streamfx.tools.inspect.keywords import split_options
from streamfx.tools.inspect.measured_steps import JOB, OUT_OF_MEMORY, WAYS, Call, Job
from streamfx.tools.inspect.side_effect_guard import original
from streamfx.tools.inspect.torch_settings import TorchSettings
from streamfx.tools.report.comparison import Comparison, MeasuredWay, measured_way

REQUIREMENT = "streamfx.compare runs the model in processes of its own"
BUILD = "define its class in a module, or pass a function of a module that builds the model: streamfx.compare(build_model, ...)"
GUARD = "put the call of streamfx.compare under `if __name__ == '__main__':`"
PROGRAM = (
    "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]; "  # `-c` adds the working directory as the first place
)
PROGRAM += "from streamfx.tools.inspect.measured_steps import serve; serve({!r}, {!r}, {}, {!r}, {!r})"


@check_call(NotComparableError, "streamfx.compare(...)")
def compare(
    model: nn.Module | Callable[[], nn.Module],
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    options: Any = None,
    **kwargs: Any,
) -> Comparison:
    """Run training steps of `model(*args, **kwargs)` in eager mode, with gradient checkpointing, and through the backend.

    Each way runs in a process of its own, which gets a copy of the model, and torch's settings of this process (default dtype,
    autocast, ...): this process and its model do not change. Memory is the
    peak of forward and backward above the level before the step: activations, gradients, and, on a GPU, what the allocator
    holds for them. The first step also traces and compiles.

    Args:
        model: a module that can be pickled, or a function without arguments that builds one, which each process calls.
        args, kwargs: the arguments of the call. A keyword named like an option (`chunk_size=512`) is an option, unless `forward`
            has an argument of that name.
        loss: a function from the output to a tensor with one element; by default that of `streamfx.verify`.
        optimizer: a function from parameters to an optimizer, which updates them after each step; by default they stay.
        steps: the number of steps; with 2 or more, memory and time are those of the later ones.
        options: the backend's, as a dictionary or `streamfx.Options`; by default those that the model was compiled with.

    Returns:
        The figures of each way. It prints as a table; `ok` is true if losses and gradients are equal up to rounding.

    Raises:
        NotComparableError: the model or an argument cannot be passed to a process, or a step fails.
        OptionError: an unknown option, or an invalid value.

    Example:
        >>> import torch, streamfx
        >>> found = streamfx.compare(torch.nn.Linear(8, 8), torch.randn(1, 64, 8), steps=1, chunk_size=16)  # doctest: +SKIP
        >>> found.ok, [way.name for way in found.ways if not way.missing], found.ways[1].missing  # doctest: +SKIP
        (True, ['eager', 'streambp'], 'the model has no gradient_checkpointing_enable() and no list of layers')
    """
    is_module = isinstance(original(model), nn.Module)
    option_values, kwargs = split_options(model if is_module else _any_call, options, args, kwargs, "streamfx.compare(...)")
    _check_arguments(model, is_module)
    build = partial(_given, original(model), args, kwargs) if is_module else partial(_built, model, args, kwargs)
    return compare_call(build, resolve_options(option_values).given(), loss, optimizer, steps)


def compare_call(
    build: Callable[[], Call], options: dict[str, Any], loss: Any = None, optimizer: Any = None, steps: int = 2
) -> Comparison:
    """Compare a call that each process builds: `build` returns the model, its arguments, and its keyword arguments."""
    is_count = isinstance(steps, int) and steps >= 1
    require(is_count, NotComparableError, "the number of steps must be 1 or more", steps, "")
    with tempfile.TemporaryDirectory(prefix="streamfx-compare-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = Job(build, loss, optimizer, options, steps, TorchSettings.current())
        main_file = _write_job(job, folder / JOB)
        return Comparison([_run_way(way, folder, main_file, steps) for way in WAYS], steps)


def _any_call(*args: Any, **kwargs: Any) -> None:
    """The signature of a model that is not built yet."""


def _given(model: Callable[..., Any], args: Any, kwargs: Any) -> Call:
    """Return a call; each process gets a copy."""
    return model, args, kwargs


def _built(function: Callable[[], nn.Module], args: Any, kwargs: Any) -> Call:
    """Return a call of the model that a function builds."""
    return function(), args, kwargs


def _check_arguments(model: Any, is_module: bool) -> None:
    """Refuse a call from a process of `compare` itself, and functions that take arguments."""
    found = "this process is one of them: it has imported the script that calls streamfx.compare"
    require(not measured_steps.is_measuring, NotComparableError, REQUIREMENT, found, GUARD)
    do = "pass a module, and loss=, a function from its output to the number to differentiate"
    require(callable(model), NotComparableError, REQUIREMENT, model, do)
    try:
        if not is_module:
            inspect.signature(model).bind()
    except (TypeError, ValueError) as error:
        asked = "streamfx.compare takes a module, or a function without arguments that builds one"
        raise NotComparableError(asked, found=str(error), do=do) from None


def _write_job(job: Job, path: Path) -> str:
    """Write a job to a file; return the user's script if the job refers to its classes or functions, otherwise "".

    Raises:
        NotComparableError: if the job cannot be pickled, or refers to an interactive session.
    """
    try:
        torch.save(job, path)
    except OSError:
        raise
    except Exception as error:
        raise NotComparableError(f"{REQUIREMENT}, so it must be picklable", found=describe_error(error), do=BUILD) from error
    with zipfile.ZipFile(path) as archive:
        data = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        is_of_main = b"__main__" in archive.read(data)
    if not is_of_main:
        return ""
    main_file: Any = getattr(sys.modules["__main__"], "__file__", None)
    found = "a class or function that is defined in an interactive session or notebook"
    is_script = main_file is not None and Path(main_file).is_file()  # `python -` has the file "<stdin>"
    require(is_script, NotComparableError, REQUIREMENT, found, BUILD)
    return str(Path(main_file).absolute())


def _run_way(way: str, folder: Path, main_file: str, steps: int) -> MeasuredWay:
    """Run one way in a process, and return its figures."""
    events: list[dict[str, Any]] = []
    with show_activity(f"comparing: {way}, step 1 of {steps}") as set_text:
        with _started(way, folder, main_file) as (process, pipe):
            for line in pipe:
                events.append(json.loads(line))
                set_text(f"comparing: {way}, step {min(len(events) + 1, steps)} of {steps}")
        code = process.returncode
    last = events[-1] if events else {}
    if code == -signal.SIGKILL:  # by the system, for lack of memory
        last = {"missing": OUT_OF_MEMORY}
    elif code and "error" not in last:
        lines = (folder / "errors.txt").read_text().strip().splitlines()
        last = {"error": lines[-1] if lines else f"its process ended with code {code}"}
    if "error" in last and way != WAYS[0]:  # the figures of the ways before it are kept
        last = {"missing": f"failed: {last['error']}"}
    do = "run a step of the model in eager mode, or, for an error of importing the script, " + GUARD
    require("error" not in last, NotComparableError, f"{REQUIREMENT}, and '{way}' failed", last.get("error", ""), do)
    return measured_way(way, [event for event in events if "loss" in event], last.get("missing", ""))


@contextmanager
def _started(way: str, folder: Path, main_file: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Context manager: start a process, and yield it and the pipe of its events. On exit it has ended; an error kills it."""
    readable, writable = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    package = getattr(sys.modules["__main__"], "__package__", None)
    command = [sys.executable, "-c", PROGRAM.format(str(folder), way, writable, main_file, package)]
    with os.fdopen(readable) as pipe, (folder / "errors.txt").open("w") as errors:
        try:
            process = subprocess.Popen(
                command, env=environment, pass_fds=(writable,), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
        finally:
            os.close(writable)
        try:
            yield process, pipe
            process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
