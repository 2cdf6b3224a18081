"""Baselines for a plan: their cost at a length, traced operator by operator in eager mode, and the longest length of each.

gradient checkpointing           only the inputs of layers are saved; the backward graph recomputes each layer
with the loss in chunks          head and loss run over chunks of the sequence, too: the full logits never exist
... checkpoints on the host      the inputs of layers are offloaded to the host, whose memory is not counted
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost.loop_sampling import run_all, run_iterations
from streamfx.dialect.offload import from_host, to_host
from streamfx.runtime.offload import free_after_copy, wait_for_copy
from streamfx.tools.inspect.eager import LayerWrapper, checkpointed
from streamfx.tools.inspect.layers import is_torch_module
from streamfx.tools.planner.search import EFFICIENT_TOKENS, MIN_RELATIVE_GAIN, TARGET_SHARE
from streamfx.tools.report.verdict import CHECKPOINTING, IN_CHUNKS

ON_HOST = "checkpoints on the host"
MAX_TRACES = 5  # in one search
Baseline = tuple[nn.Module, LayerWrapper]


class LossInChunks(nn.Module):
    """A language model whose head and loss run over chunks of the sequence and are recomputed in the backward graph."""

    def __init__(self, model: nn.Module, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.backbone, self.head = model, backbone, head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of all chunks, each recomputed in the backward graph."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False)[0]
        rows = max(EFFICIENT_TOKENS // hidden.shape[0], 1)
        chunks = list(zip(hidden.split(rows, 1), labels.split(rows, 1), strict=True))
        run_head = run_iterations if is_torch_module(self.head) else run_all
        return torch.stack(run_head(checkpointed(self._loss), chunks)).sum()

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, -2).float(), labels.flatten(), reduction="sum")


class OffloadedLayer(torch.autograd.Function):
    """A layer whose input is offloaded to the host until the layer is recomputed."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run the layer and copy its input to the host."""
        host_copy, result = to_host(hidden), layer(hidden)
        ctx.layer, ctx.device, ctx.held = layer, hidden.device, free_after_copy(host_copy, hidden)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        """Copy the input back, recompute the layer, and return the gradient of the input."""
        hidden = wait_for_copy(from_host(ctx.held, ctx.device)).requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(hidden)
        torch.autograd.backward(result, gradient)
        return None, hidden.grad


def on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a layer so that its input is offloaded to the host.

    If the input requires no gradient, a detached copy that does is used, so that the layer still gets a backward.
    """

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaf = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        return OffloadedLayer.apply(lambda value: forward(value, *args, **kwargs), leaf)

    return run


def baselines_of(model: nn.Module) -> dict[str, Baseline]:
    """Return the baselines of a model by name, the most common one first. The chunked loss needs a known backbone and head."""
    chunked = _with_loss_in_chunks(model)
    if chunked is None:
        return {CHECKPOINTING: (model, checkpointed), f"with {ON_HOST}": (model, on_host)}
    return {
        CHECKPOINTING: (model, checkpointed),
        IN_CHUNKS: (chunked, checkpointed),
        f"{IN_CHUNKS}, {ON_HOST}": (chunked, on_host),
    }


def _with_loss_in_chunks(model: nn.Module) -> nn.Module | None:
    """Return the model with head and loss in chunks, or None if backbone or head is not known."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    backbone: Any = getattr(model, "base_model", None)
    is_known = isinstance(head, nn.Module) and isinstance(backbone, nn.Module) and backbone is not model
    return LossInChunks(model, backbone, head) if is_known else None


def find_longest(
    peak_at: Callable[[int], int | None], constant_bytes: int, budget: int, first_length: int, multiple: int
) -> int | None:
    """Return approximately the longest length whose peak fits the budget, confirmed by a trace.

    Args:
        peak_at: The peak at a length, or None if it cannot be traced.
        constant_bytes: The memory that does not grow with the length, approximately.
        budget: The memory in bytes.
        first_length: The length of the first trace.
        multiple: The number of which the length is a multiple.

    Returns:
        The length; 0 if none fits, None if no peak is known.
    """
    size, best, failed = first_length, 0, None
    previous_size, previous_peak = 0, constant_bytes
    for _ in range(MAX_TRACES):
        size = max(size // multiple * multiple, multiple)
        if (peak := peak_at(size)) is None:
            return best or None
        best, failed = (size, failed) if peak <= budget else (best, size)
        slope = max((peak - previous_peak) / (size - previous_size), 1)
        previous_size, previous_peak = size, peak
        size = int(size + (TARGET_SHARE * budget - peak) / slope)
        if failed is not None and not best < size < failed:
            size = (best + failed) // 2
        if size < multiple or abs(size - best) <= max(MIN_RELATIVE_GAIN * size, multiple):
            break
    return best
