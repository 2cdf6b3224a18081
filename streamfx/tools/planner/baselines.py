"""Other ways to run a step: what they take at a length, followed operator by operator in eager, and which lengths they reach.

gradient checkpointing           each layer's input is kept, the layer is run again in the backward half
with the loss in chunks          head and loss, too, in chunks of rows: no logits of the whole sequence
... checkpoints on the host      the layers' inputs wait on the host, whose memory is not counted
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost.loop_sampling import in_turn, one_by_one
from streamfx.cost.repeats import Repeat
from streamfx.runtime.offload import free_after_copy, from_host, to_host, wait_for_copy
from streamfx.tools.inspect.eager import Around, checkpointed, costs_with_one_more, eager_cost
from streamfx.tools.inspect.layers import is_plain
from streamfx.tools.planner.initial_guess import FEWEST, guessed
from streamfx.tools.planner.models import loss_of
from streamfx.tools.planner.search import AIM, BUSY, CLOSE
from streamfx.tools.report.verdict import CHECKPOINTING, IN_CHUNKS

ON_HOST = "checkpoints on the host"
MOST = 4  # traces of the whole model
Way = tuple[nn.Module, Around]


class LossInChunks(nn.Module):
    """A language model whose head and loss run over chunks of rows, and again in the backward half."""

    def __init__(self, model: nn.Module, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.backbone, self.head = model, backbone, head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.backbone(input_ids=input_ids, use_cache=False)[0]
        rows = max(BUSY // hidden.shape[0], 1)
        pieces = list(zip(hidden.split(rows, 1), labels.split(rows, 1), strict=True))
        each = in_turn if is_plain(self.head) else one_by_one
        return torch.stack(each(checkpointed(self._loss), pieces)).sum()

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, -2).float(), labels.flatten(), reduction="sum")


class OffloadedLayer(torch.autograd.Function):
    """A layer whose input waits on the host until the layer is run again."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        held, result = to_host(hidden), layer(hidden)
        ctx.layer, ctx.device, ctx.held = layer, hidden.device, free_after_copy(held, hidden)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        hidden = wait_for_copy(from_host(ctx.held, ctx.device)).requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(hidden)
        torch.autograd.backward(result, gradient)
        return None, hidden.grad


def on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, which keeps its input on the host. Where nothing before it is trained, its input is a leaf."""

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        return OffloadedLayer.apply(lambda value: forward(value, *args, **kwargs), given)

    return run


def ways_of(model: nn.Module) -> dict[str, Way]:
    """The ways there are for a model, by name, the usual one first; its loss has chunks where it is known how to make them."""
    chunked = _in_chunks(model)
    if chunked is None:
        return {CHECKPOINTING: (model, checkpointed), f"with {ON_HOST}": (model, on_host)}
    return {
        CHECKPOINTING: (model, checkpointed),
        IN_CHUNKS: (chunked, checkpointed),
        f"{IN_CHUNKS}, {ON_HOST}": (chunked, on_host),
    }


def _in_chunks(model: nn.Module) -> nn.Module | None:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    backbone: Any = getattr(model, "base_model", None)
    is_known = isinstance(head, nn.Module) and isinstance(backbone, nn.Module) and backbone is not model
    return LossInChunks(model, backbone, head) if is_known else None


def peak_of(way: Way, inputs: Mapping[str, Tensor], alike: Repeat | None = None) -> int | None:
    """Bytes at the peak beyond what is held all the time; None where it cannot be followed. `alike` as in `eager_cost`."""
    model, around = way
    cost = eager_cost(loss_of(model), inputs, around, alike)
    return None if cost is None else cost.peak


def peaks_of_few(way: Way, inputs: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """The same of the first few layers, and about that of one more."""
    model, around = way
    costs = costs_with_one_more(loss_of(model), inputs, around, FEWEST)
    return None if costs is None else (costs[0].peak, costs[1].peak)


class Peaks(NamedTuple):
    """Of a way, by length: the peak of the whole model, of its first layer, of few layers and one more; None where not known."""

    whole: Callable[[int], int | None]
    first: Callable[[int], int | None]
    few: Callable[[int], tuple[int, int] | None]


def longest(peaks: Peaks, layers: int, budget: int, first: int, multiple: int) -> int | None:
    """About the longest length whose peak is within a budget, confirmed by a trace; 0 where none is, None where none is known."""
    guess = guessed(peaks.few, layers, first, int(budget * AIM))
    if guess is None and peaks.first(multiple) is None:
        return None
    size, base, best, failed = first, 0.0, 0, None
    if guess is not None:
        size, base = guess
    for _ in range(MOST):
        size = max(size // multiple * multiple, multiple)
        found = peaks.whole(size) or 0
        best, failed = (size, failed) if found <= budget else (best, size)
        slope = max(found - base, 1) / size
        size = int(size + (AIM * budget - found) / slope)
        if failed is not None and not best < size < failed:
            size = (best + failed) // 2
        if size < multiple or abs(size - best) <= max(CLOSE * size, multiple):
            break
    return best
