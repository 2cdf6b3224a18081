"""The most bytes that a step of a program has alive, with streamfx and without: measured while real steps run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import streamfx.passes.partition.unchunked
from streamfx.cost.meter import Meter
from streamfx.lazy.deferred import DeferredTensor
from streamfx.passes.ops.rules import DECOMPOSITIONS
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.torch_private import aot_autograd, default_partition, min_cut_rematerialization_partition
from tests.support.exactness import boxed

TOLERANCE = 1.02


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond parameters and inputs."""

    ours: int
    others: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Of the smaller of both partitions."""
        return self.ours / max(min(self.others), 1)


def peaks(model: nn.Module, loss_of: Callable[[Any], Tensor], **options: Any) -> Peaks:
    """Peaks of the step `loss_of(model).backward()`, with default options unless others are given, however small it is."""
    with however_small():
        ours = peak(model, loss_of, "streambp", options={"bodies": "eager", **options})
    ways = (default_partition, min_cut_rematerialization_partition)
    return Peaks(ours, tuple(peak(model, loss_of, partitioned(way)) for way in ways))


def however_small() -> Any:
    """A context in which graphs that take next to nothing are compared, too."""
    return mock.patch.object(streamfx.passes.partition.unchunked, "MIN_COMPARED_BYTES", 0)


def partitioned(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that runs the halves of one of AOTAutograd's partitions, operator by operator."""

    def run(module: fx.GraphModule, inputs: Any) -> Any:
        return boxed(lambda arguments: OperatorByOperator(module).boxed_run(arguments))

    backend: Callable[..., Any] = aot_autograd(fw_compiler=run, partition_fn=partition, decompositions=DECOMPOSITIONS)
    return backend


class OperatorByOperator(fx.Interpreter):
    """Views copy where kernels lay a result out in another way than they promised, as views in a compiled graph do."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(COPYING_VIEWS.get(target, target), args, kwargs)


class RealMeter(Meter):
    """Count the tensors that a use of deferred tensors allocates, not the wrappers, which have no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DeferredTensor) for kind in types):
            return NotImplemented  # they handle it, with this mode on
        return super().__torch_dispatch__(func, types, args, kwargs)


def peak(model: nn.Module, loss_of: Callable[[Any], Tensor], backend: Any, **others: Any) -> int:
    """The peak of a step after the first, which compiles."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, **others)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with RealMeter() as meter:
            loss_of(compiled).backward()
    return meter.peak
