"""Inductor and Triton without a device: they compile for an H100 that is not there, and load and time nothing.

Needs a CUDA build of PyTorch and Triton, which brings its own ptxas. The process is one of `tests.support.fake_cuda`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from torch.utils._triton import has_triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from streamfx.torch_private import TorchDispatchMode

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    is_integrated=False,
)


class Driver(DriverBase):
    """Triton's view of the device: a target to compile for."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is timed: there is no device")


class OnHost(TorchDispatchMode):
    """Makes constants on the host: Inductor computes those of a graph on their own device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        return func(*args, **({**given, "device": "cpu"} if given.get("device") is not None else given))


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> Any:
        with OnHost():
            return function(*arguments, **more)

    return run


@dataclasses.dataclass
class Compiled:
    """What was compiled so far.

    kernels: kernels of Triton's. codes: sizes in bytes of their machine code, one for each configuration that would be tried.
    tuning: bytes of example arguments that kernels would be timed on while
    they are compiled. loops: those of kernels. unguarded: loops that may run before an earlier loop of their kernel has ended.
    """

    kernels: int = 0
    codes: list[int] = dataclasses.field(default_factory=list)
    tuning: int = 0
    loops: int = 0
    unguarded: int = 0

    def precompile(self, kernel: Any, *_: Any, **__: Any) -> None:
        """In place of `CachingAutotuner.precompile`, which loads the code onto the device, too."""
        self.count_loops(inspect.getsource(kernel.fn.fn))  # a kernel that is compiled is without its source
        kernel._precompile_worker()
        self.kernels += 1
        self.codes += [_size_of_code(result) for result in kernel.compile_results]

    def count_loops(self, source: str) -> None:
        """A loop is guarded by a barrier between its first line and the line of the loop before it."""
        lines = [line.strip() for line in source.splitlines()]
        starts = [number for number, line in enumerate(lines) if line.startswith("for ")]
        self.loops += len(starts)
        self.unguarded += sum("tl.debug_barrier()" not in lines[one:other] for one, other in pairwise(starts))

    def example(
        self, wrapper: Any, original: Callable[..., Any], arg: Any, arg_type: Any, raw_arg: Any = None, *more: Any
    ) -> Any:
        if isinstance(arg_type, torch.dtype):
            buffer = wrapper.args_to_buffers.get(arg) or raw_arg
            self.tuning += math.prod(map(int, buffer.get_size())) * buffer.get_dtype().itemsize
        return original(wrapper, arg, arg_type, raw_arg, *more)


def _size_of_code(result: Any) -> int:
    """Bytes of a kernel's machine code: a file if Inductor would launch it without Triton, else a part of Triton's result."""
    path = getattr(result.kernel, "cubin_path", None)
    return Path(path).stat().st_size if path else len(result.kernel.asm["cubin"])


@contextmanager
def compiling_for_absent_device() -> Iterator[Compiled]:
    """Inductor compiles inside of it for an H100; nothing is loaded, run or timed, and no earlier result is used."""
    found, example = Compiled(), PythonWrapperCodegen.generate_example_arg_value
    nvidia = dataclasses.replace(backends["nvidia"], driver=Driver)
    own: dict[str, Any] = {
        "get_device_properties": lambda device=None: H100,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=False: True,
    }
    with ExitStack() as stack:
        for name, function in own.items():
            for owner in (CudaInterface, CudaInterface.Worker):
                if hasattr(owner, name):
                    stack.enter_context(patch.object(owner, name, staticmethod(function)))
        for context in (
            patch.dict(backends, nvidia=nvidia),
            patch.object(torch.cuda, "get_device_properties", own["get_device_properties"]),
            patch.object(torch.cuda, "current_device", own["current_device"]),
            patch.object(torch.cuda, "_lazy_init", lambda: None),
            patch.object(ConstantFolder, "run", on_host(ConstantFolder.run)),
            patch.object(UniformValueConstantFolder, "__init__", on_host(UniformValueConstantFolder.__init__)),
            patch.object(CachingAutotuner, "precompile", lambda *given, **more: found.precompile(*given, **more)),
            patch.object(
                PythonWrapperCodegen, "generate_example_arg_value", lambda self, *given: found.example(self, example, *given)
            ),
            patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", lambda self: None),
            config.patch(compile_threads=1),
            fresh_cache(),
        ):
            stack.enter_context(context)
        has_triton.cache_clear()  # it has looked for a device before
        yield found
    has_triton.cache_clear()
