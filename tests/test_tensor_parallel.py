"""Layers cut over two ranks: exact for any number of chunks, streaming, with at most the reductions of eager with checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.collectives import REDUCE, Step, step
from tests.support.ranks import on_ranks
from tests.test_distributed import CHUNK, compiled, in_eager, twins

COLUMNS, ROWS, LAYERS = ("q", "k", "v", "up"), ("out", "down"), 2
CHUNKS = (1, 4, 16)


def cut(model: nn.Module) -> nn.Module:
    """The model with its layers cut by heads and by columns: their collectives are on activations."""
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return model


def steps_of_chunks(rank: int) -> dict[str, Step]:
    """Steps of all numbers of chunks, each compiled by itself, and of eager with checkpointing."""
    found = {}
    for chunks in CHUNKS:
        torch._dynamo.reset()
        model, truth = twins(layers=LAYERS)
        run = compiled(cut(model), strict=True, chunk_size=-(-16 * CHUNK // chunks))
        step(run, model, truth, 16 * CHUNK, groups=1)
        found[f"{chunks} chunks"] = step(run, model, truth, 16 * CHUNK, groups=1)
    model, truth = twins(layers=LAYERS)
    return {**found, "eager": in_eager(cut(model), truth, groups=1, length=16 * CHUNK)}
