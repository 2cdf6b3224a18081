"""Checks that a model of another package is exact in float64, and that all its stages stream."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from tests.support.exactness import compare
from tests.support.precision import default_dtype

VOCABULARY, ROWS, LENGTH, WIDTH, HEADS, HEAD = 61, 2, 23, 32, 4, 8
BOUND = 1e-11  # of a relative error in float64

Builder: TypeAlias = "Callable[[], tuple[nn.Module, dict[str, Any]]]"


class Step(nn.Module):
    """A model that returns logits, with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, labels: Tensor, **others: Any) -> Tensor:
        return F.cross_entropy(self.net(ids, **others).flatten(0, 1), labels.flatten())


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, length))


def tokens_and_labels() -> dict[str, Any]:
    return {"ids": tokens(), "labels": tokens()}


def check(build: Builder, attention: set[str] | None = None, all_streams: bool = True, **options: Any) -> None:
    """Compare with eager, and assert that every stage streams; `attention` are the expected verdicts."""
    with default_dtype(torch.float64):
        model, inputs = build()
        model.double()
        with torch.no_grad():  # a gate of zero, its initial value, would hide everything after it
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        compare(model, inputs, attention=attention, tolerance=BOUND, **options)
        stages = streamfx.explain(model, **inputs, options={"chunk_size": 7}).stages if all_streams else []
    fallbacks = [(stage.name, stage.reasons) for stage in stages if stage.kind != "streamed"]
    assert not fallbacks and bool(stages) == all_streams, fallbacks
