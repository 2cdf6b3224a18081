"""Private interfaces of Dynamo: its errors, its graph breaks, and the state that it keeps per compilation.

"(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._C import _len_torch_dispatch_stack
from torch._dynamo import config, eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.external_utils import wrap_inline
from torch._guards import CompileContext, TracingContext

from streamfx.errors import StreamFXError
from streamfx.torch_private.eager_errors import eager_error_of
from streamfx.torch_private.lines import source_line

ORIGINAL, WRAPPER = "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"  # attributes of the results of `torch.compile`


def is_compiled(model: Any) -> bool:
    """Return whether a model is a module that `torch.compile` returned (2.11, 2.13)."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def unwrap_compiled(model: Any) -> Any:
    """Return the model or function that `torch.compile` was given; None if `model` is not a result of it (2.11, 2.13).

    Only one level is unwrapped. For a bound method, return the method of the unwrapped function. A decorator around a compiled
    function copies the attributes that Dynamo sets; the wrapper id shows that it is another function: the result is None.
    """
    if is_compiled(model):
        return model._orig_mod
    if inspect.ismethod(model):
        function = unwrap_compiled(model.__func__)
        return None if function is None else MethodType(function, model.__self__)
    if isinstance(model, nn.Module) or getattr(model, WRAPPER, id(model)) != id(model):
        return None
    inner: Any = getattr(model, ORIGINAL, None)
    is_frame = getattr(inner, "__code__", None) is wrap_inline(len).__code__  # Dynamo's wrapper around torch's own modules
    return inner.__wrapped__ if is_frame else inner


