"""Private interfaces of Dynamo: its errors, its graph breaks, and what it keeps of compilations."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private.lines import source_line

ORIGINAL, WRAPPER = "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"  # attributes of what `torch.compile` made


def is_compiled(model: Any) -> bool:
    """Whether `torch.compile` made this module (2.11, 2.13)."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def inside_of_compiled(model: Any) -> Any:
    """What `torch.compile` has wrapped, one level of it; None where it has not wrapped this (2.11, 2.13).

    A decorator around what is compiled has its attributes, and is more than it; so is a method of an object.
    """
    if is_compiled(model):
        return model._orig_mod
    if inspect.ismethod(model):
        function = inside_of_compiled(model.__func__)
        return None if function is None else MethodType(function, model.__self__)
    if isinstance(model, nn.Module) or getattr(model, WRAPPER, id(model)) != id(model):
        return None
    inside: Any = getattr(model, ORIGINAL, None)
    is_frame = getattr(inside, "__code__", None) is wrap_inline(len).__code__  # what Dynamo puts around modules of torch's own
    return inside.__wrapped__ if is_frame else inside


def backend_of(model: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function that `torch.compile` was given as a backend for this, and its keywords (2.11, 2.13)."""
    cells = [] if is_compiled(model) else getattr(model, "__closure__", None) or ()  # of a method, those of its function
    contexts = [model.dynamo_ctx] if is_compiled(model) else [cell.cell_contents for cell in cells]
    found: Any = next((one.callback for one in contexts if isinstance(one, eval_frame._TorchDynamoContext)), None)
    while (inner := getattr(found, "_torchdynamo_orig_backend", getattr(found, ORIGINAL, None))) is not None:
        found = inner
    return getattr(found, "compiler_fn", found), getattr(found, "kwargs", {})


def known_as(names: Iterable[str], where: str) -> None:
    """Let `torch.compile(backend=name)` find a backend by these names, where none is known yet by them (2.11, 2.13).

    An entry point, as that of an installed package, and not the function: Dynamo loads it when it is asked for, and refuses a
    function that is known already.
    """
    for name in names:
        registry._BACKENDS.setdefault(name, EntryPoint(name, where, "torch_dynamo_backends"))


SWITCHED_OFF = "torch.compile is switched off"
SWITCH_ON = (
    "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, leave torch._dynamo.config.disable and "
    'torch.compiler.set_stance("force_eager") out'
)


def is_switched_off() -> bool:
    """Whether the environment, or a setting, keeps `torch.compile` from doing anything (2.11, 2.13)."""
    return gives_back() or bool(config.disable) or eval_frame._stance.stance == "force_eager"


def gives_back() -> bool:
    """Whether `torch.compile` gives back what it is given: that stays so when the environment has changed (2.11, 2.13)."""
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def is_traced_here() -> bool:
    """Whether a tracer runs what calls this. `torch.compiler.is_compiling()` is one for the process: it says so while another
    thread compiles, too (2.11, 2.13).
    """
    if torch.compiler.is_dynamo_compiling():  # as Dynamo reads it, and nobody else
        return True
    if not torch.compiler.is_compiling():
        return False
    is_compiled = CompileContext.try_get() is not None or TracingContext.try_get() is not None
    return is_compiled or _len_torch_dispatch_stack() > 0  # export's, which has no such context


def compiling() -> Any:
    """A context in which this thread alone compiles, Dynamo included: tracers patch what all threads use (2.11, 2.13)."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def isolated() -> dict[str, Any]:
    """Keywords for `torch.compile` by which its recompilations are counted apart from those of others (2.13)."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def own_backend(backend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend, such that one call of `torch.compile` shares no compiled code with other calls (2.11).

    Dynamo looks compiled code up by the code object and by an equal backend. Later versions keep it apart by `isolated()`.
    """
    return backend if isolated() else functools.update_wrapper(functools.partial(backend), backend)


class Passing(ShortenTraceback):
    """One of our errors on its way through Dynamo, which wraps all others of a backend and asks to report them (2.11, 2.13).

    Dynamo lets this kind through, and raises what `remove_dynamo_frames` returns once it has reached the call of the compiled
    function. Each is an error of its own class, too, for who catches it on the way.
    """

    def __init__(self, own: StreamFXError) -> None:
        super().__init__(*own.args, first_useful_frame=None)
        self.__dict__.update(vars(own))
        self.own = own

    def remove_dynamo_frames(self) -> Any:
        """The error itself, with the frames of the user's code alone; with all of them under `TORCHDYNAMO_VERBOSE=1`."""
        trace = self.__traceback__
        return self.own.with_traceback(trace if config.verbose else _frames_of_user(trace))

    @property
    def record_filename(self) -> str:
        """What Dynamo asks for where it is about to swallow an error (`suppress_errors`): a refusal is no failure."""
        raise self

    @record_filename.setter
    def record_filename(self, name: str) -> None:
        """For `replay_record_enabled`."""


@contextmanager
def raised_as_itself(graph: fx.Graph) -> Iterator[None]:
    """For what a backend does with a graph: an error of ours reaches the caller of the compiled function as what it is."""
    try:
        yield
    except StreamFXError as error:
        _name_place(error, graph)
        kind: type[Passing] = type(type(error).__name__, (Passing, type(error)), {"__module__": __name__})
        raise kind(error) from None


def _name_place(error: StreamFXError, graph: fx.Graph) -> None:
    """Notes down which of the user's code was being compiled."""
    place = next(filter(None, map(source_line, reversed(graph.nodes))), "")
    if place and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"  raised while the code up to this line was compiled: {place}")


