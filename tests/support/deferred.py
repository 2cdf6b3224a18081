"""Deferred tensors beside the dense ones that they stand for: the same function has to do the same to both."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from streamfx.frontend.backend import streambp
from streamfx.lazy.deferred import DeferredTensor
from tests.support.heads import BATCH, LENGTH, VOCABULARY, Decoder, some_ids

OPTIONS: dict[str, Any] = {"chunk_size": 4, "loss_chunk_size": 4}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
IDS = some_ids()[..., None]
WEIGHTS = torch.randn(BATCH, LENGTH, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor | None]:
    """The gradients, taken away."""
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, relative to the norm; tensors may be deferred."""
    if isinstance(theirs, (list, tuple)) and not isinstance(theirs, torch.Size):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, tolerance)
    elif isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        look = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in (ours, theirs)]
        assert look[0] == look[1]
        difference = (ours.detach().double() - theirs.detach().double()).norm().item()
        assert difference <= tolerance * theirs.detach().double().norm().item()
    elif isinstance(theirs, (float, np.ndarray)):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    else:
        assert ours == theirs


class Compiled:
    """A model's compiled graph, called past Dynamo, so that many tests share one compilation."""

    def __init__(self, model: Decoder, mode: str) -> None:
        self.model, self.mode, self.ids = model, MODES[mode], some_ids()
        calls: list[tuple[Callable[..., Any], list[Any]]] = []

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            calls.append((streambp(module, inputs, options=OPTIONS), list(inputs)))
            return calls[-1][0]

        with self.mode():
            torch.compile(model, backend=backend)(self.ids)
        ((self._function, self._inputs),) = calls

    def deferred(self) -> Tensor:
        (logits,) = self._function(*self._inputs)
        assert isinstance(logits, DeferredTensor)
        return logits

    def dense(self) -> Tensor:
        logits: Tensor = self.model(self.ids)
        return logits


def assert_behaves(compiled: Compiled, function: Callable[[Tensor], Any], tolerance: float = 1e-12) -> None:
    """A function does the same to both tensors, also where it raises."""
    results = []
    for tensor in (compiled.deferred(), compiled.dense()):
        try:
            results.append([function(tensor), gradients(compiled.model)])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            results.append([type(error), gradients(compiled.model)])
    assert_same(results[0], results[1], tolerance)
