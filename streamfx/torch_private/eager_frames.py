"""Run functions of integers in eager, if Dynamo would compile them by themselves.

These are functions that Dynamo tries to compile because it gave up on their caller (a graph break inside of a loop), and whose
graph has no floating-point input: there is nothing to differentiate and nothing to stream. One of them may return an attention
mask. If it is compiled, it cannot read data to find out that the mask is only causal, so it returns T x T values; a graph of
the full model would not compute them. In eager it returns None.

"(2.12, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import eval_frame
from torch._dynamo.exc import SkipFrame
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._guards import TracingContext

from streamfx.torch_private.dynamo import is_library_file

ORIGINAL = "_torchdynamo_orig_backend"  # of Dynamo's callback: the function that converts frames


def compile_function(function: Callable[..., Any], backend: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, backend=backend, **keywords)`, but functions of integers below run in eager (2.12, 2.13).

    The backend is distinct for each call: in 2.11, Dynamo shares compiled code between equal backends.
    """
    converter = FrameConverter(backend)
    distinct = functools.update_wrapper(functools.partial(converter.compile_graph), backend)
    compiled = torch.compile(function, backend=distinct, **keywords)
    for cell in getattr(compiled, "__closure__", None) or ():
        callback = getattr(cell.cell_contents, "callback", None)
        if isinstance(cell.cell_contents, eval_frame._TorchDynamoContext) and hasattr(callback, ORIGINAL):
            converter.convert = getattr(callback, ORIGINAL)
            setattr(converter, ORIGINAL, getattr(converter.convert, ORIGINAL))  # an attribute: C code borrows it
            setattr(callback, ORIGINAL, converter)
    return compiled


class FrameConverter:
    """Dynamo's function that converts frames, except that functions of integers, and all that they call, run in eager.

    The decision holds for one call: Dynamo's own decisions hold for all calls of the code, which a decorator's functions share.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        """Start without functions of integers; they are found when their graphs reach the backend."""
        self.backend: Any = backend
        self.convert: Any = None  # set after `torch.compile`
        self._codes: set[CodeType] = set()
        self._functions: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Dynamo's function, such as its backend."""
        return getattr(self.convert, name)

    def compile_graph(self, module: fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
        """Compile a graph, or make Dynamo skip its function if it is one of integers."""
        code = next(iter(TracingContext.get_traced_code() or ()), None)  # the function's; inlined functions follow
        inputs = (*example_inputs, *module.parameters())
        if code is None or not _is_full_function(module, code) or any(map(_may_have_gradient, inputs)):
            return self.backend(module, example_inputs, **keywords)
        self._codes.add(code)
        raise SkipFrame("it only computes with integers")

    def __call__(self, frame: Any, *args: Any, **keywords: Any) -> Any:
        """Return Dynamo's decision about a frame, or that it runs in eager with all functions that it calls."""
        if not (frame.f_code in self._codes and _kind_of_call(frame) in self._functions):
            decision = self.convert(frame, *args, **keywords)
            if frame.f_code not in self._codes or decision.guarded_code is not None:
                return decision
            self._functions.add(_kind_of_call(frame))
        return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)


def _is_full_function(module: Any, code: CodeType) -> bool:
    """Return whether a graph has all of a function of user code; `code` is the function's.

    If it ended at a break, skipping would also skip the graphs after the break. Functions of torch and streamfx enter calls of
    modules.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break and not is_library_file(code.co_filename)


def _kind_of_call(frame: Any) -> tuple[Any, ...]:
    """Return a function's code, and the kinds of its arguments and free variables.

    These are types of tensors, and types of other objects with the functions that they hold. No attribute of an object is
    asked for: its `__getattr__` may return anything.
    """
    kinds: list[Any] = [frame.f_code]
    todo, seen = [dict(frame.f_locals)], set[int]()
    while todo:
        value = todo.pop()
        kinds.append(value.dtype if isinstance(value, Tensor) else type(value))
        is_collection = isinstance(value, (dict, list, tuple))
        if id(value) in seen or not (is_collection or callable(value)):
            continue
        seen.add(id(value))
        if is_collection:
            todo.extend(dict.values(value) if isinstance(value, dict) else value)
            continue
        kinds.append(value.__code__ if isinstance(value, FunctionType) else None)
        todo.extend(filter(callable, _held_by(value)))
    return tuple(kinds)


def _held_by(function: Any) -> Iterable[Any]:
    """Return the values that a function, or an object that is called like one, holds: a decorator's function, for example."""
    if isinstance(function, FunctionType):
        return gc.get_referents(*function.__closure__ or ())  # an empty cell refers to nothing
    if isinstance(function, functools.partial):
        return (function.func, *function.args, *function.keywords.values())
    if isinstance(function, MethodType):
        return (function.__func__, function.__self__)
    try:
        return () if isinstance(function, type) else object.__getattribute__(function, "__dict__").values()
    except AttributeError:  # of a class with slots
        return ()


def _may_have_gradient(value: Any) -> bool:
    """Return whether a value is a tensor of a type that can have gradients."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
