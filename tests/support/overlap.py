"""When a step's reductions begin, and what it takes: of one rank, by what the profiler sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from tests.support.allocations import Allocations
from tests.support.profiled import names_of

REDUCTIONS = ("allreduce_", "allreduce_coalesced_", "reduce_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
PRODUCTS = tuple(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"))
LABEL = "reduces gradients of stage "


@dataclass(frozen=True)
class Overlap:
    """Reductions of a backward half that begin before its last product, and behind it; of engines that reduce each gradient by
    itself, stages all of whose reductions begin before it, and the others.
    """

    early: int
    late: int

    @property
    def share(self) -> float:
        return self.early / (self.early + self.late)

    @staticmethod
    def of(backward: Callable[[], Any]) -> Overlap:
        names = names_of(backward)
        last = max(place for place, name in enumerate(names) if name in PRODUCTS)
        if any(name.startswith(LABEL) for name in names):
            stages, late = ({name for name in part if name.startswith(LABEL)} for part in (names, names[last:]))
            return Overlap(len(stages) - len(late), len(late))
        places = [place for place, name in enumerate(names) if name in {f"c10d::{kind}" for kind in REDUCTIONS}]
        return Overlap(sum(place < last for place in places), sum(place > last for place in places))


@dataclass(frozen=True)
class Taken:
    """What a step takes beyond what was there before it, and its reductions."""

    memory: Allocations
    overlap: Overlap

    @staticmethod
    def by(model: nn.Module, call: Callable[[], Tensor], step: Callable[[Tensor], Any] = Tensor.backward) -> Taken:
        """The second step's memory, the third's reductions: the first compiles, and DDP makes new buckets behind it."""
        step(call())
        model.zero_grad()
        memory = Allocations.of(lambda: step(call()))
        model.zero_grad()
        loss = call()
        overlap = Overlap.of(lambda: step(loss))
        model.zero_grad()
        return Taken(memory, overlap)


def stages_of(model: nn.Module) -> dict[Tensor, str]:
    """For each parameter, the stage of a decoder that its gradient comes from: the embedding's is the first layer's."""
    found: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = parts[parts.index("layers") + 1] if "layers" in parts else "0" if "embed" in parts else "head"
        found[parameter] = layer
    return found


def noted_mean(stages: dict[Tensor, str]) -> Callable[[Any, Any], torch.futures.Future[Tensor]]:
    """DDP's own reduction as a communication hook that notes of which stages it is."""

    def reduce(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        begin_noted(stages[parameter] for parameter in bucket.parameters())
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    return lambda state, bucket: reduce(state, bucket)  # DDP reads annotations, and wants none or its own


def begin_noted(stages: Iterable[str]) -> None:
    """A note for the profiler that reductions for some stages begin."""
    for stage in dict.fromkeys(stages):
        with record_function(LABEL + stage):
            pass
