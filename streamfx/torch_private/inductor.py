"""Private interfaces of Inductor: whether it has a compiler, its failures, and compilation of graphs and loop bodies.

A *loop body* is a graph without gradients, which runs for one chunk of the sequence after the other. "(2.11, 2.13)": the torch
versions on which it was tested.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from streamfx.errors import describe_error
from streamfx.torch_private import dynamo_copy, no_modes
from streamfx.torch_private.symbolic_sizes import ShapeAndExample, Shapes, with_fixed_sizes, with_sizes

BODY_SETTINGS = {  # override the user's settings; all other settings of the user also apply to loop bodies (2.11, 2.13)
    # A replay of a CUDA graph overwrites the results of the last replay: another chunk's, which a loop still needs.
    "triton.cudagraphs": False,
    # `standalone_compile` turns this on. It then allocates full-size example arguments for all kernels at once, in memory
    # that no plan counts. Without it, a kernel with several configurations is timed at its first call, on the arguments of
    # that call.
    "triton.autotune_at_compile_time": None,
}
# No code reads this setting, but it is part of Inductor's cache key, so that cached kernels without barriers are not used.
WITH_BARRIERS = {"aot_inductor.metadata": {"streamfx": "a barrier between the loops of a kernel"}}


def has_compiler(device: str) -> bool:
    """Return whether Inductor finds the compiler it needs for a device type (2.11, 2.13)."""
    from torch.utils._triton import has_triton

    return bool(has_triton()) if device == "cuda" else device == "cpu" and _has_cpp_compiler()


@functools.cache
def _has_cpp_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler; False if the search fails. The answer is cached."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


class InductorFailedError(Exception):
    """Inductor could not be loaded, or did not compile a graph; the cause has the reason."""


class InductorMemoryError(InductorFailedError):
    """Memory ran out while Inductor compiled a graph: the graph may compile if more memory is free."""


@contextmanager
def wrap_inductor_errors(unwrapped: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Context manager: raise an error of the block as `InductorFailedError`, or as `InductorMemoryError` if memory ran out.

    Errors of the types `unwrapped` pass as they are. Torch's own use of its deprecated interfaces is not a failure, even if the
    user turns warnings into errors (2.13: TorchScript).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except unwrapped:
        raise
    except Exception as error:
        raise (InductorMemoryError if is_out_of_memory(error) else InductorFailedError)(describe_error(error)) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports that memory ran out, of a device or of the host; False for None.

    Drivers' errors have types of many libraries ("Triton Error [CUDA]: out of memory"), so the text also decides.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def insert_barriers() -> Iterator[None]:
    """Context manager: in each Triton kernel that Inductor generates, insert a barrier after loops (2.11, 2.13).

    The code after a loop may load values that the loop stored. Triton may assign the store and the load to different threads
    (triton#10924, pytorch#190519): without a barrier, the load reads the old contents of memory. On an H100, gradients of a
    small GPT-OSS were hundreds of times too large.
    """
    from torch._inductor.codegen.triton import TritonKernel

    original_codegen = TritonKernel.codegen_body

    def codegen_body(self: Any) -> None:
        """Generate a kernel's body, with a barrier after its loops."""
        if any(str(getattr(line, "line", line)).lstrip().startswith("for ") for line in self.body._lines):
            self.body.writeline("tl.debug_barrier()")
        original_codegen(self)

    with mock.patch.object(TritonKernel, "codegen_body", codegen_body):
        yield


def compile_dynamo_graph(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph and its gradients with Inductor, as `torch.compile(...)` does (2.11, 2.13).

    Return a function, called as f(*inputs). The backward is compiled at once, so that its errors are raised here.

    Raises:
        InductorFailedError: if Inductor fails.
        TensorifyScalarRestartAnalysis: Inductor asks Dynamo to trace the call again, with a number as a constant.
    """
    with (
        wrap_inductor_errors(unwrapped=(TensorifyScalarRestartAnalysis,)),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        from torch._inductor.compile_fx import compile_fx

        copied = dynamo_copy(module)[0]  # compile_fx modifies its argument
        with insert_barriers():
            compiled: Callable[..., Any] = compile_fx(copied, inputs, config_patches=WITH_BARRIERS)
    return compiled


def compile_for_one_size(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a loop body for the shapes of `inputs`; return a function, called as f(*inputs) (2.11, 2.13)."""
    with torch.no_grad(), no_modes():  # AOTAutograd runs the graph once under a separate mode
        return _compile_body("from_example_inputs", module, inputs)


def compile_for_fixed_sizes(module: fx.GraphModule, tensors: Sequence[ShapeAndExample]) -> Callable[..., Any]:
    """Compile a loop body for inputs of fixed sizes, without example inputs; return a function of the inputs (2.11, 2.13).

    `tensors` has (sizes, strides, a tensor of the same dtype and device) of each input.
    """
    return with_fixed_sizes(functools.partial(_compile_body, "from_tracing_context"), module, tensors)


def compile_for_sizes(
    module: fx.GraphModule, typical_size: int, shapes: Shapes
) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Compile a loop body whose first input is a number n, for all n: the sizes of its tensors are functions of n (2.11, 2.13).

    `shapes(n)` returns (sizes, strides, a tensor with the dtype and device) of each tensor. Return the compiled function,
    called as f(n, *tensors), and a predicate for the n for which it holds. `typical_size`: the n for which it is optimized.
    """
    return with_sizes(functools.partial(_compile_body, "from_tracing_context"), module, typical_size, shapes)


def _compile_body(dynamic_shapes: str, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph without gradients, with `BODY_SETTINGS`; return a function, called as f(*inputs) (2.11, 2.13).

    `dynamic_shapes`: where `standalone_compile` looks for dynamic sizes. Raise `InductorFailedError` if Inductor fails.
    """
    with wrap_inductor_errors():
        from torch._inductor import standalone_compile

        options = {"config_patches": {**BODY_SETTINGS, **WITH_BARRIERS}}
        with insert_barriers():
            compiled: Callable[..., Any] = standalone_compile(module, inputs, dynamic_shapes=dynamic_shapes, options=options)
    return compiled
