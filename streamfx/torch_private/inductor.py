"""Private interfaces of Inductor: whether it has a compiler, its failures, whole graphs and loop bodies compiled by it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

from streamfx.errors import told
from streamfx.torch_private import dynamo_copy, no_modes
from streamfx.torch_private.symbolic_sizes import Shapes, with_sizes

BODY_SETTINGS = {  # whatever the user's own settings are; all else of theirs holds for bodies, too (2.11, 2.13)
    # A replay of a CUDA graph overwrites the results of the last one: those of another chunk, which a loop still needs.
    "triton.cudagraphs": False,
    # `standalone_compile` turns this on. It then allocates example arguments of full size for all kernels at once, in memory that
    # no plan counts. Without it a kernel that has several configurations is timed on its own arguments in its first call.
    "triton.autotune_at_compile_time": None,
}
# Read by nothing that is compiled here, and part of the key of Inductor's cache: kernels without barriers are not taken from it.
WITH_BARRIERS = {"aot_inductor.metadata": {"streamfx": "a barrier between the loops of a kernel"}}


def has_compiler(device: str) -> bool:
    """Whether Inductor finds what it needs to compile for a type of device (2.11, 2.13)."""
    from torch.utils._triton import has_triton

    return bool(has_triton()) if device == "cuda" else device == "cpu" and _has_cpp_compiler()


@functools.cache
def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


class InductorFailedError(Exception):
    """Inductor could not be loaded, or did not compile a graph; the cause says why."""


class InductorMemoryError(InductorFailedError):
    """Memory ran out while Inductor compiled a graph: the same graph may compile when more memory is free."""


@contextmanager
def inductor_runs() -> Iterator[None]:
    """What fails inside of it is Inductor's failure, and what fails elsewhere is not.

    What torch uses of its own although it is deprecated is no failure, whatever the user makes of warnings (2.13: TorchScript).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except Exception as error:
        raise (InductorMemoryError if is_out_of_memory(error) else InductorFailedError)(told(error)) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it wraps, says that memory ran out: the allocator's, the driver's or the host's.

    The driver's errors have types of many libraries ("Triton Error [CUDA]: out of memory"), so the text decides.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def barriers() -> Iterator[None]:
    """Let kernels of Triton wait between two loops, where one may read what another thread wrote (2.11, 2.13).

    Triton may give a store and the load that reads it back different threads (triton#10924, pytorch#190519): without a barrier,
    the load finds what was in memory before. On an H100, gradients of a small GPT-OSS were hundreds of times too large.
    """
    from torch._inductor.codegen.triton import TritonKernel

    plain = TritonKernel.codegen_body

    def codegen_body(self: Any) -> None:
        if any(str(getattr(line, "line", line)).lstrip().startswith("for ") for line in self.body._lines):
            self.body.writeline("tl.debug_barrier()")
        plain(self)

    with mock.patch.object(TritonKernel, "codegen_body", codegen_body):
        yield


def compile_whole(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What `torch.compile(...)` makes of a Dynamo graph, gradients included; called as f(*inputs) (2.11, 2.13)."""
    owned = dynamo_copy(module)[0]  # it changes what it is given
    with inductor_runs(), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):  # fail now, not in backward
        from torch._inductor.compile_fx import compile_fx

        with barriers():
            result: Callable[..., Any] = compile_fx(owned, inputs, config_patches=WITH_BARRIERS)
    return result


def compile_for_one_size(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph for the shapes of `inputs`; called as f(*inputs) (2.11, 2.13)."""
    with torch.no_grad(), no_modes():  # AOTAutograd watches a graph's first run with a mode of its own
        return _compile_body("from_example_inputs", module, inputs)


def compile_for_sizes(module: fx.GraphModule, like: int, shapes: Shapes) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Let Inductor compile a graph for all sizes that follow from a number: see `with_sizes` (2.11, 2.13)."""
    return with_sizes(functools.partial(_compile_body, "from_tracing_context"), module, like, shapes)


def _compile_body(dynamic_shapes: str, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph without gradients, with `BODY_SETTINGS` (2.11, 2.13)."""
    with inductor_runs():
        from torch._inductor import standalone_compile

        options = {"config_patches": {**BODY_SETTINGS, **WITH_BARRIERS}}
        with barriers():
            compiled: Callable[..., Any] = standalone_compile(module, inputs, dynamic_shapes=dynamic_shapes, options=options)
    return compiled