def backend_of(model: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the backend function that `torch.compile` was given, and its keyword arguments (2.11, 2.13).

    `model` is a result of `torch.compile`; for any other, the backend is None.
    """
    cells = [] if is_compiled(model) else getattr(model, "__closure__", None) or ()  # for a method, the cells of its function
    contexts = [model.dynamo_ctx] if is_compiled(model) else [cell.cell_contents for cell in cells]
    backend: Any = next((context.callback for context in contexts if isinstance(context, eval_frame._TorchDynamoContext)), None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", getattr(backend, ORIGINAL, None))) is not None:
        backend = inner
    return getattr(backend, "compiler_fn", backend), getattr(backend, "kwargs", {})


def register_backend_names(names: Iterable[str], where: str) -> None:
    """Register a backend, given as an import path `where`, under names for `torch.compile(backend=name)` (2.11, 2.13).

    It is registered as an entry point, like one of an installed package: Dynamo loads it on demand. Registering a function
    twice would raise an error. A name that is already registered stays as it is.
    """
    for name in names:
        registry._BACKENDS.setdefault(name, EntryPoint(name, where, "torch_dynamo_backends"))


RUN_NODE_ERROR = "Dynamo failed to run FX node"
SWITCHED_OFF = "torch.compile is switched off"
SWITCH_ON = (
    "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, and remove torch._dynamo.config.disable and "
    'torch.compiler.set_stance("force_eager")'
)


def is_switched_off() -> bool:
    """Return whether the environment or a setting disables `torch.compile`, so that calls run in eager (2.11, 2.13)."""
    return is_disabled_by_environment() or bool(config.disable) or eval_frame._stance.stance == "force_eager"


def is_disabled_by_environment() -> bool:
    """Return whether `torch.compile` now returns its argument unchanged, by an environment variable (2.11, 2.13).

    Such a result stays uncompiled even if the variable changes later.
    """
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def is_traced_here() -> bool:
    """Return whether a tracer (Dynamo, AOTAutograd, export) runs the caller in this thread (2.11, 2.13).

    `torch.compiler.is_compiling()` is per process: it is also true while another thread compiles.
    """
    if torch.compiler.is_dynamo_compiling():  # only Dynamo's tracer evaluates this as true
        return True
    if not torch.compiler.is_compiling():
        return False
    is_compiled = CompileContext.try_get() is not None or TracingContext.try_get() is not None
    return is_compiled or _len_torch_dispatch_stack() > 0  # export has no such context


def compiling() -> Any:
    """Return Dynamo's compile lock, a context in which only this thread compiles: tracers patch global state (2.11, 2.13)."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def isolation_keywords() -> dict[str, Any]:
    """Return keywords for `torch.compile` with which its result shares no compiled code and recompile limit with others.

    Empty in torch versions before this option exists (2.13).
    """
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


class UnwrappedDynamoError(ShortenTraceback):
    """One of streamfx's errors while it passes through Dynamo, which wraps other errors of a backend (2.11, 2.13).

    Dynamo does not wrap this type. It raises the result of `remove_dynamo_frames` when the error reaches the call of the
    compiled function. Each instance also has the class of the original error, for handlers in between.
    """

    def __init__(self, original: StreamFXError) -> None:
        """Copy the arguments and attributes of the original error."""
        super().__init__(*original.args, first_useful_frame=None)
        self.__dict__.update(vars(original))
        self.original = original

    def remove_dynamo_frames(self) -> Any:
        """Return the original error with only the user's frames; with all frames if `TORCHDYNAMO_VERBOSE=1`."""
        trace = self.__traceback__
        return self.original.with_traceback(trace if config.verbose else _user_frames(trace))

    @property
    def record_filename(self) -> str:
        """Raise the error: Dynamo reads this before it suppresses an error (`suppress_errors`), but ours must reach the user."""
        raise self

    @record_filename.setter
    def record_filename(self, name: str) -> None:
        """Ignore the value, which `replay_record_enabled` sets."""


@contextmanager
def unwrap_errors(graph: fx.Graph) -> Iterator[None]:
    """Context manager for the processing of a graph by a backend: streamfx's errors reach the user unwrapped by Dynamo."""
    try:
        yield
    except StreamFXError as error:
        _note_location(error, graph)
        error_type: type[UnwrappedDynamoError] = type(
            type(error).__name__, (UnwrappedDynamoError, type(error)), {"__module__": __name__}
        )
        raise error_type(error) from None


def _note_location(error: StreamFXError, graph: fx.Graph) -> None:
    """Add a note to an error with the user's last source line in the graph; none if no line is known."""
    line = next(filter(None, map(source_line, reversed(graph.nodes))), "")
    if line and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"  raised while the code up to this line was compiled: {line}")


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without torch's frames, up to the frame in which Dynamo starts to compile; None if none is left."""
    frames: list[TracebackType] = []
    while trace is not None and (module := trace.tb_frame.f_globals.get("__name__", "")) != "torch._dynamo.convert_frame":
        frames += [trace] if module.split(".")[0] != "torch" else []
        trace = trace.tb_next
    user_trace = None
    for frame in reversed(frames):
        user_trace = TracebackType(user_trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return user_trace


def user_error_of(error: BaseException) -> Exception | None:
    """Return the error to raise for a failed compilation: streamfx's own, or the error that the model raised while traced.

    None for errors of torch itself. Dynamo wraps the model's errors, and their traceback is the tracer's, so the line in the
    model is added as a note (2.11, 2.13). 2.14 wraps them twice, the second time in a `RuntimeError` (`RUN_NODE_ERROR`). An
    operator's error is that of eager mode.
    """
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

    if isinstance(error, StreamFXError):
        return error
    if not isinstance(error, TorchRuntimeError):
        return None
    cause: BaseException | None = error
    while isinstance(cause, TorchDynamoException) or str(cause).startswith(RUN_NODE_ERROR):
        assert cause is not None
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, Exception):
        return None
    cause = eager_error_of(cause) or cause
    if error.real_stack and hasattr(cause, "add_note"):  # Python 3.11
        frame = error.real_stack[-1]
        cause.add_note(f'raised while the call was traced, at "{frame.filename}", line {frame.lineno}: {frame.line}')
    return cause


def line_reading_data(error: BaseException) -> str:
    """Return the user's line that reads numbers from data, as `.item()` does, if it caused a tracing error; else "" (2.11, 2.13).

    Such errors are looked for in the chain of causes.
    """
    from torch._dynamo.exc import UserError
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode, UserError)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kinds):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not is_library_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def is_library_file(file: str) -> bool:
    """Return whether the file of a stack frame belongs to torch or streamfx, or is generated code such as "<string>"."""
    return file.startswith("<") or any(
        root in Path(file).parents for root in (Path(torch.__file__).parent, Path(__file__).parents[1])
    )