def _frames_of_user(trace: TracebackType | None) -> TracebackType | None:
    """The frames that led to the compiler, without those of torch."""
    frames: list[TracebackType] = []
    while trace is not None and (module := trace.tb_frame.f_globals.get("__name__", "")) != "torch._dynamo.convert_frame":
        frames += [trace] if module.split(".")[0] != "torch" else []
        trace = trace.tb_next
    kept = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def cause_of(error: BaseException) -> Exception | None:
    """What a compilation failed of: one of our own errors, or an error of the model's; None for all others (2.11, 2.13).

    Dynamo wraps the model's. The place in the model becomes a note of the error, whose own traceback is that of the tracer.
    """
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

    if isinstance(error, StreamFXError):
        return error
    if not isinstance(error, TorchRuntimeError):
        return None
    cause: BaseException | None = error
    while isinstance(cause, TorchDynamoException):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, Exception):
        return None
    if error.real_stack and hasattr(cause, "add_note"):  # Python 3.11
        frame = error.real_stack[-1]
        cause.add_note(f'found while the call was traced, at "{frame.filename}", line {frame.lineno}: {frame.line}')
    return cause


def decided_by_data(error: BaseException) -> str:
    """The line of the user's code that asks for numbers of data, where that is what an error is of; else empty (2.11, 2.13)."""
    from torch._dynamo.exc import UserError
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode, UserError)
    found: BaseException | None = error
    while found is not None and not isinstance(found, kinds):
        found = found.__cause__ or found.__context__
    if found is None:
        return ""
    frames = [frame for frame in traceback.extract_tb(found.__traceback__) if not _is_of_tools(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _is_of_tools(file: str) -> bool:
    """Of torch, of streamfx, or of no file."""
    return file.startswith("<") or any(
        root in Path(file).parents for root in (Path(torch.__file__).parent, Path(__file__).parents[1])
    )


@contextmanager
def noted_graph_breaks() -> Iterator[list[tuple[str, int, str]]]:
    """Collects (file, line, reason) of each graph break, from what `TORCH_LOGS="graph_breaks"` would show (2.11, 2.13); where
    `logging.config` has switched off all loggers that were there, too.
    """
    found: list[tuple[str, int, str]] = []
    shape = re.compile(r"in user code at (.+):(\d+)\nGraph Break Reason: (.*)", re.DOTALL)

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := shape.search(record.getMessage()):
                found.append((match[1], int(match[2]), match[3]))

    logger, handler = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks"), Note()
    level, propagate, disabled = logger.level, logger.propagate, logger.disabled
    logger.addHandler(handler)
    logger.propagate = propagate and logger.isEnabledFor(logging.DEBUG)
    logger.disabled = False
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


def cause_of_break(reason: str) -> tuple[str, str, bool]:
    """Of what Dynamo says of a graph break: the cause, its first hint, and whether it gave the function up (2.11, 2.13)."""
    given_up = "falling back to eager" in reason
    cause = reason.split("Graph break encountered:", 1)[-1].strip()
    if found := re.search(r"^(\S.*)\n(?:  Higher Order Operator: (.*)\n)?  Explanation: (.*)", cause, re.MULTILINE):
        hint = re.search(r"^  Hint: (.*)", cause, re.MULTILINE)
        inside = f" in {found[2]}" if found[2] else ""
        return f"{found[1]}{inside}: {found[3]}", hint[1] if hint and "report" not in hint[1] else "", given_up
    return cause.split("\n", 1)[0], "", given_up


def lost_writes(graph: fx.Graph) -> list[str]:
    """The lines that write in place to an input or buffer of no dimensions in float64 on the CPU: AOTAutograd drops these writes,
    whatever the backend, as it takes such tensors for numbers of Python; not those to a view, as `seen[...] = x` is (2.11, 2.13).
    """
    writes = (node for node in graph.nodes if node.op in ("call_method", "call_function") and _is_in_place(node.target))
    written = ((node, node.args[0].meta.get(EXAMPLE_VALUE)) for node in writes if _is_placeholder(node.args[:1]))
    lost = (node for node, value in written if isinstance(value, torch.Tensor) and _is_like_a_number(value))
    return list(dict.fromkeys(source_line(node) for node in lost))


def _is_in_place(target: Any) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return bool(re.fullmatch(r"[a-z].*[^_]_|i(add|sub|mul|truediv|floordiv|pow|mod)", name))


def _is_placeholder(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, fx.Node) and argument.op == "placeholder" for argument in arguments)


def _is_like_a_number(value: torch.Tensor) -> bool:
    return value.dim() == 0 and value.dtype is torch.float64 and value.device.type == "cpu"


@contextmanager
def quiet_tracer() -> Iterator[None]:
    """Errors of fake tensors are raised, and not logged with a traceback before that (2.11, 2.13)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def of_any_length(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, for whose first dimension a graph should be for all lengths at once (2.11, 2.13)."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@contextmanager
def noted_compilations() -> Iterator[list[tuple[int, int]]]:
    """When something was compiled inside of it, in nanoseconds since the epoch, in any thread (2.11, 2.13)."""
    from torch._dynamo.callback import callback_handler

    found, begun = list[tuple[int, int]](), list[int]()

    def begin(about: Any) -> None:
        begun.append(time.time_ns())

    def end(about: Any) -> None:
        if begun:  # else it had begun before
            found.append((begun.pop(), time.time_ns()))

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield found
    finally:
        with suppress(ValueError):  # somebody has called torch._dynamo.reset()
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)


@contextmanager
def compiled_apart(backend: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Gives keywords for `torch.compile(..., backend=backend)`; what Dynamo keeps of such compilations is dropped at the end.

    That is: compiled code, and what it has learned about sizes that change from call to call. Functions that were given up by an
    earlier call are tried again, so that what is found does not depend on it (2.11, 2.13).
    """
    from torch._dynamo import pgo
    from torch._dynamo.convert_frame import compile_lock

    learned = pgo.get_code_state()
    before = copy.deepcopy(dict(learned))
    with compile_lock:
        _try_again()
    try:
        with config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20, run_gc_after_compile=False):
            yield isolated()
    finally:
        learned.clear()
        learned.update(before)
        with compile_lock:  # else under the hands of a thread that compiles
            _drop_compiled_code(backend)
            _try_again()


def _try_again() -> None:
    """Forget which functions Dynamo was to leave alone from then on: because tracing failed (a graph break in a loop), or had
    been done too often. Who compiles them next finds out for himself. Compiled code stays.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    for reference in list(input_codes.seen):
        if (code := reference()) is not None:
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def _drop_compiled_code(backend: Callable[..., Any]) -> None:
    """Forget a backend's compiled code; code compiled by others stays."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for reference in list(input_codes.seen):
        code = reference()
        entries = [] if code is None else _debug_get_cache_entry_list(code)
        own = [entry for entry in entries if getattr(entry.backend, "compiler_fn", entry.backend) is backend]
        if own and len(own) == len(entries):
            reset_code(code)
            continue
        for entry in own:
            entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("streamfx has seen enough"))
