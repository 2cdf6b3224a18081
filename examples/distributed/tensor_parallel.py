"""Tensor parallel: `parallelize_module` cuts layers by heads and by columns; all ranks have the same text.

    torchrun --standalone --nproc-per-node 2 examples/distributed/tensor_parallel.py

What a layer adds to the residual stream is a sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Step, compare

COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")


def prepare(model: Any) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        plan = {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
        parallelize_module(layer, mesh, plan)
    step: Step = torch.compile(model, backend="streambp", options={"chunk_size": 256})  # the one line
    return step


if __name__ == "__main__":
    compare(prepare, groups=1)
