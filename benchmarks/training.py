"""One way of training one workload: what is measured, in the process that is measured."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from benchmarks.flop_formulas import counted
from benchmarks.live_bytes import peak_live_bytes
from benchmarks.ways import WAYS, Way
from benchmarks.workloads import Workload, workload_called
from streamfx.tools.inspect.peak_memory import PeakMemory


@dataclass(frozen=True)
class Training:
    """`way` is a name of `ways.WAYS`, `options` are further ones of its compiler; the rest describes the workload."""

    way: str
    length: int
    workload: str = "decoder"
    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    feed: str = "tokens"
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def how(self) -> Way:
        return WAYS[self.way]

    @property
    def compiler_options(self) -> dict[str, Any]:
        return {**self.how.options, **self.options}

    @cached_property
    def work(self) -> Workload:
        return workload_called(self.workload)(self.how, self.length, self.sizes, self.feed, self.dtype, self.device)

    @cached_property
    def loss_of(self) -> Callable[..., torch.Tensor]:
        import torch._functorch.config as functorch

        for name, value in self.how.functorch.items():
            setattr(functorch, name, value)
        if self.how.backend is None:
            return self.work.loss
        return self.work.compiled(self.how.backend, self.compiler_options)

    def step(self) -> float:
        """A step; the first one waits until loop bodies are compiled, so that all later ones are alike."""
        from streamfx.runtime.background_bodies import wait_for_compiled_bodies

        with wait_for_compiled_bodies():
            return self._step()

    def _step(self) -> float:
        loss = self.loss_of(**self.work.inputs)
        loss.backward()
        value = loss.item()
        for tensor in (*self.work.module.parameters(), *self.work.inputs.values()):
            tensor.grad = None
        return value

    def prepare(self) -> None:
        """Make the model and its input, so that only the step is measured."""
        assert self.loss_of is not None
        assert self.work.module is not None
        assert self.work.inputs is not None

    def held(self) -> dict[str, int]:
        """Bytes of parameters and inputs, and of their gradients."""
        self.prepare()
        tensors = {id(tensor): tensor for tensor in (*self.work.module.parameters(), *self.work.inputs.values())}
        total = sum(tensor.nbytes for tensor in tensors.values())
        return {
            "held_bytes": total,
            "gradient_bytes": sum(tensor.nbytes for tensor in tensors.values() if tensor.requires_grad),
        }

    def measured(self) -> dict[str, float]:
        """One step: wall and processor seconds, and the process's high-water mark over the state before."""
        self.prepare()
        memory = PeakMemory(torch.device(self.device))
        memory.start()
        wall, processor = time.perf_counter(), time.process_time()
        loss = self.step()
        if memory.on_gpu:
            torch.cuda.synchronize()
        return {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - processor,
            "peak_bytes": memory.bytes(),
            "loss": loss,
        }

    def first(self) -> dict[str, float]:
        """The first step, from the call of `torch.compile` on: what a compiler loads, makes and has other programs make.

        Inductor's pool of processes stays out of it: their seconds are counted only when these end.
        """
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        assert self.work.module is not None
        assert self.work.inputs is not None
        wall, processor = time.perf_counter(), _processor_seconds()
        loss = self._step()
        return {"seconds": time.perf_counter() - wall, "cpu_seconds": _processor_seconds() - processor, "loss": loss}

    def live(self) -> dict[str, int]:
        """The most bytes of tensors that are alive at once in a step, over those before it."""
        return {"live_bytes": peak_live_bytes(self.step)}

    def predicted(self) -> dict[str, int]:
        """The same, as `streamfx.explain` foretells it."""
        import streamfx

        explained = streamfx.explain(self.work.loss, options=self.compiler_options, **self.work.inputs)
        return {"predicted_bytes": explained.summary()["peak_bytes"]}

    def flops(self) -> dict[str, int]:
        attention, other = counted(self.step)
        return {"attention": attention, "other": other}


def _processor_seconds() -> float:
    """Of this process and of those that it has started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
