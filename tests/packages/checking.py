"""Is a model of another package exact in float64, and does every attention, MLP and head of it stream?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from tests.support.exactness import Report, compare

VOCABULARY, ROWS, LENGTH, WIDTH, HEADS, HEAD = 61, 2, 23, 32, 4, 8
BOUND = 1e-11  # of a relative error in float64

Built: TypeAlias = "tuple[nn.Module, dict[str, Any]]"
Builder: TypeAlias = "Callable[[], Built]"


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


@contextmanager
def double() -> Iterator[None]:
    """What is made without a type is float64, as in a model that is trained in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(build: Builder, attention: set[str] | None = None, **options: Any) -> Report:
    """Compare with eager, and ask `explain` what runs whole; `attention` are the verdicts that have to be found."""
    with double():
        model, inputs = build()
        unsettle(model)
        report = compare(model, inputs, attention=attention, tolerance=BOUND, **options)
        stages = streamfx.explain(model, **inputs, options={"chunk_size": 7}).stages
    whole = [(stage.name, stage.reasons) for stage in stages if stage.kind != "streamed"]
    assert stages and not whole, whole
    return report


def unsettle(model: nn.Module) -> None:
    """Move parameters off their initial values: a gate that begins at zero would hide all that is behind it."""
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
