"""FSDP2: `fully_shard` gathers a layer in front of it, and streamfx compiles each layer inside of these hooks.

torchrun --standalone --nproc-per-node 2 examples/distributed/fsdp2.py
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard
from training import Step, compare, say

from streamfx import enable


def prepare(model: Any) -> Step:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    say(str(enable(model, chunk_size=256)))  # the one line
    step: Step = model
    return step


if __name__ == "__main__":
    compare(prepare)
