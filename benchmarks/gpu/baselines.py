"""Ways to run a training step of a Hugging Face decoder: streamfx, and gradient checkpointing as its users run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import streamfx

ROWS = 2048  # of the loss in chunks
Loss = Callable[[Tensor], Tensor]  # of ids [b t], which are their own labels
Way = Callable[[Any, str], AbstractContextManager[Loss]]  # of a model and the name of a compiler, "inductor" or "aot_eager"


def streamed(**options: Any) -> Way:
    """The whole model, compiled by the backend."""

    @contextmanager
    def way(model: Any, compiler: str) -> Iterator[Loss]:
        own = options if compiler == "inductor" else {**options, "bodies": "eager"}
        yield torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend="streambp", options=own)

    return way


def checkpointed(chunks: bool) -> Way:
    """Each layer is compiled, its input is kept and it runs again in the backward; so is the loss, in chunks or not.

    Layers are compiled one by one: one graph serves all of them, where a graph of 36 layers takes minutes to compile.
    """

    @contextmanager
    def way(model: Any, compiler: str) -> Iterator[Loss]:
        layers, summed = model.model.layers, torch.compile(_summed, backend=compiler)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers:
            layer.compile(backend=compiler)
        try:
            yield lambda ids: _loss(summed, model.model(input_ids=ids).last_hidden_state, model.lm_head.weight, ids, chunks)
        finally:
            model.gradient_checkpointing_disable()
            for layer in layers:
                layer._compiled_call_impl = None

    return way


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
def checkpointed_whole(model: Any, compiler: str) -> Iterator[Loss]:
    """The whole model in one compiled graph, its layers checkpointed inside."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend=compiler)
    finally:
        model.gradient_checkpointing_disable()


WAYS: dict[str, Way] = {
    "streambp": streamed(),
    "streambp, memory_budget=auto": streamed(memory_budget="auto"),
    "streambp, offload=inputs": streamed(offload="inputs"),
    "streambp, offload=attention": streamed(offload="attention"),
    "checkpointing": checkpointed(chunks=False),
    "checkpointing, loss in chunks": checkpointed(chunks=True),
    "checkpointing, model compiled whole": checkpointed_whole,
}


def why_not(way: str) -> str:
    """Why a way cannot be taken here; empty if it can."""
    if way != "streambp, offload=attention":
        return ""
    try:
        streamfx.Options(offload="attention")  # type: ignore[arg-type]
    except streamfx.OptionError:
        return "this version of streamfx has no such option"
    return ""