@contextmanager
def record_graph_breaks() -> Iterator[list[tuple[str, int, str]]]:
    """Context manager: yield a list, to which each graph break in the block adds (file, line, reason) (2.11, 2.13).

    They are parsed from the records of Dynamo's logger for `TORCH_LOGS="graph_breaks"`, which is enabled for the block, even
    if `logging.config` has disabled it.
    """
    breaks: list[tuple[str, int, str]] = []
    record_pattern = re.compile(r"in user code at (.+):(\d+)\nGraph Break Reason: (.*)", re.DOTALL)

    class BreakHandler(logging.Handler):
        """Appends (file, line, reason) for each record about a graph break."""

        def emit(self, record: logging.LogRecord) -> None:
            """Append the graph break of a record, if it reports one."""
            if match := record_pattern.search(record.getMessage()):
                breaks.append((match[1], int(match[2]), match[3]))

    logger, handler = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks"), BreakHandler()
    level, propagate, disabled = logger.level, logger.propagate, logger.disabled
    logger.addHandler(handler)
    logger.propagate = propagate and logger.isEnabledFor(logging.DEBUG)
    logger.disabled = False
    logger.setLevel(logging.DEBUG)
    try:
        yield breaks
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


def cause_of_break(reason: str) -> tuple[str, str, bool]:
    """Parse Dynamo's text about a graph break: return (cause, hint, whether the whole function runs in eager) (2.11, 2.13).

    The cause is one line; the hint is Dynamo's first one, or "" if there is none or it only asks to report a bug.
    """
    runs_in_eager = "falling back to eager" in reason
    cause = reason.split("Graph break encountered:", 1)[-1].strip()
    if explained := re.search(r"^(\S.*)\n(?:  Higher Order Operator: (.*)\n)?  Explanation: (.*)", cause, re.MULTILINE):
        hint = re.search(r"^  Hint: (.*)", cause, re.MULTILINE)
        in_operator = f" in {explained[2]}" if explained[2] else ""
        return f"{explained[1]}{in_operator}: {explained[3]}", hint[1] if hint and "report" not in hint[1] else "", runs_in_eager
    return cause.split("\n", 1)[0], "", runs_in_eager


@contextmanager
def quiet_tracer() -> Iterator[None]:
    """Context manager: errors of fake tensors are not logged before they are raised (2.11, 2.13)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def mark_length_dynamic(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the first dimension of a tensor as dynamic, and return the tensor (2.11, 2.13)."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@contextmanager
def record_compilations() -> Iterator[list[tuple[int, int]]]:
    """Context manager: yield a list, to which each compilation adds (start, end), in nanoseconds since the epoch (2.11, 2.13).

    Compilations of all threads are recorded, if they start and end inside the block.
    """
    from torch._dynamo.callback import callback_handler

    intervals, start_times = list[tuple[int, int]](), list[int]()

    def begin(about: Any) -> None:
        """Record the start of a compilation."""
        start_times.append(time.time_ns())

    def end(about: Any) -> None:
        """Record the interval of the compilation that started last."""
        if start_times:  # otherwise it started before this block
            intervals.append((start_times.pop(), time.time_ns()))

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield intervals
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() was called
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)


@contextmanager
def isolated_compilation(backend: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Context manager: compilations in the block do not depend on earlier ones, and leave no state in Dynamo (2.11, 2.13).

    Yield keywords for `torch.compile(..., backend=backend)`. Functions that Dynamo skips since an earlier call are tried again.
    At the end, the backend's compiled code is dropped, and the sizes that Dynamo has learned to be dynamic are restored.
    """
    from torch._dynamo import pgo
    from torch._dynamo.convert_frame import compile_lock

    code_state = pgo.get_code_state()
    state_before = copy.deepcopy(dict(code_state))
    with compile_lock:
        _reset_skipped()
    try:
        with config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20, run_gc_after_compile=False):
            yield isolation_keywords()
    finally:
        code_state.clear()
        code_state.update(state_before)
        with compile_lock:  # otherwise another thread might be compiling
            _drop_compiled_code(backend)
            _reset_skipped()


def _reset_skipped() -> None:
    """Make Dynamo try all functions again that it skips: tracing failed (a graph break in a loop), or hit the recompile limit.

    Compiled code stays.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    for reference in list(input_codes.seen):
        if (code := reference()) is not None:
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def _drop_compiled_code(backend: Callable[..., Any]) -> None:
    """Drop the code that Dynamo compiled with a backend; code compiled with other backends stays."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for reference in list(input_codes.seen):
        code = reference()
        entries = [] if code is None else _debug_get_cache_entry_list(code)
        own_entries = [entry for entry in entries if getattr(entry.backend, "compiler_fn", entry.backend) is backend]
        if own_entries and len(own_entries) == len(entries):
            reset_code(code)
            continue
        for entry in own_entries:
            entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("streamfx dropped its compiled code"))
