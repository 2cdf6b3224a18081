"""Ways to run a training step of a Hugging Face decoder: streamfx, and gradient checkpointing as its users run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamfx.options import ALLOWED

ROWS = 2048  # of the loss in chunks
Loss = Callable[[Tensor], Tensor]  # of ids [b t], which are their own labels


@contextmanager
def streamed(model: Any, **options: Any) -> Iterator[Loss]:
    """The whole model, compiled by the backend."""
    run = torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend="streambp", options=options)
    yield run


@contextmanager
def checkpointed(model: Any, chunks: bool) -> Iterator[Loss]:
    """Each layer is compiled by Inductor, its input is kept and it runs again in the backward; so is the loss, in chunks or not.

    Layers are compiled one by one: one graph serves all of them, where a graph of 36 layers takes minutes to compile.
    """
    layers, summed = model.model.layers, torch.compile(_summed)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.compile()
    try:
        yield lambda ids: _loss(summed, model.model(input_ids=ids).last_hidden_state, model.lm_head.weight, ids, chunks)
    finally:
        model.gradient_checkpointing_disable()
        for layer in layers:
            layer._compiled_call_impl = None


def _loss(summed: Callable[..., Tensor], hidden: Tensor, head: Tensor, ids: Tensor, chunks: bool) -> Tensor:
    """Cross-entropy of the next token: the mean, as transformers computes it; the last row has no label, so chunks are equal."""
    rows, labels = hidden.flatten(0, 1), F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    size = ROWS if chunks else len(rows)
    parts = zip(rows.split(size), labels.split(size), strict=True)
    run = partial(checkpoint, summed, use_reentrant=False) if chunks else summed
    return torch.stack([run(own, head, targets) for own, targets in parts]).sum() / ids[:, 1:].numel()


def _summed(rows: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, head).float(), labels, reduction="sum")


@contextmanager
def checkpointed_whole(model: Any) -> Iterator[Loss]:
    """The whole model in one graph of Inductor's, its layers checkpointed inside."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss)
    finally:
        model.gradient_checkpointing_disable()


WAYS: dict[str, Callable[[Any], Any]] = {
    "streambp": streamed,
    "streambp, memory_budget=auto": lambda model: streamed(model, memory_budget="auto"),
    "streambp, offload=inputs": lambda model: streamed(model, offload="inputs"),
    "streambp, offload=attention": lambda model: streamed(model, offload="attention"),
    "checkpointing": lambda model: checkpointed(model, chunks=False),
    "checkpointing, loss in chunks": lambda model: checkpointed(model, chunks=True),
    "checkpointing, model compiled whole": checkpointed_whole,
}


def why_not(way: str) -> str:
    """Why a way cannot be taken here; empty if it can."""
    if way == "streambp, offload=attention" and "attention" not in ALLOWED["offload"]:
        return "this version of streamfx has no such option"
    return ""
